"""The engine: vectors in weight space, the loss around ``w``, and the optimizer built on both."""
