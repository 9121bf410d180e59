"""Loaders that keep another loader inside, and how copies of a loader are made.

The loader inside is either of the user's own class, whose overrides stay in effect, or torchdata's
``StatefulDataLoader``. torchdata's is for datasets that have ``state_dict`` and
``load_state_dict`` (a stream over many files, say). To resume a stream in the middle of an epoch,
a prepared loader usually reads the earlier samples again and drops them. torchdata instead collects
the dataset's state, from worker processes too, and continues from it.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from notebook_accel.errors import ConfigError


class LoaderWrapper(DataLoader[Any]):
    """A DataLoader that reads from another DataLoader inside, ``base_dataloader``.

    Attributes that the wrapper lacks are looked up in the loader inside. This is the base class of
    prepared loaders and of ``SkipDataLoader``.
    """

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
        """Whether the loader inside is torchdata's ``StatefulDataLoader``.

        Only the names of its classes are compared, so that torchdata need not be imported.
        """
        kinds = type(self.base_dataloader).__mro__
        return any(kind.__name__ == "StatefulDataLoader" for kind in kinds)

    def __len__(self) -> int:
        return len(self.base_dataloader)


def new_loader(dataset: Any, use_stateful: bool, arguments: dict[str, Any]) -> DataLoader[Any]:
    """Make a new loader: torchdata's ``StatefulDataLoader`` or torch's ``DataLoader``."""
    kind = _class_of_torchdata() if use_stateful else DataLoader
    return kind(dataset, **arguments)


def as_stateful(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a ``StatefulDataLoader`` of torchdata with the settings of ``loader``."""
    new = copied(loader, _class_of_torchdata())
    # What its __init__ sets in addition to what DataLoader's does.
    vars(new).update(
        snapshot_every_n_steps=1, next_iter_state=None, _initial_iter_for_state_dict=False
    )
    return new


def copied(loader: DataLoader[Any], kind: type[DataLoader[Any]] | None = None) -> DataLoader[Any]:
    """Return a shallow copy of ``loader``, which starts worker processes of its own."""
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
