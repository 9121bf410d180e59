"""Values that could be pickled, and would be useless or wrong in another process; what to do."""

from __future__ import annotations

__all__ = ["STAYS_HOME", "Refused", "remedy_of"]

# The attribute by which a class of ours (or of anybody's) says what to do instead.
STAYS_HOME = "_notebook_accel_stays_home"

_INSIDE = "make it inside the function"
_GROUP = "it belongs to a process group of this process; make it inside the function"
_WRAPPED = "it is bound to a process group of this process; send its `.module` and wrap it inside"
_WIDGET = "it lives in the notebook's page; print, or report from the function, instead"

# By name, since importing torch, a widget library or another launcher to ask would cost seconds.
_REMEDIES = {
    "IPython.core.interactiveshell.InteractiveShell": "it is the notebook itself",
    "accelerate.accelerator.Accelerator": _INSIDE,
    "accelerate.data_loader.DataLoaderDispatcher": _INSIDE,
    "accelerate.data_loader.DataLoaderShard": _INSIDE,
    "accelerate.optimizer.AcceleratedOptimizer": _INSIDE,
    "accelerate.scheduler.AcceleratedScheduler": _INSIDE,
    "ipywidgets.widgets.widget.Widget": _WIDGET,
    "lightning.fabric.fabric.Fabric": _INSIDE,
    "lightning_fabric.fabric.Fabric": _INSIDE,
    "notebook_accel.launch.rank.RankContext": _INSIDE,
    "notebook_accel.launch.run.Run": "take what you need of it (`run[0]`) and send that",
    "torch._C._distributed_c10d.Backend": _GROUP,
    "torch._C._distributed_c10d.ProcessGroup": _GROUP,
    "torch.distributed.distributed_c10d.ProcessGroup": _GROUP,
    "torch.distributed.distributed_c10d.Store": _GROUP,
    "torch.distributed.device_mesh.DeviceMesh": _GROUP,
    "torch.distributed.fsdp.FSDPModule": _GROUP,
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": _WRAPPED,
    "torch.distributed.tensor.DTensor": "call its `.full_tensor()` on all ranks and take that",
    "torch.nn.parallel.distributed.DistributedDataParallel": _WRAPPED,
    "tqdm.std.tqdm": "make the bar inside the function, where it is shown live",
}


class Refused(Exception):  # noqa: N818 (never seen by a user; a fact, not an error)
    """This object would arrive, but would be wrong there; the text is the remedy."""


def remedy_of(kind: type) -> str | None:
    """What to do instead of sending an instance of ``kind``; None where it may travel."""
    remedy = getattr(kind, STAYS_HOME, None)
    if isinstance(remedy, str):
        return remedy
    for base in kind.__mro__:
        remedy = _REMEDIES.get(f"{base.__module__}.{base.__qualname__}")
        if remedy:
            return remedy
    return None
