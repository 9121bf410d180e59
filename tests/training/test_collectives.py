"""What ranks tell each other, on real ranks, and the structures that it comes in."""

from __future__ import annotations

import os
from collections import OrderedDict, UserDict, defaultdict
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, PartialState, WorkerError, notebook_launcher
from notebook_accel.training import collectives
from notebook_accel.training.collectives import (
    DistributedOperationException,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    gather_ragged,
    pad_across_processes,
    reduce,
    split_between,
)
from notebook_accel.training.collectives.nested import (
    convert_to_fp32,
    find_batch_size,
    recursively_apply,
    send_to_device,
)
from notebook_accel.training.data.gathering import gather_for_metrics
from tests.training.harness import on_ranks
from tests.training.loading import prepare
from tests.training.single import forget_states


class Pair(NamedTuple):
    left: Any
    right: Any


class Encoding(UserDict):
    """As a tokenizer's batch: a mapping of its own, with more than its keys."""

    note = "kept"

    def to(self, device):
        return Encoding({key: value.to(device) for key, value in self.items()})


@on_ranks(3)
def test_tensors_and_objects_of_all_ranks():
    rank, size = collectives.this_rank(), collectives.num_ranks()
    one = torch.arange(6).reshape(2, 3)
    joined = torch.cat([one, one + 100, one + 200])
    both = one + 100 * rank
    assert torch.equal(gather(both), joined)
    assert gather(torch.tensor(rank)).tolist() == [0, 1, 2]
    structure = gather({"a": both, "b": [torch.tensor(float(rank)), Pair(both[:1], (both,))]})
    assert torch.equal(structure["a"], joined)
    scalar, pair = structure["b"]
    assert scalar.tolist() == [0, 1, 2]
    assert isinstance(pair, Pair)
    assert pair.left.shape == (3, 3)
    assert torch.equal(pair.right[0], joined)
    # memory with strides: gloo would send it as it lies
    assert torch.equal(gather(both.t()), torch.cat([one.t(), one.t() + 100, one.t() + 200]))
    assert gather(torch.tensor([rank]).expand(3)).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    conjugate = torch.tensor([1 + 1j * rank]).conj()
    assert gather(conjugate).tolist() == [1, 1 - 1j, 1 - 2j]
    assert gather(torch.tensor([rank, 1]).bool()).tolist() == [0, 1, 1, 1, 1, 1]
    for refused in (torch.bfloat16, torch.complex64, torch.uint16, torch.float8_e4m3fn):
        sent = gather(torch.tensor([rank, 1]).to(refused))
        assert sent.to(torch.complex64).tolist() == [0, 1, 1, 1, 2, 1]
    assert gather(torch.zeros(0, 3)).shape == (0, 3)
    assert not gather(torch.ones(2, requires_grad=True) * rank).requires_grad

    objects = ["r0", {"rank": 0}, "r1", {"rank": 1}, "r2", {"rank": 2}]
    assert gather_object([f"r{rank}", {"rank": rank}]) == objects
    assert gather_object(f"word{rank}") == ["word0", "word1", "word2"]
    assert gather_object((rank, rank)) == [0, 0, 1, 1, 2, 2]
    assert gather_object(Pair(rank, 0)) == [Pair(0, 0), Pair(1, 0), Pair(2, 0)]

    rows, other = gather_ragged([torch.full((rank + 1, 2), rank), torch.zeros(size - rank)])
    assert rows.tolist() == [[0, 0], [1, 1], [1, 1], [2, 2], [2, 2], [2, 2]]
    assert other.shape == (6,)
    with pytest.raises(ValueError, match="pad_across_processes") as caught:
        gather_ragged([torch.zeros(1, 2 + rank)])
    assert "rank 0: [0] float32 (any, 2)\n  rank 1: [0] float32 (any, 3)" in str(caught.value)


