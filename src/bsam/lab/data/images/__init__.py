"""Data sets of image files: listed, decoded once, and mapped into memory."""
