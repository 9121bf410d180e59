"""One-line warnings for the person: in the run's view under our launcher, as warnings elsewhere."""

from __future__ import annotations

import warnings

from notebook_accel.launch.rank import current

__all__ = ["notice", "notice_once"]

_SHOWN = "notices shown"


def notice(text: str) -> None:
    """Show one line; outside our launcher only the first rank of a machine warns."""
    context = current()
    if context.launched:
        context.notice(text)
    elif context.local_rank == 0:
        warnings.warn(text, stacklevel=3)


def notice_once(key: str, text: str) -> None:
    """The same, once a rank for each ``key``."""
    shown: set[str] = current().shared.setdefault(_SHOWN, set())
    if key not in shown:
        shown.add(key)
        notice(text)
