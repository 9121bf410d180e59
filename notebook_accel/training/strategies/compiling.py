"""``torch.compile`` on a whole model, or on each of its repeated blocks.

In a model with repeated layers (a ``ModuleList`` of one class), compiling the layers one by one
needs a single compilation for all of them. Training then starts many times sooner than with the
whole model compiled, and runs at nearly the same speed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import Module

from notebook_accel.errors import ConfigError
from notebook_accel.private import of_torch
from notebook_accel.training.models import ReplacedForward, replaced_forwards
from notebook_accel.training.settings import environment
from notebook_accel.training.settings.handlers import KwargsHandler, TextEnum


class DynamoBackend(TextEnum):
    """Names of the backends of ``torch.compile``; NO means that models are not compiled."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


# Fields that are flags, and their variables.
_FLAGS = {
    "fullgraph": "DYNAMO_USE_FULLGRAPH",
    "dynamic": "DYNAMO_USE_DYNAMIC",
    "use_regional_compilation": "DYNAMO_USE_REGIONAL_COMPILATION",
}


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Settings of ``torch.compile``, for ``Accelerator(dynamo_plugin=...)``.

    Fields that are None, other than ``options``, are read from environment variables
    ``ACCELERATE_DYNAMO_*``.

    Raises:
        ConfigError: there is no such backend.
    """

    backend: Any = None
    """A ``DynamoBackend`` or its name, such as "inductor"; "no" compiles nothing."""
    mode: str | None = None
    """Such as "reduce-overhead" or "max-autotune"."""
    fullgraph: bool | None = None
    """Whether a model that does not trace in one piece is an error."""
    dynamic: bool | None = None
    """Whether shapes may change; None lets torch find out."""
    options: Any = None
    """Options of the backend."""
    disable: bool = False
    """Whether to do nothing, for a test."""
    use_regional_compilation: bool | None = None
    """Whether repeated blocks are compiled, rather than the whole."""

    def __post_init__(self) -> None:
        text = str(self.backend or environment.read("DYNAMO_BACKEND") or "no").upper()
        if text not in DynamoBackend.__members__:
            raise ConfigError(
                f"TorchDynamoPlugin(backend={self.backend!r}): expected one of "
                f"{', '.join(name.lower() for name in DynamoBackend.__members__)}"
            )
        self.backend = DynamoBackend[text]
        self.mode = self.mode or environment.read("DYNAMO_MODE") or "default"
        for name, variable in _FLAGS.items():
            # Whether shapes change is open where nobody says it; the others are off.
            if getattr(self, name) is None and (name != "dynamic" or environment.read(variable)):
                setattr(self, name, environment.read_flag(variable))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, the backend in lower case, as torch spells it."""
        return {**super().to_dict(), "backend": self.backend.value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for ``torch.compile``: fields that differ from torch's defaults."""
        plain: dict[str, Any] = {"backend": "no", "mode": "default", "dynamic": None}
        plain |= {"fullgraph": False, "options": None, "disable": False}
        given = self.to_dict()
        return {name: given[name] for name, value in plain.items() if given[name] != value}


def compile_model(model: Module, plugin: TorchDynamoPlugin) -> Module:
    """Return the model compiled with the plugin's settings, as a whole or block by block.

    The model itself is returned if the backend is "no", or if the user has compiled the model or a
    part of it.
    """
    if plugin.backend is DynamoBackend.NO or has_compiled_regions(model):
        return model
    kwargs = plugin.to_kwargs()
    if plugin.use_regional_compilation:
        return compile_regions(model, **kwargs)
    return cast("Module", torch.compile(model, **kwargs))


@dataclass(eq=False, repr=False)
class _CompiledForward(ReplacedForward):
    """Replaces a module's forward by the compiled one.

    Forward hooks of the module run outside of the compiled code, as :func:`compile_in_place` needs.

    Args:
        inside: the forward to compile, from the module's ``__dict__``; None: that of its class.
    """

    inside: Callable[..., Any] | None
    compile_kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.replaced = self.inside
        self.compiled = torch.compile(self.plain, **self.compile_kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacedForward:
        new = super().__deepcopy__(memo)
        assert isinstance(new, _CompiledForward)
        new.compiled = torch.compile(new.plain, **self.compile_kwargs)
        return new


def compile_in_place(
    model: Module, plugin: TorchDynamoPlugin, blocks: Sequence[Module] = ()
) -> None:
    """Compile the forward of a sharded model, or those of its blocks, in place.

    The model keeps its identity and the names of its weights. Sharding adds hooks to modules, which
    gather weights or exchange activations. Only forwards are compiled, so that these hooks run
    outside of the compiled graphs. Nothing happens if the backend is "no", or if the user has
    compiled the model or a part of it.
    """
    if plugin.backend is DynamoBackend.NO or has_compiled_regions(model):
        return
    parts = list(blocks)
    if not parts and plugin.use_regional_compilation:
        repeated = [child for child in model.modules() if _is_repeated_blocks(child)]
        parts = [block for each in repeated for block in each.children()]
    for part in parts or [model]:
        # Autocast and the forward of a pipeline stay outside of what is compiled, too.
        around = [*replaced_forwards(part)]
        forward = around[-1].replaced if around else part.__dict__.get("forward")
        compiled = _CompiledForward(part, forward, plugin.to_kwargs())
        if around:
            around[-1].replaced = compiled
        else:
            part.__dict__["forward"] = compiled


def compile_regions(module: Module, **compile_kwargs: Any) -> Module:
    """Return a copy of a model whose repeated blocks, and other children, are compiled one by one.

    Args:
        module: the model; it is not changed.
        **compile_kwargs: arguments of ``torch.compile``.

    Returns:
        A model that shares the weights of ``module``. If ``module`` has no repeated blocks, this is
        ``torch.compile(module)``.
    """
    compiled = _compile_parts(module, compile_kwargs)
    if not is_compiled_module(compiled):
        of_torch.set_original_module(compiled, module)
    return compiled


def _compile_parts(module: Module, compile_kwargs: dict[str, Any]) -> Module:
    """Return a copy of ``module`` with compiled children; without repeated blocks, compile it."""
    if _is_repeated_blocks(module):
        blocks: Any = (torch.compile(block, **compile_kwargs) for block in module.children())
        return nn.ModuleList(blocks)
    children = None
    if any(map(_is_repeated_blocks, module.modules())):
        new = copy.copy(module)
        children = of_torch.own_children(new)
    if children is None:
        return cast("Module", torch.compile(module, **compile_kwargs))
    forward = module.__dict__.get("forward")
    if isinstance(forward, ReplacedForward):
        # That of the copy must call the children of the copy.
        new.__dict__["forward"] = copy.deepcopy(forward, {id(module): new})
    for name, child in module.named_children():
        children[name] = _compile_parts(child, compile_kwargs)
    return new


def is_compiled_module(module: Module) -> bool:
    """Return whether ``torch.compile`` returned this module.

    Args:
        module: the module.
    """
    # Whoever compiled has imported it; asking torch for it would import it (two seconds).
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def has_compiled_regions(module: Module) -> bool:
    """Return whether ``torch.compile`` returned this module or a module inside of it.

    Args:
        module: the module.
    """
    return any(is_compiled_module(each) for each in module.modules())


def _is_repeated_blocks(module: Module) -> bool:
    """Return whether ``module`` is a ``ModuleList`` of one or more modules of the same class."""
    return isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1
