"""``prepare_data_loader`` by Accelerate's arguments, for code that calls it by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError
from notebook_accel.training import topology
from notebook_accel.training.data import prepare_data_loader as prepare
from notebook_accel.training.data.config import DataLoaderConfiguration
from notebook_accel.training.data_group import DataGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch.utils.data import DataLoader

__all__ = ["prepare_data_loader"]


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Iterable[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoader[Any]:
    """Give a loader with one rank's part of the batches.

    Args:
        dataloader: alike on every rank.
        device: where batches are put if ``put_on_device``; None is this rank's.
        num_processes, process_index: the ranks; None asks where this one stands.
        split_batches: divide each batch over the ranks.
        put_on_device: whether batches are put on the device.
        rng_types: random states that ranks take from rank 0 at the start of each pass.
        dispatch_batches: whether rank 0 alone reads; None: for iterable datasets on a device.
        even_batches: fill the last round up.
        slice_fn_for_dispatch: not taken; batches are divided by their first dimension.
        use_seedable_sampler: an order that depends on the seed and the epoch alone.
        data_seed: that seed.
        non_blocking: copy to the device in the background.
        use_stateful_dataloader: accepted; prepared loaders always have a state.
        torch_device_mesh: not taken; ``Accelerator.prepare`` knows the mesh.

    Raises:
        ConfigError: an argument that is not taken, or settings that do not fit the loader.
    """
    for name, value in (
        ("slice_fn_for_dispatch", slice_fn_for_dispatch),
        ("torch_device_mesh", torch_device_mesh),
    ):
        if value is not None:
            raise ConfigError(f"prepare_data_loader({name}=...) is not taken here; leave it out")
    here = topology.topology()
    return prepare(
        dataloader,
        config=DataLoaderConfiguration(
            split_batches=split_batches,
            dispatch_batches=dispatch_batches,
            even_batches=even_batches,
            use_seedable_sampler=use_seedable_sampler,
            data_seed=data_seed,
            non_blocking=non_blocking,
            use_stateful_dataloader=use_stateful_dataloader,
        ),
        device=(device or here.device) if put_on_device else None,
        rng_types=rng_types,
        data_group=DataGroup.of_all_ranks(
            here.num_processes if num_processes is None else num_processes,
            here.process_index if process_index is None else process_index,
        ),
    )
