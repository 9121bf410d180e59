"""Runs a script or module after seeding its random numbers, for ``notebook-accel launch --seed``.

python -m notebook_accel.cli.seeded SEED script|module NAME ARGUMENTS...
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Seed all random generators, then run the script or module as ``__main__``, as Python does."""
    from notebook_accel.training.processes.random_numbers import set_seed

    seed, kind, name, *arguments = sys.argv[1:]
    set_seed(int(seed))
    sys.argv = [name, *arguments]
    if kind == "module":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(name))
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
