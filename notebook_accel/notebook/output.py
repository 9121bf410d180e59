"""What a cell's output holds, by MIME type."""

from __future__ import annotations

import contextvars
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.display import display, update_display

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["put", "replace"]


def put(bundle: Mapping[str, Any], display_id: str | None = None) -> None:
    """Add an output to the cell that runs now; only its own thread may."""
    display(dict(bundle), raw=True, display_id=display_id)  # type: ignore[no-untyped-call]


def replace(bundle: Mapping[str, Any], display_id: str) -> None:
    """Replace the outputs that were put under ``display_id``, from any thread.

    nbclient drops what belongs to a cell that has ended. In a context of its own the message
    belongs to the cell that runs now, whatever cell started the thread.
    """
    show = partial(update_display, dict(bundle), raw=True, display_id=display_id)
    try:
        contextvars.Context().run(show)
    except LookupError:
        # ipykernel 7.0 knows no cell but that of the context.
        show()
