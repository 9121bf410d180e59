"""Progress bars by tqdm.

Under our launcher the notebook can show one bar per rank; elsewhere usually only one rank shows a
bar.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import auto

from notebook_accel.rank.this_rank import current
from notebook_accel.training.processes import topology

_Item = TypeVar("_Item")


def progress(
    iterable: Iterable[_Item],
    desc: str | None = None,
    total: float | None = None,
    *,
    is_shown: bool,
) -> Iterable[_Item]:
    """Return ``iterable`` with a progress bar that counts its items.

    Under our launcher each rank has its own bar in the notebook.
    """
    return auto.tqdm(iterable, desc=desc, total=total, disable=not (is_shown or current().launched))


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
