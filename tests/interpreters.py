"""Scripts that need a process that has imported nothing yet."""

import os
import subprocess
import sys
from pathlib import Path


def run_script(
    script: str, *args: str, folder: Path | None = None, timeout: float = 110, **variables: str
) -> str:
    """Return what a script prints in an interpreter of its own, which has to end well."""
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
