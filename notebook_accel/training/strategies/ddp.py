"""Data parallelism (DDP): each rank has the full model, and backward averages the gradients."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from notebook_accel.private import of_torch
from notebook_accel.rank.this_rank import current
from notebook_accel.training.models import has_parts, weights_of
from notebook_accel.training.processes.topology import WRAPPED
from notebook_accel.training.settings.handlers import DistributedDataParallelKwargs, pick_handler
from notebook_accel.training.settings.notices import notice_once
from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer
from notebook_accel.training.strategies.base import ModelToPrepare, Request, Strategy


class DDPStrategy(Strategy):
    """Trains models under torch's ``DistributedDataParallel``: the default for several ranks."""

    label = "DDP"

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        if (asked := self.parallelism) is not None:
            # Not used here: scripts average a loss over the mesh's "dp_cp", whatever its size.
            self.mesh = asked.device_mesh = asked.build_device_mesh(self.topology.device.type)

    def prepare_model(self, given: ModelToPrepare) -> Module:
        model = super().prepare_model(given)
        # Torch refuses to wrap a model that has nothing to exchange.
        trains = given.training and any(weight.requires_grad for weight in model.parameters())
        if given.model in _THAW_HOOKS:
            _THAW_HOOKS.pop(given.model).remove()
        if not trains or has_parts(model.parameters()):
            if given.training and not trains:
                _THAW_HOOKS[given.model] = model.register_forward_pre_hook(_warn_if_thawed)
            return model
        options = pick_handler(self.request.handlers, DistributedDataParallelKwargs)
        has_index = given.device is not None and given.device.index is not None
        device_ids = [given.device] if has_index else None
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **options.to_kwargs())
        # True for torch, which writes a bool there in each forward, `model.forward(...)` included:
        # an int says that there was none.
        wrapped.require_forward_param_sync = 1  # type: ignore[assignment]
        wrapped.register_forward_pre_hook(_follow_what_trains)
        _note_what_trains(wrapped, options)
        known = current().shared.setdefault(WRAPPED, [])
        known.append((ref(wrapped), _wrap_again))
        return wrapped

    def wrap_optimizer(self, optimizer: Optimizer, *, moves_state: bool) -> AcceleratedOptimizer:
        first = [True]

        def before_step(stepped: Optimizer, *_: Any) -> None:
            if first and self.topology.num_processes > 1:
                first.clear()
                _warn_if_bypassed(stepped)

        with suppress(AttributeError):  # without Optimizer's __init__ there are no hooks
            optimizer.register_step_pre_hook(before_step)
        return super().wrap_optimizer(optimizer, moves_state=moves_state)

    def renew(self, model: Module) -> bool:
        if isinstance(model, DistributedDataParallel):
            known = _WRAPPED.get(model)
            if known is not None and not known.fits(model):
                if not model.is_multi_device_module:  # a layer that is new may be elsewhere
                    model.module.to(model.device)
                # They keep where autograd adds up gradients, of the size that weights had.
                del model.reducer, model.logger
                _wrap_again(model, is_in_block=True)
            return True
        trains = any(weight.requires_grad for weight in model.parameters())
        return not trains or has_parts(model.parameters())


class _WrappedFor(NamedTuple):
    """The state of a model's weights when its DDP wrapper was made."""

    weights: list[Parameter]
    trains: list[bool]
    sizes: list[torch.Size]
    """Code may change them in place."""
    options: DistributedDataParallelKwargs

    def fits(self, wrapped: Module) -> bool:
        """Return whether the wrapper can stay.

        Also True if no weight trains: torch would not wrap it.
        """
        now = [(id(one), one.requires_grad, one.shape) for one in wrapped.parameters()]
        known = [*zip(map(id, self.weights), self.trains, self.sizes, strict=True)]
        return now == known or not any(trains for _, trains, _ in now)


# What torch notes in a wrapper for the time of a block.
_OF_BLOCKS = ("require_backward_grad_sync", "require_forward_param_sync")

_WRAPPED: WeakKeyDictionary[Module, _WrappedFor] = WeakKeyDictionary()
# Of models of which nothing trains: the hook that warns once one is thawed.
_THAW_HOOKS: WeakKeyDictionary[Module, RemovableHandle] = WeakKeyDictionary()


def _note_what_trains(wrapped: Any, options: DistributedDataParallelKwargs) -> None:
    options.register_comm_hook(wrapped)
    weights = list(wrapped.parameters())
    trains, sizes = [one.requires_grad for one in weights], [one.shape for one in weights]
    _WRAPPED[wrapped] = _WrappedFor(weights, trains, sizes, options)


def _warn_if_thawed(model: Module, _: Any) -> None:
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in model.parameters()):
        notice_once(
            "thawed after prepare",
            f"{type(model).__name__} had no weight that trains as it was prepared, so that ranks "
            "do not exchange its gradients, and now it has some: give it to prepare() once more",
        )


def _warn_if_bypassed(optimizer: Optimizer) -> None:
    stepped = {id(weight) for weight in weights_of(optimizer) if weight.grad is not None}
    for wrapped, known in _WRAPPED.items():
        called = isinstance(getattr(wrapped, "require_forward_param_sync", True), bool)
        if not called and any(id(one) in stepped for one in known.weights):
            name = type(wrapped.module).__name__
            notice_once(
                f"bypassed {name}",
                f"{name} is trained without its wrapper (model.module, or unwrap_model(model)), so "
                "that ranks do not exchange its gradients: call the model that prepare() returned",
            )


def _follow_what_trains(wrapped: Any, _: Any) -> None:
    """Make a DDP wrapper anew, before a forward, if the set of weights that train has changed."""
    # It exchanges only the gradients of weights that trained when it was made: ranks would silently
    # diverge after one is unfrozen, and the forward would raise after one is frozen.
    known = _WRAPPED.get(wrapped)  # a copy is on its own
    if known is None or not torch.is_grad_enabled():
        return
    trains = [weight.requires_grad for weight in known.weights]
    # Where nothing trains there is nothing to exchange, and torch would not wrap it.
    if trains != known.trains and any(trains):
        _wrap_again(wrapped, is_in_block=True)


def _wrap_again(wrapped: Any, *, is_in_block: bool = False) -> None:
    """Make a DDP wrapper anew in place: the user's names, and the Accelerator, refer to it."""
    # The hooks of the user and ours are dictionaries of a module.
    hooks = [name for name, value in vars(torch.nn.Module()).items() if isinstance(value, dict)]
    kept = {name: vars(wrapped)[name] for name in (*hooks, "training")}
    if is_in_block:  # of no_sync() or join()
        kept |= {name: vars(wrapped)[name] for name in _OF_BLOCKS} | of_torch.join_flags(wrapped)
    options = _WRAPPED[wrapped].options
    wrapped.__init__(wrapped.module, device_ids=wrapped.device_ids, **options.to_kwargs())
    vars(wrapped).update(kept)
    _note_what_trains(wrapped, options)
