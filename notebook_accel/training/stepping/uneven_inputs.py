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
    with ExitStack() as stack:
        for loader in () if even_batches is None else loaders:
            # Loaders of others may be among them, which a subclass's prepare_data_loader gives.
            shard = getattr(loader, "_shard", None)
            if hasattr(shard, "even_batches"):
                stack.enter_context(set_within(shard, even_batches=even_batches))
            else:
                notice_once(
                    "join: even_batches",
                    f"join_uneven_inputs(even_batches={even_batches}) is only supported for "
                    "map-style datasets and streams that each rank reads: other prepared loaders "
                    "stay as they are",
                )
        stack.enter_context(Join(able))
        yield
