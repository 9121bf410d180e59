"""Reports Python's warnings of this rank to the notebook, beside what they print."""

from __future__ import annotations

import warnings
from typing import Any

from notebook_accel.rank import this_rank


def install() -> None:
    """Report what ``warnings`` shows from now on; what is filtered or caught is not shown."""
    shown = warnings.showwarning

    def show(message: Any, category: Any, filename: str, *rest: Any, **others: Any) -> None:
        shown(message, category, filename, *rest, **others)
        this_rank.current().note_warning(f"{category.__name__}: {message}")

    warnings.showwarning = show
