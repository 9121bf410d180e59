"""The precisions in which models compute, full or mixed: a class for each, and a table of names.

In float16 the loss is multiplied by a scale, so that small gradients do not become 0. A step whose
gradients overflow is skipped.

In 8 bits (by torchao), weights, gradients and optimizer steps stay in the type of the model. For
each product a linear layer rounds its inputs, its weight and the gradients of its outputs to 8
bits, with one scale per tensor; all other operations compute in bfloat16. So conversion keeps a
model's weights and their names, and an optimizer that holds them stays valid.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.nn import Module
from torch.optim import Optimizer

from notebook_accel.config.checks import as_choice
from notebook_accel.errors import ConfigError
from notebook_accel.private import of_torch
from notebook_accel.training import collectives
from notebook_accel.training.collectives.nested import convert_to_fp32
from notebook_accel.training.models import (
    RemovableForward,
    has_parts,
    local_part,
    strip_forward,
    weights_of,
)
from notebook_accel.training.settings import environment
from notebook_accel.training.settings.environment import is_installed, read_flag
from notebook_accel.training.settings.handlers import (
    AutocastKwargs,
    GradScalerKwargs,
    KwargsHandler,
    pick_handler,
)


class SpreadScaler(torch.amp.GradScaler):
    """A ``GradScaler`` for optimizers with plain gradients, sharded gradients, or both.

    Torch's ``GradScaler`` unscales all gradients in one operation, which refuses a mix of plain and
    sharded gradients. It reports an overflow only to the ranks in the mesh of that gradient, so
    that other ranks would step.

    Attributes:
        agrees: whether the strategy spreads models. All ranks then take part in each unscaling,
            even a rank without gradients (a pipeline stage whose weights are frozen), so that all
            skip the same steps and keep the same scale.
    """

    agrees = False


def _unscale(
    scaler: SpreadScaler,
    as_torch: Callable[..., dict[torch.device, torch.Tensor]],
    optimizer: Optimizer,
    found_inf: torch.Tensor,
) -> dict[torch.device, torch.Tensor]:
    weights = [*weights_of(optimizer)]
    if not (scaler.agrees or has_parts(weights)):
        return as_torch(optimizer)
    own: dict[torch.device, list[torch.Tensor]] = {}
    for grad in (local_part(weight.grad) for weight in weights if weight.grad is not None):
        part = grad.detach()
        part.grad = grad
        own.setdefault(grad.device, []).append(part)
    for device, parts in own.items():
        optimizer_of_parts = SimpleNamespace(param_groups=[{"params": parts}])
        for seen in as_torch(optimizer_of_parts, True, device).values():
            found_inf = torch.maximum(found_inf, seen.to(found_inf.device))
    return {found_inf.device: collectives.reduce(found_inf, "max")}


of_torch.unscale_by(SpreadScaler, _unscale)


class LossScaling:
    """Wraps a ``GradScaler`` so that all optimizers divide by the scale that the loss had.

    The scale is updated only before the next loss is scaled. If it were updated after each
    optimizer's step, a second optimizer would divide gradients by another scale than the loss had.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._is_used = False  # whether the gradients of the last backward were stepped or cleared
        # The optimizers whose gradients are unscaled, by their ids.
        self._done: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        # Their gradients, as the newest backward found them.
        self._found: dict[int, list[tuple[int, int]]] = {}

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """Torch's scaler; reading this property may update its scale first.

        The scale is updated if an optimizer has stepped, or gradients were cleared, since the
        previous update.
        """
        self._settle()
        return self._scaler

    def begin_backward(self) -> torch.amp.GradScaler:
        """Return the scaler for the losses of a new backward.

        The scale is updated first, if the gradients of the backwards so far were used by a step or
        cleared. Every rank has to call this before its backward, since all ranks are asked
        whether gradients were cleared where they agree.
        """
        if not self._is_used:
            # Gradients may be cleared without their optimizer: by the model's zero_grad, say.
            self._is_used = any(
                not self._is_so_anywhere(_has_gradients(optimizer))
                for optimizer in list(self._done.values())
            )
        self._settle()
        self._found = {key: gradient_marks(optimizer) for key, optimizer in self._done.items()}
        return self._scaler

    def unscale(
        self, optimizers: Iterable[Optimizer], parameters: Collection[torch.Tensor] | None = None
    ) -> None:
        """Divide the optimizers' gradients by the scale; skip those that were divided already.

        All ranks have to call it.

        Args:
            parameters: only optimizers that have at least one of these parameters are treated; None
                means all optimizers.

        Raises:
            RuntimeError: a backward has added scaled gradients to gradients that were divided
                before.
        """
        wanted = None if parameters is None else {id(parameter) for parameter in parameters}
        for optimizer in optimizers:
            is_wanted = _has_gradients(optimizer) and (
                wanted is None or any(id(weight) in wanted for weight in weights_of(optimizer))
            )
            if id(optimizer) in self._done:
                if is_wanted:
                    self._refuse_mixed(optimizer)
            elif self._is_so_anywhere(is_wanted):
                self._done[id(optimizer)] = optimizer
                self._scaler.unscale_(optimizer)

    def _refuse_mixed(self, optimizer: Optimizer) -> None:
        # Taken out: what changes them from here until the next backward (clipping) is meant to.
        found = self._found.pop(id(optimizer), None)
        if found is not None and found != gradient_marks(optimizer):
            raise RuntimeError(
                f"gradients of {type(optimizer).__name__} were divided by the loss scale, and a "
                "backward has then added others that are not: clip and unscale once a window "
                "(if accelerator.sync_gradients: ...), and clear gradients that no step is to use "
                "with optimizer.zero_grad()"
            )

    def step(
        self, optimizer: Optimizer, closure: Callable[[], float] | None
    ) -> tuple[Any, torch.Tensor | None]:
        """Divide an optimizer's gradients by the scale; let it step, unless they overflowed.

        Args:
            closure: computes the loss again, for the optimizer's ``step``; None: no closure.

        Returns:
            What the optimizer's ``step`` returned, and a tensor on the device that is not 0 if a
            gradient overflowed; None if none was looked at.
        """
        given = () if closure is None else (closure,)
        if not self._is_so_anywhere(_has_gradients(optimizer)):
            return optimizer.step(*given), None
        result = self._scaler.step(optimizer, *given)
        self._is_used = True
        self._done[id(optimizer)] = optimizer
        if not self._scaler.is_enabled():  # one that the user set: it keeps no account
            return result, None
        return result, of_torch.overflow(self._scaler, optimizer)

    def forget(self, optimizer: Optimizer) -> None:
        """Record that the optimizer's gradients were cleared, whether a step used them or not.

        The gradients of the next backward will be divided by the scale again. If the cleared
        gradients had overflowed, the scale is still lowered.
        """
        if id(optimizer) in self._done:
            self._is_used = True

    def _is_so_anywhere(self, is_so: bool) -> bool:
        # Where weights are not spread, all ranks have gradients of the same ones: it is the same.
        agrees = getattr(self._scaler, "agrees", False)
        return bool(collectives.reduce(torch.tensor(is_so), "max")) if agrees else is_so

    def _settle(self) -> None:
        if self._is_used:
            self._is_used = False
            self._done.clear()
            self._scaler.update()


