"""A job of two nodes of Slurm, played: both are this machine, and ``srun`` is a script."""

import os
from pathlib import Path

import pytest

_SRUN = """#!/bin/bash
options=()
while [[ $1 == --* ]]; do options+=("$1"); shift; done
echo "${{options[@]}} -- $@" >{said}
{command}
"""
# On the node, with what Slurm sets there.
_RUN = 'SLURMD_NODENAME=other exec "$@"'


def in_job(folder: Path, monkeypatch: pytest.MonkeyPatch, *, command: str = _RUN) -> Path:
    """Be on the first node of a job; return the file of the arguments that ``srun`` got."""
    said, srun = folder / "srun-said", folder / "srun"
    srun.write_text(_SRUN.format(said=said, command=command))
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURMD_NODENAME", "localhost")
    return said
