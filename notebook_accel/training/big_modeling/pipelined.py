"""``prepare_pippy``: a model in stages, one a rank, for inference.

Torch traces the model on example inputs, cuts the trace where given modules begin, and sends what
crosses a cut from rank to rank (``torch.distributed.pipelining``)::

    rank 0    inputs -> stage 0 --.
    rank 1                        '-> stage 1 --.
    rank 2                                      '-> stage 2 -> outputs

A trace knows one number of samples alone: that of the examples. A batch of any other number goes
through in micro-batches of that size, on which the stages compute at once; the last one is filled
up with copies of the last sample, which are cut off the outputs.

Training in stages is another thing: ``ParallelismConfig(pp_size=...)`` traces nothing, and cuts
between blocks alone.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from notebook_accel.errors import ConfigError
from notebook_accel.training import collectives, topology
from notebook_accel.training.big_modeling.sizes import compute_module_sizes, direct_parts, is_whole
from notebook_accel.training.models import RemovableForward, forward_of, strip_forward
from notebook_accel.training.nested import (
    leaves,
    leaves_with_paths,
    recursively_apply,
    send_to_device,
)
from notebook_accel.training.strategies import blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.pipelining import Pipe, ScheduleGPipe

    from notebook_accel.training.topology import Topology

__all__ = ["prepare_pippy"]

# "auto" takes a module apart that is heavier than this share of a stage.
_LARGEST_PART = 1 / 8

# What a trace can hold beside tensors, as a constant.
_PLAIN = (type(None), bool, int, float, str, torch.dtype)


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] | None = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Spread a model over all ranks, a stage on each, for inference.

    All ranks call this, and then the model, which runs without gradients. The inputs are those of
    rank 0, whatever the others give; the outputs are on the last rank, and None on the others.
    Batches may have any number of samples. All else is as in the examples: other dimensions,
    types, values that are no tensors, and the mode of the model (call ``model.eval()`` first).

    Args:
        model: on one device, and the same on every rank. It is changed in place; with one process
            it is only moved to its device.
        split_points: names of the modules with which the second stage and each later one begin,
            in order; "auto" balances the stages by their weights.
        no_split_module_classes: names of classes that "auto" leaves whole; by default those that
            a Transformers model names.
        example_args: positional inputs of one micro-batch: tensors whose first dimension is the
            samples, and plain values.
        example_kwargs: likewise, by name.
        num_chunks: how many micro-batches are under way at once; by default the number of ranks.
            More of them keep the stages busier, and take more memory.
        gather_output: give the outputs to every rank.

    Returns:
        the model. ``extract_model_from_parallel(model, keep_fp32_wrapper=False)`` gives it its own
        forward back.

    Raises:
        ConfigError: the split points or the examples do not fit the model, or the ranks.
    """
    here = topology.topology()
    if num_chunks is not None and num_chunks < 1:
        raise ConfigError(f"num_chunks={num_chunks}: expected 1 or more, or None")
    if here.num_processes == 1:
        return model.to(here.device)
    if isinstance(split_points, str) and split_points != "auto":
        raise ConfigError(f'split_points={split_points!r}: expected "auto" or a list of names')
    if split_points is None or isinstance(split_points, str):
        split_points = _balanced(model, here.num_processes, no_split_module_classes)
    if len(split_points) != here.num_processes - 1:
        raise ConfigError(
            f"split_points names {len(split_points)} modules, and there are {here.num_processes} "
            f"ranks: expected {here.num_processes - 1}, the beginnings of all stages but the first"
        )
    strip_forward(model, _InferenceForward)  # of a call before this one
    example = _Inputs(example_args, example_kwargs or {})
    example.require_micro_batch()
    pipe, outputs = _trace(model, split_points, example)
    _require_stages(pipe, split_points)
    stages = _InferenceStages(
        pipe,
        here,
        example=example,
        outputs=outputs,
        num_chunks=num_chunks or here.num_processes,
        gather_output=gather_output,
    )
    # By this name other libraries ask where a model was cut.
    model.__dict__["hf_split_points"] = list(split_points)
    model.__dict__["forward"] = _InferenceForward(model, stages)
    return model


def _balanced(
    model: nn.Module, num_stages: int, no_split_module_classes: Sequence[str] | None
) -> list[str]:
    """The modules with which stages begin that weigh about the same."""
    whole = no_split_module_classes or getattr(model, "_no_split_modules", None) or ()
    sizes = compute_module_sizes(model)
    limit = sizes.get("", 0) / num_stages * _LARGEST_PART
    names = _parts_within(limit, model, "", sizes, list(whole))
    if len(names) < num_stages:
        raise ConfigError(
            f"{type(model).__name__} has {len(names)} modules that can begin a stage, and there "
            f"are {num_stages} ranks: start fewer, or name fewer no_split_module_classes"
        )
    ends = blocks.balance([sizes.get(name, 0) for name in names], num_stages)
    return [names[end] for end in ends[:-1]]


