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
from notebook_accel.training.processes import topology
from tests.training.harness import RankError, run_ranks
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


# On ranks. Each function is one start of processes, and returns what the test looks at.


def gathers():
    rank = collectives.this_rank()
    size = collectives.num_ranks()
    both = torch.arange(6).reshape(2, 3) + 100 * rank
    structure = {"a": both, "b": [torch.tensor(float(rank)), Pair(both[:1], (both,))]}
    kinds = [torch.bool, torch.bfloat16, torch.complex64, torch.uint16, torch.float8_e4m3fn]
    asked = torch.ones(2, requires_grad=True) * rank
    return {
        "plain": gather(both),
        "scalar": gather(torch.tensor(rank)),
        "structure": gather(structure),
        # memory with strides: gloo would send it as it lies
        "transposed": gather(both.t()),
        "expanded": gather(torch.tensor([rank]).expand(3)),
        "conjugate": gather(torch.tensor([1 + 1j * rank]).conj()),
        "kinds": [gather(torch.tensor([rank, 1]).to(kind)).to(torch.complex64) for kind in kinds],
        "empty": gather(torch.zeros(0, 3)),
        "needs no gradient": gather(asked).requires_grad,
        "objects": gather_object([f"r{rank}", {"rank": rank}]),
        "one object": gather_object(f"word{rank}"),
        "tuple": gather_object((rank, rank)),
        "named": gather_object(Pair(rank, 0)),
        "ragged": gather_ragged([torch.full((rank + 1, 2), rank), torch.zeros(size - rank)]),
    }


@pytest.fixture(scope="module")
def gathered():
    return run_ranks(gathers, 3)


