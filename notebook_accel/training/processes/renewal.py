"""Make a new process group after a failed cell, and wrap the prepared models in it again.

The ranks of a notebook live on from cell to cell. A cell that fails on one rank leaves the others
waiting in a collective, so afterwards all ranks destroy their process group. Models that the user
prepared in earlier cells must still train::

    cell that failed --> ranks without a process group --> renew_group, on all ranks together
                                                             |--> a new process group
                                                             '--> DDP wraps each model in it again
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from notebook_accel.rank.this_rank import current
from notebook_accel.training.collectives import gather_object
from notebook_accel.training.processes.topology import establish, is_established

_WRAPPED = "models that are wrapped in the process group"
_HAS_MESH = "a device mesh was made of the process group"


def note_wrapped(model: Module, wrap_again: Callable[[Any], None]) -> None:
    """Register a prepared model that has to be wrapped again in a new process group."""
    wrapped = current().shared.setdefault(_WRAPPED, [])
    wrapped.append((weakref.ref(model), wrap_again))


def note_mesh() -> None:
    """Record that models of this rank are sharded over a device mesh.

    A mesh is lost with its process group, so :func:`renew_group` then asks the user to prepare the
    models again.
    """
    current().shared[_HAS_MESH] = True


def renew_group() -> list[str]:
    """Make a new default process group in place of one that was destroyed; all ranks call it.

    It also wraps the models of :func:`note_wrapped` again, unless models were sharded over a device
    mesh (:func:`note_mesh`): then the user has to prepare them again. If this rank has made no
    ``Accelerator`` or ``PartialState``, the lost group was the user's own, and is not replaced.
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
    wrapped = [(held(), wrap_again) for held, wrap_again in current().shared.get(_WRAPPED, [])]
    # On one rank a traceback may keep a model that is gone on the others.
    alive = [index for index, (model, _) in enumerate(wrapped) if model is not None]
    everywhere = set(alive).intersection(*gather_object([alive]))
    for index in sorted(everywhere):
        model, wrap_again = wrapped[index]
        wrap_again(model)
    if not everywhere:
        return []
    line = (
        "the process group was made anew, since a cell before did not end well on every rank; "
        "prepared models have rank 0's weights now. If that cell had made steps on some ranks "
        "only, make the optimizers anew, too"
    )
    return [line]