@on_ranks(2)
def test_combining():
    rank = collectives.this_rank()
    mine = torch.tensor([1.0, 10.0]) * (rank + 1)
    assert reduce(mine, "sum").tolist() == [3, 30]
    assert reduce([mine], "mean")[0].tolist() == [1.5, 15]
    assert reduce(mine, "max").tolist() == [2, 20]
    assert reduce(mine, "min").tolist() == [1, 10]
    assert reduce(mine, "none").tolist() == mine.tolist() == [1 + rank, 10 + 10 * rank]
    assert reduce(mine, "sum", scale=0.5).tolist() == [3, 30], "scale counts on XLA alone"
    assert reduce(torch.tensor(rank), "mean") == 0.5
    assert reduce(torch.tensor([True, rank == 0]), "sum").tolist() == [2, 1]
    strided = torch.arange(4).reshape(2, 2).t() + rank
    assert reduce(strided, "sum").tolist() == [[1, 5], [3, 7]]

    sent = {"x": torch.full((2, 2), rank).t(), "y": torch.tensor(rank)}
    returned = broadcast(sent, from_process=1)
    assert returned["x"].tolist() == sent["x"].tolist() == [[1, 1], [1, 1]], "in place"
    assert sent["y"] == 1
    objects = [rank, f"text{rank}"]
    assert broadcast_object_list(objects) == objects == [0, "text0"]

    padded = pad_across_processes({"z": torch.ones(2, rank + 1)}, dim=1, pad_index=-1)
    assert padded["z"].tolist() == [[1] * (rank + 1) + [-1] * (1 - rank)] * 2
    in_front = pad_across_processes(torch.ones(rank + 1), pad_first=True)
    assert in_front.tolist() == [0] * (1 - rank) + [1] * (rank + 1)
    assert pad_across_processes(torch.ones(2), dim=3).tolist() == [1, 1], "no such dimension"


def refused(operation, *args, **kwargs):
    with pytest.raises(DistributedOperationException) as caught:
        operation(*args, **kwargs)
    return str(caught.value)


@on_ranks(3)
def test_debug_mode_names_the_ranks_that_differ():
    os.environ["ACCELERATE_DEBUG_MODE"] = "true"
    rank = collectives.this_rank()
    odd = rank == 1
    shapes = {"a": torch.zeros(2 + odd, 3), "b": torch.zeros(())}
    for operation in (gather, broadcast, reduce):
        head, common, other, advice = refused(operation, shapes).splitlines()
        assert head == f"{operation.__name__} was given different tensors by different ranks:"
        assert common == "  ranks 0, 2: ['a'] float32 (2, 3), ['b'] float32 ()"
        assert other == "  rank 1: ['a'] float32 (3, 3), ['b'] float32 ()"
        assert "pad_across_processes" in advice
    kind = torch.float64 if odd else torch.float32
    assert "rank 1: float64 (2)" in refused(reduce, torch.zeros(2, dtype=kind))
    listed = refused(gather, [torch.zeros(1)] * (1 + odd))
    assert "rank 1: [0] float32 (1), [1] float32 (1)" in listed
    padded = refused(pad_across_processes, torch.zeros(2 + rank, 3 + odd))
    assert "rank 1: float32 (any, 4)" in padded
    ragged = refused(gather_ragged, [torch.zeros(1 + rank, 2 + odd)])
    assert "rank 1: [0] float32 (any, 3)" in ragged
    for _ in prepare(DataLoader(range(3), batch_size=1), rank, 3):
        metrics = refused(gather_for_metrics, torch.zeros(1, 1 + odd))
        assert "gather_for_metrics" in metrics
        assert "rank 1: float32 (any, 2)" in metrics
    assert "rank 1: str" in refused(gather_for_metrics, "word" if odd else torch.zeros(1))
    # What goes together does as always.
    assert pad_across_processes(torch.zeros(2 + rank, 3)).shape == (4, 3)
    assert gather_for_metrics(torch.tensor([rank])).tolist() == [0, 1, 2]
    assert gather_for_metrics([f"{rank}"] * rank) == ["1", "2", "2"]
    # The code has the last word, until the state is reset.
    state = PartialState()
    for asked in (False, True):
        state.debug = asked
        assert (state.debug, collectives.compares()) == (asked, asked)
    os.environ["ACCELERATE_DEBUG_MODE"] = "false"
    assert state.debug
    forget_states()
    assert not collectives.compares()


def mixes_up():
    accelerator = Accelerator(cpu=True)
    accelerator.gather(torch.zeros(2 + accelerator.process_index, 3))


def is_told():
    accelerator = Accelerator(cpu=True)
    return refused(accelerator.gather, torch.zeros(2 + accelerator.process_index, 3))


def test_without_it_the_error_names_the_mode():
    with pytest.raises(WorkerError, match="debug=True, which compares") as caught:
        notebook_launcher(mixes_up, num_processes=2, view="none")
    assert caught.value.signal == "SIGABRT"
    told = notebook_launcher(is_told, num_processes=2, view="none", debug=True)
    assert ["gather was given different tensors" in each for each in told] == [True, True]


@pytest.mark.parametrize(
    ("backends", "device", "expected"),
    [
        ("cpu:gloo,cuda:gloo", "cpu", "cpu"),
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu"),  # gloo lacks most collectives there
        ("cuda:nccl", "cpu", "cuda"),
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:0", "cuda:0"),
        ("cpu:gloo,cuda:nccl", "xpu:0", "cpu"),
    ],
)
def test_tensors_travel_where_the_backend_carries_them(backends, device, expected, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backends)
    assert collectives.transport_device(torch.device(device)) == torch.device(expected)


