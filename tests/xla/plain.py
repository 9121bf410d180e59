"""Scripts in plain Python, without a launcher: one rank on torch_xla's CPU device."""

import os
import subprocess
import sys


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stderr
    return done
