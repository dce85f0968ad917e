"""What all packages share, and what knows nothing of optimizer steps."""
