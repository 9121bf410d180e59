"""Commands, and scripts that need a process that has imported nothing yet."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_script(
    script: str, *args: str, folder: Path | None = None, timeout: float = 110, **variables: str
) -> str:
    """Return what a script prints in an interpreter of its own, which has to end well."""
    variables = {**os.environ, **variables}
    return run([sys.executable, "-c", script, *args], variables, folder=folder, timeout=timeout)


def run(
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    folder: Path | None = None,
    timeout: float = 110,
) -> str:
    """Return what a command prints that has these environment variables, and has to end well."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
