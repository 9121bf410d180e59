"""How batches get onto the device: when the loop gets them, or ahead of it, beside its work.

With ``non_blocking`` on a device that has streams, the next batch is copied while the loop computes
with the one that it has (from pinned memory; other memory is copied by the host, as always)::

    host             read 1   read 2               read 3
    side stream      copy 1 . copy 2 ............. copy 3
    current stream   . . . .  wait 1, step 1 ..... wait 2, step 2

A batch with objects that move themselves is moved when the loop gets it: which memory they copy
into, and for how long it must stay, cannot be known here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from notebook_accel.training.collectives.nested import leaves, send_to_device
from notebook_accel.training.processes import devices

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Transfer", "make_transfer"]


class Transfer(NamedTuple):
    """Functions that each batch goes through on its way to the loop; None: it stays as it is."""

    send: Callable[[Any], Any] | None = None
    """Called with the batch when it was read, one batch ahead of the loop."""
    receive: Callable[[Any], Any] | None = None
    """Called with what ``send`` gave, right before the loop gets the batch."""


class _Sent(NamedTuple):
    """A batch whose copy is under way."""

    batch: Any
    copied: Any
    """Event of the stream that copies."""


def make_transfer(device: torch.device | None, non_blocking: bool) -> Transfer:
    """How batches get onto ``device``, where they do not lie there already."""
    if device is None or devices.is_only_device(device):
        return Transfer()
    move: Callable[[Any], Any] = partial(send_to_device, device=device, non_blocking=non_blocking)
    mark = devices.batch_boundary(device)
    if mark is not None:
        return Transfer(receive=lambda batch: (mark(), move(batch))[1])
    streams = devices.streams(device) if non_blocking else None
    if streams is None:
        return Transfer(receive=move)
    side = streams.side

    def send(batch: Any) -> Any:
        if any(
            callable(getattr(leaf, "to", None)) and not _is_tensor(leaf) for leaf in leaves(batch)
        ):
            return batch
        with streams.use(side):
            return _Sent(move(batch), side.record_event())

    def receive(sent: Any) -> Any:
        if type(sent) is not _Sent:
            return move(sent)
        now = streams.current()
        now.wait_event(sent.copied)
        for leaf in filter(_is_tensor, leaves(sent.batch)):
            # It was allocated for the side stream: torch would give its memory away as soon as
            # Python drops it, though the loop's stream may not have come to its end yet.
            leaf.record_stream(now)
        return sent.batch

    return Transfer(send, receive)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
