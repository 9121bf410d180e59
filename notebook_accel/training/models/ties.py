"""Weights that have several names: which they are, and how they become one again after a load."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Module

__all__ = ["retie_parameters", "tied_names"]


def tied_names(model: Module) -> list[list[str]]:
    """The groups of names that stand for one parameter, each in the order of the model's modules.

    The first name is that of the module whose initial values a tied weight has: of the embedding,
    where ``head.weight = embedding.weight`` was said.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def retie_parameters(model: Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make each group of names one parameter again: the first that is not on the meta device.

    A group whose parameters are all on the meta device stays as it is.

    Args:
        model: whose weights were loaded or moved name by name.
        tied_params: as :func:`tied_names` gave them before.
    """
    for group in tied_params:
        found = (model.get_parameter(name) for name in group)
        parameter = next((one for one in found if one.device.type != "meta"), None)
        for name in group if parameter is not None else ():
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, parameter)
