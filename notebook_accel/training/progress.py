"""Progress bars: one a rank in the run's view, one in all elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tqdm.auto import tqdm

from notebook_accel.launch.rank import current

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["progress"]

_Item = TypeVar("_Item")


def progress(
    iterable: Iterable[_Item],
    desc: str | None = None,
    total: float | None = None,
    *,
    is_shown: bool,
) -> Iterable[_Item]:
    """``iterable`` with a bar; under our launcher each rank has its own.

    Args:
        iterable: what is gone through.
        desc: name of the bar.
        total: number of items, where ``iterable`` cannot say.
        is_shown: whether this rank shows one outside our launcher.
    """
    return tqdm(iterable, desc=desc, total=total, disable=not (is_shown or current().launched))
