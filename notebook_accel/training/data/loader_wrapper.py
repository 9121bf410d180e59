"""Loaders that keep another loader inside, and how copies of a loader are made.

The loader inside is of the user's own class, whose overrides go on to hold, or torchdata's
``StatefulDataLoader``. That one is for datasets that say themselves how far they are: a prepared
loader that goes on in the middle of an epoch counts, reads what was read before, and leaves it out;
with a dataset that has ``state_dict`` and ``load_state_dict`` (a stream over many files, say)
torchdata collects its state, from worker processes too, and goes on there.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from notebook_accel.errors import ConfigError

__all__ = ["LoaderWrapper", "as_stateful", "copied", "new_loader"]


class LoaderWrapper(DataLoader[Any]):
    """A loader that runs another one, and looks up there what it does not have itself."""

    base_dataloader: DataLoader[Any]

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":  # while this is unpickled
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __getstate__(self) -> dict[str, Any]:
        # An iterator holds worker processes.
        return {**vars(self), "base_dataloader": copied(self.base_dataloader)}

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether the loader inside is torchdata's; asked without importing it."""
        kinds = type(self.base_dataloader).__mro__
        return any(kind.__name__ == "StatefulDataLoader" for kind in kinds)

    def __len__(self) -> int:
        return len(self.base_dataloader)


def new_loader(dataset: Any, use_stateful: bool, arguments: dict[str, Any]) -> DataLoader[Any]:
    """Make torch's loader, or torchdata's.

    Raises:
        ConfigError: torchdata is not installed.
    """
    kind = _class_of_torchdata() if use_stateful else DataLoader
    return kind(dataset, **arguments)


def as_stateful(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return torchdata's loader with the settings of ``loader``.

    Raises:
        ConfigError: torchdata is not installed.
    """
    new = copied(loader, _class_of_torchdata())
    # What its __init__ sets in addition to what DataLoader's does.
    vars(new).update(
        snapshot_every_n_steps=1, next_iter_state=None, _initial_iter_for_state_dict=False
    )
    return new


def copied(loader: DataLoader[Any], kind: type[DataLoader[Any]] | None = None) -> DataLoader[Any]:
    """A copy of ``loader``, of its class or another; it shares the samplers and all else, and has
    worker processes of its own."""
    kind = kind or type(loader)
    new: DataLoader[Any] = kind.__new__(kind)
    vars(new).update(vars(loader), _iterator=None)
    return new


def _class_of_torchdata() -> type[DataLoader[Any]]:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise ConfigError(
            "use_stateful_dataloader=True needs torchdata's StatefulDataLoader, which could not be "
            f"imported ({error}): pip install torchdata, or leave it out"
        ) from error
    kind: type[DataLoader[Any]] = StatefulDataLoader
    return kind
