"""The check behind ``optimizer.check``: finding silent mistakes in a training loop."""
