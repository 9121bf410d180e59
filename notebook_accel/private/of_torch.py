"""Private names of torch, which is imported by whoever calls: the launcher's side has none."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.optim import Optimizer

__all__ = [
    "abort_groups",
    "at_other_device",
    "backends_of_groups",
    "count_of_changes",
    "default_store",
    "flatten_mesh",
    "forget_half_made_groups",
    "fsdp_parameters",
    "is_compiled_function",
    "is_to_replace",
    "join_flags",
    "loadable_names",
    "original_function",
    "original_module",
    "overflowed",
    "own_children",
    "part_of_file",
    "parts_of_module",
    "replace_group_maker",
    "replace_stash",
    "replace_store_maker",
    "replace_store_parameters",
    "set_original_module",
    "set_rotate_method",
    "unscale_by",
    "untyped_storage",
    "whole_gradient",
]

# ---- replaced in ranks. Each gives False where torch has no such name, or another signature.


def is_to_replace(environment: Mapping[str, str]) -> bool:
    """Whether ranks replace parts of torch: not with ``NOTEBOOK_ACCEL_TORCH_FIXES=0``."""
    return environment.get("NOTEBOOK_ACCEL_TORCH_FIXES") != "0"


def replace_stash(wrap: Callable[[Any], Any]) -> bool:
    """Replace ``torch._C._stash_obj_in_tls(key, object)``, which each backward calls.

    Without it a rank on the CPU that drops its model after its process group may hang.
    """
    return _replace(sys.modules["torch"]._C, "_stash_obj_in_tls", wrap)


def replace_group_maker(wrap: Callable[[Any], Any]) -> bool:
    """Replace ``_new_process_group_helper``, which makes each process group and its store.

    Without it a rank that waits in a collective cannot be freed, since its sockets are not known,
    and a rank that destroys its group at once may break the group of one that still connects.
    """
    module = sys.modules["torch.distributed.distributed_c10d"]
    return _replace(module, "_new_process_group_helper", wrap, ("group_size", "group_rank"))


def replace_store_maker(wrap: Callable[[Any], Any]) -> bool:
    """Replace ``_create_c10d_store``, which makes the store of a group that meets at MASTER_ADDR.

    Without it a function that destroys its group and makes the next may fail or hang there: a rank
    connects to the server of the first one, which is about to close.
    """
    module = sys.modules["torch.distributed.rendezvous"]
    expected = ("hostname", "port", "rank", "world_size", "timeout")
    return _replace(module, "_create_c10d_store", wrap, expected)


def replace_store_parameters(wrap: Callable[[Any], Any], expected: tuple[str, ...]) -> bool:
    """``TCPStore.__init__``, whose parameters are taken by position: ``expected`` are its first.

    Without it a store that a function opens at MASTER_PORT listens on all interfaces.
    """
    store = sys.modules["torch.distributed"].TCPStore
    # It is made in C++: its text says what it takes.
    described = (store.__init__.__doc__ or "").partition("self")[2]
    places = [described.find(f" {name}:") for name in expected]
    if -1 in places or places != sorted(places):
        return False
    store.__init__ = wrap(store.__init__)
    return True


def _replace(
    module: Any, name: str, wrap: Callable[[Any], Any], expected: tuple[str, ...] = ()
) -> bool:
    plain = getattr(module, name, None)
    if plain is None:
        return False
    if expected and list(inspect.signature(plain).parameters)[: len(expected)] != [*expected]:
        return False
    setattr(module, name, wrap(plain))
    return True


def forget_half_made_groups() -> bool:
    """Have torch number its next default group from 0 (``_world.group_count``), if none is open.

    It gives False where this torch has no such number.

    Without it ranks wait for each other under different names, for ever, after one of them failed
    to make a group.
    """
    module: Any = sys.modules["torch.distributed.distributed_c10d"]
    if not hasattr(getattr(module, "_world", None), "group_count"):
        return False
    if not module.is_initialized():
        module._world.group_count = 0
    return True


# ---- process groups and meshes


def backends_of_groups() -> list[str]:
    """Return ``_world.pg_backend_config``: the backends of all process groups ("cuda:nccl").

    Without it a group of NCCL is closed like one of gloo, and its rank may never end.
    """
    world: Any = getattr(sys.modules["torch.distributed.distributed_c10d"], "_world", None)
    return [str(config) for config in getattr(world, "pg_backend_config", {}).values()]


def abort_groups() -> Callable[[], None] | None:
    """``_abort_process_group``, which aborts all groups of NCCL; None where torch has none.

    Without it a rank that waits for others on its GPU is freed by SIGTERM alone.
    """
    module = sys.modules.get("torch.distributed.distributed_c10d")
    abort: Callable[[], None] | None = getattr(module, "_abort_process_group", None)
    return abort


def default_store() -> Any:
    """Return the default group's store (``_get_default_store``), whichever launcher made it.

    Without it ranks cannot agree on a save, nor exchange objects by notes.
    """
    return sys.modules["torch.distributed.distributed_c10d"]._get_default_store()


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Join the dimensions of a mesh into one of this name (``DeviceMesh._flatten``).

    Without it there are no "dp", "dp_cp" and "dp_shard_cp", by which scripts average a loss.
    """
    flat: DeviceMesh = mesh._flatten(name)
    return flat


def set_rotate_method(exchange: str) -> None:
    """Choose how torch's ring attention passes keys and values on (``_attention``).

    Without it context parallelism on GPUs uses torch's choice, whatever ``cp_comm_strategy`` says.
    """
    from torch.distributed.tensor.experimental import _attention

    _attention.set_rotate_method(exchange)


