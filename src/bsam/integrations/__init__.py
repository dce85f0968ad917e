"""Integrations with other frameworks; each module needs its framework, from the extra ``integrations``."""
