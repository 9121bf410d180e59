"""``Accelerator``: one object through which a training loop runs on one device or on many.

The class is whole in this file; each method hands over to the part that does the work. What it asks
about the ranks (``is_main_process``, ``print``, ...) it shares with ``PartialState``.

A subclass may bring its own ``prepare_model`` or ``prepare_data_loader``, which calls ours or not:
``prepare`` calls whichever the object has. DeepSpeed makes a model and its optimizer ready in one
step: there ``prepare`` calls neither ``prepare_model`` nor ``prepare_optimizer``.
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
from notebook_accel.training.data.gathering import gather_for_metrics
from notebook_accel.training.data.skipping import skip_first_batches
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
    """Prepares the objects of a training loop for the devices of a run, and runs its steps.

    Names and arguments are those of Hugging Face Accelerate. The same loop trains on one device or
    on many, under a launch, torchrun or plain Python.

    Attributes:
        project_configuration: where the files of the project are.

    Example:
        The examples of the methods use these names.

        >>> import torch
        >>> from notebook_accel import Accelerator
        >>> accelerator = Accelerator()
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
        >>> dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)
        >>> model, optimizer, scheduler, loader = accelerator.prepare(
        ...     model, optimizer, scheduler, loader
        ... )
        >>> for inputs, targets in loader:
        ...     loss = torch.nn.functional.mse_loss(model(inputs), targets)
        ...     accelerator.backward(loss)
        ...     optimizer.step()
        ...     scheduler.step()
        ...     optimizer.zero_grad()
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
        """Find this rank's place and device, and make the process group of several ranks.

        Args:
            device_placement: whether ``prepare`` moves models and batches to the device.
            split_batches: sets this field of ``dataloader_config``, unless None.
            mixed_precision: "no", "bf16", "fp16" or "fp8" (by torchao). None reads the environment
                (NOTEBOOK_ACCEL_MIXED_PRECISION, then ACCELERATE_MIXED_PRECISION), else "no".
            gradient_accumulation_steps: batches per optimizer step. None reads the environment,
                else 1.
            cpu: compute on the CPU even if there is an accelerator.
            dataloader_config: how the ranks share batches.
            deepspeed_plugin: train by DeepSpeed's ZeRO, with these settings.
            fsdp_plugin: shard weights, gradients and optimizer states over the ranks.
            parallelism_config: number of ranks for each kind of parallelism.
            rng_types: random states that ranks take from rank 0 when a loader begins: "torch",
                "generator" (the order of samples, which is always taken), or a device type such as
                "cuda". An empty list takes none: seed all ranks alike then.
            log_with: trackers that ``log`` feeds beside the live panel: a name such as
                "tensorboard" (``LoggerType`` has all), "all", a ``GeneralTracker``, or a list.
            project_dir: folder for numbered checkpoints and for files of trackers.
            project_config: more settings of that folder.
            gradient_accumulation_plugin: more settings of accumulation; replaces
                ``gradient_accumulation_steps``.
            step_scheduler_with_optimizer: whether prepared schedulers move only when their
                optimizer stepped. False moves them at each call.
            kwargs_handlers: settings of parts of torch, at most one of each class, such as
                ``DistributedDataParallelKwargs``.
            dynamo_backend: compile models with this backend of ``torch.compile``, such as
                "inductor". None reads the environment.
            dynamo_plugin: more settings of compiling; replaces ``dynamo_backend``.
            dispatch_batches: sets this field of ``dataloader_config``, unless None.
            even_batches: sets this field of ``dataloader_config``, unless None.
            use_seedable_sampler: sets this field of ``dataloader_config``, unless None.
            deepspeed_plugins: another name of ``deepspeed_plugin``.
            **others: plugins of other strategies; and arguments of Accelerate that are not
                supported, whose values must ask for nothing (None, "no").

        Raises:
            ConfigError: a setting is invalid, or not supported.
            TypeError: an argument is unknown.
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
            plugins={
                "fsdp_plugin": fsdp_plugin,
                "parallelism_config": parallelism_config,
                "deepspeed_plugin": deepspeed_plugin or deepspeed_plugins,
                **others,
            },
            dynamo=dynamo_plugin,
            dynamo_backend=dynamo_backend,
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
        """Whether a prepared optimizer steps during the backward pass (``lomo_backward``)."""
        return any(hasattr(one.optimizer, "fused_backward") for one in self._prepared.optimizers)

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare models, optimizers, data loaders and schedulers, in any order.

        Args:
            *args: the objects. Objects of other kinds are returned unchanged.
            device_placement: for each object, whether it is moved to the device. None moves all,
                unless the Accelerator was made with ``device_placement=False``.

        Returns:
            The objects to use from now on, in the same order; one object without a tuple.

        Raises:
            AttributeError: ``AcceleratorState._reset_state()`` was called since this Accelerator
                was made.
            ConfigError: ``device_placement`` has not one entry per object.
            TypeError: an object belongs to another framework.

        Example:
            >>> other = torch.nn.Linear(8, 8)
            >>> other = accelerator.prepare(other)
        """
        newest_settings()
        placement: Sequence[bool | None] = (
            [None] * len(args) if device_placement is None else device_placement
        )
        ready = self._prepared.prepare(args, placement, self)
        return ready[0] if len(ready) == 1 else tuple(ready)

    def prepare_model(
        self, model: Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Move a model to its device and precision, and wrap or shard it for the ranks.

        Args:
            model: the model.
            device_placement: whether it is moved to the device. None: as the Accelerator.
            evaluation_mode: True neither wraps nor shards it: it will not be trained.

        Returns:
            The prepared model.

        Example:
            >>> teacher = accelerator.prepare_model(torch.nn.Linear(8, 1), evaluation_mode=True)
        """
        return self._prepared.model(model, device_placement, evaluation=evaluation_mode)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """Return a loader that gives the batches of this rank, on its device.

        Args:
            data_loader: the loader.
            device_placement: whether batches are moved to the device. None: as the Accelerator.
            slice_fn_for_dispatch: where rank 0 reads for all, takes the part of one rank:
                ``slice_fn_for_dispatch(batch, slice, process_index=..., num_processes=...)``. None
                takes the rows of the slice from each tensor.

        Returns:
            The prepared loader.

        Example:
            >>> test_loader = accelerator.prepare_data_loader(
            ...     torch.utils.data.DataLoader(dataset, batch_size=32)
            ... )
            >>> len(test_loader)
            2
        """
        return self._prepared.loader(data_loader, device_placement, slice_fn_for_dispatch)

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Return an optimizer that steps at the end of an accumulation window.

        Args:
            optimizer: the optimizer.
            device_placement: whether its states are moved to the device of their weights. None: as
                the Accelerator.

        Returns:
            The prepared optimizer.

        Example:
            >>> extra = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> extra = accelerator.prepare_optimizer(extra)
        """
        return self._prepared.optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Return a scheduler that moves with the steps of its optimizer.

        Args:
            scheduler: the scheduler, of an optimizer that was prepared before.

        Returns:
            The prepared scheduler.

        Example:
            >>> decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
            >>> decay = accelerator.prepare_scheduler(decay)
        """
        return self._prepared.scheduler(scheduler)

    def unwrap_model(
        self, model: Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """Return the model inside the wrappers that ``prepare`` added.

        Args:
            model: a prepared model.
            keep_fp32_wrapper: keep the mixed precision of its forward. False restores the original
                forward, for good.
            keep_torch_compile: keep it compiled. False returns the model that was compiled.

        Returns:
            The model.

        Example:
            >>> type(accelerator.unwrap_model(model)).__name__
            'Linear'
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Return the loader unchanged: DeepSpeed's sequence parallelism is not supported.

        Args:
            dl: the loader.
            model: not used.

        Returns:
            The loader.

        Example:
            >>> accelerator.deepspeed_ulysses_dl_adapter(loader, model) is loader
            True
        """
        return dl

    def skip_first_batches(
        self, dataloader: DataLoader[Any], num_batches: int = 0
    ) -> DataLoader[Any]:
        """Return a loader that begins each epoch at batch ``num_batches``.

        Args:
            dataloader: the loader, prepared or not.
            num_batches: batches to skip, 0 or more.

        Returns:
            The shorter loader. Use ``dataloader`` itself for later epochs.

        Raises:
            ConfigError: ``num_batches`` is no whole number from 0 on.

        Example:
            >>> len(loader), len(accelerator.skip_first_batches(loader, 3))
            (4, 1)
        """
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects, and free memory that nothing else holds.

        Accumulation begins anew. DeepSpeed's engine ends.

        Args:
            *objects: prepared objects whose names you assign anew.

        Returns:
            None for each object.

        Example:
            >>> model, optimizer = accelerator.free_memory(model, optimizer)
            >>> model is None
            True
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
        """Compute the gradients of a loss.

        The loss is divided by the number of batches of an accumulation window, and multiplied by
        the loss scale with fp16.

        Args:
            loss: a tensor with one element.
            learning_rate: for optimizers that step during backward (see ``lomo_backward``).
            **kwargs: arguments of ``loss.backward``.

        Example:
            >>> loss = model(torch.ones(2, 8)).sum()
            >>> accelerator.backward(loss)
            >>> model.weight.grad.tolist()
            [[2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]]
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
        """Run backward and step in one, for optimizers that do both (LOMO, AdaLomo).

        ``backward(loss, learning_rate=...)`` does the same with the loss divided by the number of
        batches of a window.

        Args:
            loss: a tensor with one element.
            learning_rate: the learning rate of this step.

        Raises:
            ConfigError: the learning rate is None, or no such optimizer was prepared.

        Source: K. Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited
        Resources" (2023).

        Example:
            >>> class Fused(torch.optim.SGD):
            ...     def fused_backward(self, loss, lr):
            ...         loss.backward()
            ...         self.step()
            >>> optimizer = accelerator.prepare(Fused(model.parameters(), lr=0.1))
            >>> accelerator.lomo_backward(model(torch.ones(2, 8)).sum(), learning_rate=0.1)
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
        """Return whether a model, or a part of it, is spread over devices by a ``device_map``.

        Args:
            model: the model.

        Example:
            >>> accelerator.verify_device_map(model)
            False
        """
        return any(len(getattr(part, "hf_device_map", ())) > 1 for part in model.modules())

    def forward_backward(
        self,
        model: Module,
        inputs: Any,
        targets: Any,
        loss_function: Callable[[Any, Any], torch.Tensor],
    ) -> torch.Tensor:
        """Run forward, loss and backward of one batch in one call.

        Every strategy can run it. A pipeline runs its stages on several micro-batches at once.
        Elsewhere it is ``loss = loss_function(model(inputs), targets)``, then ``backward(loss)``. A
        loop that calls it is the same under every strategy.

        Args:
            model: a prepared model.
            inputs: the model's arguments: a tuple or list, a mapping of keywords, or a single
                argument. The first dimension of tensors is the batch.
            targets: second argument of ``loss_function``. The first dimension of tensors is the
                batch.
            loss_function: called with the outputs and the targets. It returns the mean over the
                batch.

        Returns:
            The loss of this rank's batch, on every rank, without a gradient.

        Example:
            >>> for inputs, targets in loader:
            ...     loss = accelerator.forward_backward(
            ...         model, inputs, targets, torch.nn.functional.mse_loss
            ...     )
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        return self._strategy.forward_backward(
            model, inputs, targets, loss_function, self._accumulation.num_steps
        )

    def accumulate(self, *models: Module | Sequence[Module]) -> Window:
        """Return a block for one batch of an accumulation window.

        Ranks exchange gradients, and prepared optimizers step, with the last batch of a window.

        Args:
            *models: the prepared models that the block trains, or lists of them.

        Example:
            >>> accelerator.gradient_accumulation_steps = 2
            >>> for inputs, targets in loader:
            ...     with accelerator.accumulate(model):
            ...         loss = torch.nn.functional.mse_loss(model(inputs), targets)
            ...         accelerator.backward(loss)
            ...         optimizer.step()
            ...         optimizer.zero_grad()
            >>> optimizer.num_steps
            6
        """
        return Window(self._accumulation, models, self._strategy.gradient_sync)

    def no_sync(self, model: Module) -> AbstractContextManager[Any]:
        """Return a block in which backward exchanges no gradients between the ranks.

        Args:
            model: a prepared model. Its forward belongs into the block too.

        Example:
            >>> with accelerator.no_sync(model):
            ...     accelerator.backward(model(torch.ones(2, 8)).sum())
        """
        return self._strategy.gradient_sync(model, False)

    @staticmethod
    def trigger_sync_in_backward(model: Module) -> AbstractContextManager[Any]:
        """Return a block whose backward exchanges gradients though its forward was in ``no_sync``.

        Args:
            model: a model that this rank's newest ``Accelerator`` prepared.

        Example:
            >>> with accelerator.no_sync(model):
            ...     loss = model(torch.ones(2, 8)).sum()
            >>> with accelerator.trigger_sync_in_backward(model):
            ...     accelerator.backward(loss)
        """
        strategy: Strategy = current().shared[_STRATEGY]
        return strategy.gradient_sync(model, True)

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any, bool | None]:
        """Return a block whose operations compute in the mixed precision.

        The forward of a prepared model needs no such block. Use it for a loss of your own.

        Args:
            autocast_handler: settings of this block. None: those of ``kwargs_handlers``.

        Example:
            >>> with accelerator.autocast():
            ...     loss = model(torch.ones(2, 8)).pow(2).mean()
        """
        return self._plan.precision.autocast(autocast_handler)

    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a block for one batch in which the ranks divide its sequences.

        Under ``ParallelismConfig(cp_size=...)``, each rank has its part of the buffers inside of
        the block, and ``scaled_dot_product_attention`` attends to whole sequences. The sequences
        have no padding. The loss is that of the part; ``forward_backward`` returns the mean over
        the parts. Elsewhere the block changes nothing. Forward and backward belong into the block.

        Args:
            buffers: tensors with a sequence dimension, such as inputs, targets and positions. They
                change in place, and are whole again after the block.
            buffer_seq_dims: the sequence dimension of each buffer.
            no_restore_buffers: buffers that may keep their part after the block.

        Raises:
            ConfigError: the length of a sequence is no multiple of ``2 * cp_size``.

        Example:
            >>> tokens = torch.ones(2, 8)
            >>> with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
            ...     accelerator.backward(model(tokens).sum())
        """
        return self._strategy.divide_sequences(
            list(buffers or ()), list(buffer_seq_dims or ()), set(no_restore_buffers or ())
        )

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale of fp16; without one, do nothing.

        Args:
            optimizer: a prepared optimizer, or a list of them. None: all of them.

        Example:
            >>> accelerator.backward(model(torch.ones(2, 8)).sum())
            >>> accelerator.unscale_gradients()
        """
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
        """Clip the gradients of a complete accumulation window to a norm.

        Inside of a window, nothing is clipped.

        Args:
            parameters: one weight, or several whose gradients together get the norm.
            max_norm: the largest norm allowed.
            norm_type: the order of the norm; "inf" is the largest absolute gradient. DeepSpeed
                refuses all but 2.

        Returns:
            The norm before clipping, a tensor of shape ().

        Example:
            >>> accelerator.backward(model(torch.ones(1, 8)).sum())
            >>> norm = accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
            >>> norm.item()
            3.0
        """
        own, norm = self._ready_to_clip(parameters), float(norm_type)
        if not self.sync_gradients:
            scale = 1.0 if self._scaling is None else self._scaling.scaler.get_scale()
            return self._strategy.clip_grad_norm(own, float("inf"), norm) / scale
        return self._strategy.clip_grad_norm(own, max_norm, norm)

    def clip_grad_value_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        """Clip each gradient of a complete accumulation window to ``[-clip_value, clip_value]``.

        Args:
            parameters: one weight or several.
            clip_value: the largest absolute value allowed.

        Raises:
            ConfigError: DeepSpeed trains, which clips norms only.

        Example:
            >>> accelerator.backward(model(torch.ones(2, 8)).sum())
            >>> accelerator.clip_grad_value_(model.parameters(), 0.5)
            >>> model.weight.grad.max().item()
            0.5
        """
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
        """Wait until all ranks have called this.

        Example:
            >>> accelerator.wait_for_everyone()
        """
        self._strategy.barrier()

    def gather(self, tensor: Any) -> Any:
        """Join the tensors of all ranks, in the order of the ranks.

        All ranks call it, with tensors of the same shapes. No gradient flows through it. Ranks that
        hold one model together (tensor parallelism, pipelines) count as one.

        Args:
            tensor: a tensor, or lists, tuples and mappings of tensors. A tensor has shape (n, ...)
                or ().

        Returns:
            The same structure. Shape (n, ...) becomes (ranks * n, ...), and () becomes (ranks,).

        Raises:
            TypeError: something in it is not a tensor.

        Example:
            >>> accelerator.gather(torch.ones(2, 3)).shape
            torch.Size([2, 3])
        """
        return collectives.gather(tensor, group=self._data_ranks)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Join what all ranks computed from their batches, each sample counted once.

        Samples that a loader repeated to fill up its last batches are left out.

        Args:
            input_data: tensors in any nesting, or any objects. A tensor whose first dimension is
                the batch has shape (n, ...).
            use_gather_object: treat the input as a list of objects; the lists are joined.

        Returns:
            The same structure with shape (num_samples, ...); tensors without a batch dimension are
            all kept. For objects, one list.

        Example:
            >>> total = 0
            >>> for inputs, targets in loader:
            ...     guesses, truth = accelerator.gather_for_metrics((model(inputs), targets))
            ...     total += len(truth)
            >>> total
            64
        """
        return gather_for_metrics(input_data, use_gather_object, group=self._data_ranks)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine the tensors of all ranks, element by element.

        Args:
            tensor: a tensor, or lists, tuples and mappings of tensors; the same shapes on all
                ranks.
            reduction: "sum", "mean", "max", "min", or "none", which returns the tensor of this
                rank.
            scale: without effect.

        Returns:
            New tensors of the same shapes.

        Raises:
            TypeError: something in it is not a tensor.
            ValueError: ``reduction`` is unknown.

        Example:
            >>> accelerator.reduce(torch.tensor([1.0, 2.0]), reduction="mean")
            tensor([1., 2.])
        """
        return collectives.reduce(tensor, reduction, scale, group=self._data_ranks)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Pad the tensors of all ranks to the largest size that a rank has.

        Args:
            tensor: a tensor, or lists, tuples and mappings of tensors. All dimensions but ``dim``
                are equal on all ranks. A tensor without ``dim`` is returned unchanged.
            dim: the dimension to pad.
            pad_index: the value to pad with.
            pad_first: pad at the start rather than at the end.

        Returns:
            The same structure with padded tensors.

        Example:
            >>> accelerator.pad_across_processes(torch.ones(2, 3), dim=1).shape
            torch.Size([2, 3])
        """
        return collectives.pad_across_processes(
            tensor, dim, pad_index, pad_first, group=self._data_ranks
        )

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return a block in which the ranks may have different numbers of batches.

        Args:
            joinables: the prepared models. It works for ``DistributedDataParallel``; other models
                are left as they are.
            even_batches: ``even_batches`` of the prepared loaders inside of the block. None: as
                they are.

        Example:
            >>> with accelerator.join_uneven_inputs([model], even_batches=False):
            ...     for inputs, targets in loader:
            ...         accelerator.backward(model(inputs).sum())
        """
        if self.num_processes == 1:
            return nullcontext()
        return join_uneven_inputs(joinables, self._prepared.loaders, even_batches)

    def set_trigger(self) -> None:
        """Make the next ``check_trigger`` return True on all ranks.

        Example:
            >>> accelerator.set_trigger()
        """
        self._triggered = True

    def check_trigger(self) -> bool:
        """Return whether a rank called ``set_trigger`` since the last check; all ranks call it.

        Example:
            >>> if loss.isnan():
            ...     accelerator.set_trigger()
            >>> accelerator.check_trigger()
            False
        """
        flag = torch.tensor(float(self._triggered), device=self.device)
        self._triggered = False
        return bool(collectives.reduce(flag, "max") > 0)

    # ---- checkpoints and weights ----------------------------------------------------------------

    def get_state_dict(self, model: Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole weights of a model; all ranks call it.

        Weights that were joined from parts are on the CPU, unless the plugin says otherwise
        (``FullStateDictConfig(offload_to_cpu=False)``).

        Args:
            model: a prepared model.
            unwrap: remove the wrapper from the names. False keeps its names; a model that is spread
                over the ranks has its own names in any case.

        Returns:
            Tensors by name. It is empty on the other ranks if a plugin asks for rank 0 alone
            (``FullStateDictConfig(rank0_only=True)``), and under DeepSpeed's stage 3 on all but the
            first rank of each machine.

        Raises:
            ConfigError: weights are on the meta device.

        Example:
            >>> sorted(accelerator.get_state_dict(model))
            ['bias', 'weight']
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
        """Write an object to a file, once, from rank 0.

        A file is complete or not there.

        Args:
            obj: the object, such as a state dict.
            f: path or open file.
            safe_serialization: write a mapping of tensors as safetensors.

        Example:
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
            >>> accelerator.save(accelerator.get_state_dict(model), path)
            >>> sorted(torch.load(path))
            ['bias', 'weight']
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
        """Write the weights of a model to a folder, a large model in several files.

        All ranks call it. Rank 0 alone may, if each rank has the whole model. The other ranks do
        not wait for the files.

        Args:
            model: a model, prepared or not.
            save_directory: the folder; it is made.
            max_shard_size: largest size of a file: bytes, or a text such as "10GB" (powers of ten).
            safe_serialization: write safetensors rather than torch's files.

        Raises:
            ConfigError: ``max_shard_size`` is no size.
            NotebookAccelError: the weights are spread over the ranks, and some ranks never came.

        Example:
            >>> import os, tempfile
            >>> folder = tempfile.mkdtemp()
            >>> accelerator.save_model(model, folder)
            >>> os.listdir(folder)
            ['model.safetensors']
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
        """Write a checkpoint of everything that was prepared and registered; all ranks call it.

        The ranks wait for each other. With ``async_save``, training continues while the checkpoint
        is written as it was at the call. The folder appears once it is complete on every rank. The
        next save waits for it, and so do ``load_state``, ``wait_for_checkpoint``, ``end_training``
        and the end of a launched function. They raise if it could not be written.

        Inside of an accumulation window, the checkpoint has the begin of the window and none of its
        gradients: a resumed training reads the batches of the window again. ``Start``,
        ``accelerator.step`` and bars count from the first batch of the window, and metrics of its
        batches are logged again. These batches draw the same random numbers from torch as before.
        They draw others from Python's ``random`` and numpy, unless the window is the first of its
        epoch.

        Args:
            output_dir: the folder, replaced in one step if it exists. None takes the next number in
                ``project_dir/checkpoints``.
            safe_serialization: write weights as safetensors.
            async_save: write in the background.
            **save_model_func_kwargs: arguments of DeepSpeed's ``save_checkpoint``, where it trains.

        Returns:
            The folder.

        Raises:
            ConfigError: ``output_dir`` is None and checkpoints are not numbered, or a state has an
                object that could not be read again without trusting the file.
            NotebookAccelError: another rank could not write its part, a machine does not see the
                disk of rank 0, or an earlier save in the background failed.

        Example:
            >>> import tempfile
            >>> folder = accelerator.save_state(tempfile.mkdtemp())
            >>> accelerator.load_state(folder)
        """
        return self._checkpoints.save(
            output_dir,
            safe=safe_serialization,
            in_background=async_save,
            own_options=save_model_func_kwargs,
        )

    def wait_for_checkpoint(self) -> None:
        """Wait until a checkpoint of ``save_state(async_save=True)`` is complete.

        Raises:
            NotebookAccelError: it could not be written.

        Example:
            >>> import tempfile
            >>> folder = accelerator.save_state(tempfile.mkdtemp(), async_save=True)
            >>> accelerator.wait_for_checkpoint()
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
        """Read a checkpoint into everything that was prepared and registered; all ranks call it.

        Args:
            input_dir: the folder. None takes the newest number in ``project_dir/checkpoints``.
            load_kwargs: arguments of ``torch.load`` for files that are no safetensors.
                ``{"weights_only": False}`` trusts the files. ``map_location`` holds for states of
                optimizers, schedulers and registered objects.
            strict: whether the names of weights must match.
            **load_model_func_kwargs: arguments of DeepSpeed's ``load_checkpoint``, where it trains
                and wrote the checkpoint.

        Raises:
            FileNotFoundError: there is no such checkpoint, or a file is missing.
            NotebookAccelError: a file is damaged, or names a type that is not known to be safe.
            ConfigError: a file is complete and cannot be read with ``load_kwargs``.
            RuntimeError: the checkpoint has another model, or states of more registered objects
                than there are.
            ValueError: the checkpoint has another optimizer.

        Example:
            >>> import tempfile
            >>> folder = accelerator.save_state(tempfile.mkdtemp())
            >>> accelerator.load_state(folder)
        """
        self._checkpoints.load(
            input_dir, load_kwargs=load_kwargs, strict=strict, own_options=load_model_func_kwargs
        )

    def resume_or_start(self, dir: Path_) -> Start:  # noqa: A002 (a name that users pass)
        """Continue from the newest checkpoint of a folder, or start anew; all ranks call it.

        Call it after everything was prepared and registered. The loop is the same for the first run
        and after a crash or a stop, at any batch. The loader continues at the next batch by itself.
        ``enumerate(loader, start.batch if epoch == start.epoch else 0)`` numbers its batches. A
        checkpoint saved with the last batch of an epoch, or after it, continues with the next
        epoch.

        It looks at ``dir``, the folders in it and those in ``dir/checkpoints``, the newest first. A
        line names each incomplete checkpoint that it passes over. Afterwards, ``save_state()``
        without a folder continues the numbers there (in ``dir/checkpoints`` if ``dir`` is the
        project's with automatic naming, or has numbered checkpoints there). The number of ranks and
        the strategy may differ from those of the checkpoint: the data continues at the first sample
        not yet seen.

        Args:
            dir: folder of the checkpoints, which need not exist.

        Returns:
            The place in the training: ``epoch`` to continue with, ``batch`` (batches of that epoch
            that are done), ``step`` and ``samples`` so far, and the ``folder`` that was loaded
            (None: started anew).

        Raises:
            RuntimeError: the checkpoint is complete and has another model.
            ValueError: the checkpoint is complete and has another optimizer.
            PermissionError: you may not read the checkpoint.
            NotebookAccelError: there are checkpoints, and none could be loaded.

        Example:
            >>> import tempfile
            >>> start = accelerator.resume_or_start(tempfile.mkdtemp())
            >>> for epoch in range(start.epoch, 2):
            ...     for inputs, targets in loader:
            ...         accelerator.backward(model(inputs).sum())
            ...         optimizer.step()
            ...         optimizer.zero_grad()
            ...     folder = accelerator.save_state()
        """
        return self._checkpoints.resume(dir)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Keep the state of further objects in checkpoints.

        Args:
            *objects: objects with ``state_dict`` and ``load_state_dict``.

        Raises:
            ConfigError: an object lacks one of these methods.

        Example:
            >>> average = torch.optim.swa_utils.AveragedModel(accelerator.unwrap_model(model))
            >>> accelerator.register_for_checkpointing(average)
        """
        self._checkpoints.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call a function on every rank before ``save_state`` writes weights.

        Args:
            hook: called as ``hook(models, weights, folder)``. It may change the list ``weights``,
                the state dicts of the models.

        Returns:
            A handle; ``handle.remove()`` removes the hook.

        Example:
            >>> def hook(models, weights, folder):
            ...     print(f"saves {len(models)} model")
            >>> import tempfile
            >>> handle = accelerator.register_save_state_pre_hook(hook)
            >>> folder = accelerator.save_state(tempfile.mkdtemp())
            saves 1 model
        """
        return self._checkpoints.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call a function on every rank before ``load_state`` reads weights.

        Args:
            hook: called as ``hook(models, folder)``. Models that it takes out of the list are not
                loaded.

        Returns:
            A handle; ``handle.remove()`` removes the hook.

        Example:
            >>> handle = accelerator.register_load_state_pre_hook(lambda models, folder: None)
            >>> handle.remove()
        """
        return self._checkpoints.add_load_hook(hook)

    # ---- what a person sees ---------------------------------------------------------------------

    @property
    def log_with(self) -> Sequence[type[GeneralTracker] | GeneralTracker]:
        """Trackers that ``init_trackers`` will start, beside the live panel; may be set."""
        return self._tracking.asked

    @log_with.setter
    def log_with(self, value: Any) -> None:
        self._tracking.asked = resolve_trackers(value, self._tracking.logging_dir)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """Trackers that this rank feeds; may be set.

        These are the ones that ``init_trackers`` made, those that code has added, and the live
        panel's. The list is empty on all ranks but rank 0.
        """
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
        """Start the trackers of ``log_with`` on rank 0; the live panel needs no start.

        Args:
            project_name: name of the project or run, as the library calls it.
            config: settings of the training, for the trackers to show.
            init_kwargs: arguments of each library's own start, by the name of the tracker.

        Example:
            >>> import tempfile
            >>> accelerator = Accelerator(log_with="tensorboard", project_dir=tempfile.mkdtemp())
            >>> accelerator.init_trackers("digits", config={"lr": 1e-3})
            >>> accelerator.log({"loss": 0.5}, step=1)
            >>> accelerator.end_training()
        """
        if self.is_main_process:
            self._tracking.start(project_name, config, init_kwargs or {})

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """Log metrics to all trackers, from rank 0.

        In a launch, the panel draws the metrics live, and ``run.metrics`` keeps them.

        Args:
            values: metrics by name: numbers, tensors and arrays with one element, mappings of
                these, and what else the trackers accept.
            step: step of the training. None: the trackers count.
            log_kwargs: arguments of each tracker's ``log``, by the name of the tracker.

        Example:
            >>> accelerator.log({"loss": loss, "lr": scheduler.get_last_lr()[0]}, step=4)
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
        """Return the tracker of a name; on ranks other than 0, a tracker without effect.

        Args:
            name: such as "wandb", or "notebook" for the live panel.
            unwrap: return the library's own object instead.

        Raises:
            ConfigError: there is no such tracker.

        Example:
            >>> import tempfile
            >>> accelerator = Accelerator(log_with="tensorboard", project_dir=tempfile.mkdtemp())
            >>> accelerator.init_trackers("digits")
            >>> type(accelerator.get_tracker("tensorboard", unwrap=True)).__name__
            'SummaryWriter'
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
        """Whether the run was asked to stop; it becomes True on all ranks at the same step."""
        return current().should_stop()

    def progress(
        self, iterable: Iterable[_Item], desc: str | None = None, total: float | None = None
    ) -> Iterable[_Item]:
        """Return ``iterable`` with a progress bar.

        In a launch, each rank has a bar in the panel. Elsewhere, the first rank of each machine
        draws a tqdm bar.

        Args:
            iterable: what the loop goes over.
            desc: name of the bar.
            total: number of items. None: ``len(iterable)``.

        Example:
            >>> for inputs, targets in accelerator.progress(loader, "epoch 1"):
            ...     loss = model(inputs).sum()
        """
        return progress(iterable, desc, total, is_shown=self.is_local_main_process)

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> AbstractContextManager[Profiler]:
        """Return a block that runs under torch's profiler.

        Args:
            profile_handler: settings of this block. None: those of ``kwargs_handlers``, else
                torch's own. With a folder for traces, each rank writes one.

        Example:
            >>> with accelerator.profile() as profiler:
            ...     loss = model(torch.ones(2, 8)).sum()
            >>> any("linear" in event.key for event in profiler.key_averages())
            True
        """
        options = profile_handler or pick_handler(self._plan.handlers, ProfileKwargs)
        return profile(options, self.process_index)

    def end_training(self) -> None:
        """Finish the trackers, and free what the training holds.

        It waits for a checkpoint that is being written. Outside of a launch, it closes the process
        group too. All of this is done even if a tracker fails to finish.

        Example:
            >>> accelerator.end_training()
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
        """The loss scaler of fp16, else None; may be set.

        A scaler that is set scales losses from then on, in any precision. None scales none.
        """
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
        """Whether prepared optimizers step with this batch, the last of its window; may be set."""
        return self._accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._accumulation.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches per accumulation window; may be set."""
        return self._accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self._accumulation.num_steps = as_steps("gradient_accumulation_steps", value)
        self._prepared.watch.start(self)

    @property
    def step(self) -> int:
        """Number of batches since a loader gave its last one.

        The last batch of a loader closes a window. With ``sync_with_dataloader=False`` it does not,
        and the number counts from the start.
        """
        return self._accumulation.step

    @step.setter
    def step(self, value: int) -> None:
        self._accumulation.step = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether a prepared optimizer skipped its last step because a gradient overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    # ---- what it was made with, to read and to set ----------------------------------------------

    @property
    def state(self) -> AcceleratorState:
        """Place of this rank, and the settings of its newest ``Accelerator``."""
        return AcceleratorState()

    @property
    def gradient_state(self) -> GradientState:
        """Place in the accumulation window and in the loader."""
        return GradientState(accumulation=self._plan.accumulation)

    @property
    def distributed_type(self) -> DistributedType:
        """How the ranks train together, such as ``DistributedType.MULTI_CPU``."""
        return self._plan.strategy.distributed_type or super().distributed_type

    @property
    def multi_device(self) -> bool:
        """Whether several ranks train, each on an accelerator of its own."""
        alone = (DistributedType.NO, DistributedType.MULTI_CPU)
        return self.num_processes > 1 and self.distributed_type not in alone

    @property
    def should_save_model(self) -> bool:
        """Whether this rank writes the files of a model."""
        return self.is_main_process

    @property
    def mixed_precision(self) -> str:
        """Name of the precision: "no", "bf16", "fp16" or "fp8"."""
        return self._plan.precision.name

    @property
    def fp8_enabled(self) -> bool:
        """Whether the precision is "fp8"."""
        return self._plan.precision.converts_layers

    @property
    def fp8_backend(self) -> FP8BackendType:
        """Library that computes in 8 bits: "AO" (torchao) with "fp8", else "NO"."""
        converts = self._plan.precision.converts_layers
        return FP8BackendType.AO if converts else FP8BackendType.NO

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The DeepSpeed plugin in use; None without DeepSpeed."""
        plugin: Any = self._plan.plugins.get("deepspeed_plugin")
        return plugin  # type: ignore[no-any-return]

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """Configuration of DeepSpeed, which ``prepare`` completes; None without DeepSpeed."""
        plugin = self.deepspeed_plugin
        return None if plugin is None else plugin.deepspeed_config

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """Wrapper of DeepSpeed's engine, with the engine as ``engine``.

        None before a model is prepared, and without DeepSpeed.
        """
        return getattr(self._plan.strategy, "engine", None)

    @property
    def is_fsdp2(self) -> bool:
        """Whether weights are sharded; this package always shards by ``fully_shard`` (FSDP2)."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """Number of ranks for each kind of parallelism; None if neither you nor a plugin set it."""
        return self._plan.strategy.parallelism

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """Device mesh of the ranks; None if they have no dimensions."""
        return self._plan.strategy.mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether the weights are spread over a device mesh."""
        return self._plan.strategy.spreads_weights

    @property
    def data_parallel_rank(self) -> int:
        """Index of the share of the data that this rank reads."""
        return self._plan.strategy.data_group.index

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this rank among those that shard one copy of the model."""
        return self._place_in("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of this rank among those that compute each layer together."""
        return self._place_in("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Index of this rank's stage in the pipeline."""
        return self._place_in("pp")

    @property
    def context_parallel_rank(self) -> int:
        """Index of this rank among those that divide each sequence."""
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
        """Whether ``prepare`` moves models and batches to the device; may be set."""
        return self._plan.device_placement

    @device_placement.setter
    def device_placement(self, value: bool) -> None:
        self._plan.device_placement = value

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether prepared schedulers move only when their optimizer stepped; may be set."""
        return self._plan.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, value: bool) -> None:
        self._plan.step_scheduler_with_optimizer = value

    @property
    def rng_types(self) -> list[str]:
        """Random states that ranks take from rank 0 when a prepared loader begins; may be set."""
        return ["generator"] if self._plan.rng_types is None else list(self._plan.rng_types)

    @rng_types.setter
    def rng_types(self, value: Iterable[Any]) -> None:
        self._plan.rng_types = check_rng_types(value, self.device)

    @property
    def native_amp(self) -> bool:
        """Whether forwards compute in the mixed precision; set it to False for full precision."""
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
        """Settings of autocast; None: torch's own. May be set."""
        return self._handler(AutocastKwargs)

    @autocast_handler.setter
    def autocast_handler(self, value: AutocastKwargs | None) -> None:
        self._set_handler(AutocastKwargs, value)
        self._plan.precision.options = value or AutocastKwargs()

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """Settings of ``DistributedDataParallel``; None: torch's own. May be set."""
        return self._handler(DistributedDataParallelKwargs)

    @ddp_handler.setter
    def ddp_handler(self, value: DistributedDataParallelKwargs | None) -> None:
        self._set_handler(DistributedDataParallelKwargs, value)

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """Settings of ``profile``; None: torch's own. May be set."""
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
        """Settings of training in 8 bits; None without "fp8"."""
        return self._handler(AORecipeKwargs) or self._plan.precision.recipe

    @property
    def has_fp8_handler(self) -> bool:
        """Whether there are settings of training in 8 bits."""
        return self.ao_recipe_handler is not None

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """Settings of the loss scaler; None: torch's own."""
        return self._handler(GradScalerKwargs)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """Settings of the process group; None: those that the device needs."""
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
        """How the ranks share batches, for loaders that are prepared from now on; may be set."""
        return self._plan.loaders

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        self._plan.loaders = resolve_loaders(value)

    @property
    def split_batches(self) -> bool:
        """Whether the ranks divide each batch of a loader."""
        return self._plan.loaders.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 alone reads the data.

        None: it does for iterable datasets whose batches are moved to the device.
        """
        return self._plan.loaders.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether samples are repeated at the end so that all ranks get equally many batches.

        May be set.
        """
        return self._plan.loaders.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._plan.loaders.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of an epoch depends only on the seed and the number of the epoch."""
        return self._plan.loaders.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device while the CPU continues."""
        return self._plan.loaders.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether prepared loaders are torchdata's ``StatefulDataLoader`` too; all have a state."""
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
        """Smallest number of the next numbered checkpoint."""
        return self.project_configuration.iteration

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            "an Accelerator cannot be pickled: its process group, device and trackers are its "
            "process's. Make one in the process that needs it"
        )
