"""The only place where private names of torch are used; a new release may change them.

A name that is gone turns off what needs it, with one line (:func:`_report_missing`); it never
raises in a user's training step. The file does not import torch at the top, since the processes of
the launcher import it without torch.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import pickle
import sys
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.optim import Optimizer

_missing: set[str] = set()


def _report_missing(name: str, without: str) -> None:
    # Not a warning, which a filter may turn into an error; of many ranks, the first one reports.
    if name not in _missing and os.environ.get("RANK", "0") == "0":
        version = getattr(sys.modules.get("torch"), "__version__", "")
        logging.getLogger("notebook_accel").warning(
            "torch %s has no %s as notebook_accel knows it: %s. Update notebook_accel, or install "
            "an older torch.",
            *(version, name, without),
        )
    _missing.add(name)


# ---- replaced in ranks


def is_to_replace(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether ranks may replace functions of torch by the functions ``replace_*`` below.

    They may unless the variable ``NOTEBOOK_ACCEL_TORCH_FIXES`` is "0" in ``environment``.
    """
    return environment.get("NOTEBOOK_ACCEL_TORCH_FIXES") != "0"


def replace_stash(wrap: Callable[[Any], Any]) -> None:
    """Replace ``torch._C._stash_obj_in_tls(key, object)``, which each backward calls."""
    without = "a rank on the CPU may hang when it drops its model after its process group"
    _replace(sys.modules["torch"]._C, "_stash_obj_in_tls", wrap, without)


def replace_group_maker(wrap: Callable[[Any], Any]) -> None:
    """Replace ``_new_process_group_helper``, which makes each process group and its store."""
    without = "ranks that wait in a collective are not freed, and a group may be closed early"
    module = sys.modules.get("torch.distributed.distributed_c10d")
    _replace(module, "_new_process_group_helper", wrap, without, ("group_size", "group_rank"))


def replace_store_maker(wrap: Callable[[Any], Any]) -> None:
    """Replace ``_create_c10d_store``, which makes a group's store at MASTER_ADDR."""
    without = "a function that makes one process group after the other may fail"
    module = sys.modules.get("torch.distributed.rendezvous")
    expected = ("hostname", "port", "rank", "world_size", "timeout")
    _replace(module, "_create_c10d_store", wrap, without, expected)


def replace_store_parameters(wrap: Callable[[Any], Any], expected: tuple[str, ...]) -> bool:
    """Replace ``TCPStore.__init__``; return whether this torch has the expected parameters."""
    store = sys.modules["torch.distributed"].TCPStore
    # It is made in C++: its text says what it takes.
    described = (store.__init__.__doc__ or "").partition("self")[2]
    places = [described.find(f" {name}:") for name in expected]
    if -1 in places or places != sorted(places):
        _report_missing("TCPStore.__init__", "other machines can reach the store of the ranks")
        return False
    store.__init__ = wrap(store.__init__)
    return True


def _replace(
    module: Any, name: str, wrap: Callable[[Any], Any], without: str, expected: tuple[str, ...] = ()
) -> None:
    if module is None or not is_to_replace():  # a torch without torch.distributed
        return
    plain = getattr(module, name, None)
    if plain is None or (
        expected and list(inspect.signature(plain).parameters)[: len(expected)] != [*expected]
    ):
        _report_missing(name, without)
    else:
        setattr(module, name, wrap(plain))


def forget_half_made_groups() -> None:
    """Reset torch's count of groups, so that all ranks give the next default group the same name.

    Torch names a default group by the number of groups made before (``_world.group_count``).
    Destroying the group resets the number. But a rank that failed to make a group has none to
    destroy: its next group would have another name than the other ranks' group, and it would wait
    for them for ever. Called when a rank has dropped its group.
    """
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None or not is_to_replace():
        return
    if not hasattr(getattr(module, "_world", None), "group_count"):
        _report_missing("_world.group_count", "ranks may not meet after one failed to make a group")
    elif not module.is_initialized():
        module._world.group_count = 0


# ---- process groups and meshes


def backends_of_groups() -> list[str]:
    """Return the backends of all process groups of this rank, such as "cuda:nccl".

    This uses ``_world.pg_backend_config``. If torch removed it, the list would be empty: a group of
    NCCL would be closed like one of gloo, and its rank might never end.
    """
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    return [str(config) for config in getattr(world, "pg_backend_config", {}).values()]


