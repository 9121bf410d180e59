"""``Accelerator``: one object through which a training loop runs on one device or on many.

Each method hands over to the part that does the work: ``processes`` (the ranks), ``strategies``
(how models are spread), ``precision``, ``accumulation``, ``prepare``, ``collectives``,
``checkpoint``, ``tracking``.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from notebook_accel.errors import ConfigError
from notebook_accel.launch.rank import current
from notebook_accel.training import collectives, devices
from notebook_accel.training.accumulation import Window
from notebook_accel.training.checkpoint import Checkpoints
from notebook_accel.training.checkpoint.view import CheckpointView
from notebook_accel.training.data import skip_first_batches
from notebook_accel.training.data.gathering import gather_for_metrics
from notebook_accel.training.notices import notice_once
from notebook_accel.training.optimizer import inner_optimizer
from notebook_accel.training.plan import make_plan, refuse_unbuilt, resolve_loaders, resolve_project
from notebook_accel.training.prepare import Preparation, extract_model_from_parallel
from notebook_accel.training.preparing import PreparingView
from notebook_accel.training.process_group import close_process_group
from notebook_accel.training.profiling import profile
from notebook_accel.training.progress import progress
from notebook_accel.training.settings import ProfileKwargs, pick_handler
from notebook_accel.training.tracking.registry import resolve_trackers
from notebook_accel.training.tracking.view import TrackerView, Tracking
from notebook_accel.training.uneven_inputs import join_uneven_inputs
from notebook_accel.training.window import WindowView

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from torch.nn import Module
    from torch.profiler import profile as Profiler  # noqa: N812
    from torch.utils.data import DataLoader

    from notebook_accel.training.compiling import DynamoBackend, TorchDynamoPlugin
    from notebook_accel.training.data.config import DataLoaderConfiguration
    from notebook_accel.training.deepspeed_plugin import DeepSpeedPlugin
    from notebook_accel.training.fsdp_plugin import FullyShardedDataParallelPlugin
    from notebook_accel.training.parallelism import ParallelismConfig
    from notebook_accel.training.settings import (
        AutocastKwargs,
        GradientAccumulationPlugin,
        KwargsHandler,
        ProjectConfiguration,
    )
    from notebook_accel.training.strategies import Strategy

    Path_ = str | os.PathLike[str]

__all__ = ["Accelerator"]

_Item = TypeVar("_Item")
# Where a rank keeps the strategy of its newest Accelerator.
_STRATEGY = "strategy"


class Accelerator(WindowView, CheckpointView, TrackerView, PreparingView):
    """Makes the objects of a training loop ready for where it runs, and runs its steps."""

    # What a launch tells a user who passes it one of these as an argument
    # (``launch/payload/refusals``).
    _notebook_accel_stays_home: ClassVar[str] = "make it inside the function"

    def __init__(
        self,
        *,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        parallelism_config: ParallelismConfig | None = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: Path_ | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: str | DynamoBackend | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        dispatch_batches: bool | None = None,
        even_batches: bool | None = None,
        use_seedable_sampler: bool | None = None,
        deepspeed_plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        **others: Any,
    ) -> None:
        """Find out where this rank stands; make the process group if there are several ranks.

        Args:
            device_placement: whether ``prepare`` puts models and batches on the device.
            mixed_precision: "no", "bf16", "fp16" or "fp8" (by torchao); None asks the environment
                (NOTEBOOK_ACCEL_, then ACCELERATE_MIXED_PRECISION), else "no".
            gradient_accumulation_steps: batches a step; None asks the environment.
            cpu: compute on the host whatever else is there.
            dataloader_config: how batches are shared out; ``split_batches``,
                ``dispatch_batches``, ``even_batches`` and ``use_seedable_sampler`` set fields
                of it unless they are None.
            deepspeed_plugin: DeepSpeed's ZeRO; ``deepspeed_plugins`` is several of them, by name.
            fsdp_plugin: weights in parts, one a rank, instead of a whole model on each.
            parallelism_config: how many ranks each kind of parallelism gets.
            rng_types: random numbers that ranks take from rank 0 as a loader begins: "torch",
                "generator" (the order of samples, which is always taken), or a kind of device
                such as "cuda"; with an empty list none, and ranks have to be seeded alike.
            log_with: trackers that ``log`` feeds beside the notebook's own: "tensorboard",
                "wandb", ..., "all", a ``GeneralTracker`` of one's own, or several.
            project_dir: folder of the project, for numbered checkpoints and trackers' files.
            project_config: more about that folder.
            gradient_accumulation_plugin: more about windows, instead of the number of steps.
            step_scheduler_with_optimizer: False moves prepared schedulers at each call.
            kwargs_handlers: arguments for things of torch, each of another class.
            dynamo_backend: compile models with this backend of ``torch.compile``, such as
                "inductor"; None asks the environment.
            dynamo_plugin: more about compiling, instead of the backend.
            **others: arguments of Accelerate that are not built here, which are refused unless
                they ask for nothing (None, "no").

        Raises:
            ConfigError: a setting makes no sense, or is not built.
            TypeError: nobody knows the argument.
        """
        refuse_unbuilt(others)
        loaders = resolve_loaders(
            dataloader_config,
            split_batches=split_batches,
            dispatch_batches=dispatch_batches,
            even_batches=even_batches,
            use_seedable_sampler=use_seedable_sampler,
        )
        project = resolve_project(project_config, project_dir)
        trackers = resolve_trackers(log_with, project.logging_dir)
        plan = make_plan(
            cpu=cpu,
            mixed_precision=mixed_precision,
            num_steps=gradient_accumulation_steps,
            plugin=gradient_accumulation_plugin,
            handlers=kwargs_handlers or (),
            fsdp=fsdp_plugin,
            parallelism=parallelism_config,
            dynamo=dynamo_plugin,
            dynamo_backend=dynamo_backend,
            deepspeed=(deepspeed_plugin, deepspeed_plugins),
            loaders=loaders,
            device_placement=device_placement,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            rng_types=rng_types,
        )
        super().__init__(plan, project, Preparation(plan))
        self._tracking = Tracking(trackers, project)
        self._strategy = plan.strategy
        # One rank of each share of the data: what is joined over them counts each sample once.
        self._data_ranks = plan.strategy.data_group.process_group
        self._checkpoints = Checkpoints(self._prepared, self.project_configuration)
        self._triggered = False
        self._accumulation.show()
        current().shared[_STRATEGY] = self._strategy
        self._strategy.data_group.show()
        plan.settings().show()
        self._prepared.watch.start(self)

    # Making objects ready.

    def unwrap_model(
        self, model: Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """The user's model inside what ``prepare`` put around it.

        Args:
            model: as ``prepare`` gave it.
            keep_fp32_wrapper: leave its forward in the mixed precision; False gives it back
                the forward that it had, for good.
            keep_torch_compile: leave it compiled, by ``prepare`` or before; False gives the model
                that was compiled.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """The loader as it is: DeepSpeed's sequence parallelism, which would divide its batches,
        is not there (``ParallelismConfig`` refuses ``sp_size``)."""
        return dl

    def skip_first_batches(
        self, dataloader: DataLoader[Any], num_batches: int = 0
    ) -> DataLoader[Any]:
        """The loader from batch ``num_batches`` of the epoch on.

        Raises:
            ConfigError: ``num_batches`` is no whole number from 0 on.
        """
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget what was prepared, begin windows anew, and free what nobody else holds.

        DeepSpeed's engine ends with it.

        Returns:
            a None for each object, to assign to their names.
        """
        self._prepared.clear()
        self._strategy.forget()
        self._accumulation.reset()
        given = len(objects)
        del objects
        gc.collect()
        devices.empty_cache(self.device)
        return [None] * given

    clear = free_memory

    # A step.

    def backward(
        self, loss: torch.Tensor, *, learning_rate: float | None = None, **kwargs: Any
    ) -> None:
        """Compute gradients of the loss, which is divided by the batches of a window.

        Args:
            loss: a tensor of one number.
            learning_rate: for optimizers that step as they go back (see ``lomo_backward``).
            **kwargs: for ``loss.backward``.
        """
        if not self._prepared.models and self.num_processes > 1:
            notice_once(
                "backward without a prepared model",
                "backward() was called and no model was prepared: unless something else exchanges "
                f"the gradients, each of the {self.num_processes} ranks trains a model of its own. "
                "Write model = accelerator.prepare(model)",
            )
        num_steps = self._accumulation.num_steps
        if learning_rate is None:
            self._strategy.backward(loss, num_steps, **kwargs)
        else:
            self.lomo_backward(loss / num_steps, learning_rate)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Backward and step in one, for prepared optimizers that do both (LOMO, AdaLomo).

        ``backward(loss, learning_rate=...)`` does it with the loss divided by a window's batches.

        Raises:
            ConfigError: there is no learning rate, or no such optimizer was prepared.
        """
        given = [known.optimizer for known in self._prepared.optimizers]
        fused: list[Any] = [one for one in given if hasattr(one, "fused_backward")]
        if learning_rate is None or not fused:
            raise ConfigError(
                f"lomo_backward(learning_rate={learning_rate}) needs a learning rate, and an "
                "optimizer with fused_backward (lomo_optim's Lomo or AdaLomo) given to prepare(); "
                f"prepared are {[type(one).__name__ for one in given]}"
            )
        for optimizer in fused:
            optimizer.fused_backward(loss, learning_rate)

    def verify_device_map(self, model: Module) -> bool:
        """Whether a model, or a part of it, is spread over devices (``device_map``)."""
        return any(len(getattr(part, "hf_device_map", ())) > 1 for part in model.modules())

    def forward_backward(
        self,
        model: Module,
        inputs: Any,
        targets: Any,
        loss_function: Callable[[Any, Any], torch.Tensor],
    ) -> torch.Tensor:
        """Forward, loss and ``backward`` of one batch in one call, which every strategy can run.

        A pipeline runs them itself, micro-batch by micro-batch; elsewhere this means
        ``loss = loss_function(model(inputs), targets)`` and ``backward(loss)``. A loop that
        calls it is the same under every strategy.

        Args:
            model: as ``prepare`` gave it.
            inputs: what it is called with: a tuple or list gives its arguments, a mapping its
                keywords, anything else is the one argument.
            targets: the loss function's second argument, first dimension the batch's.
            loss_function: called with the outputs and the targets; gives a mean over the batch.

        Returns:
            the loss of this rank's batch, without gradient, on every rank.
        """
        return self._strategy.forward_backward(
            model, inputs, targets, loss_function, self._accumulation.num_steps
        )

    def accumulate(self, *models: Module | Sequence[Module]) -> Window:
        """A block for one batch of a window of ``models``, as ``prepare`` gave them (or of lists of
        them); gradients are exchanged and used at its last."""
        return Window(self._accumulation, models, self._strategy.gradient_sync)

    def no_sync(self, model: Module) -> AbstractContextManager[Any]:
        """A block in which backward exchanges no gradients between ranks."""
        return self._strategy.gradient_sync(model, False)

    @staticmethod
    def trigger_sync_in_backward(model: Module) -> AbstractContextManager[Any]:
        """A block whose backward exchanges gradients though its forward was in ``no_sync``.

        The model is one that this rank's newest ``Accelerator`` prepared.
        """
        strategy: Strategy = current().shared[_STRATEGY]
        return strategy.gradient_sync(model, True)

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any, bool | None]:
        """A block whose operations compute in the mixed precision."""
        return self._plan.precision.autocast(autocast_handler)

    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """A block for one batch, forward and backward, in which ranks divide its sequences.

        Under ``ParallelismConfig(cp_size=...)`` each rank has its part of the buffers inside, and
        ``scaled_dot_product_attention`` attends to whole sequences, which have no padding; a loss
        is that of the part (``forward_backward`` gives the mean of the parts). Elsewhere the block
        changes nothing.

        Args:
            buffers: tensors with a dimension along the sequence, such as inputs, targets and
                positions; changed in place, and whole again after the block.
            buffer_seq_dims: that dimension of each.
            no_restore_buffers: those that may keep their part after the block.

        Raises:
            ConfigError: a sequence's length is no multiple of twice ``cp_size``.
        """
        return self._strategy.divide_sequences(
            list(buffers or ()), list(buffer_seq_dims or ()), set(no_restore_buffers or ())
        )

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients of one, several or all prepared optimizers by the loss scale."""
        if self._scaling is None:
            return
        given = self._prepared.optimizers if optimizer is None else optimizer
        several = given if isinstance(given, (list, tuple)) else [given]
        self._scaling.unscale(map(inner_optimizer, several))

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float | str = 2.0,
    ) -> torch.Tensor:
        """Clip the gradients of a complete window to a norm; within one nothing is clipped.

        Args:
            parameters: one weight or several, whose gradients together get the norm.
            max_norm: the largest one that they may have.
            norm_type: which norm; "inf" is the largest gradient. DeepSpeed refuses another than 2.

        Returns:
            the norm before, a tensor without dimensions.
        """
        own, norm = self._ready_to_clip(parameters), float(norm_type)
        if not self.sync_gradients:
            scale = 1.0 if self._scaling is None else self._scaling.scaler.get_scale()
            return self._strategy.clip_grad_norm(own, float("inf"), norm) / scale
        return self._strategy.clip_grad_norm(own, max_norm, norm)

    def clip_grad_value_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        """Clip each gradient of a complete window to [-clip_value, clip_value]. A ConfigError under
        DeepSpeed, which clips norms alone."""
        own = self._ready_to_clip(parameters)
        if self.sync_gradients:
            self._strategy.clip_grad_value(own, clip_value)

    def _ready_to_clip(
        self, parameters: torch.Tensor | Iterable[torch.Tensor]
    ) -> list[torch.Tensor]:
        own = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self._scaling is not None and self.sync_gradients:
            self._scaling.unscale([known.optimizer for known in self._prepared.optimizers], own)
        return own

    # Between the ranks.

    def wait_for_everyone(self) -> None:
        """Wait until all ranks are here."""
        self._strategy.barrier()

    def gather(self, tensor: Any) -> Any:
        """The tensors of all ranks, of one shape each and in any nesting, in the ranks' order.

        One of (n, ...) becomes (ranks * n, ...), one without a dimension (ranks,); no gradient
        flows through it. All ranks call it; those that hold one model together count as one.

        Raises:
            TypeError: a leaf is not a tensor.
        """
        return collectives.gather(tensor, group=self._data_ranks)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What all ranks computed from their batches, each sample counted once.

        Tensors whose first dimension is the batch's become (num_samples, ...); other tensors are
        all kept. With ``use_gather_object`` everything is one list of objects a rank, joined.
        """
        return gather_for_metrics(input_data, use_gather_object, group=self._data_ranks)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The tensors of all ranks combined, in new ones of the same shapes: by "sum", "mean",
        "max", "min" or "none". ``scale`` has no effect.

        Raises:
            TypeError: a leaf is not a tensor.
            ValueError: another ``reduction``.
        """
        return collectives.reduce(tensor, reduction, scale, group=self._data_ranks)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """The tensors, padded along ``dim`` to the largest size that a rank has; their other
        dimensions are equal on all ranks, and one without ``dim`` stays as it is."""
        return collectives.pad_across_processes(
            tensor, dim, pad_index, pad_first, group=self._data_ranks
        )

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """A block in which ranks may have different numbers of batches.

        Args:
            joinables: the prepared models, under DistributedDataParallel; others change nothing.
            even_batches: what holds for prepared loaders within the block.
        """
        if self.num_processes == 1:
            return nullcontext()
        return join_uneven_inputs(joinables, self._prepared.loaders, even_batches)

    def set_trigger(self) -> None:
        """Let the next ``check_trigger`` of all ranks be True."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether a rank called ``set_trigger`` since the last check; all ranks call it."""
        flag = torch.tensor(float(self._triggered), device=self.device)
        self._triggered = False
        return bool(collectives.reduce(flag, "max") > 0)

    # What a person sees.

    @property
    def should_stop(self) -> bool:
        """True, on all ranks at the same step, once the run was asked to stop."""
        return current().should_stop()

    def progress(
        self, iterable: Iterable[_Item], desc: str | None = None, total: float | None = None
    ) -> Iterable[_Item]:
        """``iterable`` with a progress bar: each rank's in the run's view, one in all elsewhere.

        ``desc`` is the bar's name, ``total`` the number of items; None takes ``len(iterable)``.
        """
        return progress(iterable, desc, total, is_shown=self.is_local_main_process)

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> AbstractContextManager[Profiler]:
        """A block under torch's profiler, by ``profile_handler`` or else that of
        ``kwargs_handlers``, with a trace a rank if a folder was given for it."""
        options = profile_handler or pick_handler(self._plan.handlers, ProfileKwargs)
        return profile(options, self.process_index)

    def end_training(self) -> None:
        """Finish the trackers and give back what the training made.

        Outside the launcher, which ends its own, the process group is closed too; all of it
        also where a tracker fails to finish. A checkpoint that is still being written is waited
        for.
        """
        with ExitStack() as last_first:
            if not current().launched:
                last_first.callback(close_process_group)
            last_first.callback(self._strategy.close)
            last_first.callback(self._checkpoints.wait)  # it needs the process group
            self._tracking.finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            "an Accelerator cannot be pickled: its process group, device and trackers are its "
            "process's. Make one in the process that needs it"
        )
