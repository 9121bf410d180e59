"""Tensor parallelism: ranks compute each layer together, by torch's ``parallelize_module``.

A plan says for each layer how it is divided: by a style's name in Transformers ("colwise",
"rowwise", ...), or by a ``ParallelStyle`` of torch.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import Module

from notebook_accel.errors import ConfigError
from notebook_accel.training.models import has_parts, retie_parameters, tied_names

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # The output is gathered, so that what comes after (a loss) sees all of it.
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    # The input is whole on every rank, each of which takes its columns of it.
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    # Every rank looks all words up, in its rows or its columns of the table.
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    # A norm of each attention head: every rank holds its own heads already, and gradients are
    # summed. Torch only wants the name of some divided dimension: any but the last will do, which
    # the norm is over.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(
        sequence_dim=0, use_local_output=True
    ),
}


def divide_layers(model: Module, mesh: DeviceMesh, plan: Mapping[str, Any] | None) -> None:
    """Divide the layers that the plan names over the ranks of ``mesh``, in place.

    All ranks of the mesh call it.

    Args:
        mesh: a mesh of one dimension.
        plan: style of each layer, by module name or pattern ("layers.*.up": "colwise"). None takes
            the model's attribute ``tp_plan`` or ``_tp_plan``, which Transformers sets.
    """
    if has_parts(model.parameters()):
        return
    if plan is None:
        plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan:
        raise ConfigError(
            f"tp_size={mesh.size()} divides layers by a plan, and {type(model).__name__} has none: "
            'give ParallelismConfig(tp_plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"})'
        )
    styles: dict[str, ParallelStyle] = {}
    for name, part in model.named_modules():
        style = next((style for key, style in plan.items() if fnmatch.fnmatchcase(name, key)), None)
        if style is not None and name:
            _check_divisible(name, part, style, mesh.size())
            styles[name] = _as_style(name, style)
    if not styles:
        raise ConfigError(
            f"the tp_plan names {', '.join(map(repr, plan))}, and {type(model).__name__} has no "
            f"module of such a name; it has {', '.join(name for name, _ in model.named_children())}"
        )
    ties = tied_names(model)
    parallelize_module(model, mesh, styles)
    _check_alike(model, ties)
    retie_parameters(model, ties)
    for weight in model.parameters():
        if isinstance(weight, DTensor) and weight.is_floating_point():
            _sum_gradients(weight)


def _sum_gradients(weight: DTensor) -> None:
    """Have the gradient of a weight that each rank has whole summed over the ranks at once.

    Torch leaves it as a sum to be made (``Partial``) where a norm is replicated, and what is not
    linear in it (clipping) then fails, or is lost without a word on torch 2.11.
    """
    placements, needs_gradient = weight.placements, weight.requires_grad
    weight.requires_grad_()  # a hook wants it; the user may unfreeze the weight later
    weight.register_hook(  # type: ignore[no-untyped-call]
        lambda grad: grad.redistribute(placements=placements)
    )
    weight.requires_grad_(needs_gradient)


def _as_style(name: str, given: Any) -> ParallelStyle:
    if isinstance(given, ParallelStyle):
        return given
    if given not in _STYLES:
        raise ConfigError(
            f"the tp_plan says {given!r} for {name!r}: expected one of {', '.join(_STYLES)}, or a "
            "ParallelStyle of torch. What else a model of Transformers plans (for experts, say) it "
            "does itself: from_pretrained(..., distributed_config=DistributedConfig(tp_size=...)) "
            "gives a model that prepare() takes as it is"
        )
    return _STYLES[given]()


def _check_divisible(name: str, part: Module, style: Any, size: int) -> None:
    """Refuse a layer that cannot be divided evenly, since later layers would get wrong shapes."""
    weight = getattr(part, "weight", None)
    if weight is None or not isinstance(style, str) or "wise" not in style:
        return
    # An embedding's weight is (rows, features), a linear layer's (out, in).
    is_linear = hasattr(part, "in_features")
    dimension = (0 if is_linear else 1) if "colwise" in style else (1 if is_linear else 0)
    if weight.ndim > dimension and weight.shape[dimension] % size:
        raise ConfigError(
            f"the tp_plan divides {name!r} of shape {tuple(weight.shape)} over {size} ranks: "
            f"expected its dimension {dimension} to be a multiple of {size}"
        )


def _check_alike(model: Module, ties: Sequence[Sequence[str]]) -> None:
    """Refuse a model in which the plan divides a tied weight differently under its names."""
    for names in ties:
        weights = [model.get_parameter(name) for name in names]
        layouts = {weight.placements if isinstance(weight, DTensor) else None for weight in weights}
        if len(layouts) > 1:
            raise ConfigError(
                f"{' and '.join(map(repr, names))} are one weight, and the tp_plan divides them in "
                "different ways: divide both alike (an embedding rowwise, its head colwise), or "
                "neither"
            )