# Backends whose collectives are done when they return, and that notice a peer's end.
_OF_HOST = frozenset({"fake", "gloo", "mpi", "ucc"})


def is_asynchronous(backends: str) -> bool:
    """Return whether one of a group's backends only queues its collectives on a device.

    NCCL and its kin do (xccl, hccl, tpu_dist, ...).
    """
    return any(one.rpartition(":")[2] not in _OF_HOST for one in backends.split(",") if one)


def abort_groups() -> Callable[[], None] | None:
    """Return torch's function that aborts all process groups, ``_abort_process_group``.

    Return None if torch has no such function. Only SIGTERM can then end a rank that waits for other
    ranks on its GPU.
    """
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return getattr(module, "_abort_process_group", None)


def ranks_of_groups() -> dict[str, list[int]]:
    """Return the ranks of each process group of this rank, by torch's name of the group.

    This uses ``_world.pg_names``. If torch removed it, each group is taken to have all ranks.
    """
    module: Any = sys.modules["torch.distributed.distributed_c10d"]
    names = getattr(getattr(module, "_world", None), "pg_names", {})
    return {name: module.get_process_group_ranks(group) for group, name in [*names.items()]}


# What an entry of the flight recorder is asked for.
_OF_ENTRY = frozenset(
    {"collective_seq_id", "input_sizes", "is_p2p", "process_group", "profiling_name", "retired"}
    | {"time_created_ns"}
)


def recorded_collectives() -> list[dict[str, Any]] | None:
    """Return what torch's flight recorder has of this rank's collectives, the oldest first.

    The frames of the Python code that began them are there if one is not done: the first time they
    take torch a second. An entry's ``state`` says nothing: "scheduled" for gloo, also when done.

    This uses ``_dump_fr_trace`` and, for NCCL, ``_dump_nccl_trace``. If torch removed both, or
    their entries are not as we know them, return None: which ranks hang is read from stacks alone.
    """
    native = sys.modules.get("torch._C._distributed_c10d")
    names = ("_dump_fr_trace", "_dump_nccl_trace")
    recorders = [getattr(native, name) for name in names if hasattr(native, name)]
    found: list[dict[str, Any]] = []
    for dump in recorders:
        entries = pickle.loads(dump(True, False, False)).get("entries", [])
        if any(not entry["retired"] for entry in entries):
            entries = pickle.loads(dump(True, True, False))["entries"]
        found += entries
    is_known = recorders and (not found or _OF_ENTRY.issubset(found[0]))
    return found if is_known else None


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh of one dimension, called ``name``, with all ranks of ``mesh``.

    This uses ``DeviceMesh._flatten``. If torch removed it, a device mesh would lack the dimensions
    "dp", "dp_cp" and "dp_shard_cp", over which scripts average a loss.
    """
    if hasattr(mesh, "_flatten"):
        flat: DeviceMesh = mesh._flatten(name)
        return flat
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    _report_missing("DeviceMesh._flatten", f'a device mesh has no dimension "{name}"')
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, tuple(mesh.mesh.flatten().tolist()))
    group, _ = dist.new_subgroups_by_enumeration(sorted(set(of_all)))  # type: ignore[no-untyped-call]
    return DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=(name,))


def set_rotate_method(exchange: str) -> None:
    """Choose how torch's ring attention exchanges keys and values: "allgather" or "alltoall".

    This uses the private module ``_attention``. If torch removed it, context parallelism on GPUs
    would use torch's default, whatever ``cp_comm_strategy`` says.
    """
    try:
        from torch.distributed.tensor.experimental import _attention

        _attention.set_rotate_method(exchange)
    except (AttributeError, ImportError):
        _report_missing("set_rotate_method", "cp_comm_strategy has no effect")


# ---- weights in parts


def drop_whole_gradients(module: Any, weights: Container[int]) -> None:
    """Drop the gradients that FSDP2 has accumulated and not yet reduced over the ranks.

    This uses ``_fsdp_param_group`` or, in newer torch, ``_fsdp_param_groups``, and
    ``_unsharded_param``. If torch removed them, gradients that a script clears during gradient
    accumulation would come back at the next step.
    """
    from torch.distributed.fsdp import fully_shard

    try:
        state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        found = [held for group in groups if group is not None for held in group.fsdp_params]
        for held in (each for each in found if id(each.sharded_param) in weights):
            # Since torch 2.15 a property without a setter: the gradient of the weight below.
            with suppress(AttributeError):
                held.unsharded_accumulated_grad = None
            whole = getattr(held, "_unsharded_param", None)  # None before the first forward
            if whole is not None:
                whole.grad = None
            if held.unsharded_accumulated_grad is not None:
                raise AttributeError("_unsharded_param")
    except AttributeError as error:
        _report_missing(
            f"place of FSDP2's gradients that we know ({error})",
            "gradients that are cleared during gradient accumulation come back at the next step",
        )


def at_other_device(spread: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor like ``spread`` whose local shard is ``local``, on any device.

    This uses ``DTensor._spec``. If torch removed it, the copy of a sharded weight that is saved in
    the background would take memory of its GPU.
    """
    if hasattr(spread, "_spec"):
        part: torch.Tensor = type(spread)(local, spread._spec, requires_grad=False)
        return part
    _report_missing("DTensor._spec", "the copy of a checkpoint stays on its device")
    copied: torch.Tensor = spread.detach().clone()
    return copied


