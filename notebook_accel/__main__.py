"""Runs the command line: ``python -m notebook_accel`` does what ``notebook-accel`` does."""

from __future__ import annotations

import sys

from notebook_accel.cli import main

if __name__ == "__main__":
    sys.exit(main())