def _parts_within(
    limit: float, module: nn.Module, prefix: str, sizes: Mapping[str, int], whole: list[str]
) -> list[str]:
    """The modules inside one, in order, those that weigh more than the limit in parts."""
    names = []
    for name, part in direct_parts(module, prefix):
        if isinstance(part, torch.Tensor):
            continue
        # A list of modules has no forward with which a stage could begin.
        is_called = type(part).forward is not nn.Module.forward
        if is_called and (is_whole(part, whole) or sizes.get(name, 0) <= limit):
            names.append(name)
        else:
            names += _parts_within(limit, part, name, sizes, whole)
    return names


@dataclass(frozen=True)
class _TensorForm:
    """What is fixed of a tensor whose first dimension is the samples: all but their number."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dtype} of shape ({', '.join(map(str, ('samples', *self.shape)))})"


def _form_of(value: Any) -> Any:
    """What stands for a value in the form of inputs or outputs."""
    if isinstance(value, torch.Tensor):
        return _TensorForm(tuple(value.shape[1:]), value.dtype)
    return value


class _Inputs:
    """The arguments of a forward, and each value in them by its path."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.nested = (tuple(args), dict(kwargs))
        self.values = dict(
            [
                *leaves_with_paths(self.nested[0], "args"),
                *leaves_with_paths(self.nested[1], "kwargs"),
            ]
        )
        self.forms = {path: _form_of(value) for path, value in self.values.items()}
        self.tensors = {
            path: value for path, value in self.values.items() if isinstance(value, torch.Tensor)
        }

    @property
    def num_samples(self) -> int:
        """The first dimension of all tensors; 0 where they differ in it, or there are none."""
        sizes = {tuple(tensor.shape[:1]) for tensor in self.tensors.values()}
        return sizes.pop()[0] if len(sizes) == 1 and () not in sizes else 0

    def require_micro_batch(self) -> None:
        """Refuse examples of which no batch could be made.

        Raises:
            ConfigError: it says what they are.
        """
        odd = [path for path, value in self.values.items() if not _fits_in_trace(value)]
        if odd:
            raise ConfigError(
                f"{odd[0]} of the examples is a {type(self.values[odd[0]]).__name__}: expected "
                "tensors and plain values (None, numbers, text), in lists, tuples and dicts"
            )
        if not self.num_samples:
            shapes = {path: tuple(tensor.shape) for path, tensor in self.tensors.items()}
            raise ConfigError(
                f"the tensors in example_args and example_kwargs are {shapes or 'none'}: expected "
                "one or more, with the samples of one micro-batch as their first dimension, such "
                "as example_args=(batch[:1],)"
            )

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Any:
        """``(args, kwargs)`` with other tensors in place of these, in the same order."""
        new = iter(tensors)
        return recursively_apply(lambda _: next(new), self.nested)


def _fits_in_trace(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, *_PLAIN))


class _Traceable(nn.Module):
    """A model between tensors, as it is traced.

    Its inputs and outputs are copies. So every input enters at the first stage, and goes on from
    there to the stages that use it (torch refuses a model's inputs at any other stage); and every
    output comes from the last stage, also one that an earlier stage made.
    """

    def __init__(self, model: nn.Module, call: Callable[..., Sequence[torch.Tensor]]) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the model makes of tensors in the order of its inputs' paths."""
        outputs = self.call(self.model, [tensor.clone() for tensor in tensors])
        return tuple(tensor.clone() for tensor in outputs)


def _trace(model: nn.Module, split_points: Sequence[str], example: _Inputs) -> tuple[Pipe, Any]:
    """The model as it is traced and cut into stages, and the form of its outputs.

    Raises:
        ConfigError: the model has no module of a split point's name, or an output without samples.
    """
    # Not at the top: it takes a second.
    from torch.distributed.pipelining import pipe_split, pipeline

    outputs: Any = None

    def call(model: nn.Module, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        nonlocal outputs
        args, kwargs = example.with_tensors(tensors)
        outputs = model(*args, **kwargs)
        return [value for value in leaves(outputs) if isinstance(value, torch.Tensor)]

    def begin_stage(module: nn.Module, inputs: Any) -> None:  # noqa: ARG001
        pipe_split()  # type: ignore[no-untyped-call]

    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    tensors = send_to_device(tuple(example.tensors.values()), device)
    # Where gradients are on, torch takes each no_grad inside the model for a part that it cannot
    # cut.
    with contextlib.ExitStack() as hooks, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)  # torch uses what it says is deprecated
        for name in split_points:
            hook = _module_at(model, name).register_forward_pre_hook(begin_stage)
            hooks.callback(hook.remove)
        pipe = pipeline(_Traceable(model, call), mb_args=tensors)
    return pipe, _form_of_outputs(outputs, example.num_samples)


