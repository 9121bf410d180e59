"""One-line notices for the user.

In ranks that our launcher started they appear in the notebook's view of the run, elsewhere as
Python warnings.
"""

from __future__ import annotations

import warnings

from notebook_accel.rank.this_rank import current

_SHOWN = "notices shown"


def notice(text: str, *, from_any_rank: bool = False) -> None:
    """Show one line to the user.

    The notebook shows equal lines of several ranks once. In ranks that our launcher did not start,
    only the first rank of each machine issues a Python warning, or with ``from_any_rank`` each.
    """
    context = current()
    if context.launched:
        context.notice(text)
    elif from_any_rank or context.local_rank == 0:
        warnings.warn(text, stacklevel=3)


def notice_once(key: str, text: str, *, from_any_rank: bool = False) -> None:
    """Show one line by :func:`notice`, unless this rank has done so for the same ``key``."""
    shown: set[str] = current().shared.setdefault(_SHOWN, set())
    if key not in shown:
        shown.add(key)
        notice(text, from_any_rank=from_any_rank)
