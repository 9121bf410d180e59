"""``prepare_data_loader`` by Accelerate's arguments, for code that calls it by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from notebook_accel.training import topology
from notebook_accel.training.data import prepare_data_loader as prepare
from notebook_accel.training.data.config import DataLoaderConfiguration
from notebook_accel.training.data_group import DataGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.device_mesh import DeviceMesh
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
    torch_device_mesh: DeviceMesh | None = None,
) -> DataLoader[Any]:
    """Give a loader with one rank's part of the batches.

    Args:
        dataloader: the same on every rank.
        device: where batches are put if ``put_on_device``; None is this rank's.
        num_processes: number of ranks; None takes the number that are running.
        process_index: the rank whose part it is; None is this one.
        split_batches: divide each batch over the ranks.
        put_on_device: whether batches are put on the device.
        rng_types: random states that ranks take from rank 0 at the start of each pass, as
            ``Accelerator`` takes them.
        dispatch_batches: whether rank 0 alone reads; None: for iterable datasets on a device.
        even_batches: fill the last round up.
        slice_fn_for_dispatch: takes a rank's part out of what rank 0 has read for all: called with
            the batch, a slice, and ``process_index`` and ``num_processes``; None takes the rows of
            the slice.
        use_seedable_sampler: an order that depends on the seed and the epoch alone.
        data_seed: that seed.
        non_blocking: copy to the device while the loop computes.
        use_stateful_dataloader: make it torchdata's ``StatefulDataLoader`` too.
        torch_device_mesh: the ranks, where several hold one model together: those along its
            dimensions "dp_replicate" and "dp_shard" read different samples.

    Raises:
        ConfigError: settings that do not fit the loader.
    """
    here = topology.topology()
    data_group = DataGroup.of_all_ranks(
        here.num_processes if num_processes is None else num_processes,
        here.process_index if process_index is None else process_index,
    )
    if torch_device_mesh is not None:
        rank = here.process_index if process_index is None else process_index
        data_group = DataGroup.of_mesh(torch_device_mesh, rank)
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
        data_group=data_group,
        slice_fn=slice_fn_for_dispatch,
        # Nobody counts the loaders here. A random number, as in Accelerate, gives each loader an
        # order of its own, and the same one after the same seed.
        ordinal=int(torch.empty((), dtype=torch.int64).random_()),
    )