def _module_at(model: nn.Module, name: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if name not in modules:
        raise ConfigError(
            f"split_points names {name!r}, and {type(model).__name__} has no such module: expected "
            f"names of model.named_modules(), such as {[*modules][1:4]}"
        )
    return modules[name]


def _form_of_outputs(outputs: Any, num_samples: int) -> Any:
    """The outputs with a form in place of each tensor; what cannot travel becomes None.

    That is a decoder's cache of keys and values, say: each stage has its own part of it.

    Raises:
        ConfigError: a tensor has not the samples as its first dimension.
    """
    for path, value in leaves_with_paths(outputs, "outputs"):
        if isinstance(value, torch.Tensor) and tuple(value.shape[:1]) != (num_samples,):
            raise ConfigError(
                f"{path} of the model has shape {tuple(value.shape)} for {num_samples} samples: "
                "expected outputs whose first dimension is the samples (no loss, which is one "
                "number a batch)"
            )
    return recursively_apply(
        lambda value: _form_of(value) if _fits_in_trace(value) else None,
        outputs,
        test_type=lambda value: not isinstance(value, (list, tuple, Mapping)),
    )


def _stage_calls(pipe: Pipe) -> list[Any]:
    """The calls of the stages in the trace, in order."""
    return [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]


def _require_stages(pipe: Pipe, split_points: Sequence[str]) -> None:
    """Refuse a trace that is not one stage a rank, one after the other."""
    calls, num_ranks = _stage_calls(pipe), len(split_points) + 1
    if len(calls) == num_ranks and all(
        pipe.split_gm.get_submodule(call.target) is pipe.get_stage_module(index)
        for index, call in enumerate(calls)
    ):
        return
    raise ConfigError(
        f"split_points={list(split_points)} makes {len(calls)} stages of the model's forward, and "
        f"there are {num_ranks} ranks: expected the names of modules that the forward calls once, "
        "in this order, each after some work of the stage before"
    )


class _InferenceStages:
    """This rank's stage of a model, and the way of a batch through all of them."""

    def __init__(
        self,
        pipe: Pipe,
        here: Topology,
        *,
        example: _Inputs,
        outputs: Any,
        num_chunks: int,
        gather_output: bool,
    ) -> None:
        self._here = here
        self._last_rank = here.num_processes - 1
        self._forms = example.forms
        self._micro_batch = example.num_samples
        self._outputs = outputs
        self._num_chunks = num_chunks
        self._gather_output = gather_output
        _receive_in_order(pipe, here.process_index)
        self._stage = pipe.build_stage(here.process_index, here.device)
        _exchange_contiguous(self._stage.submod)
        inputs = [node for node in pipe.split_gm.graph.nodes if node.op == "placeholder"]
        used = [inputs.index(node) for node in _stage_calls(pipe)[0].args]
        # Without those that the forward does not use: the trace has none of them.
        self._used_paths = [[*example.tensors][index] for index in used]
        self._schedules: dict[int, ScheduleGPipe] = {}

    def run(self, inputs: _Inputs) -> Any:
        """The outputs for the inputs of rank 0: on the last rank, or gathered on all.

        Raises:
            ConfigError: the inputs of rank 0 are not as the examples were.
        """
        num_samples = self._agree_on_samples(inputs)
        num_micro_batches = math.ceil(num_samples / self._micro_batch)
        is_first = self._here.process_index == 0
        given = self._whole_micro_batches(inputs, num_micro_batches) if is_first else []
        parts = []
        for start in range(0, num_micro_batches, self._num_chunks):
            end = min(start + self._num_chunks, num_micro_batches)
            rows = slice(start * self._micro_batch, end * self._micro_batch)
            part = self._schedule(end - start).step(*(tensor[rows] for tensor in given))
            parts.append(part if isinstance(part, (list, tuple)) else (part,))
        self._stage.clear_runtime_states()  # drops the activations
        if self._here.process_index == self._last_rank:
            tensors = [torch.cat(column)[:num_samples] for column in zip(*parts, strict=True)]
        elif self._gather_output:
            tensors = self._room_for_outputs(num_samples)
        else:
            return None
        return self._hand_out(tensors)

    def _agree_on_samples(self, inputs: _Inputs) -> int:
        """How many samples rank 0 has, which all ranks hear, so that none waits for a refusal."""
        refusal = self._refusal(inputs) if self._here.process_index == 0 else ""
        num_samples = torch.tensor(0 if refusal else inputs.num_samples)
        collectives.broadcast(num_samples)
        if refusal:
            raise ConfigError(refusal)
        if not num_samples:
            raise ConfigError("rank 0 refused the inputs of the model: its own error says why")
        return int(num_samples)

    def _refusal(self, inputs: _Inputs) -> str:
        """Why these inputs cannot go through the trace; "" where they can."""
        if inputs.forms.keys() != self._forms.keys():
            return (
                f"the model was called with {[*inputs.forms]}, and traced with {[*self._forms]}: "
                "expected what prepare_pippy was given as examples, by position and by name alike"
            )
        for path, form in self._forms.items():
            given = inputs.forms[path]
            # Arrays, say, have no yes or no to "are they equal": an error of rank 0 alone would
            # leave the others waiting.
            if not isinstance(given, (_TensorForm, *_PLAIN)) or given != form:
                return (
                    f"{path} is {given}, and the model was traced with {form}: call "
                    "it with that, or call prepare_pippy on a new model with other examples"
                )
        if not inputs.num_samples:
            shapes = {path: tuple(tensor.shape) for path, tensor in inputs.tensors.items()}
            return f"the tensors have shapes {shapes}: expected one and the same number of samples"
        return ""

    def _whole_micro_batches(self, inputs: _Inputs, num_micro_batches: int) -> list[torch.Tensor]:
        """The tensors that the first stage takes, on its device, with the last one filled up."""
        rows = torch.arange(num_micro_batches * self._micro_batch, device=self._here.device)
        rows = rows.clamp(max=inputs.num_samples - 1)
        tensors = [inputs.tensors[path].to(self._here.device) for path in self._used_paths]
        return [tensor.index_select(0, rows) for tensor in tensors]

    def _schedule(self, num_micro_batches: int) -> ScheduleGPipe:
        from torch.distributed.pipelining import ScheduleGPipe

        if num_micro_batches not in self._schedules:
            self._schedules[num_micro_batches] = ScheduleGPipe(
                self._stage, num_micro_batches, scale_grads=False
            )
        return self._schedules[num_micro_batches]

    def _room_for_outputs(self, num_samples: int) -> list[torch.Tensor]:
        forms = [form for form in leaves(self._outputs) if isinstance(form, _TensorForm)]
        return [
            torch.empty((num_samples, *form.shape), dtype=form.dtype, device=self._here.device)
            for form in forms
        ]

    def _hand_out(self, tensors: list[torch.Tensor]) -> Any:
        """The outputs in the form in which the model gives them."""
        if self._gather_output:
            collectives.broadcast(tensors, from_process=self._last_rank)
        new = iter(tensors)
        return recursively_apply(
            lambda _: next(new),
            self._outputs,
            test_type=lambda value: isinstance(value, _TensorForm),
        )


def _receive_in_order(pipe: Pipe, index: int) -> None:
    """Let a stage receive what several stages send it in the order in which each sends.

    Torch sends a stage's outputs in their order, and receives in the order in which the other
    stage uses them: of two tensors from one rank, each would be taken for the other.
    """
    calls = _stage_calls(pipe)
    call = calls[index]
    stage: Any = pipe.get_stage_module(index)
    if index == 0:
        return  # it receives nothing

    def place(pair: tuple[Any, Any]) -> tuple[int, int]:
        _, sent = pair
        # A stage's only output is the call itself, one of several an item of it.
        source, number = (sent, 0) if sent.op == "call_module" else sent.args
        return calls.index(source), number

    inputs = [node for node in stage.graph.nodes if node.op == "placeholder"]
    ordered = sorted(zip(inputs, call.args, strict=True), key=place)
    behind = next(node for node in stage.graph.nodes if node.op != "placeholder")
    for node, _ in ordered:
        behind.prepend(node)
    call.args = tuple(sent for _, sent in ordered)
    stage.recompile()


def _exchange_contiguous(stage: Any) -> None:
    """Let a stage, a traced graph, send contiguous tensors, and expect such.

    gloo refuses others. NCCL sends the memory of a tensor as it lies, and of one that was expanded
    (an attention mask) there is less than its shape says.
    """
    ends = [node for node in stage.graph.nodes if node.op == "placeholder"]
    ends += [*stage.graph.output_node().all_input_nodes]
    for node in ends:
        node.meta["val"] = node.meta["val"].contiguous()
    stage.register_forward_hook(
        lambda _module, _inputs, outputs: recursively_apply(torch.Tensor.contiguous, outputs)
    )


class _InferenceForward(RemovableForward):
    """What the user calls: the model in stages, without gradients.

    A pickled module comes back with its plain forward.
    """

    def __init__(self, module: nn.Module, stages: _InferenceStages) -> None:
        super().__init__(module)
        self.stages = stages

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.stages.run(_Inputs(args, kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        return (forward_of, (self.module, self.replaced))
