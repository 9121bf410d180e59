from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest

from notebook_accel.notebook import display_slot
from notebook_accel.notebook.display_slot import DisplaySlot

cell: ContextVar[str] = ContextVar("cell")


@pytest.mark.parametrize(("default", "expected"), [("newest", "newest"), (None, "launching")])
def test_a_replacement_belongs_to_the_newest_cell_where_the_kernel_knows_it(
    monkeypatch: pytest.MonkeyPatch, default: str | None, expected: str
) -> None:
    """A kernel that knows cells by context alone, as ipykernel 7.0, has the launching one."""
    shown: list[Any] = []

    def display(bundle: dict[str, Any], *, raw: bool, display_id: str) -> None:
        shown.append(("first", bundle, display_id))

    def update_display(bundle: dict[str, Any], *, raw: bool, display_id: str) -> None:
        assert raw
        where = cell.get() if default is None else cell.get(default)
        shown.append((where, bundle, display_id))

    monkeypatch.setattr(display_slot, "display", display)
    monkeypatch.setattr(display_slot, "update_display", update_display)
    cell.set("launching")
    slot = DisplaySlot()
    slot.show({"text/plain": "start"})
    slot.show({"text/plain": "end"})
    slot.clear()
    (first, second, third) = shown
    assert first[:2] == ("first", {"text/plain": "start"})
    assert second == (expected, {"text/plain": "end"}, first[2])
    assert not any(third[1].values())
