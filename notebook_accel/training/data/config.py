"""Settings for how ``Accelerator.prepare`` divides the batches of a DataLoader among the ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields

from notebook_accel.errors import ConfigError


@dataclass
class DataLoaderConfiguration:
    """Settings of prepared DataLoaders: how their batches are divided, ordered and copied.

    Raises:
        ConfigError: a setting has a wrong type.

    Example:
        >>> from notebook_accel import Accelerator, DataLoaderConfiguration
        >>> config = DataLoaderConfiguration(split_batches=True)
        >>> Accelerator(dataloader_config=config).split_batches
        True
    """

    split_batches: bool = False
    """True: each batch of the loader is divided over the ranks, so that its batch size is that
    of all ranks together. False: each rank gets whole batches."""

    dispatch_batches: bool | None = None
    """True: rank 0 alone reads the data and sends each rank its part. None: so for iterable
    datasets whose batches are put on the device."""

    even_batches: bool = True
    """True: the end of the data is filled up with samples from its start, so that every rank
    gets as many batches of the same size. What rank 0 dispatches always is. A stream that divides
    itself (by a method ``shard``, as Hugging Face's do) is left to do so where each rank gets the
    same number of shards; a rank then has the samples of its shards, which may be more or fewer
    than another's."""

    use_seedable_sampler: bool = False
    """True: the order of an epoch depends on the seed and the number of the epoch alone."""

    data_seed: int | None = None
    """Seed of the order; None takes that of the random numbers on rank 0."""

    non_blocking: bool = False
    """True: a batch in pinned memory is copied to the device while the CPU continues. The copy is
    queued behind the step before it, on the same stream."""

    use_stateful_dataloader: bool = False
    """True: prepared loaders are torchdata's ``StatefulDataLoader`` too, so that a dataset with
    ``state_dict`` and ``load_state_dict`` goes on where it was without reading what came before.
    Without it, prepared loaders have a ``state_dict`` too, which counts batches."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), int if field.name == "data_seed" else bool
            if value is not field.default and not isinstance(value, kind):
                raise ConfigError(f"{field.name}={value!r}: expected {kind.__name__}")
