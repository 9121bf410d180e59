"""Progress bars: one a rank in the run's view, one in all elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import auto

from notebook_accel.launch.rank import current
from notebook_accel.training.processes import topology

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["progress", "tqdm"]

_Item = TypeVar("_Item")


def progress(
    iterable: Iterable[_Item],
    desc: str | None = None,
    total: float | None = None,
    *,
    is_shown: bool,
) -> Iterable[_Item]:
    """Return ``iterable`` with a progress bar; under our launcher each rank has its own.

    Args:
        iterable: items to count.
        desc: name of the bar.
        total: number of items, where ``iterable`` cannot say.
        is_shown: whether this rank shows one outside our launcher.
    """
    return auto.tqdm(iterable, desc=desc, total=total, disable=not (is_shown or current().launched))


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> auto.tqdm[Any]:
    """A tqdm bar that only the first rank of each machine shows.

    Args:
        *args: as tqdm.
        main_process_only: False shows a bar of every rank.
        **kwargs: as tqdm.

    Example:
        >>> from notebook_accel.utils import tqdm
        >>> sum(tqdm(range(3), disable=True))
        3
    """
    if main_process_only and topology.topology().local_process_index != 0:
        kwargs["disable"] = True
    return auto.tqdm(*args, **kwargs)
