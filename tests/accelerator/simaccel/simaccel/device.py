"""The module ``torch.sim``: what ``torch.cuda`` is for CUDA."""

import atexit
import contextlib
import os
from typing import Any

import torch

from simaccel import _C

Stream = torch.Stream
Event = torch.Event
device_count = _C.device_count
is_initialized = _C.is_initialized
_is_in_bad_fork = _C.is_in_bad_fork
_lazy_init = _C.init


def register() -> None:
    """Name torch's free device type "sim", and give it this module."""
    import sys

    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(_C.drain)


def _index(device: Any = None) -> int:
    if device is None:
        return _C.current_device()
    if isinstance(device, int):
        return device if device >= 0 else _C.current_device()
    index = torch.device(device).index
    return _C.current_device() if index is None else index


def is_available() -> bool:
    return device_count() > 0


def init() -> None:
    _C.init()


def current_device() -> int:
    _C.init()
    return _C.current_device()


def set_device(device: Any) -> None:
    if _index(device) >= 0:
        _C.init()
        _C.set_device(_index(device))


def synchronize(device: Any = None) -> None:
    _C.init()
    _C.synchronize(_index(device))


class device(contextlib.AbstractContextManager):
    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        self.prev_idx = _C.exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _C.exchange_device(self.prev_idx)


class device_of(device):
    def __init__(self, of: torch.Tensor) -> None:
        super().__init__(of.device if of.device.type == "sim" else None)


def _exchange_device(index: int) -> int:
    return _C.exchange_device(index) if index >= 0 else -1


_maybe_exchange_device = _exchange_device


def current_stream(device: Any = None) -> torch.Stream:
    _C.init()
    return torch._C._accelerator_getStream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=20)


def set_stream(stream: torch.Stream) -> None:
    torch._C._accelerator_setStream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None):
    if stream is None:
        yield
        return
    with stream:
        yield


def manual_seed(seed: int) -> None:
    _C.manual_seed(_C.current_device(), int(seed) % 2**64)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _C.manual_seed(index, int(seed) % 2**64)


def initial_seed() -> int:
    return _C.default_generator(_C.current_device()).initial_seed()


def seed() -> None:
    manual_seed(int.from_bytes(os.urandom(8), "little"))


def get_rng_state(device: Any = None) -> torch.Tensor:
    _C.init()
    return _C.default_generator(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    _C.default_generator(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def memory_allocated(device: Any = None) -> int:
    return _C.memory(_index(device))["allocated"]


def max_memory_allocated(device: Any = None) -> int:
    return _C.memory(_index(device))["peak"]


def memory_reserved(device: Any = None) -> int:
    return _C.memory(_index(device))["reserved"]


def max_memory_reserved(device: Any = None) -> int:
    return _C.memory(_index(device))["reserved_peak"]


def reset_peak_memory_stats(device: Any = None) -> None:
    _C.reset_peak(_index(device))


def empty_cache() -> None:
    if is_initialized():
        _C.empty_cache()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return _C.memory_limit() - memory_allocated(device), _C.memory_limit()


class _Properties:
    def __init__(self, index: int) -> None:
        self.name = f"Simulated Accelerator {index}"
        self.total_memory = _C.memory_limit()
        self.multi_processor_count = 1

    def __repr__(self) -> str:
        return f"_SimDeviceProperties(name={self.name!r}, total_memory={self.total_memory >> 20}MB)"


def get_device_properties(device: Any = None) -> _Properties:
    _C.init()
    return _Properties(_index(device))


def get_device_name(device: Any = None) -> str:
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return 1, 0


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]
