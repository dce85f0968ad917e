"""Measures of a trained network. Nothing here trains, and nothing here leaves a trace in the network."""
