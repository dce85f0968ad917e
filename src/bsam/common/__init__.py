"""Helpers that all packages share; they know nothing about optimizer steps."""