def test_tensors_of_all_ranks(gathered):
    one = torch.arange(6).reshape(2, 3)
    joined = torch.cat([one, one + 100, one + 200])
    for got in gathered:
        assert torch.equal(got["plain"], joined)
        assert got["scalar"].tolist() == [0, 1, 2]
        assert torch.equal(got["transposed"], torch.cat([one.t(), one.t() + 100, one.t() + 200]))
        assert got["expanded"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert got["conjugate"].tolist() == [1, 1 - 1j, 1 - 2j]
        assert got["empty"].shape == (0, 3)
        assert not got["needs no gradient"]
        assert torch.equal(got["structure"]["a"], joined)
        scalar, pair = got["structure"]["b"]
        assert scalar.tolist() == [0, 1, 2]
        assert isinstance(pair, Pair)
        assert pair.left.shape == (3, 3)
        assert torch.equal(pair.right[0], joined)


def test_types_that_backends_refuse_travel_too(gathered):
    for got in gathered:
        booleans, *others = got["kinds"]
        assert booleans.tolist() == [0, 1, 1, 1, 1, 1]
        assert [each.tolist() for each in others] == [[0, 1, 1, 1, 2, 1]] * 4


def test_objects_of_all_ranks(gathered):
    for got in gathered:
        assert got["objects"] == [
            "r0", {"rank": 0}, "r1", {"rank": 1}, "r2", {"rank": 2},
        ]  # fmt: skip
        assert got["one object"] == ["word0", "word1", "word2"]
        assert got["tuple"] == [0, 0, 1, 1, 2, 2]
        assert got["named"] == [Pair(0, 0), Pair(1, 0), Pair(2, 0)]


def test_rows_of_ranks_that_have_more_or_fewer(gathered):
    for got in gathered:
        rows, other = got["ragged"]
        assert rows.tolist() == [[0, 0], [1, 1], [1, 1], [2, 2], [2, 2], [2, 2]]
        assert other.shape == (6,)


def combines():
    rank = collectives.this_rank()
    mine = torch.tensor([1.0, 10.0]) * (rank + 1)
    sent = {"x": torch.full((2, 2), rank).t(), "y": torch.tensor(rank)}
    returned = broadcast(sent, from_process=1)
    objects = [rank, f"text{rank}"]
    padded = pad_across_processes({"z": torch.ones(2, rank + 1)}, dim=1, pad_index=-1)
    return {
        "sum": reduce(mine, "sum"),
        "mean": reduce([mine], "mean")[0],
        "max": reduce(mine, "max"),
        "min": reduce(mine, "min"),
        "none": reduce(mine, "none"),
        "scaled": reduce(mine, "sum", scale=0.5),
        "counts": reduce(torch.tensor(rank), "mean"),
        "flags": reduce(torch.tensor([True, rank == 0]), "sum"),
        "strided": reduce(torch.arange(4).reshape(2, 2).t() + rank, "sum"),
        "untouched": mine,
        "broadcast": returned,
        "in place": sent,
        "objects": [broadcast_object_list(objects), objects],
        "padded": padded["z"],
        "padded in front": pad_across_processes(torch.ones(rank + 1), pad_first=True),
        "no such dimension": pad_across_processes(torch.ones(2), dim=3),
    }


def test_combining():
    for rank, got in enumerate(run_ranks(combines, 2)):
        assert got["sum"].tolist() == [3, 30]
        assert got["mean"].tolist() == [1.5, 15]
        assert got["max"].tolist() == [2, 20]
        assert got["min"].tolist() == [1, 10]
        assert got["none"].tolist() == got["untouched"].tolist() == [1 + rank, 10 + 10 * rank]
        assert got["scaled"].tolist() == [3, 30], "scale counts on XLA alone"
        assert got["counts"] == 0.5
        assert got["flags"].tolist() == [2, 1]
        assert got["strided"].tolist() == [[1, 5], [3, 7]]
        assert got["broadcast"]["x"].tolist() == [[1, 1], [1, 1]]
        assert got["in place"]["x"].tolist() == [[1, 1], [1, 1]]
        assert got["in place"]["y"] == 1
        assert got["objects"] == [[0, "text0"]] * 2
        padding = [-1] * (1 - rank)
        assert got["padded"].tolist() == [[1] * (rank + 1) + padding] * 2
        assert got["padded in front"].tolist() == [0] * (1 - rank) + [1] * (rank + 1)
        assert got["no such dimension"].tolist() == [1, 1]


def refused(operation, *args, **kwargs):
    with pytest.raises(DistributedOperationException) as caught:
        operation(*args, **kwargs)
    return str(caught.value)


def compares_in_debug_mode():
    os.environ["ACCELERATE_DEBUG_MODE"] = "true"
    rank = collectives.this_rank()
    odd = rank == 1
    shapes = {"a": torch.zeros(2 + odd, 3), "b": torch.zeros(())}
    kind = torch.float64 if odd else torch.float32
    loader = prepare(DataLoader(range(3), batch_size=1), rank, 3)
    with_loop = [refused(gather_for_metrics, torch.zeros(1, 1 + odd)) for _ in loader]
    found = {
        **{
            operation.__name__: refused(operation, shapes)
            for operation in (gather, broadcast, reduce)
        },
        "type": refused(reduce, torch.zeros(2, dtype=kind)),
        "structure": refused(gather, [torch.zeros(1)] * (1 + odd)),
        "pad": refused(pad_across_processes, torch.zeros(2 + rank, 3 + odd)),
        "ragged": refused(gather_ragged, [torch.zeros(1 + rank, 2 + odd)]),
        "metrics": with_loop[0],
        "objects": refused(gather_for_metrics, "word" if odd else torch.zeros(1)),
    }
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
    return found


def test_debug_mode_names_the_ranks_that_differ():
    results = run_ranks(compares_in_debug_mode, 3)
    assert results[0] == results[1] == results[2], "it is raised on every rank"
    (found, *_) = results
    for name in ("gather", "broadcast", "reduce"):
        head, common, other, advice = found[name].splitlines()
        assert head == f"{name} was given different tensors by different ranks:"
        assert common == "  ranks 0, 2: ['a'] float32 (2, 3), ['b'] float32 ()"
        assert other == "  rank 1: ['a'] float32 (3, 3), ['b'] float32 ()"
        assert "pad_across_processes" in advice
    assert "rank 1: float64 (2)" in found["type"]
    assert "rank 1: [0] float32 (1), [1] float32 (1)" in found["structure"]
    assert "rank 1: float32 (any, 4)" in found["pad"]
    assert "rank 1: [0] float32 (any, 3)" in found["ragged"]
    assert "gather_for_metrics" in found["metrics"]
    assert "rank 1: float32 (any, 2)" in found["metrics"]
    assert "rank 1: str" in found["objects"]


def mixes_up():
    accelerator = Accelerator(cpu=True)
    accelerator.gather(torch.zeros(2 + accelerator.process_index, 3))


def test_without_it_the_error_names_the_mode():
    with pytest.raises(WorkerError, match="debug=True, which compares") as caught:
        notebook_launcher(mixes_up, num_processes=2, view="none")
    assert caught.value.signal == "SIGABRT"
    with pytest.raises(WorkerError, match=r"gather was given different tensors") as caught:
        notebook_launcher(mixes_up, num_processes=2, view="none", debug=True)
    assert caught.value.ranks == [0, 1]


def uneven_elsewhere():
    with pytest.raises(ValueError, match="pad_across_processes") as caught:
        gather_ragged([torch.zeros(1, 2 + collectives.this_rank())])
    return str(caught.value)


def test_ragged_tensors_differ_in_their_first_dimension_alone():
    for text in run_ranks(uneven_elsewhere, 2):
        assert "rank 0: [0] float32 (any, 2)\n  rank 1: [0] float32 (any, 3)" in text


def raises_on_one_rank():
    if collectives.this_rank() == 1:
        raise OSError("this one")
    topology.barrier()


def test_the_harness_tells_of_a_failed_rank():
    with pytest.raises(RankError, match=r"(?s)rank 0: .*rank 1: .*OSError: this one"):
        run_ranks(raises_on_one_rank, 2)


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


def test_alone():
    tensor = torch.tensor([1.0, 2.0])
    assert gather(tensor) is tensor
    assert gather(torch.tensor(3.0)).shape == (1,)
    assert gather_object("word") == ["word"]
    assert gather_object(["a", "b"]) == ["a", "b"]
    assert broadcast(tensor) is tensor
    assert broadcast_object_list([1]) == [1]
    assert reduce(torch.tensor([1, 2]), "mean").dtype == torch.float32
    assert reduce(tensor, "sum") is not tensor
    assert pad_across_processes(tensor) is tensor
    assert gather_ragged([tensor])[0] is tensor
    assert collectives.num_ranks() == 1


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
