"""Progress bars by tqdm.

Under our launcher the notebook can show one bar per rank; elsewhere usually only one rank shows a
bar.
"""

from __future__ import annotations

from typing import Any

from tqdm import auto

from notebook_accel.training.processes import topology


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
