"""Prepared DataLoaders: which samples each rank gets, and how an epoch is resumed in its middle.

``prepare_loader`` here makes prepared loaders from the user's. If each rank reads its own samples,
``samplers`` chooses them; if rank 0 reads for all ranks, ``dispatch`` divides its batches.
``loaders`` and ``dispatch`` have the classes of prepared loaders, and ``IndexSource`` gives a
resumed epoch the samples and random numbers that it would have had without the interruption.
``stepping/active_loaders`` tells which loader is being iterated.

Three words are used throughout. A *round* is the samples on which all ranks work at the same step,
a *pass* is one run over a loader (``for batch in loader``), and a *share* is the part of the data
that one rank reads. Ranks that hold one model together (tensor parallelism, say) read the same
share (``DataGroup``).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from notebook_accel.errors import ConfigError
from notebook_accel.private import of_libraries
from notebook_accel.training.collectives.data_group import DataGroup
from notebook_accel.training.data import samplers
from notebook_accel.training.data.dispatch import DataLoaderDispatcher
from notebook_accel.training.data.loader_wrapper import SkipDataLoader, as_stateful, copied
from notebook_accel.training.data.loaders import DataLoaderShard, LoaderOptions, PreparedLoader
from notebook_accel.training.data.samplers import IterableDatasetShard, ShortRoundCollate
from notebook_accel.training.processes import topology
from notebook_accel.training.processes.random_numbers import new_generator
from notebook_accel.training.settings.handlers import DataLoaderConfiguration
from notebook_accel.training.settings.notices import notice_once


def prepare_loader(
    loader: DataLoader[Any],
    *,
    config: DataLoaderConfiguration,
    device: torch.device | None,
    data_group: DataGroup,
    rng_types: Iterable[Any] | None = None,
    slice_fn: Callable[..., Any] | None = None,
    ordinal: int = 0,
) -> PreparedLoader:
    """Return a loader that gives this rank's part of the batches of ``loader``, on ``device``.

    The workers, ``collate_fn``, pinned memory and any class of the user's own are kept. A loader
    that is prepared already is returned unchanged.

    Args:
        device: where batches are put; None leaves them where they are.
        rng_types: random states that ranks take from rank 0 at the start of each pass. None: only
            the generator from which the order of samples is drawn ("generator"). Any list that is
            not empty synchronizes that generator too, even if the list does not name it. With an
            empty list nothing is synchronized, and the ranks have to be seeded alike.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    if isinstance(loader, SkipDataLoader):
        raise ConfigError(
            f"prepare() got a stream without its first {loader.skip_batches} batches: prepare the "
            "loader first, and call skip_first_batches(loader, n), where n counts the batches of "
            "one rank"
        )
    rng_types = ("generator",) if rng_types is None else rng_types
    is_dispatched = _is_dispatched(loader, config, device)
    num_shares = data_group.size
    size = samplers.batch_size_of(loader)
    if config.split_batches and size is not None:
        samplers.share_of(size, num_shares, split_batches=True)  # raises where it cannot be divided
    draft = copied(loader)  # changed step by step, instead of the user's
    if config.use_stateful_dataloader and type(draft) is DataLoader:
        draft = as_stateful(draft)  # a class of the user's own stays, and counts
    if config.use_seedable_sampler:
        _make_seedable(draft, config.data_seed)
    data_seed = config.data_seed
    if data_seed is None:
        # Of the global random numbers' state: none is drawn, so preparing does not change them.
        state = torch.get_rng_state().numpy().tobytes()
        digest = hashlib.blake2b(state, digest_size=8, key=b"%d" % ordinal).digest()
        data_seed = int.from_bytes(digest, "little") >> 1
    private = new_generator(data_seed)
    # Without a generator of its own, torch's loader draws from the global random numbers as a pass
    # begins, and a run that is resumed in the middle of one would go on with other numbers.
    options = LoaderOptions(
        device=device,
        non_blocking=config.non_blocking,
        generator=draft.generator or private,
        rng_types=tuple(str(getattr(kind, "value", kind)) for kind in rng_types),
        synchronized_generator=_order_generator(draft, private),
        data_group=data_group,
        split_batches=config.split_batches,
        is_uneven=num_shares > 1 and not (config.even_batches or is_dispatched),
        slice_fn=slice_fn,
    )
    if is_dispatched:
        return DataLoaderDispatcher.around(draft, options)
    if num_shares > 1:
        options = _share_out(draft, options, config)
    return DataLoaderShard.around(draft, options)


