"""Weights that have several names: which they are, and how they become one again after a load."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.nn import Module

__all__ = [
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "ensure_weights_retied",
    "find_tied_parameters",
    "retie_parameters",
    "tied_names",
]

_log = logging.getLogger(__name__)


def find_tied_parameters(model: Module) -> list[list[str]]:
    """The groups of names that stand for one and the same parameter.

    Returns:
        a sorted list of names for each parameter that has more than one.
    """
    return [sorted(group) for group in tied_names(model)]


def tied_names(model: Module) -> list[list[str]]:
    """The same groups, each in the order of the model's modules.

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
        tied_params: as :func:`find_tied_parameters` or :func:`tied_names` gave them before.
    """
    for group in tied_params:
        found = (model.get_parameter(name) for name in group)
        parameter = next((one for one in found if one.device.type != "meta"), None)
        for name in group if parameter is not None else ():
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, parameter)


def check_tied_parameters_in_config(model: Module) -> bool:
    """Whether a Transformers model's configuration says that some of its weights are tied."""
    config = getattr(model, "config", None)
    if config is None:
        return False
    ties_words = bool(getattr(config, "tie_word_embeddings", False))
    embeddings = getattr(model, "get_output_embeddings", lambda: None)()
    ties_encoder = getattr(config, "is_encoder_decoder", False) and getattr(
        config, "tie_encoder_decoder", False
    )
    ties_modules = any(hasattr(module, "_tie_weights") for module in model.modules())
    return (ties_words and embeddings is not None) or bool(ties_encoder) or ties_modules


def check_tied_parameters_on_same_device(
    tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Any]
) -> None:
    """Warn of each group of tied weights that a device map spreads over several devices."""
    for group in tied_params:
        places = {name: _device_of(name, device_map) for name in group}
        if len(set(places.values())) > 1:
            _log.warning(
                "Tied parameters are on different devices: %s. Each device gets a copy, which "
                "training would let drift apart: map them to one device.",
                places,
            )


def _device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def ensure_weights_retied(
    param_init_fn: Callable[[Module], Module],
    model: Module,
    device: Any,  # noqa: ARG001
) -> Callable[[Module], Module]:
    """A ``param_init_fn`` after which the weights that a Transformers model ties are one again.

    Args:
        param_init_fn: gives one module memory, and gives it back.
        model: names its tied weights in ``_tied_weights_keys``; without them nothing changes.
        device: accepted.
    """
    names = getattr(model, "_tied_weights_keys", None)
    if not names:
        return param_init_fn
    tied = {id(model.get_parameter(name)) for name in names}
    made: dict[int, Any] = {}  # the weight with memory, by the id of the one before

    def initialize(module: Module) -> Module:
        own = module.named_parameters(recurse=False)
        before = {name: id(weight) for name, weight in own if id(weight) in tied}
        module = param_init_fn(module)
        for name, identity in before.items():
            setattr(module, name, made.setdefault(identity, getattr(module, name)))
        return module

    return initialize
