"""Smaller batches after an out-of-memory error, and memory that is given back."""

import weakref

import pytest
import torch

from notebook_accel import ConfigError, find_executable_batch_size
from notebook_accel.training.processes.device_memory import is_out_of_memory, release_memory

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Job:
    """Fits up to ``limit`` samples a batch; keeps the sizes that it was tried with."""

    def __init__(self, limit, error=None):
        self.limit = limit
        self.error = error or RuntimeError(CUDA)
        self.sizes = []

    def run(self, batch_size, *, name=""):
        self.sizes.append(batch_size)
        if batch_size > self.limit:
            raise self.error
        return batch_size, name


def test_bare_it_begins_with_128_and_takes_nine_tenths():
    job = Job(100)
    run = find_executable_batch_size(job.run)
    assert run(name="a") == (92, "a")
    assert job.sizes == [128, 115, 103, 92]
    assert run() == (92, ""), "a later call begins with what was found"
    assert job.sizes[4:] == [92]


def test_with_arguments_both_kinds_of_reduction_hold():
    sizes = iter([20, 10] * 2)

    def optional(factor=1):
        return next(sizes) * factor

    for reduce in (lambda size: size // 2, lambda: next(sizes), optional):
        job = Job(10)
        decorate = find_executable_batch_size(starting_batch_size=40, reduce_batch_size_fn=reduce)
        assert decorate(job.run)() == (10, "")
        assert job.sizes == [40, 20, 10]


def test_no_size_fits_and_the_next_call_begins_anew():
    job = Job(0)
    run = find_executable_batch_size(job.run, starting_batch_size=2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^No executable batch size found: run\(\).*CUDA"):
            run()
    assert job.sizes == [2, 1, 2, 1]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("any text"),
        MemoryError(),
        RuntimeError("XPU out of memory. Tried to allocate"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if"),
        RuntimeError("[enforce fail at alloc] DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("[enforce fail at alloc] DefaultCPUAllocator: not enough memory: you"),
    ],
)
def test_what_says_that_memory_is_short_is_tried_again(error):
    assert is_out_of_memory(error)
    assert find_executable_batch_size(Job(4, error).run, starting_batch_size=5)() == (4, "")


def test_the_host_s_own_error_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError(CUDA)])
def test_another_error_passes(error):
    job = Job(0, error)
    with pytest.raises(type(error)) as caught:
        find_executable_batch_size(job.run)()
    assert caught.value is error
    assert job.sizes == [128]


def test_the_tensors_of_a_failed_try_are_gone_before_the_next():
    held = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size):
        assert all(tensor() is None for tensor in held)
        batch = torch.zeros(batch_size)
        held.append(weakref.ref(batch))
        if batch_size > 2:
            raise RuntimeError(CUDA)
        return batch_size

    assert train() == 2
    assert len(held) == 3


def test_a_function_takes_the_batch_size_first():
    for function in (lambda: None, lambda *, batch_size: None):
        with pytest.raises(TypeError, match="its batch size, as its first argument"):
            find_executable_batch_size(function)()


@pytest.mark.parametrize(("args", "kwargs"), [((64,), {}), ((), {"batch_size": 64})])
def test_a_call_leaves_the_batch_size_out(args, kwargs):
    job = Job(1000)
    with pytest.raises(TypeError, match=r"run\(\) is given its batch size, .* leave it out"):
        find_executable_batch_size(job.run)(*args, **kwargs)
    assert job.sizes == []


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="starting_batch_size=0: expected a whole number, 1"):
        find_executable_batch_size(starting_batch_size=0)
    stuck = find_executable_batch_size(Job(0).run, 8, lambda size: size)
    with pytest.raises(ConfigError, match="gave 8 after 8: expected a smaller"):
        stuck()


def test_released_objects_are_free_once_their_names_are_given_away():
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    seen = weakref.ref(model)
    model, other = release_memory(model, other)
    assert model is None
    assert other is None
    assert seen() is None
