"""``python -m notebook_accel`` is the command line."""

from __future__ import annotations

import sys

from notebook_accel.cli import main

if __name__ == "__main__":
    sys.exit(main())