# In a world of one.


@pytest.mark.parametrize("function", [gather, broadcast, reduce, pad_across_processes])
def test_what_is_no_tensor_is_refused_by_name(function):
    with pytest.raises(
        TypeError, match=rf"{function.__name__.split('_')[0]}.*a str \('label'\).*gather_object"
    ):
        function({"a": torch.zeros(1), "b": ["label"]})


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="reduction='average': expected one of 'sum', 'mean'"):
        reduce(torch.zeros(1), "average")


def test_structures_keep_their_types():
    counts = defaultdict(list, a=torch.ones(1))
    data = {
        "named": Pair(torch.ones(1), "text"),
        "ordered": OrderedDict(a=torch.ones(1)),
        "default": counts,
        "own": Encoding(ids=torch.ones(1)),
        "frozen": MappingProxyType({"a": torch.ones(1)}),
        "tuple": (torch.ones(1), None),
    }
    doubled = recursively_apply(lambda tensor: tensor * 2, data)
    assert doubled["named"] == Pair(torch.full((1,), 2.0), "text")
    assert type(doubled["ordered"]) is OrderedDict
    assert doubled["default"].default_factory is list
    assert type(doubled["own"]) is Encoding
    assert doubled["own"].note == "kept"
    assert doubled["own"]["ids"] == 2
    assert doubled["frozen"]["a"] == 2
    assert doubled["tuple"] == (2, None)
    assert [data["default"]["a"], data["own"]["ids"]] == [1, 1], "the input was changed"


def test_putting_on_a_device():
    meta = torch.device("meta")
    thing = object()
    data = [torch.ones(2), (torch.ones(1), "text"), Encoding(ids=torch.ones(3)), thing]
    for non_blocking in (False, True):
        moved = send_to_device(data, meta, non_blocking=non_blocking)
        assert moved[0].device == moved[1][0].device == moved[2]["ids"].device == meta
        assert moved[1][1] == "text"
        assert moved[3] is thing
    kept = send_to_device({"a": torch.ones(1), "b": torch.ones(1)}, meta, skip_keys="a")
    assert (kept["a"].device.type, kept["b"].device.type) == ("cpu", "meta")


def test_looking_into_structures():
    data = {"n": 3, "loss": torch.tensor(1.0), "x": [torch.zeros(5, 2)]}
    assert find_batch_size(data) == 5
    assert find_batch_size({"n": 3}) is None
    assert convert_to_fp32([torch.zeros(1, dtype=torch.float16)])[0].dtype == torch.float32
    assert convert_to_fp32(torch.zeros(1, dtype=torch.int64)).dtype == torch.int64


class Table:
    """As a dataset of Hugging Face's."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def select(self, indices):
        return Table([self.rows[index] for index in indices])


def parts(inputs, count, padding=False):
    return [split_between(inputs, count, index, padding) for index in range(count)]


def test_dividing_what_everybody_has():
    assert parts([1, 2, 3], 2) == [[1, 2], [3]]
    assert parts([1, 2, 3], 2, padding=True) == [[1, 2], [3, 3]]
    assert parts((1, 2, 3), 2, padding=True) == [(1, 2), (3, 3)]
    assert parts([1], 3) == [[1], [], []]
    assert parts([1], 3, padding=True) == [[1], [1], [1]]
    assert parts([], 2, padding=True) == [[], []]
    assert parts(list(range(7)), 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert parts("text", 2) == ["text", "text"]
    assert parts([1, 2], 1) == [[1, 2]]
    tensors = parts(torch.arange(3), 2, padding=True)
    assert [each.tolist() for each in tensors] == [[0, 1], [2, 2]]
    assert [each.tolist() for each in parts(np.arange(3), 2)] == [[0, 1], [2]]
    assert [each.rows for each in parts(Table([4, 5, 6]), 2, padding=True)] == [[4, 5], [6, 6]]


def test_dividing_a_dict_leaves_it_as_it_was():
    given = {"a": [1, 2, 3], "b": torch.arange(3)}
    first, second = parts(given, 2)
    assert (first["a"], first["b"].tolist()) == ([1, 2], [0, 1])
    assert (second["a"], second["b"].tolist()) == ([3], [2])
    assert given["a"] == [1, 2, 3]
    with pytest.raises(ValueError, match=r"lengths differ: \{'a': 1, 'b': 2\}"):
        split_between({"a": [1], "b": [1, 2]}, 2, 0)
