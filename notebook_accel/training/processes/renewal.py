"""Makes a process group anew, and wraps the models of the previous group again.

In a session a call that fails on one rank leaves the others in a collective, so all ranks leave
their group after it. What the person had prepared in earlier cells lives on:

    call that did not end well --> ranks without a group --> renew_group, on all of them together
                                                               |--> the same group, anew
                                                               '--> each model wrapped in it again
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_accel.launch.rank import current
from notebook_accel.training.collectives import gather_object
from notebook_accel.training.processes.topology import establish, is_established

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module

__all__ = ["note_mesh", "note_wrapped", "renew_group"]

_WRAPPED = "models that are wrapped in the process group"
_HAS_MESH = "a device mesh was made of the process group"


class _Wrapped(NamedTuple):
    model: weakref.ref[Module]
    wrap_again: Callable[[Any], None]


def note_wrapped(model: Module, wrap_again: Callable[[Any], None]) -> None:
    """Register ``wrap_again(model)`` to be called when the default group is made anew.

    Args:
        model: as the user has it; it is not kept alive.
        wrap_again: does in place what was done when it was wrapped. All ranks call it together.
    """
    wrapped = current().shared.setdefault(_WRAPPED, [])
    wrapped.append(_Wrapped(weakref.ref(model), wrap_again))


def note_mesh() -> None:
    """Note that models are spread over a device mesh, which ends with its group."""
    current().shared[_HAS_MESH] = True


def renew_group() -> list[str]:
    """Make the default group anew, if this package made it; returns messages for the user.

    All ranks call it together.
    """
    if not is_established():
        return ["the process group of an earlier cell is gone: make it again where you need it"]
    establish()
    if current().shared.pop(_HAS_MESH, False):
        line = (
            "the process group was made anew, and the device mesh of the one before is gone: make "
            "the Accelerator, and prepare what it trains, again"
        )
        return [line]
    wrapped: list[_Wrapped] = current().shared.get(_WRAPPED, [])
    models = [one.model() for one in wrapped]
    # On one rank a traceback may keep a model that is gone on the others.
    alive = [index for index, model in enumerate(models) if model is not None]
    everywhere = set(alive).intersection(*gather_object([alive]))
    for index in sorted(everywhere):
        wrapped[index].wrap_again(models[index])
    if not everywhere:
        return []
    line = (
        "the process group was made anew, since a cell before did not end well on every rank; "
        "prepared models have rank 0's weights now. If that cell had made steps on some ranks "
        "only, make the optimizers anew, too"
    )
    return [line]
