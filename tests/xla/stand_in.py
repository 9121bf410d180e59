"""Several ranks on torch_xla's CPU device, which has no collectives between them by itself.

Imported by the leader of a launch (NOTEBOOK_ACCEL_XLA_MODULES), in tests alone. On the CPU two
ranks meet in a collective only where both run one compiled module, so that compiling is done by one
at a time here; the second finds what the first has compiled. Each collective gets a graph of its
own, and none may differ from rank to rank.
"""

import os
import threading
from typing import Any

os.environ.setdefault("XLA_THREAD_POOL_SIZE", "16")

import torch_xla
import torch_xla.core.xla_model as xm

_one_compiles = threading.Lock()
_C = torch_xla._XLAC
_step_marker, _sync_multi = _C._xla_step_marker, _C._xla_sync_multi


def _wait(device: str) -> None:
    _C._xla_wait_device_ops([f"CPU:{device.split(':')[1]}"])


def _mark(device: Any, devices: Any, wait: bool = False, reset_scope: bool = True) -> None:
    with _one_compiles:
        _step_marker(device, devices, wait=False, reset_scope=reset_scope)
    # A second graph would wait for the first while it holds the lock.
    _wait(str(device))


def _sync(tensors: Any, devices: Any, wait: bool = True, sync_xla_data: bool = True) -> None:
    with _one_compiles:
        _sync_multi(tensors, devices, wait=False, sync_xla_data=sync_xla_data)
    _wait(str(_C._xla_get_default_device()))


_C._xla_step_marker, _C._xla_sync_multi = _mark, _sync


def _alone(function: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        torch_xla.sync()
        result = function(*args, **kwargs)
        torch_xla.sync()
        return result

    return run


def _gather(value: Any, dim: int = 0, groups: Any = None, pin_layout: bool = True) -> Any:
    # By default it pads by the number of the rank: a graph that differs.
    return _all_gather(value, dim=dim, groups=groups, pin_layout=False)


_all_gather = xm.all_gather
xm.all_gather = _alone(_gather)
xm.all_reduce = _alone(xm.all_reduce)
xm.collective_broadcast = _alone(xm.collective_broadcast)
xm.broadcast_master_param = _alone(xm.broadcast_master_param)
