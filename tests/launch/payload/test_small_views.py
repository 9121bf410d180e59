"""Tensors that show a part of a large storage: what is sent, and what stays tied together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_accel.launch import payload

BIG = 10_000_000


def there_and_back(value: Any) -> tuple[Any, int]:
    """The value as the notebook has it, and the number of bytes that travelled."""
    packed = payload.pack_result(value)
    copies = tuple(memoryview(bytearray(buffer)) for buffer in packed.buffers)
    # Without the pickle, which is the last of them.
    num_bytes = sum(buffer.nbytes for buffer in packed.buffers[:-1])
    return payload.unpack_result(payload.Packed(packed.header, copies), payload.Registry()), (
        num_bytes
    )


def shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.float64, torch.bfloat16, torch.complex128, torch.int8, torch.bool]
)
def test_a_slice_is_sent_alone(kind: torch.dtype) -> None:
    big = torch.arange(BIG).to(kind)
    for part in (big[:3], big[5:9], big[-3:], big[100:200:7], big[7], big[3:3]):
        back, num_bytes = there_and_back(part)
        assert num_bytes < 5_000
        assert torch.equal(back, part)
        assert back.stride() == part.stride()
        assert back.dtype == kind


def test_types_that_torch_pickles_in_another_way() -> None:
    for kind in (torch.uint16, torch.float8_e4m3fn):
        big = torch.zeros(BIG, dtype=torch.uint8).view(torch.uint8)[: BIG // 2 * 2].view(kind)
        back, num_bytes = there_and_back({"a": big[3:5], "b": big[4:6]})
        assert num_bytes < 5_000
        assert back["a"].dtype == kind
        assert shares(back["a"], back["b"])


def test_views_that_overlap_still_do() -> None:
    big = torch.arange(BIG)
    (first, second, bytewise, far), num_bytes = there_and_back(
        [big[10:20], big[15:25], big[10:20].view(torch.uint8), big[5_000_000:5_000_003]]
    )
    assert num_bytes < 5_000
    assert shares(first, second)
    assert shares(first, bytewise)
    assert not shares(first, far)
    first[5] = -1
    assert second[0] == -1
    bytewise.zero_()
    assert first.sum() == 0
    assert far.tolist() == [5_000_000, 5_000_001, 5_000_002]


def test_a_view_beside_its_whole_stays_its_view() -> None:
    big = torch.zeros(BIG)
    (part, whole), num_bytes = there_and_back((big[3:5], big))
    assert num_bytes == 4 * BIG
    part += 1
    assert whole[3:5].tolist() == [1, 1]
    (part, storage), _ = there_and_back((big[3:5], big.untyped_storage()))
    assert part.untyped_storage().data_ptr() == storage.data_ptr()


def test_parts_that_make_up_most_of_a_storage_stay_one() -> None:
    flat = torch.arange(BIG, dtype=torch.float32)
    parts = [flat[: BIG // 4], flat[BIG // 2 :]]
    (first, second), num_bytes = there_and_back(parts)
    assert num_bytes == 4 * BIG
    assert shares(first, second)


def test_parameters_and_classes_of_tensors_keep_what_they_are() -> None:
    class Marked(torch.Tensor):
        pass

    big = torch.arange(BIG, dtype=torch.float32)
    parameter = torch.nn.Parameter(big[2:6])
    marked = big[4:8].as_subclass(Marked)
    marked.note = "mine"  # type: ignore[attr-defined]
    loss = (parameter * 2)[:1]
    (parameter, marked, loss, same), num_bytes = there_and_back(
        [parameter, marked, loss, parameter]
    )
    assert num_bytes < 5_000
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter is same
    assert parameter.requires_grad
    assert not loss.requires_grad
    assert (type(marked).__name__, marked.note, marked.tolist()) == ("Marked", "mine", [4, 5, 6, 7])
    assert shares(parameter, marked)


def test_a_tensor_that_is_made_as_it_is_pickled_is_no_part_of_anything() -> None:
    class Made:
        """Each time it is pickled it makes a tensor, in other memory than the time before."""

        num_times = 0
        state: torch.Tensor

        def __getstate__(self) -> dict[str, torch.Tensor]:
            Made.num_times += 1
            return {"state": torch.arange(10 + Made.num_times)[:5]}

    (part, made), num_bytes = there_and_back([torch.zeros(BIG)[:3], Made()])
    assert (part.tolist(), made.state.tolist()) == ([0.0] * 3, [0, 1, 2, 3, 4])
    assert num_bytes < 5_000


def test_a_slice_goes_alone_to_the_ranks_too() -> None:
    big = torch.arange(BIG)
    part = big[1000:1003]

    def train() -> Any:
        return part

    call = payload.pack_call(train)
    assert sum(buffer.nbytes for buffer in call.packed.buffers) < 100_000
