"""Data sets of persons and their joints."""
