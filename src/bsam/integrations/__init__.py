"""Training loops of other frameworks; each module needs its framework, the extra ``integrations``."""