def part_of_file(stored: Mapping[str, Any]) -> Any:
    """Return torch's record of where a shard lies in a checkpoint's files.

    This uses ``_StorageInfo``. If torch removed it, the record is an object with the same fields.
    """
    from torch.distributed.checkpoint import filesystem

    return getattr(filesystem, "_StorageInfo", SimpleNamespace)(**stored)


# ---- loss scaling


def unscale_by(
    scaler: Any, unscale: Callable[[Any, Callable[..., Any], Optimizer, torch.Tensor], Any]
) -> None:
    """Replace the method ``_unscale_grads_`` of a subclass of GradScaler.

    Without the replacement, fp16 training raises an error if an optimizer has both sharded and
    plain weights, and ranks may skip different steps.
    """
    plain = getattr(scaler, "_unscale_grads_", None)
    if plain is None:
        _report_missing(
            "GradScaler._unscale_grads_",
            "fp16 fails with sharded and plain weights in one optimizer",
        )
        return

    def replaced(
        self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool
    ) -> Any:
        def as_torch(optimizer: Any, allow_fp16: bool = allow_fp16, device: Any = None) -> Any:
            # To the host torch copies both without waiting, and reads them at once.
            values = (value.to(device=device) for value in (inv_scale, found_inf))
            return plain(self, optimizer, *values, allow_fp16)

        return unscale(self, as_torch, optimizer, found_inf)

    scaler._unscale_grads_ = replaced


def overflow(scaler: Any, optimizer: Optimizer) -> torch.Tensor | None:
    """Return a tensor on the device that is not 0 if the optimizer's newest step overflowed.

    This uses ``GradScaler._found_inf_per_device``. If torch removed it, ``step_was_skipped`` would
    never be true, and learning rate schedules would advance on skipped steps.
    """
    if not hasattr(scaler, "_found_inf_per_device"):
        _report_missing("GradScaler._found_inf_per_device", "step_was_skipped is never true")
        return None
    by_device = [*scaler._found_inf_per_device(optimizer).values()]
    if not by_device:
        return None
    found: torch.Tensor = by_device[0].clone()  # torch adds those of other optimizers in place
    for other in by_device[1:]:
        found += other.to(found.device, non_blocking=True)
    return found


# ---- modules and wrappers


def own_children(copied: Module) -> dict[str, Any] | None:
    """Give a shallow copy of a module its own dict of children, and return the dict.

    A child can then be replaced in the copy alone. This uses ``Module._modules``. Return None if
    torch removed it: the model is then compiled as a whole, not each repeated block.
    """
    if not hasattr(copied, "_modules"):
        _report_missing("Module._modules", "regional compilation compiles the whole model")
        return None
    children = vars(copied)["_modules"] = dict(copied._modules)
    return children


