"""Context parallelism: each rank has a part of every sequence, and attention spans all parts.

Torch's ``context_parallel`` divides the tensors that the user names, in place, and replaces
``scaled_dot_product_attention`` inside a ``with`` block. Under a causal mask, later positions cost
more to compute, so each rank gets a piece from the front and one from the back::

    positions    0  1  2  3  4  5  6  7
    rank 0       0  1              6  7
    rank 1             2  3  4  5

Torch's attention over the parts (ring attention) needs the kernels of accelerators. On the CPU it
raises "_scaled_dot_product_flash_attention_for_cpu has no sharding strategy registered" (torch
2.13; its math backend raises "mixed torch.Tensor and DTensor"). On the CPU,
:func:`_replaced_attention` therefore replaces it: each rank gathers all keys and values, and
computes the rows of its own queries. The results are the same, with more memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import Module

from notebook_accel.errors import ConfigError
from notebook_accel.private import of_torch
from notebook_accel.rank.this_rank import current
from notebook_accel.training import collectives
from notebook_accel.training.models import set_within

# As it is outside of a block: inside, torch has put its ring in its place.
_attend: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
# Where a rank keeps the positions of its part, inside of a block.
_POSITIONS = "positions of a part"


class SequenceDivider:
    """Makes the context managers in which ranks divide the sequences of a batch."""

    def __init__(self, mesh: DeviceMesh, *, device: torch.device, exchange: str) -> None:
        self._mesh = mesh
        self._device = device
        self._exchange = exchange
        # Of the length of sequences that came last: this rank's positions, and those of all.
        self._length = 0
        self._positions = (torch.empty(0), torch.empty(0))

    @contextmanager
    def divided(
        self,
        buffers: Sequence[torch.Tensor],
        seq_dims: Sequence[int],
        no_restore: set[torch.Tensor],
    ) -> Iterator[None]:
        """Divide buffers inside a ``with`` block; attention there spans the full sequences.

        All ranks of the mesh enter the block together.

        Args:
            buffers: tensors with a sequence dimension. Inside the block they hold this rank's part;
                after it they are restored.
            seq_dims: the sequence dimension of each buffer.
        """
        _check(self._mesh, buffers, seq_dims)
        for buffer in buffers:
            if buffer.untyped_storage().nbytes() != buffer.numel() * buffer.element_size():
                # Torch resizes buffers in place: tensors that share a buffer's memory (inputs and
                # targets cut from the same tokens) would be overwritten.
                buffer.data = buffer.detach().clone()
        own, of_ranks = self._positions_of(buffers[0].shape[seq_dims[0]])
        of_torch.set_rotate_method(self._exchange)
        with ExitStack() as stack:
            stack.enter_context(
                context_parallel(
                    self._mesh,
                    buffers=list(buffers),
                    buffer_seq_dims=list(seq_dims),
                    no_restore_buffers=no_restore,
                )
            )
            if self._device.type == "cpu":  # where torch's ring attention does not work
                stack.enter_context(_replaced_attention(self._mesh.get_group(), own, of_ranks))
            shared = current().shared
            shared[_POSITIONS] = own
            stack.callback(shared.pop, _POSITIONS)
            yield

    def _positions_of(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions that this rank has, and those of all ranks one after the other."""
        if length != self._length:
            own = torch.arange(length, device=self._device)
            with context_parallel(
                self._mesh, buffers=[own], buffer_seq_dims=[0], no_restore_buffers={own}
            ):
                pass  # ``own`` keeps this rank's part
            of_ranks = collectives.gather(own, group=self._mesh.get_group())
            self._length, self._positions = length, (own, of_ranks)
        return self._positions


def _check(mesh: DeviceMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int]) -> None:
    if not buffers or len(buffers) != len(seq_dims):
        raise ConfigError(
            f"maybe_context_parallel got {len(buffers)} buffers and {len(seq_dims)} "
            "buffer_seq_dims: expected the tensors that have a dimension along the sequence "
            "(inputs, targets, positions), and that dimension of each"
        )
    pieces = 2 * mesh.size()
    for number, (buffer, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        length = buffer.shape[dim]
        if length % pieces:
            raise ConfigError(
                f"maybe_context_parallel divides buffers[{number}] of shape "
                f"{tuple(buffer.shape)} along dimension {dim} into {pieces} pieces (two for each "
                f"of cp_size={mesh.size()} ranks): expected a multiple of {pieces}; pad the "
                "sequences"
            )


def _replaced_attention(
    group: dist.ProcessGroup, own: torch.Tensor, of_ranks: torch.Tensor
) -> AbstractContextManager[None]:
    """Return a context in which attention gathers keys and values from all ranks.

    Each rank computes the rows of its own queries. It is used where torch's ring attention does not
    work (on the CPU).

    Args:
        own: the positions of this rank's part, of shape (part,).
        of_ranks: the positions of all ranks, one rank after the other, of shape (length,).
    """

    @functools.cache  # one for all layers, [part, length]
    def causal_mask() -> torch.Tensor:
        return own[:, None] >= of_ranks[None, :]

    def replaced(
        query: torch.Tensor,  # this rank's, [..., length, width], as key and value
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise ConfigError(
                "attention inside maybe_context_parallel got a mask: expected is_causal=True, or "
                "no mask; leave attention_mask out of the model's inputs, without padding"
            )
        keys, values = (_gathered(part, group) for part in (key, value))
        mask = causal_mask() if is_causal else None
        return _attend(query, keys, values, attn_mask=mask, dropout_p=dropout_p, **kwargs)

    return set_within(F, scaled_dot_product_attention=replaced)


class _Gathered(torch.autograd.Function):
    """All-gather along the sequence (dimension -2); backward sums, and returns this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return torch.cat(collectives.gather(part, group=group).chunk(group.size()), dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = collectives.reduce(grads[0], "sum", group=ctx.group)
        return whole.chunk(ctx.group.size(), dim=-2)[ctx.group.rank()], None


_gathered: Callable[..., torch.Tensor] = _Gathered.apply


def fit_decoder(model: Module) -> None:
    """Add hooks to a Transformers decoder, so that it computes correctly on a part of a sequence.

    Without the hooks, the decoder would count positions from 0 in each part, and build a mask of
    the part alone. Inside a block of :class:`SequenceDivider`, the hooks pass the true positions
    (unless the user passes ``position_ids``), and drop the mask. No mask is needed: sequences have
    no padding under context parallelism, and the decoder passes ``is_causal`` to attention.
    """
    layers = [part for name, part in model.named_modules() if name.endswith("self_attn")]
    for layer in layers:
        layer.register_forward_pre_hook(_without_mask, with_kwargs=True)
    if layers and "position_ids" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_with_positions, with_kwargs=True)


# Module-level functions: a model with its hooks can be copied and pickled.
def _without_mask(_: Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if _POSITIONS in current().shared and kwargs.get("attention_mask") is not None:
        kwargs["attention_mask"] = None
    return args, kwargs


def _with_positions(_: Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    positions = current().shared.get(_POSITIONS)
    if positions is not None and kwargs.get("position_ids") is None:
        kwargs["position_ids"] = positions[None]
    return args, kwargs
