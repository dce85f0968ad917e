"""Helpers that several packages of the laboratory share."""
