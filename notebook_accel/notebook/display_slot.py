"""One slot in a cell's output: what is shown there first can be replaced later, from any thread."""

from __future__ import annotations

import contextvars
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.display import display, update_display

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DisplaySlot"]


class DisplaySlot:
    """A slot that the first :meth:`show` puts into the output of the cell that runs then.

    Contents are mappings from MIME types, as Jupyter's messages have them.
    """

    def __init__(self) -> None:
        self._id = f"notebook-accel-{uuid.uuid4().hex}"
        self._is_shown = False

    def show(self, bundle: Mapping[str, Any]) -> None:
        """Show ``bundle`` in the slot, in place of what was there.

        The first call must come from the cell's own thread; the others may come from any.
        """
        if not self._is_shown:
            self._is_shown = True
            display(dict(bundle), raw=True, display_id=self._id)  # type: ignore[no-untyped-call]
            return
        replace = partial(update_display, dict(bundle), raw=True, display_id=self._id)
        # nbclient drops what belongs to a cell that has ended. In a context of its own the message
        # belongs to the cell that runs now, whatever cell started the thread.
        try:
            contextvars.Context().run(replace)
        except LookupError:
            # ipykernel 7.0 knows no cell but that of the context.
            replace()
