"""Loaders whose data each rank reads itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.training.data.loaders import PreparedLoader

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DataLoaderShard"]


class DataLoaderShard(PreparedLoader):
    """A loader that gives each rank its own batches, which the rank itself reads; what
    ``prepare`` makes of a ``DataLoader``.

    One that is made by hand divides nothing: each rank gets all that the samplers give.

    Args:
        dataset: as torch's DataLoader.
        device: where batches are put; None leaves them where they are.
        rng_types: random states that every rank takes from rank 0 at the start of a pass.
        synchronized_generator: the generator that the order comes from.
        skip_batches: batches at the start of each epoch that are left out.
        use_stateful_dataloader: make it torchdata's ``StatefulDataLoader`` too, whose arguments it
            then takes as well.
        _drop_last: without effect; ``drop_last`` counts.
        _non_blocking: copy to the device while the loop computes.
        torch_device_mesh: of the ranks, where several of them hold one model together; those read
            the same batches.
        iteration: number of the first epoch.
        **kwargs: further arguments of torch's DataLoader.

    Raises:
        ConfigError: torchdata's loader is asked for, and torchdata is not installed.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Iterable[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: DeviceMesh | None = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        if use_stateful_dataloader:
            # Imported here: its class is made of this one.
            from notebook_accel.training.data.stateful import StatefulShard, make_stateful

            make_stateful(self, StatefulShard)
        self._make_by_hand(
            dataset,
            kwargs,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
            device=device,
            rng_types=tuple(rng_types or ()),
            synchronized_generator=synchronized_generator,
            skip_batches=skip_batches or None,
            non_blocking=_non_blocking,
        )
