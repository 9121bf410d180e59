"""Pipeline parallelism: each rank has some blocks of the model, and batches pass through the ranks.

The ranks of one pipeline read the same samples. There may be several pipelines
(``dp_replicate_size``, or ``dp_shard_size``, which also shards the weights of blocks). They read
different samples and average their gradients. ``tp_size`` ranks compute the layers of a stage
together::

    ParallelismConfig(pp_size=2, dp_replicate_size=2)      dp_replicate ->
                                                    pp  0: [ rank 0, rank 1 ]  first stages
                                                        1: [ rank 2, rank 3 ]  last stages

``stages`` cuts a model and runs batches through its stages. This module collects
weights, optimizer states and gradient norms from all stages for the rest of ``training``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from notebook_accel.config.checks import too_old_torch
from notebook_accel.errors import ConfigError
from notebook_accel.training import collectives
from notebook_accel.training.collectives.nested import recursively_apply
from notebook_accel.training.files import memory_of
from notebook_accel.training.models import set_within
from notebook_accel.training.stepping.step_timer import step_timer
from notebook_accel.training.strategies import dtensors, stages
from notebook_accel.training.strategies.mesh import MeshParallel, shared_weight
from notebook_accel.training.strategies.stages import add_up_gradients
from notebook_accel.training.strategies.strategy_request import (
    LossFunction,
    ModelToPrepare,
    Request,
)

_Key = tuple[float, ...]


class PipelineParallel(MeshParallel):
    """Strategy for pipelines by ``torch.distributed.pipelining``.

    Each stage may in addition be sharded and divided over ranks, as ``MeshParallel`` does it. A
    weight is identified on all ranks by a key: the number of its model in the order of ``prepare``
    calls, and the position of the weight in the uncut model.
    """

    def __init__(self, request: Request) -> None:
        if too_old := too_old_torch((2, 11)):  # stages and gloo of 2.9 disagree on sizes
            raise ConfigError(f"pipelines: {too_old}")
        super().__init__(request)
        assert self.mesh is not None
        self._group = self.mesh["pp"].get_group()
        self._stage_index = self.mesh.get_local_rank("pp")
        self._has_users_plugin = "fsdp_plugin" in request.plugins
        # The key of every weight of a prepared model, kept on this rank or not, alike on every
        # rank: the number of the model, and the weight's place in it.
        self._keys = WeakIdKeyDictionary()
        # Weights that no other stage has.
        self._own = WeakIdKeyDictionary()
        # Of each optimizer: the keys of the weights of all stages, by group.
        self._layouts: WeakKeyDictionary[Optimizer, list[list[_Key]]] = WeakKeyDictionary()
        self._state_names: WeakKeyDictionary[Module, list[str]] = WeakKeyDictionary()

    @property
    def saves_shards(self) -> bool:
        # Whole files, unless the user's plugin wants every rank's parts.
        return self._has_users_plugin and super().saves_shards

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        groups = _weights_of(optimizer)
        super().prepare_optimizer(optimizer)
        if optimizer not in self._layouts:
            self._layouts[optimizer] = self._lay_out(groups)
        return optimizer

    def prepare_model(self, given: ModelToPrepare) -> Module:
        if not given.training or self._is_spread(given.model):
            return super().prepare_model(given)
        model = given.model
        weights = dict(model.named_parameters())
        for name, weight in weights.items():
            # Each backward would add up what stages share once more, that of the other model too.
            if weight.requires_grad and weight in self._keys:
                raise shared_weight(model, name)
        number = len(self._state_names)
        self._state_names[model] = list(model.state_dict())
        note = _name_all(self._state_names[model])
        model.register_state_dict_post_hook(note)  # type: ignore[no-untyped-call]
        keys = {name: (number, place) for place, name in enumerate(weights)}
        for name, weight in weights.items():
            self._keys[weight] = keys[name]
        model = super().prepare_model(given)
        kept = {id(weight) for weight in model.parameters()}
        for name, weight in model.named_parameters():
            if weight not in self._keys:  # made anew, of one on the meta device
                self._keys[weight] = keys[name]
        for weight in weights.values():
            if id(weight) not in kept and weight not in self._replaced:
                self._replaced[weight] = None
        pipeline = stages.pipeline_of(model)
        assert pipeline is not None
        pipeline.note_weights(model)
        for weight in pipeline.own_weights:
            self._own[weight] = True
        return model

    def _lay_out(self, groups: Sequence[Sequence[torch.Tensor]]) -> list[list[_Key]]:
        """Return the keys of an optimizer's weights in all stages, a list for each parameter group.

        All ranks of the pipeline call it. An optimizer that was made before ``prepare`` has the
        weights of all stages, and their order is kept. An optimizer that was made after ``prepare``
        has this rank's weights alone: then the keys of all ranks are joined and sorted.
        """
        mine = self._keys_of(groups)
        of_stages: list[list[list[_Key]]] = collectives.gather_object([mine], group=self._group)
        if all(keys == mine for keys in of_stages):
            return mine
        return [sorted({*chain(*of_group)}) for of_group in zip(*of_stages, strict=True)]

    def forward_backward(
        self, model: Module, inputs: Any, targets: Any, loss_function: LossFunction, num_steps: int
    ) -> torch.Tensor:
        pipeline = stages.pipeline_of(model)
        if pipeline is None:
            raise ConfigError(
                f"forward_backward() got a {type(model).__name__} that was not prepared for "
                "training: expected what accelerator.prepare(model) gave"
            )

        scaler = None if self.scaling is None else self.scaling.begin_backward()

        def for_backward(loss: torch.Tensor) -> torch.Tensor:
            loss = loss / num_steps
            return loss if scaler is None else scaler.scale(loss)

        if scaler is not None:
            # A scaler makes its scale when it is first used, which the last stage alone would do.
            scaler.scale(torch.zeros((), device=self.topology.device))
        if pipeline.has_added_up and self._stage_index:
            # Gradients that the loop kept were added up already, and count once.
            for weight in pipeline.shared_weights:
                weight.grad = None
        with step_timer().backward():  # and forward, in turn
            loss = pipeline.forward_backward(model, inputs, targets, loss_function, for_backward)
        pipeline.has_added_up = pipeline.exchanges_gradients
        if pipeline.exchanges_gradients:
            add_up_gradients(pipeline.shared_weights, self._group)
            if self.data_group.size > 1:
                assert self.data_group.process_group is not None
                # ``fully_shard`` averages the gradients of what it has sharded itself.
                own = [
                    weight
                    for weight in pipeline.own_weights
                    if not isinstance(weight, DTensor)
                    or "dp_shard" not in (weight.device_mesh.mesh_dim_names or ())
                ]
                weights = [*pipeline.shared_weights, *own]
                group, size = self.data_group.process_group, self.data_group.size
                add_up_gradients(weights, group, divide_by=size)
        return loss

    def backward(self, loss: torch.Tensor, num_steps: int = 1, **kwargs: Any) -> None:
        raise ConfigError(f"backward() was called: {stages.PLAIN_LOOP}")

    def gradient_sync(self, model: Module, enabled: bool) -> AbstractContextManager[Any]:
        pipeline = stages.pipeline_of(model)
        if pipeline is None:
            return super().gradient_sync(model, enabled)
        return set_within(pipeline, exchanges_gradients=enabled)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        weights = [weight for weight in parameters if weight.grad is not None]
        # What all stages have counts once.
        counted = [weight for weight in weights if weight in self._own or not self._stage_index]
        norm = dtensors.total_grad_norm(counted, norm_type, self.topology.device).float()
        if norm_type == float("inf"):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self._group)
            total = norm
        else:
            power = norm**norm_type
            dist.all_reduce(power, group=self._group)
            total = power ** (1 / norm_type)
        dtensors.scale_grads(weights, max_norm, total)
        return total

    def state_dict(self, model: Module, *, full: bool, keeps: bool = True) -> dict[str, Any]:
        if not full or model not in self._state_names:
            return super().state_dict(model, full=full, keeps=keeps)
        whole: dict[str, Any] = self.make_whole(model.state_dict())
        return whole if keeps else {}

    def buffers_elsewhere(self, model: Module) -> set[str]:
        pipeline, found = stages.pipeline_of(model), super().buffers_elsewhere(model)
        if pipeline is None or pipeline.has_last_stage:
            return found
        # It alone runs the model's forward to its end (see _join).
        prefix = pipeline.prefix
        return found | {name for name, _ in model.named_buffers() if not name.startswith(prefix)}

    def make_whole(self, values: Any) -> Any:
        # What a user saves by hand: accelerator.save(model.state_dict(), file).
        def join(state: Any) -> dict[str, Any]:
            joined = self._join(_whole_with_ties(state))
            return {name: joined[name] for name in getattr(state, _NAMES)}

        return recursively_apply(join, values, test_type=lambda value: hasattr(value, _NAMES))

    def own_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        return self._numbered(optimizer, self._own_state(optimizer))

    def optimizer_state(self, optimizer: Optimizer, *, keeps: bool = True) -> dict[str, Any]:
        own = recursively_apply(_whole_on_host, self._own_state(optimizer))
        return self._numbered(optimizer, self._join(own))

    def _own_state(self, optimizer: Optimizer) -> dict[_Key, Any]:
        """Return the optimizer states of this rank's weights, by the keys of the weights."""
        keys = [*chain(*self._keys_of(_weights_of(optimizer)))]
        return {keys[index]: state for index, state in optimizer.state_dict()["state"].items()}

    def _numbered(self, optimizer: Optimizer, by_key: Mapping[_Key, Any]) -> dict[str, Any]:
        """Return an optimizer's state dict in torch's format, numbered over all stages."""
        layout = self._layouts[optimizer]
        numbers = iter(range(sum(map(len, layout))))
        groups = [
            {**settings, "params": [next(numbers) for _ in group]}
            for settings, group in zip(optimizer.state_dict()["param_groups"], layout, strict=True)
        ]
        state = {index: by_key[key] for index, key in enumerate(chain(*layout)) if key in by_key}
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        layout = self._layouts[optimizer]
        stored = [len(group["params"]) for group in state["param_groups"]]
        if stored != [len(group) for group in layout]:
            raise ValueError(
                f"the optimizer's state is of groups of {stored} weights, and the optimizer has "
                f"groups of {[len(group) for group in layout]}: load it into one made alike"
            )
        by_key = {key: state["state"].get(index) for index, key in enumerate(chain(*layout))}
        local = optimizer.state_dict()
        groups = [
            {**settings, "params": own["params"]}
            for settings, own in zip(state["param_groups"], local["param_groups"], strict=True)
        ]
        own_states = map(by_key.get, chain(*self._keys_of(_weights_of(optimizer))))
        found = {index: values for index, values in enumerate(own_states) if values is not None}
        super().load_optimizer_state(optimizer, {**state, "state": found, "param_groups": groups})

    def _keys_of(self, groups: Sequence[Sequence[torch.Tensor]]) -> list[list[_Key]]:
        # A weight of no prepared model is known by its place in the optimizer.
        known: Any = self._keys
        return [
            [known.get(weight, (math.inf, number, index)) for index, weight in enumerate(group)]
            for number, group in enumerate(groups)
        ]

    def _join(self, own: dict[Any, Any]) -> dict[Any, Any]:
        """Join the dictionaries of all stages; the last rank's value of a key is taken."""
        of_stages = collectives.gather_object([own], group=self._group)
        return {key: value for found in of_stages for key, value in found.items()}


# An attribute of a cut model's state dict: the names of the whole one.
_NAMES = "_notebook_accel_names"


def _name_all(names: list[str]) -> Callable[..., None]:
    """Return a hook that attaches the uncut model's names to a state dict, for ``make_whole``."""

    def note(module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:  # noqa: ARG001
        if not prefix:
            setattr(state, _NAMES, names)

    return note


def _whole_with_ties(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return full tensors on the CPU, one object for a tied weight.

    All ranks of the stage call it.
    """
    seen: dict[Any, torch.Tensor] = {}
    found = dict(state)
    for name, value in state.items():
        if torch.is_tensor(value) and value.numel():
            key = memory_of(dtensors.local_part(value))
            if key not in seen:
                seen[key] = _whole_on_host(value)
            found[name] = seen[key]
    return found


def _weights_of(optimizer: Optimizer) -> list[list[torch.Tensor]]:
    return [list(group["params"]) for group in optimizer.param_groups]


def _whole_on_host(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU, joined if it is sharded; all ranks of a stage call it."""
    whole: torch.Tensor = dtensors.make_whole(value.detach())
    return whole.cpu()
