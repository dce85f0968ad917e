"""The command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bsam ...``; the exit status."""
    parser = argparse.ArgumentParser(prog="bsam", description="Train into flat minima: BSAM (Bilateral Sharpness-Aware Minimization) and its family.")
    parser.add_argument("--version", action="version", version=f"bsam {__version__}")
    parser.parse_args(argv)
    parser.print_help()
    return 0
