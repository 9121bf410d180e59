"""Models and optimizers in a checkpoint: whole files of rank 0, or parts that every rank writes.

The strategy says how they are written. How they are read is said by what the folder holds: either
kind loads under every strategy, one process included.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from notebook_accel.training.files import zero
from notebook_accel.training.files.pieces import Piece, state_file
from notebook_accel.training.files.state_files import on_host, read_state
from notebook_accel.training.files.weights import (
    load_weights,
    numbered,
    save_weights,
    with_ties,
)
from notebook_accel.training.models import uncompiled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch.nn import Module
    from torch.optim import Optimizer

    from notebook_accel.training.strategies import Strategy

__all__ = ["PreparedParts"]


class PreparedParts:
    """What was prepared, as a checkpoint takes it.

    Attributes:
        strategy: spreads them over the ranks.
        models: without wrapper.
        optimizers: the user's own, without wrapper.
    """

    def __init__(
        self, strategy: Strategy, models: Sequence[Module], optimizers: Sequence[Optimizer]
    ) -> None:
        self.strategy = strategy
        self.models = [uncompiled(model) for model in models]
        self.optimizers = list(optimizers)

    def file_names(self) -> list[list[str]]:
        """For each model, then each optimizer, the names that it may have in a checkpoint."""
        return [
            *(
                [
                    numbered("model", index, ".safetensors"),
                    numbered("pytorch_model", index, ".bin"),
                    f"pytorch_model_fsdp_{index}",
                    zero.FOLDER,
                ]
                for index in range(len(self.models))
            ),
            *(
                [numbered("optimizer", index, ".bin"), f"optimizer_{index}", zero.FOLDER]
                for index in range(len(self.optimizers))
            ),
        ]

    def collect_weights(self, *, writes: bool) -> list[dict[str, Any]]:
        """The weights of each model as they are written: whole, or this rank's parts.

        Whole weights that are joined from parts go only to ranks that ``writes`` is true for; the
        others help to join and get nothing, so their hosts need no room for them.
        """
        full = not self.strategy.saves_shards
        return [self.strategy.state_dict(model, full=full, keeps=writes) for model in self.models]

    def pieces(
        self,
        weights: Sequence[dict[str, Any]],
        *,
        safe: bool,
        writes: bool,
        own_options: dict[str, Any],
    ) -> Iterator[Piece]:
        """The weights and the optimizers' states, collected one after the other.

        Args:
            weights: from :meth:`collect_weights`; hooks may have taken some out.
            safe: whole weights as safetensors.
            writes: whether this rank writes what is whole.
            own_options: for the library of a strategy that writes all of it itself.
        """
        own = self.strategy.own_piece(own_options)
        if own is not None:
            yield own
            return
        if self.strategy.saves_shards:
            # Imported here: torch's distributed checkpoints take 0.3 s, for sharded training alone.
            from notebook_accel.training.files import sharded

            for index, state in enumerate(weights):
                yield sharded.model_piece(state, index)
            names = sharded.names_of(self.models)
            for index, optimizer in enumerate(self.optimizers):
                yield sharded.optimizer_piece(optimizer, names, index)
            return
        if writes:
            for index, state in enumerate(weights):
                yield Piece(state, partial(save_weights, index=index, safe=safe))
        for index, optimizer in enumerate(self.optimizers):
            # Every rank takes part in joining what is in parts; one at a time for the memory.
            state = self.strategy.optimizer_state(optimizer, keeps=writes)
            if writes:
                name = numbered("optimizer", index, ".bin")
                yield state_file(state, name, type(optimizer).__name__)
            del state

    def read(
        self,
        models: Sequence[Module],
        folder: Path,
        options: dict[str, Any],
        *,
        strict: bool,
        own_options: dict[str, Any],
    ) -> None:
        """Read the weights and the optimizers' states.

        Args:
            models: those whose weights are read; hooks may have taken some out.
            folder: of the checkpoint.
            options: arguments of ``torch.load``; ``map_location`` holds for optimizers alone.
            strict: whether names of weights must match.
            own_options: for the library of a strategy that reads what it wrote itself.

        Raises:
            FileNotFoundError: a model or an optimizer is not in the folder.
        """
        if self.strategy.read_own(folder, own_options, strict=strict):
            return
        for index, model in enumerate(map(uncompiled, models)):
            self._read_model(model, folder, index, on_host(options), strict=strict)
        for index, optimizer in enumerate(self.optimizers):
            self._read_optimizer(optimizer, folder, index, options)

    def _read_model(
        self, model: Module, folder: Path, index: int, options: dict[str, Any], *, strict: bool
    ) -> None:
        if (folder / f"pytorch_model_fsdp_{index}").is_dir():
            from notebook_accel.training.files import sharded

            sharded.read_model(model, folder, index, options, strict=strict)
            return
        state = load_weights(folder, index, options)
        if state is None and zero.is_in(folder):
            state = zero.read_weights(folder, options)
        if state is None:
            raise FileNotFoundError(numbered("model", index, ".safetensors"))
        self.strategy.load_state_dict(model, with_ties(state, model), strict=strict)

    def _read_optimizer(
        self, optimizer: Optimizer, folder: Path, index: int, options: dict[str, Any]
    ) -> None:
        if (folder / f"optimizer_{index}").is_dir():
            from notebook_accel.training.files import sharded

            names = sharded.names_of(self.models)
            sharded.read_optimizer(optimizer, names, folder, index, on_host(options))
            return
        path = folder / numbered("optimizer", index, ".bin")
        if not path.exists() and zero.is_in(folder):
            zero.say_optimizer_begins_anew(folder)
            return
        if not path.exists():
            raise FileNotFoundError(path.name)
        self.strategy.load_optimizer_state(optimizer, read_state(path, options))