def _is_dispatched(
    loader: DataLoader[Any], config: DataLoaderConfiguration, device: torch.device | None
) -> bool:
    if config.dispatch_batches is None:
        is_split = of_libraries.is_split_by_node(loader.dataset)
        return isinstance(loader.dataset, IterableDataset) and device is not None and not is_split
    if config.dispatch_batches and device is None:
        raise ConfigError(
            "dispatch_batches=True sends batches to the devices of the ranks, but "
            "device_placement=False (put_on_device=False) keeps them off: expected one or the "
            "other; leave dispatch_batches out, or place on the device"
        )
    return config.dispatch_batches


def _make_seedable(draft: DataLoader[Any], data_seed: int | None) -> None:
    """Replace torch's ``RandomSampler`` in ``draft``, if it has one, by a seedable sampler.

    ``draft`` is the copy of the user's loader that is being prepared. With ``data_seed=None`` the
    seed is that of the replaced sampler's generator or, if that sampler has none, of torch's global
    random numbers.
    """
    inner = getattr(samplers.batch_sampler_of(draft), "sampler", draft.sampler)
    if type(inner) is not RandomSampler:  # a subclass has an order of its own
        return
    # None follows the length of a dataset that grows.
    is_all = inner.num_samples == len(inner.data_source)
    num_samples = None if is_all else inner.num_samples
    seedable = samplers.SeedableRandomSampler(
        inner.data_source, inner.replacement, num_samples, data_seed=data_seed
    )
    seedable.counts_epochs = False
    if data_seed is None and inner.generator is not None:
        # It may differ from rank to rank: as a pass begins, all take rank 0's.
        seedable.initial_seed = inner.generator.initial_seed()
    _replace_sampler(draft, inner, seedable)


def _replace_sampler(draft: DataLoader[Any], old: Sampler[Any], new: Sampler[Any]) -> None:
    for name in ("sampler", "batch_sampler"):
        vars(draft)[name] = _with_sampler(getattr(draft, name), old, new)


def _with_sampler(outer: Any, old: Sampler[Any], new: Sampler[Any]) -> Any:
    """Return ``outer``, or a copy of it that reads ``new`` in place of ``old``."""
    if outer is old:
        return new
    held = getattr(outer, "__dict__", {}).items()
    within = {
        name: _with_sampler(part, old, new)
        for name, part in held
        if isinstance(part, Sampler) or name.lstrip("_") in ("batch_sampler", "sampler")
    }
    if all(part is vars(outer)[name] for name, part in within.items()):
        return outer
    copied = copy.copy(outer)  # the user's own stay as they are
    vars(copied).update(within)
    return copied


def _order_generator(draft: DataLoader[Any], private: torch.Generator) -> torch.Generator | None:
    """Return the generator of the samples' order, ``private`` where it had none; or None."""
    if isinstance(draft.dataset, IterableDataset):
        found = getattr(draft.dataset, "generator", None)
        return found if isinstance(found, torch.Generator) else None
    own = draft.sampler
    if type(own) is RandomSampler and own.generator is None:
        # A copy of what shuffle=True has made: the user's loader may be prepared again. Other
        # samplers stay the user's own, who may change them between epochs (weights, say).
        _replace_sampler(draft, own, copy.copy(own))
    for sampler in samplers.samplers_of(draft):
        # One that skips has the attributes of the sampler inside, which comes after it.
        is_ours = isinstance(sampler, (samplers.SeedableRandomSampler, samplers.SkipBatchSampler))
        if is_ours or not hasattr(sampler, "generator"):
            continue
        if sampler.generator is None:
            sampler.generator = private
        if isinstance(sampler.generator, torch.Generator):
            return sampler.generator
    return None


