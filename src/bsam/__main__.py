"""The command ``bsam``, as ``python -m bsam``."""

from .lab.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
