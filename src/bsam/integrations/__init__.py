"""Sharpness-aware training inside other frameworks; each module imports its own."""
