from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest

from notebook_accel.notebook import output

cell: ContextVar[str] = ContextVar("cell")


@pytest.mark.parametrize(("default", "expected"), [("newest", "newest"), (None, "launching")])
def test_a_replacement_belongs_to_the_newest_cell_where_the_kernel_knows_it(
    monkeypatch: pytest.MonkeyPatch, default: str | None, expected: str
) -> None:
    """A kernel that knows cells by context alone, as ipykernel 7.0, has the launching one."""
    shown: list[Any] = []

    def update_display(bundle: dict[str, Any], *, raw: bool, display_id: str) -> None:
        assert raw
        where = cell.get() if default is None else cell.get(default)
        shown.append((where, bundle, display_id))

    monkeypatch.setattr(output, "update_display", update_display)
    cell.set("launching")
    output.replace({"text/plain": "end"}, "id")
    assert shown == [(expected, {"text/plain": "end"}, "id")]
