"""Loggers and progress bars for code that runs on every rank: by default one rank shows them."""

from __future__ import annotations

import functools
import logging
from collections.abc import MutableMapping
from typing import Any

from tqdm import auto

from notebook_accel.rank.this_rank import current
from notebook_accel.training.processes import topology
from notebook_accel.training.settings import environment


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """The logger that :func:`get_logger` returns; by default it logs on rank 0 only.

    Its methods (``info``, ``warning``, ...) also take ``main_process_only`` (True unless given) and
    ``in_order`` (False unless given); :meth:`log` explains them.
    """

    @functools.cached_property
    def _warned(self) -> set[str]:
        return set()

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log on rank 0 only; with ``main_process_only=False`` on every rank that calls it.

        With ``in_order=True`` all ranks log, one after the other, whatever ``main_process_only``
        is. All ranks have to make that call, since each waits for the others.
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
        """Return the message, prefixed by "[RANK n]" if there are several ranks, and ``kwargs``.

        Python's ``LoggerAdapter`` defines this method; ``kwargs`` is not changed.
        """
        context = current()
        prefix = f"[RANK {context.rank}] " if context.world_size > 1 else ""
        return f"{prefix}{msg}", kwargs

    def warning_once(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log a warning, unless this logger object has logged the same text by this method."""
        text = str(msg) % args if args else str(msg)
        if text not in self._warned:
            self._warned.add(text)
            self.log(logging.WARNING, msg, *args, **{"stacklevel": 3, **kwargs})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that writes the lines of rank 0 only, unless a call asks for more.

    ``logger.info(..., main_process_only=False)`` writes a line on each rank that calls it.
    ``in_order=True`` writes the lines of all ranks, one rank after the other, and all ranks have to
    make this call. The same holds for ``warning`` and the other methods.

    Args:
        name: the logger's name, usually ``__name__``.
        log_level: the level of this logger and of the root logger, such as "INFO". None takes the
            variable ACCELERATE_LOG_LEVEL; if that is unset, no level is changed.

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


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> auto.tqdm[Any]:
    """Return a tqdm progress bar, which by default only the first rank of each machine shows.

    Args:
        *args: arguments of ``tqdm.auto.tqdm``.
        main_process_only: False: every rank shows its bar.
        **kwargs: keyword arguments of ``tqdm.auto.tqdm``.

    Example:
        >>> from notebook_accel.utils import tqdm
        >>> sum(tqdm(range(3), disable=True))
        3
    """
    if main_process_only and topology.topology().local_process_index != 0:
        kwargs["disable"] = True
    return auto.tqdm(*args, **kwargs)