def _share_out(
    draft: DataLoader[Any], options: LoaderOptions, config: DataLoaderConfiguration
) -> LoaderOptions:
    """Change ``draft``, in place, to read only this rank's share; return the adapted options."""
    dataset: Any = draft.dataset
    is_stream = isinstance(dataset, IterableDataset)
    num_shares, index = options.data_group.size, options.data_group.index
    sharing = {"split_batches": config.split_batches, "even_batches": config.even_batches}
    if is_stream:
        if of_libraries.is_split_by_node(dataset):
            notice_once(
                "split_dataset_by_node",
                "prepare leaves a stream that split_dataset_by_node has split as it is; unsplit, "
                "prepare shares it out itself",
            )
            return replace(options, is_uneven=True, split_batches=False)
        if not config.split_batches and _divides_itself(
            dataset, num_shares, evenly=config.even_batches
        ):
            vars(draft)["dataset"] = dataset.shard(num_shards=num_shares, index=index)
            return replace(options, is_uneven=True)
        size, drop_last = draft.batch_size, draft.drop_last
        vars(draft)["dataset"] = IterableDatasetShard(
            dataset, size, drop_last, num_shares, index, **sharing, marks_last_round=True
        )
        draft.collate_fn = ShortRoundCollate(draft.collate_fn)
        if config.split_batches and size is not None:
            share = samplers.share_of(size, num_shares, split_batches=True)
            batches = BatchSampler(draft.sampler, share, drop_last)
            vars(draft).update(batch_size=share, batch_sampler=batches)
        return options
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers.samplers_of(draft)):
        notice_once(
            "DistributedSampler",
            "prepare leaves a loader with a DistributedSampler as it is; without one it shares "
            "the data out itself, and gather_for_metrics leaves out what was repeated",
        )
        return replace(options, split_batches=False)
    name = "sampler" if draft.batch_sampler is None else "batch_sampler"
    vars(draft)[name] = samplers.BatchSamplerShard(
        getattr(draft, name), num_shares, index, **sharing
    )
    return options


def _divides_itself(dataset: Any, num_processes: int, *, evenly: bool) -> bool:
    """Return whether an iterable dataset can give each rank some of its shards (files, say).

    The dataset needs a method ``shard``, as Hugging Face's datasets have, and at least one shard
    for each rank. With ``evenly``, each rank must get the same number of shards.
    """
    num_shards = getattr(dataset, "num_shards", getattr(dataset, "n_shards", 0))
    if not hasattr(dataset, "shard") or num_shards < num_processes:
        return False
    if evenly and num_shards % num_processes:
        notice_once(
            "shards",
            f"a stream of {num_shards} shards does not divide evenly over {num_processes} ranks, "
            "and ranks with more shards would wait for ranks that have finished: so each rank "
            "reads the whole stream, and takes its part of the samples. Make the number of shards "
            f"a multiple of {num_processes}, or pass even_batches=False",
        )
        return False
    return True


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
    """Return a loader that gives one rank's part of the batches of ``dataloader``.

    A loader that is prepared already is returned unchanged.

    Args:
        dataloader: the user's loader, made alike on every rank.
        device: where batches are put if ``put_on_device`` is set; None means this rank's device.
        num_processes: number of ranks; None means all that are running. Not used if
            ``torch_device_mesh`` is given.
        process_index: the rank whose part is returned; None means this rank.
        split_batches: True: divide each batch of the loader over the ranks. False: each rank gets
            whole batches.
        put_on_device: whether batches are put on the device.
        rng_types: names of random states that ranks take from rank 0 at the start of each pass,
            such as "torch" or "cuda". None: only "generator", from which the order of samples is
            drawn.
        dispatch_batches: whether rank 0 alone reads the data and sends each rank its part. None:
            only for iterable datasets whose batches are put on a device.
        even_batches: fill up the last batches with samples from the start of the data, so that all
            ranks get the same number of batches.
        slice_fn_for_dispatch: cuts one rank's part out of the batch that rank 0 has read for all;
            called with the batch, a slice, ``process_index`` and ``num_processes``. None takes the
            rows of the slice.
        use_seedable_sampler: draw an order of samples that depends on the seed and the epoch alone.
        data_seed: seed of the order of samples, with or without ``use_seedable_sampler``; None
            takes one from rank 0's random numbers.
        non_blocking: copy from pinned memory while the CPU continues.
        use_stateful_dataloader: keep torchdata's ``StatefulDataLoader`` inside, which saves and
            restores the state of a dataset that has ``state_dict``.
        torch_device_mesh: the mesh of the ranks, if several of them hold one model together. Only
            ranks that differ along a dimension "dp..." ("dp_replicate", "dp_shard") read different
            samples.

    Raises:
        ConfigError: the settings do not fit the loader.
    """
    here = topology.topology()
    size = here.num_processes if num_processes is None else num_processes
    rank = here.process_index if process_index is None else process_index
    return prepare_loader(
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
        data_group=DataGroup.of(torch_device_mesh, size, rank),
        slice_fn=slice_fn_for_dispatch,
        # Nobody counts the loaders here. A random number, as in Accelerate, gives each loader an
        # order of its own, and the same one after the same seed.
        ordinal=int(torch.empty((), dtype=torch.int64).random_()),
    )
