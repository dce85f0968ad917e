"""Behind ``optimizer.check``: what would be silently wrong in a training loop."""
