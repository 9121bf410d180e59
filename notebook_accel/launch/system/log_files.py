"""Where the output of each rank lies in a run's folder."""

from __future__ import annotations

from pathlib import Path

__all__ = ["log_path"]


def log_path(log_dir: str | Path, rank: int) -> Path:
    """The file with the whole output of a rank."""
    return Path(log_dir) / f"rank-{rank}.log"
