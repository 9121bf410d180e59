"""Training loops in which ranks have different numbers of batches, by torch's ``Join``.

A rank that has no more batches takes part in the collectives of the other ranks until they have
finished theirs. ``DistributedDataParallel`` and torch's ``ZeroRedundancyOptimizer`` support that.
A model whose weights are sharded over the ranks does not: the other ranks would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.distributed.algorithms.join import Join

from notebook_accel.private import of_torch
from notebook_accel.training.models import set_within
from notebook_accel.training.settings.notices import notice_once
from notebook_accel.training.stepping.optimizer import inner_optimizer


@contextmanager
def join_uneven_inputs(
    joinables: Sequence[Any], loaders: Sequence[Any], even_batches: bool | None
) -> Iterator[None]:
    """Return a context in which ranks may have different numbers of batches.

    All ranks have to enter it.

    A notice is shown, and nothing else happens, if no object in ``joinables`` supports torch's
    ``Join``.

    Args:
        even_batches: whether the loaders, inside the block, repeat samples so that all ranks get
            equally many batches; None leaves the loaders as they are.
    """
    # The object inside a prepared optimizer or compiled model is the one that ``Join`` marks.
    inner: list[Any] = [inner_optimizer(one) for one in joinables]
    able: list[Any] = [
        one for one in map(of_torch.original_module, inner) if hasattr(one, "join_hook")
    ]
    if not able:
        kinds = ", ".join(sorted({type(one).__name__ for one in joinables})) or "nothing"
        notice_once(
            "join",
            "join_uneven_inputs() has no effect, and loaders stay as they are: ranks that have no "
            "more batches can join the others for a model under DistributedDataParallel, and it "
            f"was given {kinds}",
        )
        yield
        return
    with _filling_up(loaders, even_batches), Join(able):
        yield


@contextmanager
def _filling_up(loaders: Sequence[Any], value: bool | None) -> Iterator[None]:
    """Return a context in which ``even_batches`` of the loaders is ``value``; None changes nothing.

    A notice is shown if a loader has no setting ``even_batches``.
    """
    # Those of others may be among them, which a subclass's prepare_data_loader gives.
    asked: list[Any] = (
        [] if value is None else [getattr(loader, "_shard", None) for loader in loaders]
    )
    found = [shard for shard in asked if hasattr(shard, "even_batches")]
    if len(found) < len(asked):
        notice_once(
            "join: even_batches",
            f"join_uneven_inputs(even_batches={value}) is only supported for map-style datasets "
            f"and streams that each rank reads: {len(asked) - len(found)} of the {len(asked)} "
            "prepared loaders stay as they are",
        )
    with ExitStack() as restored:
        for shard in found:
            restored.enter_context(set_within(shard, even_batches=value))
        yield
