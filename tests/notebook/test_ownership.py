"""Whether a session gets a name again: what a look at a value sees, and what it costs."""

import numpy as np
import pytest
import torch

from notebook_accel.launch.payload import cells, pickling
from notebook_accel.notebook.ownership import look_at, names_used

# Larger than what was once compared of an array; pages of zeros that nobody wrote cost nothing.
LARGE = 100_000_001


def _large():
    return np.zeros(LARGE, np.uint8)


def _weights():
    return torch.zeros(500_000)


def _write_through(value):
    value["x"].numpy()[:] = 1


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: {"x": _large()}, lambda value: value["x"].__setitem__(12_345_678, 1)),
        (lambda: {"x": _large()}, lambda value: value.update(x=_large() + 1)),
        (lambda: {"x": _weights()}, lambda value: value["x"].__setitem__(12_345, 1)),
        (lambda: {"x": _weights()}, lambda value: value["x"].data.add_(1)),
        (lambda: {"x": _weights()}, _write_through),
        (lambda: {"x": torch.zeros(5)}, _write_through),
    ],
    ids=["element", "array", "tensor", "tensor.data", "tensor.numpy()", "small tensor.numpy()"],
)
def test_a_change_within_a_value_is_seen(make, change):
    value = make()
    before = look_at("value", value)
    assert look_at("value", value) == before, "nothing has changed"
    change(value)
    assert look_at("value", value).digest != before.digest


def test_names_are_found_where_memory_is_not_looked_at(monkeypatch):
    main = cells.main_namespace()
    monkeypatch.setitem(main, "of_main", 1)
    function = eval("lambda: of_main", main)
    value = (function, {"array": np.zeros(3), "tensor": torch.zeros(3)})
    assert names_used(value) == look_at("value", value).names == {"of_main"}


def test_names_are_found_without_the_memory_of_tensors(monkeypatch):
    def read(_storage):
        raise AssertionError("of a device, all of it would be copied to the host")

    monkeypatch.setattr(pickling, "memory_of", read)
    assert names_used([torch.ones(3), torch.nn.Linear(2, 2)]) == frozenset()
