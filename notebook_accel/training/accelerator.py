"""``Accelerator``: one object through which a training loop runs on one device or on many.

The class is whole in this file; each method hands over to the part that does the work. What it asks
about the ranks (``is_main_process``, ``print``, ...) it shares with ``PartialState``.

A subclass may bring its own ``prepare_model`` or ``prepare_data_loader``, which calls ours or not:
``prepare`` calls whichever the object has. DeepSpeed makes a model and its optimizer ready in one
step: there ``prepare`` calls neither ``prepare_model`` nor ``prepare_optimizer``, and a line names
those of a subclass.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from notebook_accel.errors import ConfigError
from notebook_accel.launch.rank import current
from notebook_accel.training import collectives
from notebook_accel.training.checkpoint import Checkpoints
from notebook_accel.training.data import skip_first_batches
from notebook_accel.training.data.gathering import gather_for_metrics
from notebook_accel.training.files.weights import save_object
from notebook_accel.training.precision.float8 import AORecipeKwargs
from notebook_accel.training.preparing.plan import (
    check_rng_types,
    make_plan,
    refuse_unbuilt,
    resolve_loaders,
    resolve_project,
)
from notebook_accel.training.preparing.prepare import Preparation, extract_model_from_parallel
from notebook_accel.training.processes import ProcessInfo, devices
from notebook_accel.training.processes.process_group import close_process_group
from notebook_accel.training.settings.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    DistributedType,
    FP8BackendType,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    as_steps,
    pick_handler,
)
from notebook_accel.training.settings.notices import notice_once
from notebook_accel.training.state import AcceleratorState, newest_settings
from notebook_accel.training.stepping.accumulation import Window
from notebook_accel.training.stepping.gradient_state import GradientState
from notebook_accel.training.stepping.optimizer import inner_optimizer
from notebook_accel.training.stepping.uneven_inputs import join_uneven_inputs
from notebook_accel.training.tracking.active_trackers import Tracking
from notebook_accel.training.tracking.base import BlankTracker
from notebook_accel.training.tracking.profiling import profile
from notebook_accel.training.tracking.progress import progress
from notebook_accel.training.tracking.registry import resolve_trackers

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from torch.nn import Module
    from torch.profiler import profile as Profiler  # noqa: N812
    from torch.utils.data import DataLoader

    from notebook_accel.training.data.config import DataLoaderConfiguration
    from notebook_accel.training.models.compiling import DynamoBackend, TorchDynamoPlugin
    from notebook_accel.training.settings.deepspeed_plugin import DeepSpeedPlugin
    from notebook_accel.training.settings.fsdp_plugin import FullyShardedDataParallelPlugin
    from notebook_accel.training.settings.handlers import (
        GradientAccumulationPlugin,
        ProjectConfiguration,
    )
    from notebook_accel.training.settings.parallelism import ParallelismConfig
    from notebook_accel.training.strategies import Strategy

    Path_ = str | os.PathLike[str]
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.hooks import RemovableHandle

    from notebook_accel.training.checkpoint.start import Start
    from notebook_accel.training.collectives.data_group import DataGroup
    from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer
    from notebook_accel.training.stepping.scheduler import AcceleratedScheduler
    from notebook_accel.training.tracking.base import GeneralTracker

__all__ = ["Accelerator"]

_Item = TypeVar("_Item")
_Handler = TypeVar("_Handler", bound=KwargsHandler)
# Where a rank keeps the strategy of its newest Accelerator.
_STRATEGY = "strategy"


class Accelerator(ProcessInfo):
    """Makes the objects of a training loop ready for where it runs, and runs its steps.

    Attributes:
        project_configuration: where the project's files are.
    """

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
        self._plan = plan
        self.project_configuration = project
        self._accumulation = plan.accumulation
        self._scaling = plan.strategy.scaling
        self._prepared = Preparation(plan)
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

    # ---- making objects ready -------------------------------------------------------------------

    @property
    def _models(self) -> list[Any]:
        """The models as they are called: Transformers' Trainer asks how many there are."""
        return [known.wrapped for known in self._prepared.models]

    @property
    def _optimizers(self) -> list[Any]:
        """Where a subclass that makes the prepared optimizer itself puts it, as in Accelerate."""
        return self._prepared.optimizers

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether an optimizer was prepared that steps as it goes back (``lomo_backward``)."""
        return any(hasattr(one.optimizer, "fused_backward") for one in self._prepared.optimizers)

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Make models, optimizers, data loaders and schedulers ready, in any order.

        Args:
            *args: the objects; others are given back as they are.
            device_placement: for each object, whether it is put on the device.

        Returns:
            the objects to use instead, in the same order; a single one not as a tuple.

        Raises:
            AttributeError: ``AcceleratorState._reset_state()`` was called meanwhile.
            ConfigError: ``device_placement`` has not one entry an object.
            TypeError: an object belongs to another framework.
        """
        newest_settings()
        placement: Sequence[bool | None] = (
            [None] * len(args) if device_placement is None else device_placement
        )
        if self._prepared.plan.strategy.prepares_together:
            self._name_methods_left_out()
        ready = self._prepared.prepare(args, placement, self)
        return ready[0] if len(ready) == 1 else tuple(ready)

    def prepare_model(
        self, model: Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """The model on its device, in its precision, spread over the ranks unless it is only
        evaluated."""
        return self._prepared.model(model, device_placement, evaluation=evaluation_mode)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """The loader that gives this rank's batches.

        ``slice_fn_for_dispatch(batch, slice, process_index=, num_processes=)`` takes a rank's part
        out of what rank 0 has read for all, in place of those rows of each tensor.
        """
        return self._prepared.loader(data_loader, device_placement, slice_fn_for_dispatch)

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """The optimizer that steps at the end of a window."""
        return self._prepared.optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """The scheduler that moves with its optimizer's steps."""
        return self._prepared.scheduler(scheduler)

    def _name_methods_left_out(self) -> None:
        """Say which of the user's own methods ``prepare`` does not call."""
        own = [
            f"{name}()"
            for name in ("prepare_model", "prepare_optimizer")
            if getattr(getattr(self, name), "__func__", None) is not getattr(Accelerator, name)
        ]
        if own:
            notice_once(
                "methods left out",
                f"prepare() does not call {' and '.join(own)} of {type(self).__name__}: DeepSpeed "
                "makes a model and its optimizer ready in one step. Do before or after prepare() "
                "what they do",
            )

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

    # ---- a step ---------------------------------------------------------------------------------

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

    # ---- between the ranks ----------------------------------------------------------------------

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

    # ---- checkpoints and weights ----------------------------------------------------------------

    def get_state_dict(self, model: Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole weights of a model; all ranks call it.

        Those that are joined of parts are on the host, unless the plugin says otherwise
        (``FullStateDictConfig(offload_to_cpu=False)``).

        Args:
            model: as ``prepare`` gave it.
            unwrap: False keeps the names that the wrapper gives; a model that is spread over the
                ranks has its own names.

        Returns:
            tensors by name; nothing on the other ranks where a plugin asks for rank 0 alone
            (``FullStateDictConfig(rank0_only=True)``), nor, under DeepSpeed's stage 3, on all but
            the first rank of each machine.
        """
        if not unwrap and not self._strategy.saves_together:
            return model.state_dict()
        return self._whole_weights(model, keeps=True)

    def _whole_weights(self, model: Module, *, keeps: bool) -> dict[str, Any]:
        own = extract_model_from_parallel(model, keep_torch_compile=False)
        if any(weight.is_meta for weight in own.parameters()):
            raise ConfigError(
                "the model has weights on the meta device (cpu_offload, disk_offload, a "
                "device_map): accelerate.utils.modeling.get_state_dict_offloaded_model(model) "
                "gives them from where they are kept"
            )
        return self._strategy.state_dict(own, full=True, keeps=keeps)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object once, by rank 0; the file is whole or not there.

        Args:
            obj: the object, such as a state dict.
            f: path or open file.
            safe_serialization: write a dictionary of tensors as safetensors.
        """
        obj = self._strategy.make_whole(obj)
        if self._writes:
            save_object(obj, f, safe=safe_serialization)

    def save_model(
        self,
        model: Module,
        save_directory: Path_,
        max_shard_size: float | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights, in several files where they are large.

        All ranks call it; rank 0 alone may where each rank has the whole model. The others do not
        wait until the files are there.

        Args:
            model: as ``prepare`` gave it, or any other.
            save_directory: the folder, which is made.
            max_shard_size: of a file: bytes, or a text such as "10GB" (powers of ten).
            safe_serialization: safetensors rather than torch's files.

        Raises:
            ConfigError: the size makes no sense.
            NotebookAccelError: the weights are spread over the ranks, and some never came.
        """
        self._checkpoints.save_model(
            lambda: self._whole_weights(model, keeps=self._writes),
            Path(save_directory),
            max_shard_size,
            safe=safe_serialization,
            writes=self._writes,
        )

    @property
    def _writes(self) -> bool:
        each_machine = self.project_configuration.save_on_each_node
        return self.is_local_main_process if each_machine else self.is_main_process

    def save_state(
        self,
        output_dir: Path_ | None = None,
        safe_serialization: bool = True,
        *,
        async_save: bool = False,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write a checkpoint of everything prepared and registered.

        With ``async_save`` the training goes on while it is written, as it was when this was
        called; the folder appears once it is whole on every rank. The next save waits for it, and
        so do ``load_state``, ``wait_for_checkpoint``, ``end_training`` and the end of a launched
        function: they raise if it could not be written.

        All ranks call it, and wait for each other.

        Within an accumulation window, the checkpoint says where the window began, and has none of
        its gradients: what resumes reads the window's batches again. ``Start``,
        ``accelerator.step`` and bars count from its first batch; metrics that its batches have
        logged are logged again. These batches draw the same random numbers from torch as before,
        and others from Python's ``random`` and numpy, unless the window is the first of its epoch.

        Args:
            output_dir: the folder, replaced in one step if it exists; None takes the next
                number in ``project_dir/checkpoints``.
            safe_serialization: weights as safetensors.
            async_save: write in the background.
            **save_model_func_kwargs: for DeepSpeed's ``save_checkpoint``, where it trains.

        Returns:
            the folder.

        Raises:
            ConfigError: no folder was given and checkpoints are not numbered, or a state holds
                what could not be read again without trusting the file.
            NotebookAccelError: another rank could not write its part, a machine does not see
                rank 0's disk, or what an earlier call began in the background could not be
                written.
        """
        return self._checkpoints.save(
            output_dir,
            safe=safe_serialization,
            in_background=async_save,
            own_options=save_model_func_kwargs,
        )

    def wait_for_checkpoint(self) -> None:
        """Wait until what ``save_state(async_save=True)`` began is in its place.

        Raises:
            NotebookAccelError: it could not be written.
        """
        self._checkpoints.wait()

    def load_state(
        self,
        input_dir: Path_ | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        strict: bool = True,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Read a checkpoint into everything prepared and registered; all ranks call it.

        Args:
            input_dir: the folder; None takes the newest number in ``project_dir/checkpoints``.
            load_kwargs: arguments of ``torch.load`` for what is no safetensors;
                ``{"weights_only": False}`` trusts the files. ``map_location`` is for the states
                of optimizers, schedulers and registered objects.
            strict: whether names of weights must match.
            **load_model_func_kwargs: for DeepSpeed's ``load_checkpoint``, where it trains and wrote
                the checkpoint.

        Raises:
            FileNotFoundError: there is no such checkpoint, or it lacks something.
            NotebookAccelError: a file is damaged, or names what is not known to be safe.
            ConfigError: a file is whole, and cannot be read with ``load_kwargs``.
            RuntimeError, ValueError: it holds another model or optimizer, or states of more
                registered objects than there are.
        """
        self._checkpoints.load(
            input_dir, load_kwargs=load_kwargs, strict=strict, own_options=load_model_func_kwargs
        )

    def resume_or_start(self, dir: Path_) -> Start:  # noqa: A002 (a name that users pass)
        """Go on from the newest checkpoint under a folder, or begin anew; all ranks call it.

        Call it once everything is prepared and registered. The loop is the same the first time
        and after a crash or a stop, at whatever batch that was::

            start = accelerator.resume_or_start("runs/mine")
            for epoch in range(start.epoch, num_epochs):
                for inputs, targets in loader:          # goes on at the next batch by itself
                    with accelerator.accumulate(model):
                        accelerator.backward(loss_function(model(inputs), targets))
                        optimizer.step()
                        optimizer.zero_grad()
                    if ...:
                        accelerator.save_state()        # runs/mine/checkpoint_0, then _1, ...

        ``enumerate(loader, start.batch if epoch == start.epoch else 0)`` numbers the batches. A
        checkpoint saved with the last batch of an epoch, or after it, goes on with the next epoch.

        Looked at are ``dir`` itself, the folders in it and those in ``dir/checkpoints``, the
        newest first. One that is not whole is passed over, and a line names it and says why.
        Afterwards ``save_state()`` without a folder numbers on there (in ``dir/checkpoints``
        where ``dir`` is the project's with automatic naming, or has numbered ones there already).
        The number of ranks and the strategy may be others than when it was written: the data goes
        on at the first sample not yet seen.

        Args:
            dir: where checkpoints are, or will be.

        Returns:
            where training stands: the epoch to go on with, the batches of it that are done, the
            steps and samples so far, and the folder that was loaded (None: begun anew).

        Raises:
            RuntimeError, ValueError: the checkpoint is whole and holds another model or optimizer.
            PermissionError: this user may not read it.
            NotebookAccelError: checkpoints looked whole, and none could be loaded.
        """
        return self._checkpoints.resume(dir)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Keep the state of more objects in checkpoints.

        Raises:
            ConfigError: one has no ``state_dict`` or no ``load_state_dict``.
        """
        self._checkpoints.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, folder)`` on every rank before weights are written."""
        return self._checkpoints.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, folder)`` on every rank before weights are read."""
        return self._checkpoints.add_load_hook(hook)

    # ---- what a person sees ---------------------------------------------------------------------

    @property
    def log_with(self) -> Sequence[type[GeneralTracker] | GeneralTracker]:
        """What ``init_trackers`` will make, beside the notebook's own tracker; may be set."""
        return self._tracking.asked

    @log_with.setter
    def log_with(self, value: Any) -> None:
        self._tracking.asked = resolve_trackers(value, self._tracking.logging_dir)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """Those that this rank feeds, to read and to change: what ``init_trackers`` made, what code
        has added, and the notebook's own."""
        return self._tracking.trackers if self.is_main_process else []

    @trackers.setter
    def trackers(self, value: Iterable[GeneralTracker]) -> None:
        self._tracking.feed(value)

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """Begin what ``log_with`` asks for, on the main process; the notebook's own needs none.

        Args:
            project_name: of the project or run, as the library calls it.
            config: the settings of the training.
            init_kwargs: arguments for the libraries' own start, by the tracker's name.
        """
        if self.is_main_process:
            self._tracking.start(project_name, config, init_kwargs or {})

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """Give numbers to all trackers, those of rank 0 alone; they are shown live, and kept in
        ``run.metrics``.

        Args:
            values: Python numbers, tensors and arrays of one number, dictionaries of them, and
                what else the trackers take.
            step: of the training.
            log_kwargs: arguments for the trackers' ``log``, by the tracker's name.
        """
        if self.is_main_process and self.log_with and not self._tracking.is_started:
            notice_once(
                "init_trackers",
                "log() before init_trackers(): the trackers of log_with get nothing of it; call "
                "accelerator.init_trackers(project_name) first",
            )
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Give the tracker of this name; on ranks that don't track, one that keeps nothing.

        Args:
            name: such as "wandb", or "notebook" for the live one.
            unwrap: give the library's own object instead.

        Raises:
            ConfigError: there is no such tracker.
        """
        if not self.is_main_process:
            return BlankTracker()
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        names = ", ".join(repr(tracker.name) for tracker in self.trackers)
        raise ConfigError(
            f"get_tracker({name!r}): there is no such tracker; there is {names}. Ask for it with "
            "Accelerator(log_with=...) and call init_trackers() first"
        )

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

    # ---- where training stands, to read and to set ----------------------------------------------

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16; None otherwise. One that is set scales losses from then on, in
        any precision; None scales none."""
        return None if self._scaling is None else self._scaling.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        strategy = self._plan.strategy
        strategy.scale_by(scaler)
        self._scaling = self._prepared.watch.scaling = strategy.scaling
        for optimizer in self._prepared.optimizers:
            optimizer.scaling = strategy.scaling

    @property
    def sync_gradients(self) -> bool:
        """Whether the next step of a prepared optimizer is a real one."""
        return self._accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._accumulation.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches a window."""
        return self._accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self._accumulation.num_steps = as_steps("gradient_accumulation_steps", value)
        self._prepared.watch.start(self)

    @property
    def step(self) -> int:
        """Batches since a loader gave its last one, which closes a window; since the start with
        ``sync_with_dataloader=False``."""
        return self._accumulation.step

    @step.setter
    def step(self, value: int) -> None:
        self._accumulation.step = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether a prepared optimizer left out its last step because a gradient overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    # ---- what it was made with, to read and to set ----------------------------------------------

    @property
    def state(self) -> AcceleratorState:
        """Where this rank stands, with the settings of the newest ``Accelerator``."""
        return AcceleratorState()

    @property
    def gradient_state(self) -> GradientState:
        """Where the training stands in its window and its loader."""
        return GradientState(accumulation=self._plan.accumulation)

    @property
    def distributed_type(self) -> DistributedType:
        """How the ranks belong together."""
        return self._plan.strategy.distributed_type or super().distributed_type

    @property
    def multi_device(self) -> bool:
        """Whether several ranks compute on accelerators, one each."""
        alone = (DistributedType.NO, DistributedType.MULTI_CPU)
        return self.num_processes > 1 and self.distributed_type not in alone

    @property
    def should_save_model(self) -> bool:
        """Whether this rank writes the model's files."""
        return self.is_main_process

    @property
    def mixed_precision(self) -> str:
        """The precision by its name: "no", "bf16", "fp16" or "fp8"."""
        return self._plan.precision.name

    @property
    def fp8_enabled(self) -> bool:
        """Whether the precision is "fp8"."""
        return self._plan.precision.converts_layers

    @property
    def fp8_backend(self) -> FP8BackendType:
        """What computes in 8 bits: "AO" (torchao) in the precision "fp8", else "NO"."""
        converts = self._plan.precision.converts_layers
        return FP8BackendType.AO if converts else FP8BackendType.NO

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The DeepSpeed plugin that ``prepare`` uses now; None without DeepSpeed."""
        return None if self._plan.deepspeed is None else self._plan.deepspeed.active

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """That plugin's configuration, which ``prepare`` completes; None without DeepSpeed."""
        plugin = self.deepspeed_plugin
        return None if plugin is None else plugin.deepspeed_config

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """What takes DeepSpeed's engine through a step, with ``engine`` inside; None before a model
        is prepared, and without DeepSpeed."""
        return getattr(self._plan.strategy, "engine", None)

    @property
    def is_fsdp2(self) -> bool:
        """Whether weights are sharded: ``fully_shard`` always does it here."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How many ranks each kind of parallelism has; None where neither the user nor a plugin
        said so."""
        return self._plan.strategy.parallelism

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The ranks, arranged by the kinds of parallelism; None where they are just a row."""
        return self._plan.strategy.mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether the weights are in parts over a mesh."""
        return self._plan.strategy.spreads_weights

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the data this rank reads."""
        return self._plan.strategy.data_group.index

    @property
    def data_parallel_shard_rank(self) -> int:
        """This rank's place among those that shard one copy of the model."""
        return self._place_in("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's place among those that compute each layer together."""
        return self._place_in("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This rank's place in the pipeline."""
        return self._place_in("pp")

    @property
    def context_parallel_rank(self) -> int:
        """This rank's place among those that divide each sequence."""
        return self._place_in("cp")

    @property
    def _data_group(self) -> DataGroup:
        return self._plan.strategy.data_group

    def _place_in(self, dimension: str) -> int:
        mesh = self._plan.strategy.mesh
        if mesh is None or dimension not in (mesh.mesh_dim_names or ()):
            return 0
        return mesh.get_local_rank(dimension)

    @property
    def device_placement(self) -> bool:
        """Whether ``prepare`` puts models and batches on the device."""
        return self._plan.device_placement

    @device_placement.setter
    def device_placement(self, value: bool) -> None:
        self._plan.device_placement = value

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether prepared schedulers move with their optimizers' steps."""
        return self._plan.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, value: bool) -> None:
        self._plan.step_scheduler_with_optimizer = value

    @property
    def rng_types(self) -> list[str]:
        """Random numbers that ranks take from rank 0 as a prepared loader begins."""
        return ["generator"] if self._plan.rng_types is None else list(self._plan.rng_types)

    @rng_types.setter
    def rng_types(self, value: Iterable[Any]) -> None:
        self._plan.rng_types = check_rng_types(value, self.device)

    @property
    def native_amp(self) -> bool:
        """Whether forwards compute in the mixed precision; False: all in full precision."""
        return self._plan.precision.is_on and self._plan.precision.dtype is not None

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        if value and self._plan.precision.dtype is None:
            notice_once(
                "native_amp",
                'native_amp=True has no effect with mixed_precision="no": make the Accelerator '
                'with mixed_precision="bf16" or "fp16"',
            )
        self._plan.precision.is_on = value

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """How autocast is entered; None: by torch's own settings."""
        return self._handler(AutocastKwargs)

    @autocast_handler.setter
    def autocast_handler(self, value: AutocastKwargs | None) -> None:
        self._set_handler(AutocastKwargs, value)
        self._plan.precision.options = value or AutocastKwargs()

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """How ``prepare`` wraps models; None: by torch's own settings."""
        return self._handler(DistributedDataParallelKwargs)

    @ddp_handler.setter
    def ddp_handler(self, value: DistributedDataParallelKwargs | None) -> None:
        self._set_handler(DistributedDataParallelKwargs, value)

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """The settings of ``profile`` where it is given none; None: torch's own."""
        return self._handler(ProfileKwargs)

    @profile_handler.setter
    def profile_handler(self, value: ProfileKwargs | None) -> None:
        self._set_handler(ProfileKwargs, value)

    # Of libraries that are not used here: such a handler is refused.
    fp8_recipe_handler: None = None

    te_recipe_handler: None = None

    msamp_recipe_handler: None = None

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """How layers compute in 8 bits; None where they do not."""
        return self._handler(AORecipeKwargs) or self._plan.precision.recipe

    @property
    def has_fp8_handler(self) -> bool:
        """Whether there is one."""
        return self.ao_recipe_handler is not None

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """How the loss scaler was made; None: by torch's own settings."""
        return self._handler(GradScalerKwargs)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """How the process group was asked for; None: as the device needs it."""
        return self._handler(InitProcessGroupKwargs)

    def _handler(self, kind: type[_Handler]) -> _Handler | None:
        return next((one for one in self._plan.handlers if isinstance(one, kind)), None)

    def _set_handler(self, kind: type[KwargsHandler], value: KwargsHandler | None) -> None:
        if value is not None and not isinstance(value, kind):
            raise ConfigError(
                f"this handler is a {kind.__name__} or None, and a {type(value).__name__} was given"
            )
        # In place: the strategy reads the same list.
        others = [one for one in self._plan.handlers if not isinstance(one, kind)]
        self._plan.handlers[:] = [*others, *([] if value is None else [value])]

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How batches are shared out, of the loaders that are prepared from now on."""
        return self._plan.loaders

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        self._plan.loaders = resolve_loaders(value)

    @property
    def split_batches(self) -> bool:
        """Whether each batch of a loader is divided over the ranks."""
        return self._plan.loaders.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 alone reads the data; None: where the dataset is iterable and its batches
        are put on the device."""
        return self._plan.loaders.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the end of the data is filled up, so that all ranks get the same number of
        batches."""
        return self._plan.loaders.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._plan.loaders.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of an epoch depends on the seed and its number alone."""
        return self._plan.loaders.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device while the host goes on."""
        return self._plan.loaders.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether prepared loaders are torchdata's too; they always have a state."""
        return self._plan.loaders.use_stateful_dataloader

    @property
    def project_dir(self) -> str | None:
        """Folder of the project."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Folder of the project's logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The least number for the next numbered checkpoint."""
        return self.project_configuration.iteration

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            "an Accelerator cannot be pickled: its process group, device and trackers are its "
            "process's. Make one in the process that needs it"
        )