# ---- weights in parts


def fsdp_parameters(module: Any) -> Iterator[Any]:
    """Return what FSDP2 keeps of each weight (``_fsdp_param_group``, newer ``_fsdp_param_groups``).

    Without it gradients that a script has dropped in an open window come back at the next step.
    """
    from torch.distributed.fsdp import fully_shard

    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return (one for group in groups if group is not None for one in group.fsdp_params)


def whole_gradient(held: Any) -> Any:
    """Return the weight with the whole gradient, of an item of :func:`fsdp_parameters`.

    None before the first forward. Without it: as there.
    """
    return getattr(held, "_unsharded_param", None)


def at_other_device(spread: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor whose part is on another device than its mesh (``DTensor._spec``).

    Without it sharded weights on GPUs cannot be saved in the background.
    """
    part: torch.Tensor = type(spread)(local, spread._spec, requires_grad=False)
    return part


def part_of_file(stored: Mapping[str, Any]) -> Any:
    """Return where a tensor's part lies in a sharded checkpoint (``_StorageInfo``).

    Without it no sharded checkpoint is written.
    """
    from torch.distributed.checkpoint import filesystem

    return filesystem._StorageInfo(**stored)


# ---- loss scaling


def unscale_by(
    scaler: Any, unscale: Callable[[Callable[..., Any], Optimizer, torch.Tensor], Any]
) -> None:
    """``GradScaler._unscale_grads_``, replaced in a class of ours.

    Without it fp16 training raises where an optimizer has weights in parts and plain ones, and
    ranks skip different steps.

    Args:
        scaler: the class.
        unscale: gets torch's way, as a function of an optimizer and ``allow_fp16``, the optimizer,
            and the tensor in which an overflow is noted.
    """
    plain = scaler._unscale_grads_

    def replaced(
        self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool
    ) -> Any:
        def as_torch(optimizer: Any, allow_fp16: bool = allow_fp16) -> Any:
            return plain(self, optimizer, inv_scale, found_inf, allow_fp16)

        return unscale(as_torch, optimizer, found_inf)

    scaler._unscale_grads_ = replaced


def overflowed(scaler: Any, optimizer: Optimizer) -> bool:
    """Whether the optimizer's last step was skipped (``GradScaler._found_inf_per_device``).

    Without it ``step_was_skipped`` is never true, and schedules go on over skipped steps.
    """
    found = scaler._found_inf_per_device(optimizer)
    return any(bool(value.item()) for value in found.values())


# ---- modules and wrappers


def own_children(copied: Module) -> dict[str, Any]:
    """Give a shallow copy of a module its own dict of children, so that they can be replaced.

    Without it the repeated blocks of a model cannot be compiled one by one.
    """
    children = vars(copied)["_modules"] = dict(copied._modules)
    return children


def parts_of_module(attributes: dict[str, Any]) -> dict[str, Any]:
    """Take children and weights out of a module's attributes (``_modules``, ``_parameters``).

    Without it an error about what cannot be pickled says ``model._modules['x']``.
    """
    taken = (attributes.pop(name, None) for name in ("_modules", "_parameters"))
    return {
        name: part for parts in taken if isinstance(parts, dict) for name, part in parts.items()
    }


def original_module(module: Module) -> Module:
    """Return the module that ``torch.compile`` was given (``_orig_mod``), or the module itself.

    Without it names of a compiled model's weights begin with "_orig_mod", in checkpoints too.
    """
    inner: Module = getattr(module, "_orig_mod", module)
    return inner


def set_original_module(compiled: Module, module: Module) -> None:
    """Set ``_orig_mod``, so that a module compiled in parts counts as compiled."""
    compiled.__dict__["_orig_mod"] = module


def join_flags(wrapped: Module) -> dict[str, Any]:
    """Return what DDP keeps for a ``join`` block (``_join_config`` and its divisor).

    Without them a wrapper that is made anew inside of ``join_uneven_inputs`` leaves the block, and
    the other ranks wait for it.
    """
    names = ("_join_config", "_divide_by_initial_world_size")
    return {name: vars(wrapped)[name] for name in names if name in vars(wrapped)}


# ---- tensors, functions and files


def count_of_changes(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to (``Tensor._version``).

    Without it gradients that are scaled in part are not refused, and a variable of the notebook
    whose tensor changed in place is not sent to the session anew.

    Raises:
        RuntimeError: of a tensor that was made in inference mode.
    """
    return tensor._version


def untyped_storage(typed: Any) -> Any:
    """Return the untyped storage (``_untyped_storage``; the public name warns).

    Without it no tensor travels between the notebook and its ranks.
    """
    return typed._untyped_storage


def is_compiled_function(function: Any) -> bool:
    """Whether ``torch.compile`` made this function (``_torchdynamo_orig_callable``).

    Without it compiled functions of the notebook do not travel to the ranks.
    """
    return "_torchdynamo_orig_callable" in vars(function)


def original_function(compiled: Any) -> Any:
    """Return the function that ``torch.compile`` was given (``_torchdynamo_orig_callable``)."""
    return vars(compiled)["_torchdynamo_orig_callable"]


def loadable_names() -> dict[str, Any]:
    """Return the names that torch loads with ``weights_only`` (``_get_allowed_globals``).

    Without it no checkpoint of tensors is read unless the person trusts the file.
    """
    from torch import _weights_only_unpickler

    return dict(_weights_only_unpickler._get_allowed_globals())
