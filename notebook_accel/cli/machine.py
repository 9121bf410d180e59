"""Commands about this machine: ``env`` (versions, devices, settings), ``doctor``, ``join``."""

from __future__ import annotations

import os
import platform
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from getpass import getpass
from importlib import import_module, metadata

from notebook_accel.config import default_config_path
from notebook_accel.errors import ConfigError
from notebook_accel.launch.doctor import STOPS, as_lines, examine
from notebook_accel.launch.preflight import look_at_machine
from notebook_accel.launch.text import wording

_VARIABLES = ("NOTEBOOK_ACCEL_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "CUDA_", "SLURM_")


def env(arguments: Sequence[str]) -> int:
    """``notebook-accel env``: print versions, devices and settings for a bug report."""
    description = "Print what a bug report needs: versions, devices, settings."
    ArgumentParser(prog="notebook-accel env", description=description).parse_args(arguments)
    for name, text in _facts():
        print(f"- {name}: {text}")
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    yield "system", f"{platform.platform()}, Python {platform.python_version()}"
    lines = metadata.requires("notebook-accel") or ()
    required = [re.split(r"[\s<>=!~;\[(]", line)[0] for line in lines if "extra ==" not in line]
    packages = ("notebook-accel", "accelerate", *required)
    yield "packages", ", ".join(filter(None, map(_version, packages)))
    machine = look_at_machine()
    found = machine.found
    yield "accelerators", found.error or found.problem or ", ".join(found.names) or "none"
    yield "versions", ", ".join(f"{name} {text}" for name, text in found.versions.items())
    memory = wording.memory(machine.memory)
    yield "host", f"{machine.num_cores} CPU cores, {memory} of memory"
    path = default_config_path()
    text = path.read_text(encoding="utf-8") if path.is_file() else "no file"
    # Variables of `env` may be secrets.
    shown = re.sub(r"(?m)^env:\n(?:  .*\n?)*", "env: (not shown)\n", text).strip()
    yield f"settings ({path})", shown.replace("\n", "\n    ")
    # Their texts may be secrets, too.
    given = sorted(name for name in os.environ if name.startswith(_VARIABLES))
    yield "variables set", ", ".join(given) or "none"


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""


def doctor(arguments: Sequence[str]) -> int:
    """``notebook-accel doctor``: return 1 if something would prevent a launch here, else 0."""
    description = "Look for what stops or hurts a launch; the exit status is 1 for what stops one."
    ArgumentParser(prog="notebook-accel doctor", description=description).parse_args(arguments)
    findings = examine()
    print("\n".join(as_lines(findings)))
    return int(any(finding.level == STOPS for finding in findings))


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