def gradient_marks(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Return a list that differs after every backward, to detect whether there was one.

    For each weight it has the ``id`` of its gradient, and how often torch has changed that tensor.
    """
    return [
        (id(weight.grad), 0 if weight.grad is None else of_torch.count_of_changes(weight.grad))
        for weight in weights_of(optimizer)
    ]


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(weight.grad is not None for weight in weights_of(optimizer))


# torch's product of 8-bit numbers takes no other sizes.
_DIVISOR = 16
_LEAST_CAPABILITY = (8, 9)


def require_torchao(asked: str) -> None:
    """Raise if torchao is not installed."""
    if not is_installed("torchao"):
        raise ConfigError(
            f"{asked} computes in 8 bits by torchao, which is not installed: use "
            'mixed_precision="bf16", or pip install torchao'
        )


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Settings of ``mixed_precision="fp8"``, for ``kwargs_handlers``: how torchao converts layers.

    Raises:
        ConfigError: torchao is not installed, or ``enable_fsdp_float8_all_gather`` is True, which
            is not supported.
    """

    config: Any = None
    """A ``torchao.float8.Float8LinearConfig``; None makes one. With ``emulate=True`` it computes on
    every device, slower than in full precision, to try what 8 bits do to a training."""
    module_filter_func: Callable[[Module, str], bool] | None = None
    """Called with a layer and its name: whether it is converted. None takes all linear layers whose
    sizes are multiples of 16, but the first and the last, which a training needs in more bits."""
    pad_inner_dim: bool | None = None
    """Pad the inner dimension of products to what the device takes. Variable
    ACCELERATE_FP8_PAD_INNER_DIM, else True."""
    enable_fsdp_float8_all_gather: bool | None = None
    """Gather sharded weights in 8 bits: not there yet. Its variable, which Accelerate's launcher
    sets to true unless told otherwise, is without effect."""

    def __post_init__(self) -> None:
        require_torchao("AORecipeKwargs")
        if self.config is None:
            from torchao.float8 import Float8LinearConfig

            if self.pad_inner_dim is None:
                self.pad_inner_dim = read_flag("FP8_PAD_INNER_DIM", default=True)
            self.config = Float8LinearConfig(pad_inner_dim=self.pad_inner_dim)
        if self.enable_fsdp_float8_all_gather or self.config.enable_fsdp_float8_all_gather:
            raise ConfigError(
                "enable_fsdp_float8_all_gather=True is not supported: it puts weights of another "
                "kind into the model. Leave it out: sharded weights are gathered in bfloat16, and "
                "multiplied in 8 bits"
            )

    def check_device(self, device: torch.device) -> None:
        """Raise if a device cannot multiply in 8 bits, unless ``config.emulate`` is True."""
        if self.config.emulate:
            return
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        if capability is None or capability < _LEAST_CAPABILITY:
            found = "" if capability is None else f" (compute capability {capability})"
            raise ConfigError(
                f'mixed_precision="fp8" on {device}{found}: 8-bit products need an NVIDIA GPU of '
                'compute capability 8.9 or higher (Ada, Hopper); use mixed_precision="bf16", or '
                "emulate them: kwargs_handlers=[AORecipeKwargs(config=Float8LinearConfig("
                "emulate=True))]"
            )


def convert_model_to_fp8_ao(
    model: Module,
    config: Any = None,
    module_filter_func: Callable[[Module, str], bool] | None = None,
) -> None:
    """Convert linear layers of a model in place, so that they multiply in 8 bits.

    Their weights stay the same. Layers that are converted already are left as they are.

    Args:
        model: the model.
        config: a ``torchao.float8.Float8LinearConfig``; None takes torchao's default.
        module_filter_func: called with a layer and its name; returns whether to convert it. None
            takes all linear layers whose sizes are multiples of 16, except the model's first and
            last linear layer.

    Raises:
        ConfigError: torchao is not installed.
    """
    require_torchao("convert_model_to_fp8_ao()")
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    ends = find_first_last_linear_layers(model)

    def is_chosen(module: Module, name: str) -> bool:
        if isinstance(module, Float8Linear):
            return False
        if module_filter_func is not None:
            return module_filter_func(module, name)
        return filter_linear_layers(module, name, ends)

    convert_to_float8_training(model, module_filter_fn=is_chosen, config=config)


def find_first_last_linear_layers(model: Module) -> tuple[str | None, str | None]:
    """Return the names of a model's first and last linear layer; (None, None) if it has none.

    Args:
        model: the model.

    Example:
        >>> import torch
        >>> from notebook_accel.utils import find_first_last_linear_layers
        >>> layers = [torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)]
        >>> model = torch.nn.Sequential(*layers)
        >>> find_first_last_linear_layers(model)
        ('0', '2')
    """
    linear = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    return (linear[0], linear[-1]) if linear else (None, None)


def filter_linear_layers(
    module: Module, fqn: str, layers_to_filter: Collection[str | None]
) -> bool:
    """Return whether a linear layer is to be converted to 8-bit products; torchao calls this.

    A linear layer is converted if both of its sizes are multiples of 16, which the product of 8-bit
    numbers needs, and its name is not in ``layers_to_filter``.

    Args:
        module: the layer.
        fqn: the layer's full name in the model.
        layers_to_filter: names of layers that are not converted.
    """
    if isinstance(module, torch.nn.Linear) and (
        module.in_features % _DIVISOR or module.out_features % _DIVISOR
    ):
        return False
    return fqn not in layers_to_filter


@dataclass(eq=False, repr=False)
class AutocastForward(RemovableForward):
    """Runs a module's forward under autocast, and converts the outputs to float32."""

    autocast: Callable[[], AbstractContextManager[Any, bool | None]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.autocast():
            outputs = self.plain(*args, **kwargs)
        return convert_to_fp32(outputs)


class Precision:
    """Full precision, and the base class of the mixed precisions.

    An ``Accelerator`` makes one object, of a class in ``PRECISIONS``.

    Attributes:
        dtype: the type to which autocast casts operations; None for full precision.
    """

    name: ClassVar[str] = "no"
    dtype: ClassVar[torch.dtype | None] = None
    converts_layers: ClassVar[bool] = False
    """Whether a model gets layers of another class, which need to be whole."""
    recipe: AORecipeKwargs | None = None
    """How layers are converted; None where they are not."""
    is_on = True
    """Whether operations are cast to it at all; the user may turn that off (``native_amp``)."""

    def __init__(self, device: torch.device, handlers: Sequence[KwargsHandler]) -> None:
        self.device_type = device.type
        self.options = pick_handler(handlers, AutocastKwargs)
        self.scaler_options = pick_handler(handlers, GradScalerKwargs)

    def make_scaler(self) -> SpreadScaler | None:
        """Return a loss scaler; None if this precision needs none."""
        return None

    def autocast(
        self, options: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any, bool | None]:
        """Return a context in which operations compute in this precision.

        Args:
            options: settings of ``torch.autocast``; None takes those of the ``Accelerator``.
        """
        if self.dtype is None or not self.is_on:
            return nullcontext()
        chosen = options or self.options
        return torch.autocast(
            self.device_type, self.dtype, chosen.enabled, cache_enabled=chosen.cache_enabled
        )

    def wrap(self, model: Module) -> None:
        """Make the model's forward compute in this precision, in place.

        In a mixed precision the model's outputs are still float32. Subclasses may also convert
        layers.
        """
        strip_forward(model, AutocastForward)
        if self.dtype is not None:
            model.__dict__["forward"] = AutocastForward(model, self.autocast)


class BFloat16(Precision):
    """Mixed precision in bfloat16; it has float32's range, so that it needs no loss scaling."""

    name = "bf16"
    dtype = torch.bfloat16


class Float16(Precision):
    """Mixed precision in float16; small gradients would become 0 in it, so the loss is scaled."""

    name = "fp16"
    dtype = torch.float16

    def make_scaler(self) -> SpreadScaler | None:
        if not self.scaler_options.enabled:
            return None
        return SpreadScaler(self.device_type, **self.scaler_options.to_kwargs())


class Float8(BFloat16):
    """Mixed precision whose linear layers multiply in 8 bits, by torchao; the rest is bfloat16."""

    name = "fp8"
    converts_layers = True

    def __init__(self, device: torch.device, handlers: Sequence[KwargsHandler]) -> None:
        super().__init__(device, handlers)
        self.recipe: AORecipeKwargs = pick_handler(handlers, AORecipeKwargs)
        self.recipe.check_device(device)

    def wrap(self, model: Module) -> None:
        convert_model_to_fp8_ao(model, self.recipe.config, self.recipe.module_filter_func)
        super().wrap(model)


PRECISIONS: dict[str, type[Precision]] = {
    kind.name: kind for kind in (Precision, BFloat16, Float16, Float8)
}


def resolve_precision(asked: str | None) -> str:
    """Return the name of the precision to use.

    Args:
        asked: the user's argument. None takes the variable ACCELERATE_MIXED_PRECISION; if that is
            unset, the precision is "no" (full precision).
    """
    name = "mixed_precision"
    if asked is None:
        name = environment.find("MIXED_PRECISION") or name
        asked = environment.read("MIXED_PRECISION") or "no"
    return as_choice(name, str(asked).lower(), [*PRECISIONS])
