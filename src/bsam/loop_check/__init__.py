"""The check behind ``optimizer.check``, which finds silent mistakes in a training loop."""
