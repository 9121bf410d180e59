"""``notebook-accel join HOST:PORT``: lends this machine to a launch in a notebook elsewhere."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from getpass import getpass
from importlib import import_module

from notebook_accel.errors import ConfigError

_TOKEN = "NOTEBOOK_ACCEL_JOIN_TOKEN"


def join(arguments: Sequence[str]) -> int:
    """``notebook-accel join HOST:PORT``: run ranks of a launch on this machine."""
    parser = ArgumentParser(
        prog="notebook-accel join",
        description=join.__doc__,
        epilog=f"The token of the launch is taken from {_TOKEN}, or asked for.",
        allow_abbrev=False,
    )
    parser.add_argument("address", metavar="HOST:PORT", help="as the launch in the notebook says")
    parser.add_argument("--token", help=f"every user of this machine can read it: set {_TOKEN}")
    typed = parser.parse_args(arguments)
    if typed.token and typed.token in " ".join(sys.argv):
        # Into the environment, which other users cannot read.
        os.environ[_TOKEN] = typed.token
        left_out = ("--token", typed.token, f"--token={typed.token}")
        words = [word for word in sys.orig_argv[1:] if word not in left_out]
        os.execv(sys.executable, [sys.executable, *words])
    token = typed.token or os.environ.pop(_TOKEN, "")
    if not token and sys.stdin is not None and sys.stdin.isatty():
        token = getpass("Token, as the notebook shows it: ")
    if not token:
        raise ConfigError(f"a token is needed: {_TOKEN}, as the launch in the notebook says")
    elastic = import_module("notebook_accel.launch.engines.elastic")
    return int(elastic.join(typed.address, token))