def parts_of_module(attributes: dict[str, Any]) -> dict[str, Any]:
    """Remove ``_modules`` and ``_parameters`` from attributes of a module; return their items.

    Errors about values that cannot be pickled then say ``model.x``, not ``model._modules['x']``.
    For an object that is no module, return an empty dictionary.
    """
    taken = (attributes.pop(name, None) for name in ("_modules", "_parameters"))
    return {
        name: part for parts in taken if isinstance(parts, dict) for name, part in parts.items()
    }


def original_module(module: Module) -> Module:
    """Return the module that was given to ``torch.compile``, or ``module`` if it is not compiled.

    This uses ``_orig_mod``. If torch renamed it, the names of a compiled model's weights would
    begin with the new name, in checkpoints too.
    """
    return getattr(module, "_orig_mod", module)


def set_original_module(compiled: Module, module: Module) -> None:
    """Set ``_orig_mod`` of a module whose blocks were compiled one by one.

    :func:`original_module` then returns ``module`` for ``compiled``, as for a module that
    torch.compile made.
    """
    compiled.__dict__["_orig_mod"] = module


def join_flags(wrapped: Module) -> dict[str, Any]:
    """Return the attributes that DDP sets for a ``join`` block, by name.

    These are ``_join_config`` and ``_divide_by_initial_world_size``. They are copied if a model is
    wrapped in DDP anew inside ``join_uneven_inputs``. If torch removed them, the new wrapper would
    not take part in the block, and the other ranks would wait for this one.
    """
    names = ("_join_config", "_divide_by_initial_world_size")
    return {name: vars(wrapped)[name] for name in names if name in vars(wrapped)}


# ---- tensors, functions and files


def num_collectives() -> int:
    """Return how many collectives this process has begun in the process groups that it has.

    0 without groups, and where torch or a group's backend does not count them: steps of an
    optimizer that one rank alone has are then taken for steps of all ranks.
    """
    module = sys.modules.get("torch.distributed.distributed_c10d")
    groups = getattr(getattr(module, "_world", None), "pg_map", ())
    with suppress(AttributeError, RuntimeError):
        return sum(group._get_sequence_number_for_group() for group in groups)
    return 0


def count_of_changes(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place.

    This uses ``Tensor._version``. If torch removed it, a mix of scaled and unscaled gradients would
    not be refused, and a notebook variable whose tensor was changed in place would not be sent to
    the session again.

    Raises:
        RuntimeError: the tensor was made in inference mode, and has no such count.
    """
    try:
        return tensor._version
    except AttributeError:
        _report_missing("Tensor._version", "gradients that change in place are taken for unchanged")
        return 0


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have ``call`` called when the backward that runs now has computed all gradients.

    What was queued in this way before, such as the wait for other ranks, runs before it. Where
    torch lacks the name nothing is called.
    """
    engine = getattr(sys.modules["torch"].autograd.Variable, "_execution_engine", None)
    if engine is None:
        _report_missing("Variable._execution_engine", "the wait for other ranks is not measured")
    else:
        engine.queue_callback(call)


def untyped_storage(typed: Any) -> Any:
    """Return the untyped storage of a TypedStorage.

    This uses ``_untyped_storage``, since the public ``untyped()`` warns.
    """
    own = getattr(typed, "_untyped_storage", None)
    return typed.untyped() if own is None else own


def without_iterator(loader: Any) -> Any:
    """Return ``loader``, or a copy without the iterator that it keeps (``persistent_workers``)."""
    if getattr(loader, "_iterator", None) is None:
        return loader
    copied = copy.copy(loader)
    copied._iterator = None
    return copied


def original_function(function: Any) -> Any:
    """Return the function from which ``torch.compile`` made this one; None for any other.

    This uses ``_torchdynamo_orig_callable``. If torch removed it, compiled functions of the
    notebook could not be sent to the ranks.
    """
    return vars(function).get("_torchdynamo_orig_callable")


def loadable_names() -> dict[str, Any]:
    """Return the classes and functions that ``torch.load(weights_only=True)`` allows, by full name.

    This uses ``_get_allowed_globals``. If torch removed it, even a checkpoint that contains only
    tensors could be read only if the user says that the file is trusted.
    """
    try:
        from torch import _weights_only_unpickler

        return dict(_weights_only_unpickler._get_allowed_globals())
    except (AttributeError, ImportError):
        _report_missing("_get_allowed_globals", "checkpoints are read only if they are trusted")
        return {}
