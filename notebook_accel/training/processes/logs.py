"""Loggers for code that runs on every rank: a line is written once."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.rank import current
from notebook_accel.training.processes import topology
from notebook_accel.training.settings import environment

if TYPE_CHECKING:
    from collections.abc import MutableMapping

__all__ = ["MultiProcessAdapter", "get_logger"]


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """Logger whose calls also take ``main_process_only=True`` and ``in_order=False``."""

    @functools.cached_property
    def _warned(self) -> set[str]:
        return set()

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log on rank 0; with ``main_process_only=False`` on all ranks.

        With ``in_order=True`` all ranks log, one after the other, whatever ``main_process_only``
        says: all of them call it.
        """
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        if not in_order:
            if not main_only or current().rank == 0:
                self._write(level, msg, *args, **kwargs)
            return
        here = topology.topology()
        for rank in range(here.num_processes):
            if rank == here.process_index:
                self._write(level, msg, *args, **kwargs)
            topology.barrier()

    def _write(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        if self.isEnabledFor(level):
            kwargs["stacklevel"] += 1
            text, options = self.process(msg, kwargs)
            self.logger.log(level, text, *args, **options)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message with a prefix that names the rank, if there are several ranks."""
        context = current()
        prefix = f"[RANK {context.rank}] " if context.world_size > 1 else ""
        return f"{prefix}{msg}", kwargs

    def warning_once(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log a warning once per text; repetitions are dropped."""
        text = str(msg) % args if args else str(msg)
        if text not in self._warned:
            self._warned.add(text)
            self.log(logging.WARNING, msg, *args, **{"stacklevel": 3, **kwargs})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger whose lines are written by rank 0 only.

    Each call takes ``main_process_only=False`` for lines of all ranks, and ``in_order=True`` for
    one rank after the other.

    Args:
        name: usually ``__name__``.
        log_level: such as "INFO". None reads ACCELERATE_LOG_LEVEL, else changes nothing.

    Example:
        >>> from notebook_accel import Accelerator
        >>> from notebook_accel.logging import get_logger
        >>> accelerator = Accelerator()
        >>> get_logger("train").info("begins", main_process_only=False)
    """
    logger = logging.getLogger(name)
    level = log_level or environment.read("LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger)
