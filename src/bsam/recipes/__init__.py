"""What to run, as Python functions that return runs."""
