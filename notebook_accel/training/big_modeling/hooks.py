"""Hooks: code around the forward of a module, and code that runs as a hook is added and removed.

A module has at most one hook, in ``module._hf_hook``; several are joined in a
:class:`SequentialHook`. Both names that a hook puts on its module (``_hf_hook``, and
``_old_forward`` for the forward before it) are those that Transformers and Diffusers look for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from notebook_accel.training.models import ReplacedForward, replaced_forwards

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = [
    "ModelHook",
    "SequentialHook",
    "add_hook_to_module",
    "hook_of",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]


class ModelHook:
    """What happens around a module's forward; a method that is not overridden does nothing.

    Attributes:
        no_grad: run the forward without recording gradients.
    """

    no_grad = False

    def init_hook(self, module: Module) -> Module:
        """Make the module ready when the hook is added; gives back the module to hook."""
        return module

    def pre_forward(
        self, module: Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Act before the forward; gives back the arguments that it gets."""
        return args, kwargs

    def post_forward(self, module: Module, output: Any) -> Any:
        """Act after the forward; gives back the output that the caller gets."""
        return output

    def detach_hook(self, module: Module) -> Module:
        """Undo what :meth:`init_hook` did, when the hook is removed."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one, each method called on all of them in their order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: Module) -> Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(
        self, module: Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: Module) -> Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


class _HookedForward(ReplacedForward):
    """A module's forward between the two halves of its hook.

    The hook is read from the module at each call, so that a copied module uses its own.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hook: ModelHook = self.module._hf_hook  # type: ignore[assignment]
        args, kwargs = hook.pre_forward(self.module, *args, **kwargs)
        if hook.no_grad:
            with torch.no_grad():
                output = self.plain(*args, **kwargs)
        else:
            output = self.plain(*args, **kwargs)
        return hook.post_forward(self.module, output)


def hook_of(module: Module) -> ModelHook | None:
    """The hook of a module; None where it has none."""
    return module.__dict__.get("_hf_hook")


def add_hook_to_module(module: Module, hook: ModelHook, append: bool = False) -> Module:
    """Run a hook around the forward of a module.

    Args:
        module: is changed.
        hook: takes the place of the one that the module has, which is not detached.
        append: run it after the one that the module has.

    Returns:
        the module.
    """
    present = hook_of(module)
    if append and present is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(present, hook)
    _take_out(module)
    module = hook.init_hook(module)
    forward = _HookedForward(module)
    module.__dict__["_hf_hook"] = hook
    module.__dict__["_old_forward"] = forward.plain
    module.__dict__["forward"] = forward
    return module


def remove_hook_from_module(module: Module, recurse: bool = False) -> Module:
    """Detach the hook of a module, and give it back its own forward.

    Args:
        module: is changed; it may have no hook.
        recurse: do the same for all modules inside.

    Returns:
        the module.
    """
    hook = hook_of(module)
    if hook is not None:
        hook.detach_hook(module)
        module.__dict__.pop("_hf_hook")
    _take_out(module)
    for child in module.children() if recurse else ():
        remove_hook_from_module(child, recurse=True)
    return module


def _take_out(module: Module) -> None:
    """Take the forward of a hook out of those of a module; others may have come around it since,
    such as that of the mixed precision."""
    for forward in replaced_forwards(module):
        if isinstance(forward, _HookedForward):
            forward.put_back()
            module.__dict__.pop("_old_forward", None)
            return


def remove_hook_from_submodules(module: Module) -> None:
    """Detach the hooks of a module and of all modules inside."""
    remove_hook_from_module(module, recurse=True)
