"""``Accelerator``: one object through which a training loop runs on one device or on many.

Each method of the class calls the module that does the work. Members about the ranks
(``is_main_process``, ``print``, ...) come from the base class ``ProcessInfo``, as in
``PartialState``; those about how it trains come from ``TrainingInfo``, as in ``AcceleratorState``.

A subclass may override ``prepare_model`` or ``prepare_data_loader``, and need not call the original
method: ``prepare`` calls the overriding one. Under DeepSpeed, which prepares a model and its
optimizer in one step, ``prepare`` calls neither ``prepare_model`` nor ``prepare_optimizer``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle
from tqdm import auto

from notebook_accel.config.checks import as_count
from notebook_accel.errors import ConfigError
from notebook_accel.rank.knobs import Knob, make_knob
from notebook_accel.rank.this_rank import current
from notebook_accel.training import collectives
from notebook_accel.training.checkpoint import Checkpoints
from notebook_accel.training.checkpoint.saves import meet
from notebook_accel.training.checkpoint.start import Start
from notebook_accel.training.collectives.data_group import DataGroup
from notebook_accel.training.data.gathering import gather_for_metrics
from notebook_accel.training.data.loader_wrapper import skip_first_batches
from notebook_accel.training.files import save_model, save_object
from notebook_accel.training.precision import PRECISIONS, AORecipeKwargs, resolve_precision
from notebook_accel.training.preparing import Preparation, extract_model_from_parallel
from notebook_accel.training.processes import topology
from notebook_accel.training.processes.device_memory import release_memory
from notebook_accel.training.processes.process_group import close_process_group
from notebook_accel.training.settings.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.settings.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    FP8BackendType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    pick_handler,
)
from notebook_accel.training.settings.notices import notice_once
from notebook_accel.training.settings.parallelism import ParallelismConfig
from notebook_accel.training.state import (
    AcceleratorSettings,
    AcceleratorState,
    TrainingInfo,
    newest_settings,
)
from notebook_accel.training.stepping.accumulation import (
    Accumulation,
    GradientState,
    Window,
    resolve_plugin,
)
from notebook_accel.training.stepping.optimizer import (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    inner_optimizer,
)
from notebook_accel.training.stepping.uneven_inputs import join_uneven_inputs
from notebook_accel.training.strategies import (
    PLUGIN_ARGUMENTS,
    Request,
    make_strategy,
    resolve_plugins,
)
from notebook_accel.training.strategies.compiling import DynamoBackend, TorchDynamoPlugin
from notebook_accel.training.strategies.deepspeed_plugin import DeepSpeedPlugin
from notebook_accel.training.tracking import resolve_trackers
from notebook_accel.training.tracking.profiling import profile
from notebook_accel.training.tracking.tracker import BlankTracker, GeneralTracker, Tracking
from notebook_accel.wire import KnobValue

Path_ = str | os.PathLike[str]
_Item = TypeVar("_Item")
_Handler = TypeVar("_Handler", bound=KwargsHandler)

# Arguments of Hugging Face's Accelerator that are not built here, and what to use instead.
_UNBUILT = {
    "megatron_lm_plugin": "Megatron-LM is not there; tensor and pipeline parallelism by torch is: "
    "parallelism_config=ParallelismConfig(tp_size=..., pp_size=...)",
    "torch_tp_plugin": "pass parallelism_config=ParallelismConfig(tp_size=...) instead",
}
_NOTHING = (None, "no", "NO")
_HANDLERS = (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)


class Accelerator(TrainingInfo):
    """Prepares the objects of a training loop for the devices of a run, and runs its steps.

    Every rank makes its own ``Accelerator``. Names and arguments are those of Hugging Face
    Accelerate. The same loop trains on one device or on many, under ``notebook_launcher``, torchrun
    or plain Python.

    Attributes:
        project_configuration: folders for checkpoints and for the files of trackers, and how
            checkpoints are named.

    Example:
        The examples of the methods use these variables.

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
        """Determine this rank and its device; with several ranks, make the process group.

        All ranks make their Accelerator together: the process group is complete once all have
        joined. A process group that exists already is used.

        Args:
            device_placement: whether ``prepare`` moves models and batches to the device.
            split_batches: whether the ranks divide each batch of a loader, rather than each take
                whole batches. None: as in ``dataloader_config``.
            mixed_precision: "no", "bf16", "fp16" or "fp8" (by torchao). None reads the environment
                (NOTEBOOK_ACCEL_MIXED_PRECISION, then ACCELERATE_MIXED_PRECISION), else "no".
            gradient_accumulation_steps: batches per optimizer step. None reads the environment
                (NOTEBOOK_ACCEL_GRADIENT_ACCUMULATION_STEPS, then
                ACCELERATE_GRADIENT_ACCUMULATION_STEPS), else 1.
            cpu: compute on the CPU even if there is an accelerator.
            dataloader_config: how the ranks share the batches of a loader.
            deepspeed_plugin: train by DeepSpeed's ZeRO, with these settings.
            fsdp_plugin: shard weights, gradients and optimizer states over the ranks.
            parallelism_config: number of ranks for each kind of parallelism.
            rng_types: random states that ranks copy from rank 0 when an epoch of a prepared loader
                begins: "torch", a device type such as "cuda", or "generator", which draws the order
                of the samples. "generator" is copied along with any other name, and alone if
                ``rng_types`` is None. An empty list copies nothing: then give all ranks the same
                seed.
            log_with: trackers that ``log`` writes to, besides the live panel: a name such as
                "tensorboard" (``LoggerType`` has all), "all", a ``GeneralTracker``, or a list.
            project_dir: folder for numbered checkpoints and for files of trackers.
            project_config: further settings of the project's folder, such as whether
                checkpoints are numbered.
            gradient_accumulation_plugin: further settings of gradient accumulation; replaces
                ``gradient_accumulation_steps``.
            step_scheduler_with_optimizer: whether ``step()`` of a prepared scheduler has an effect
                only if its optimizer stepped. False: every call moves the schedule.
            kwargs_handlers: settings of parts of torch, at most one of each class, such as
                ``DistributedDataParallelKwargs``.
            dynamo_backend: compile models with this backend of ``torch.compile``, such as
                "inductor". None reads the environment (ACCELERATE_DYNAMO_BACKEND), else compiles
                nothing.
            dynamo_plugin: further settings of ``torch.compile``; replaces ``dynamo_backend``.
            dispatch_batches: whether rank 0 alone reads the data and sends each rank its batch.
                None: as in ``dataloader_config``.
            even_batches: whether samples are repeated at the end of an epoch so that all ranks get
                equally many batches. None: as in ``dataloader_config``.
            use_seedable_sampler: whether the order of an epoch depends only on the seed and the
                number of the epoch. None: as in ``dataloader_config``.
            deepspeed_plugins: another name of ``deepspeed_plugin``.
            **others: plugins of strategies that were added to ``PLUGIN_ARGUMENTS``; and arguments
                of Accelerate that are not supported (``megatron_lm_plugin``, ``torch_tp_plugin``),
                of which only None and "no" are accepted as values.

        Raises:
            ConfigError: a setting is invalid, or not supported.
            TypeError: an argument is unknown.
        """
        # What can be checked is checked before the ranks meet: an invalid setting then raises at
        # once, and no rank is left waiting for the others.
        _refuse_unbuilt(others)
        loaders = _resolve_loaders(
            dataloader_config,
            split_batches=split_batches,
            dispatch_batches=dispatch_batches,
            even_batches=even_batches,
            use_seedable_sampler=use_seedable_sampler,
        )
        _check_type("project_config", project_config, ProjectConfiguration)
        # Changed in place, since user code may read the folder from its own object.
        project = project_config or ProjectConfiguration()
        if project_dir is not None and project.project_dir is None:
            project.set_directories(str(project_dir))
        trackers = resolve_trackers(log_with, project.logging_dir)
        handlers = _check_handlers(kwargs_handlers or ())
        accumulation, num_steps = gradient_accumulation_plugin, gradient_accumulation_steps
        _check_type("gradient_accumulation_plugin", accumulation, GradientAccumulationPlugin)
        _check_type("dynamo_plugin", dynamo_plugin, TorchDynamoPlugin)
        if accumulation is not None and num_steps not in (None, 1):
            raise ConfigError(
                f"gradient_accumulation_steps={num_steps} and a gradient_accumulation_plugin were "
                "given: pass one of them"
            )
        plugins = resolve_plugins(
            {
                "fsdp_plugin": fsdp_plugin,
                "parallelism_config": parallelism_config,
                "deepspeed_plugin": deepspeed_plugin or deepspeed_plugins,
                **others,
            }
        )
        if dynamo_plugin is not None and dynamo_backend is not None:
            raise ConfigError(
                f"Accelerator got dynamo_plugin and dynamo_backend={str(dynamo_backend)!r}: give "
                "one of them (a plugin has the backend among its fields)"
            )
        dynamo = dynamo_plugin or TorchDynamoPlugin(backend=dynamo_backend)
        num_ranks, num_local_ranks = topology.count_ranks()
        for one in plugins.values():
            one.check_ranks(plugins, num_ranks, num_local_ranks)
            # What a plugin's own configuration says holds for everything here.
            mixed_precision = one.resolve_precision(mixed_precision)
            num_steps = one.resolve_steps(num_steps)
        precision = resolve_precision(mixed_precision)
        if PRECISIONS[precision].converts_layers and any(
            one.divides_layers for one in plugins.values()
        ):
            raise ConfigError(
                f"mixed_precision={precision!r} converts whole linear layers, and was asked for "
                "with tensor parallelism or DeepSpeed, which divide or keep them their own way: "
                'use mixed_precision="bf16", or DDP, FSDP or a pipeline'
            )
        window = resolve_plugin(None if accumulation else num_steps, accumulation)
        here = topology.establish(cpu=cpu, options=pick_handler(handlers, InitProcessGroupKwargs))
        if cpu and here.device.type != "cpu":
            notice_once(
                "cpu",
                f"cpu=True came too late: this rank computes on {here.device}. Make the rank's "
                "first Accelerator (or PartialState) with cpu=True, or launch with devices='cpu'",
            )
        self.project_configuration = project
        self._accumulation = Accumulation(window, here.device)
        self._request = Request(
            topology=here,
            precision=PRECISIONS[precision](here.device, handlers),
            handlers=handlers,
            plugins=plugins,
            dynamo=dynamo,
            accumulation=self._accumulation,
            loaders=loaders,
            device_placement=device_placement,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            rng_types=None if rng_types is None else _check_rng_types(rng_types, here.device),
        )
        self._strategy = make_strategy(self._request)
        self._prepared = Preparation(self._strategy)
        self._tracking = Tracking(trackers, project)
        # One rank of each share of the data: what is joined over them counts each sample once.
        self._data_ranks = self._data_group.process_group
        self._checkpoints = Checkpoints(self._prepared, project)
        self._triggered = False
        # What states and collectives of this rank show from now on.
        current().shared[Accumulation] = self._accumulation
        current().shared[DataGroup] = self._data_group
        current().shared[AcceleratorSettings] = self._settings
        self._prepared.watch.start()

    # ---- making objects ready -------------------------------------------------------------------

    @property
    def _models(self) -> list[Any]:
        """The prepared models, with their wrappers; Transformers' Trainer uses ``len`` of it."""
        return [known.wrapped for known in self._prepared.models]

    @property
    def _optimizers(self) -> list[Any]:
        """The prepared optimizers.

        As in Accelerate, a subclass that overrides ``prepare_optimizer`` appends its optimizers to
        this list.
        """
        return self._prepared.optimizers

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare models, optimizers, data loaders and schedulers, given in any order.

        All ranks call it with corresponding objects in the same order, since wrapping a model sends
        rank 0's weights to all ranks.

        Args:
            *args: the objects. Objects of other kinds are returned unchanged.
            device_placement: for each object, whether it is moved to the device. None moves all,
                unless the Accelerator was made with ``device_placement=False``.

        Returns:
            The objects to use from now on: a tuple in the same order, or for one argument the
            prepared object itself.

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
        """Move a model to the device, set its mixed precision, and wrap or shard it for the ranks.

        All ranks call it.

        Args:
            model: the model.
            device_placement: whether the model is moved to the device. None: as
                ``Accelerator(device_placement=...)`` says.
            evaluation_mode: True for a model that will not be trained. Most strategies then neither
                wrap nor shard it.

        Returns:
            The prepared model.

        Example:
            >>> teacher = accelerator.prepare_model(torch.nn.Linear(8, 1), evaluation_mode=True)
        """
        return self._prepared.prepare_model(model, device_placement, evaluation_mode)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """Return a loader that gives the batches of this rank, on its device.

        Args:
            data_loader: the loader.
            device_placement: whether batches are moved to the device. None: as
                ``Accelerator(device_placement=...)`` says.
            slice_fn_for_dispatch: used if rank 0 reads the data for all ranks
                (``dispatch_batches``). It returns one rank's part of a batch, and is called as
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
        return self._prepared.prepare_data_loader(
            data_loader, device_placement, slice_fn_for_dispatch
        )

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Return an optimizer whose ``step`` acts only once all batches of a step are accumulated.

        Args:
            optimizer: the optimizer.
            device_placement: whether its states are moved to the device of their weights. None: as
                ``Accelerator(device_placement=...)`` says.

        Returns:
            The prepared optimizer.

        Example:
            >>> extra = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> extra = accelerator.prepare_optimizer(extra)
        """
        return self._prepared.prepare_optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Return a scheduler whose ``step`` by default acts only after a step of its optimizer.

        With ``step_scheduler_with_optimizer=False`` every call acts. By default the schedule
        advances by N per optimizer step on N ranks (by 1 with ``split_batches``), since its length
        is counted in batches of the unprepared loader, and N ranks use N of these at a time.

        Args:
            scheduler: a scheduler whose optimizer was prepared before.

        Returns:
            The prepared scheduler.

        Example:
            >>> decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
            >>> decay = accelerator.prepare_scheduler(decay)
        """
        return self._prepared.prepare_scheduler(scheduler)

    def unwrap_model(
        self, model: Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """Return the model inside the wrappers that ``prepare`` added.

        Args:
            model: a prepared model.
            keep_fp32_wrapper: whether the forward keeps its mixed precision. False restores the
                original forward, for the prepared model too.
            keep_torch_compile: whether a compiled model stays compiled. False returns the model
                that ``torch.compile`` was given.

        Returns:
            The model.

        Example:
            >>> type(accelerator.unwrap_model(model)).__name__
            'Linear'
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def skip_first_batches(
        self, dataloader: DataLoader[Any], num_batches: int = 0
    ) -> DataLoader[Any]:
        """Return a loader without the first batches, to resume in the middle of an epoch.

        Args:
            dataloader: the loader, prepared or not.
            num_batches: batches to skip, 0 or more; for a prepared loader, batches of this rank.

        Returns:
            A loader that skips these batches in each epoch. Use ``dataloader`` itself for later
            epochs.

        Raises:
            ConfigError: ``num_batches`` is negative, or not a whole number.

        Example:
            >>> len(loader), len(accelerator.skip_first_batches(loader, 3))
            (4, 1)
        """
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects, and free memory that nothing else holds.

        Gradient accumulation starts over. DeepSpeed's engine is destroyed.

        Args:
            *objects: prepared objects. Assign the result to their variables, so that these no
                longer keep the memory.

        Returns:
            A list with None for each object.

        Example:
            >>> model, optimizer = accelerator.free_memory(model, optimizer)
            >>> model is None
            True
        """
        self._prepared.clear()
        self._strategy.forget()
        self._accumulation.reset()
        return release_memory(*objects)

    clear = free_memory

    # ---- a step ---------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss.

        The loss is divided by ``gradient_accumulation_steps``, and multiplied by the loss scale
        with fp16. All ranks call it: it exchanges the gradients at the last accumulated batch.

        Args:
            loss: a tensor with one element.
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
        self._accumulation.has_backward = True
        self._strategy.backward(loss, self._accumulation.num_steps, **kwargs)

    def verify_device_map(self, model: Module) -> bool:
        """Return whether a ``device_map`` of Transformers spreads a model over several devices.

        The result is True as well if only a submodule was loaded with such a ``device_map``.

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
        """Run forward, loss and backward of one batch in one call; all ranks call it.

        A loop that calls it works under every strategy. Pipeline parallelism needs it, to run its
        stages on several micro-batches at the same time. Without a pipeline it is
        ``loss = loss_function(model(inputs), targets)``, then ``backward(loss)``.

        Args:
            model: a prepared model.
            inputs: the model's arguments: a tuple or list, a mapping of keywords, or a single
                argument. The first dimension of tensors is the batch.
            targets: second argument of ``loss_function``. The first dimension of tensors is the
                batch.
            loss_function: called with the outputs and the targets. It must return the mean loss
                over the batch.

        Returns:
            The loss of this rank's batch, detached from the graph. All ranks of a pipeline, which
            have the same batch, get the same loss.

        Example:
            >>> for inputs, targets in loader:
            ...     loss = accelerator.forward_backward(
            ...         model, inputs, targets, torch.nn.functional.mse_loss
            ...     )
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        self._accumulation.has_backward = True
        return self._strategy.forward_backward(
            model, inputs, targets, loss_function, self._accumulation.num_steps
        )

    def accumulate(self, *models: Module | Sequence[Module]) -> AbstractContextManager[None]:
        """Return a context manager for one batch of gradient accumulation.

        ``gradient_accumulation_steps`` consecutive blocks form one accumulation window; by default,
        the final batch of a loader ends a window early. Only in the last block of a window do the
        ranks exchange gradients, and only there do prepared optimizers step.

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
            >>> optimizer.num_steps  # 4 in the example of the class, 2 here
            6
        """
        return Window(self._accumulation, models, self._strategy.gradient_sync)

    def no_sync(self, model: Module) -> AbstractContextManager[Any]:
        """Return a context manager in which backward exchanges no gradients between the ranks.

        Args:
            model: a prepared model. Its forward must run inside the block, too.

        Example:
            >>> with accelerator.no_sync(model):
            ...     accelerator.backward(model(torch.ones(2, 8)).sum())
        """
        return self._strategy.gradient_sync(model, False)

    @staticmethod
    def trigger_sync_in_backward(model: Module) -> AbstractContextManager[Any]:
        """Return a context manager in which backward exchanges gradients between the ranks.

        Use it for a backward whose forward ran inside a ``no_sync`` block.

        Args:
            model: a model that this rank's newest ``Accelerator`` prepared.

        Example:
            >>> with accelerator.no_sync(model):
            ...     loss = model(torch.ones(2, 8)).sum()
            >>> with accelerator.trigger_sync_in_backward(model):
            ...     accelerator.backward(loss)
        """
        strategy = newest_settings().strategy
        assert strategy is not None
        return strategy.gradient_sync(model, True)

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any, bool | None]:
        """Return a context manager in which torch computes in the Accelerator's mixed precision.

        The forward of a prepared model runs in mixed precision anyway. Use the block for
        computations outside of the model, such as a loss.

        Args:
            autocast_handler: settings of this block. None: the ``AutocastKwargs`` among
                ``kwargs_handlers``, else torch's defaults.

        Example:
            >>> with accelerator.autocast():
            ...     loss = model(torch.ones(2, 8)).pow(2).mean()
        """
        return self._request.precision.autocast(autocast_handler)

    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context manager in which the ranks divide the sequences of one batch.

        Under ``ParallelismConfig(cp_size=...)``, each buffer holds this rank's part of the
        sequences inside the block, and ``scaled_dot_product_attention`` still attends to the full
        sequences. Without ``cp_size``, the block changes nothing.

        Run forward and backward inside the block, on sequences without padding. A loss computed in
        the block covers this rank's part alone; ``forward_backward`` returns the mean of all parts.
        All ranks enter the block together.

        Args:
            buffers: tensors with a sequence dimension, such as inputs, targets and positions. They
                change in place, and are restored after the block.
            buffer_seq_dims: the sequence dimension of each buffer.
            no_restore_buffers: buffers that need not be restored after the block.

        Raises:
            ConfigError: the length of a sequence is no multiple of ``2 * cp_size``.

        Example:
            >>> tokens = torch.ones(2, 8)
            >>> with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
            ...     accelerator.backward(model(tokens).sum())
        """
        if (sequences := self._strategy.sequences) is None:
            return nullcontext()
        return sequences.divided(
            list(buffers or ()), list(buffer_seq_dims or ()), set(no_restore_buffers or ())
        )

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale of fp16; in other precisions, do nothing.

        All ranks call it. It is needed only before code that reads or changes gradients:
        ``optimizer.step()`` divides gradients that are not divided yet.

        Args:
            optimizer: a prepared optimizer, or a list of them. None: all prepared optimizers.

        Example:
            >>> accelerator.backward(model(torch.ones(2, 8)).sum())
            >>> accelerator.unscale_gradients()
        """
        if self._strategy.scaling is None:
            return
        given = self._prepared.optimizers if optimizer is None else optimizer
        several = given if isinstance(given, (list, tuple)) else [given]
        self._strategy.scaling.unscale(map(inner_optimizer, several))

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float | str = 2.0,
    ) -> torch.Tensor:
        """Clip the norm of the gradients, before the optimizer steps; all ranks call it.

        While batches are still accumulated (``sync_gradients`` is False), nothing is clipped.

        Args:
            parameters: one weight, or several. The norm is that of all their gradients together.
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
            found = self._strategy.clip_grad_norm(own, float("inf"), norm)
            if self._strategy.scaling is None:
                return found
            # Divided on the device: `get_scale` would wait for it.
            one = torch.ones((), device=found.device)
            return found / self._strategy.scaling.scaler.scale(one)
        return self._strategy.clip_grad_norm(own, max_norm, norm)

    def clip_grad_value_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        """Clip each gradient to ``[-clip_value, clip_value]``, before the optimizer steps.

        While batches are still accumulated (``sync_gradients`` is False), nothing is clipped.

        Args:
            parameters: one weight or several.
            clip_value: the largest absolute value allowed.

        Raises:
            ConfigError: training runs under DeepSpeed, which clips norms only.

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
        if self._strategy.scaling is not None and self.sync_gradients:
            self._strategy.scaling.unscale(
                [known.optimizer for known in self._prepared.optimizers], own
            )
        return own

    # ---- between the ranks ----------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all ranks, in the order of the ranks, on every rank.

        All ranks call it, with tensors of the same shapes. No gradient flows through it. Ranks that
        work on one copy of the model together (tensor parallelism, pipelines) have the same samples
        and count as one rank.

        Args:
            tensor: a tensor, or lists, tuples and mappings of tensors. A tensor has shape (n, ...)
                or ().

        Returns:
            The same structure. Shape (n, ...) becomes (ranks * n, ...), and () becomes (ranks,).

        Raises:
            TypeError: ``tensor`` contains something that is not a tensor.

        Example:
            >>> accelerator.gather(torch.ones(2, 3)).shape
            torch.Size([2, 3])
        """
        return collectives.gather(tensor, group=self._data_ranks)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Concatenate the results of all ranks for the current batch, each sample counted once.

        All ranks call it, inside the loop over a prepared loader. Results of samples that the
        loader repeated to fill up its last batches are left out. Every rank gets the results.

        Args:
            input_data: tensors in any nesting, or any objects. A tensor whose first dimension is
                the batch has shape (n, ...).
            use_gather_object: treat the input as a list of objects; the lists are joined.

        Returns:
            The same structure with shape (num_samples, ...). Tensors without a batch dimension are
            concatenated without leaving anything out. For objects, one list.

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
        """Combine the tensors of all ranks, element by element; all ranks call it.

        Every rank gets the result. Ranks that work on one copy of the model together count as one.

        Args:
            tensor: a tensor, or lists, tuples and mappings of tensors; the same shapes on all
                ranks.
            reduction: "sum", "mean", "max", "min", or "none", which returns this rank's own tensor.
            scale: has no effect, as in Accelerate on devices other than TPUs.

        Returns:
            The same structure with new tensors of the same shapes.

        Raises:
            TypeError: ``tensor`` contains something that is not a tensor.
            ValueError: ``reduction`` is unknown.

        Example:
            >>> accelerator.reduce(torch.tensor([1.0, 2.0]), reduction="mean")
            tensor([1., 2.])
        """
        return collectives.reduce(tensor, reduction, scale, group=self._data_ranks)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Pad this rank's tensors along one dimension to the largest size on any rank.

        All ranks call it. Afterwards the tensors have the same shape on all ranks, which ``gather``
        requires.

        Args:
            tensor: a tensor, or lists, tuples and mappings of tensors. All dimensions but ``dim``
                are equal on all ranks. A tensor that has no dimension ``dim`` is returned
                unchanged.
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
        """Return a context manager in which the ranks may have different numbers of batches.

        All ranks enter the block. A rank that runs out of batches takes part in the gradient
        exchanges of the other ranks until these have finished, so that they do not hang. With one
        rank the block does nothing.

        Args:
            joinables: the prepared models. Of these, only ``DistributedDataParallel`` models take
                part; other models are left as they are.
            even_batches: the setting ``even_batches`` of the prepared loaders inside the block.
                None leaves it unchanged.

        Example:
            >>> with accelerator.join_uneven_inputs([model], even_batches=False):
            ...     for inputs, targets in loader:
            ...         accelerator.backward(model(inputs).sum())
        """
        if self.num_processes == 1:
            return nullcontext()
        return join_uneven_inputs(joinables, self._prepared.loaders, even_batches)

    def set_trigger(self) -> None:
        """Make the next ``check_trigger`` return True on all ranks; any one rank may call it.

        Example:
            >>> accelerator.set_trigger()
        """
        self._triggered = True

    def check_trigger(self) -> bool:
        """Return whether any rank called ``set_trigger`` since the previous ``check_trigger``.

        All ranks call it, and get the same answer.

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
        """Return the state dict of a model with full (unsharded) weights; all ranks call it.

        Weights that are sharded over the ranks are joined on the CPU, unless the FSDP plugin has
        ``FullStateDictConfig(offload_to_cpu=False)``.

        Args:
            model: a prepared model.
            unwrap: whether names are those of the model inside its wrapper. False gives the
                wrapper's names ("module.weight" under DDP), unless the weights are sharded.

        Returns:
            Tensors by name, on every rank. Two exceptions: with
            ``FullStateDictConfig(rank0_only=True)`` the dictionary is empty on all ranks but rank
            0, and under DeepSpeed's stage 3 on all but the first rank of each machine.

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
        """Write an object to a file, from rank 0 alone; all ranks call it.

        With ``ProjectConfiguration(save_on_each_node=True)`` the first rank of each machine writes.
        The file appears only once it is complete.

        Args:
            obj: the object, such as a state dict. Sharded tensors in it are joined first, by all
                ranks.
            f: path or open file.
            safe_serialization: write a mapping of tensors in the safetensors format, rather than by
                ``torch.save``.

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
        """Write the weights of a model to a folder, those of a large model in several files.

        All ranks call it, and rank 0 writes. If each rank has the full model, a call on rank 0
        alone is enough. The other ranks do not wait until the files are written.

        Args:
            model: a model, prepared or not.
            save_directory: the folder, which is created if needed.
            max_shard_size: largest size of a file: bytes, or a text such as "10GB" (powers of ten).
            safe_serialization: write safetensors rather than torch's files.

        Raises:
            ConfigError: ``max_shard_size`` is not a valid size.
            NotebookAccelError: the weights are sharded over the ranks, and not all ranks called
                this.

        Example:
            >>> import os, tempfile
            >>> folder = tempfile.mkdtemp()
            >>> accelerator.save_model(model, folder)
            >>> os.listdir(folder)
            ['model.safetensors']
        """
        self._checkpoints.wait()
        if self._checkpoints.needs_all:
            # A rank that is alone here waits, and is named, before it begins a collective.
            meet("save_model()", self._request.topology)
        if self._checkpoints.needs_all or self._writes:
            weights = self._whole_weights(model, keeps=self._writes)
        if self._writes:
            save_model(weights, Path(save_directory), max_shard_size, safe=safe_serialization)

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

        On one device and with DDP no rank waits for another, and rank 0 may call it alone. Rank 0
        writes the checkpoint; each other rank adds its random states, and a resume without them
        says so. If the model is spread over the ranks, they wait for each other. The folder is
        never seen half written.

        With ``async_save``, the call returns after the state is copied, and a thread writes the
        copy while training continues. The next save waits for that thread. ``load_state``,
        ``wait_for_checkpoint``, ``end_training`` and the end of a launched function wait until the
        checkpoint has all that this rank has to say, and raise if it failed.

        A checkpoint saved while gradients accumulate holds the position right after the previous
        optimizer step, and no gradients. A resumed training goes back to that position with its
        counters (``Start``, ``accelerator.step``, progress bars), repeats the batches since
        then, and logs their metrics again. Repeated batches draw the same random numbers from torch
        as before. From Python's ``random`` and numpy they draw other numbers, except if they are
        the first batches of their epoch.

        Args:
            output_dir: the folder, replaced in one step if it exists. None takes the next number in
                ``project_dir/checkpoints``.
            safe_serialization: write weights as safetensors.
            async_save: write in the background.
            **save_model_func_kwargs: under DeepSpeed, arguments of its ``save_checkpoint``.

        Returns:
            The path of the checkpoint's folder.

        Raises:
            ConfigError: ``output_dir`` is None and checkpoints are not numbered, or a state dict
                holds an object that ``torch.load(weights_only=True)`` refuses to read.
            NotebookAccelError: another rank could not write what this one needs, a machine does not
                see the disk of rank 0, or an earlier save failed.

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
        """Wait until the checkpoints that this rank has saved are complete, its own files included.

        Return at once if no checkpoint is being written.

        Raises:
            NotebookAccelError: the checkpoint could not be written.

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
            input_dir: the folder. None takes the checkpoint with the highest number in
                ``project_dir/checkpoints``.
            load_kwargs: arguments of ``torch.load`` for files that are not safetensors.
                ``{"weights_only": False}`` unpickles any object, so use it only for files that you
                trust. ``map_location`` applies to states of optimizers, schedulers and registered
                objects.
            strict: whether the names of weights must match those of the model exactly.
            **load_model_func_kwargs: arguments of DeepSpeed's ``load_checkpoint``, for a checkpoint
                that DeepSpeed wrote, under DeepSpeed.

        Raises:
            FileNotFoundError: there is no such checkpoint, or a file is missing.
            NotebookAccelError: a file is damaged, or holds an object of a type that torch does not
                consider safe to load.
            ConfigError: a file is complete and cannot be read with ``load_kwargs``.
            RuntimeError: the checkpoint is of another model, or has states of more registered
                objects than were registered here.
            ValueError: the checkpoint is of another optimizer.

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

        Call it after everything was prepared and registered. The same loop then serves the first
        run and a run after a crash or a stop at any batch: the prepared loader skips the batches
        that are done. ``enumerate(loader, start.batch if epoch == start.epoch else 0)`` numbers the
        batches of an epoch. A checkpoint saved at the last batch of an epoch, or after it,
        continues with the next epoch.

        Candidates are ``dir`` itself, the folders in it and those in ``dir/checkpoints``, the
        newest first. Incomplete checkpoints are skipped, with a printed line for each. Afterwards,
        ``save_state()`` without a folder continues the numbering of the checkpoints in ``dir`` (in
        ``dir/checkpoints`` if numbered checkpoints are there, or if ``dir`` is the project's folder
        with automatic naming). The number of ranks and the strategy may differ from those of the
        checkpoint: the data continues at the first sample not yet seen.

        Args:
            dir: folder of the checkpoints, which need not exist.

        Returns:
            Where training continues: ``epoch`` to continue with, ``batch`` (batches of that epoch
            that are done), ``step`` and ``samples`` so far, and the ``folder`` that was loaded
            (None if training starts anew).

        Raises:
            RuntimeError: the checkpoint is complete and of another model.
            ValueError: the checkpoint is complete and of another optimizer.
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
        start = self._checkpoints.resume(dir)
        # From now on `run.save()` needs nothing of the function.
        current().save_here = self.save_state
        return start

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have ``save_state`` save, and ``load_state`` restore, the state of further objects.

        Register the same objects in the same order before either call.

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
        """Register a function that runs on every rank before ``save_state`` writes weights.

        Args:
            hook: called as ``hook(models, weights, folder)``. ``weights`` is the list of the
                models' state dicts, which the hook may change before they are written.

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
        handle = RemovableHandle(self._checkpoints.save_hooks)
        self._checkpoints.save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Register a function that runs on every rank before ``load_state`` reads weights.

        Args:
            hook: called as ``hook(models, folder)``. Models that it removes from the list
                ``models`` are not loaded.

        Returns:
            A handle; ``handle.remove()`` removes the hook.

        Example:
            >>> handle = accelerator.register_load_state_pre_hook(lambda models, folder: None)
            >>> handle.remove()
        """
        handle = RemovableHandle(self._checkpoints.load_hooks)
        self._checkpoints.load_hooks[handle.id] = hook
        return handle

    # ---- what a person sees ---------------------------------------------------------------------

    @property
    def log_with(self) -> Sequence[type[GeneralTracker] | GeneralTracker]:
        """Trackers (classes or objects) that ``init_trackers`` will start; may be set.

        The notebook's live panel is not among them: it needs no start.
        """
        return self._tracking.asked

    @log_with.setter
    def log_with(self, value: Any) -> None:
        self._tracking.asked = resolve_trackers(value, self._tracking.logging_dir)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """Trackers that receive what this rank logs, beside the live panel; may be set.

        On rank 0 these are the ones that ``init_trackers`` started and the ones that user code
        added. On all other ranks the list is empty.
        """
        return self._tracking.trackers if self.is_main_process else []

    @trackers.setter
    def trackers(self, value: Iterable[GeneralTracker]) -> None:
        self._tracking.trackers = list(value)

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of ``log_with`` on rank 0; do nothing on other ranks.

        The notebook's live panel needs no start.

        Args:
            project_name: name under which each tracking library files the run.
            config: hyperparameters of the training, which the trackers record.
            init_kwargs: further arguments of each tracker's constructor, by the tracker's name:
                ``{"wandb": {"entity": "me"}}``.

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
        """Log metrics to all trackers from rank 0; do nothing on other ranks.

        In a launch, the live panel draws the metrics, and ``run.metrics`` keeps them.

        Args:
            values: metrics by name: numbers, tensors and arrays with one element, mappings of
                these, and any other value that the trackers accept.
            step: number of the training step. None: the live panel numbers the values of each
                metric, and each tracking library uses its own default.
            log_kwargs: further arguments of each tracker's ``log``, by the tracker's name.

        Example:
            >>> accelerator.log({"loss": loss, "lr": scheduler.get_last_lr()[0]}, step=4)
        """
        if self.is_main_process and self.log_with and not self._tracking.is_started:
            notice_once(
                "init_trackers",
                "log() before init_trackers(): the trackers of log_with get nothing of it; call "
                "accelerator.init_trackers(project_name) first",
            )
        for tracker in [*self.trackers, self._tracking.live] if self.is_main_process else []:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker with a given name; on ranks other than 0, one that does nothing.

        Args:
            name: such as "wandb", or "notebook" for the live panel.
            unwrap: return the tracking library's own object (such as wandb's run) instead.

        Raises:
            ConfigError: rank 0 has no tracker of this name.

        Example:
            >>> import tempfile
            >>> accelerator = Accelerator(log_with="tensorboard", project_dir=tempfile.mkdtemp())
            >>> accelerator.init_trackers("digits")
            >>> type(accelerator.get_tracker("tensorboard", unwrap=True)).__name__
            'SummaryWriter'
        """
        if not self.is_main_process:
            return BlankTracker()
        trackers = [*self.trackers, self._tracking.live]
        for tracker in trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        names = ", ".join(repr(tracker.name) for tracker in trackers)
        raise ConfigError(
            f"get_tracker({name!r}): there is no such tracker; there is {names}. Ask for it with "
            "Accelerator(log_with=...) and call init_trackers() first"
        )

    @property
    def should_stop(self) -> bool:
        """Whether the launched run was asked to stop, by the panel or ``run.stop()``.

        The n-th read of this property gives the same value on all ranks, so that a loop may end
        when it is True. All ranks must therefore read it equally often.
        """
        return current().should_stop()

    @property
    def should_save(self) -> bool:
        """Whether ``run.save()`` or the panel asked for a checkpoint at this step.

        It is True on all ranks at the same step, at each read within that step. All ranks must read
        it equally often. After ``resume_or_start`` it stays False: the checkpoint is then written
        without it.

        Example:
            >>> if accelerator.should_save:
            ...     folder = accelerator.save_state("now")
        """
        return current().should_save()

    def knob(
        self,
        name: str,
        default: KnobValue,
        *,
        low: float | None = None,
        high: float | None = None,
        log: bool = False,
        choices: Sequence[KnobValue] | None = None,
        on_change: Callable[[KnobValue], object] | None = None,
    ) -> Knob:
        """Return a value that a person may change while the training goes on.

        The panel shows a slider, a list or a switch for it, and ``run.set(name=value)`` sets it.
        All ranks take a new value at the same step, where a prepared loader gives its next batch;
        in a function without one, before an optimizer's step or where it reads ``should_stop``.
        Checkpoints keep it, and each change is a metric ``knob/NAME``. Outside of a launch it is
        its default.

        Args:
            name: a knob that was made before under this name is returned.
            default: a number, a text, True or False: what it is before anybody changes it, and the
                type that it keeps.
            low: the smallest value; None for no limit.
            high: the greatest value; None for no limit.
            log: whether the panel's slider is logarithmic; ``low`` must then be above 0.
            choices: the values to choose from; None for any in the range.
            on_change: called with the new value on each rank, at the step at which it changes.

        Returns:
            The knob; ``knob.value`` is its value now.

        Raises:
            ConfigError: the default does not fit, or the name has another type or range already.

        Example:
            >>> rate = accelerator.knob("lr", 3e-4, low=1e-6, high=1e-2, log=True)
            >>> rate.value
            0.0003
        """
        limits = {"low": low, "high": high, "log": log, "choices": tuple(choices or ())}
        return make_knob(name, default, on_change, **limits)

    def progress(
        self, iterable: Iterable[_Item], desc: str | None = None, total: float | None = None
    ) -> Iterable[_Item]:
        """Return an iterable over the same items that shows a progress bar.

        In a launch, each rank has a bar in the live panel. Outside of a launch, the first rank of
        each machine draws a tqdm bar.

        Args:
            iterable: the items that the loop iterates over.
            desc: name of the bar.
            total: number of items. None: ``len(iterable)``, if it has a length.

        Example:
            >>> for inputs, targets in accelerator.progress(loader, "epoch 1"):
            ...     loss = model(inputs).sum()
        """
        is_shown = self.is_local_main_process or current().launched  # there each rank has its own
        return auto.tqdm(iterable, desc=desc, total=total, disable=not is_shown)

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> AbstractContextManager[torch.profiler.profile]:
        """Return a context manager that runs torch's profiler and gives it to ``with ... as``.

        Args:
            profile_handler: settings of this block. None: the ``ProfileKwargs`` among
                ``kwargs_handlers``, else torch's defaults. If its ``output_trace_dir`` is set, each
                rank writes a trace there.

        Example:
            >>> with accelerator.profile() as profiler:
            ...     loss = model(torch.ones(2, 8)).sum()
            >>> any("linear" in event.key for event in profiler.key_averages())
            True
        """
        options = profile_handler or pick_handler(self._request.handlers, ProfileKwargs)
        return profile(options, self.process_index)

    def end_training(self) -> None:
        """Finish the trackers, and wait for a checkpoint that is being written; all ranks call it.

        Under DeepSpeed, or outside of ``notebook_launcher``, the process group that this package
        made is closed, too. All of this is done even if a tracker fails to finish.

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
        """The loss scaler; None if losses are not scaled. May be set.

        By default there is one with fp16 only. After ``accelerator.scaler = scaler``, that object
        scales losses in any precision. Setting None turns loss scaling off.
        """
        return None if self._strategy.scaling is None else self._strategy.scaling.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._strategy.scale_by(scaler)
        self._prepared.watch.scaling = self._strategy.scaling
        for optimizer in self._prepared.optimizers:
            optimizer.scaling = self._strategy.scaling

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch is the last one before an optimizer step; may be set.

        While it is False, gradients accumulate: ``step`` of a prepared optimizer does nothing.
        """
        return self._accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._accumulation.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches whose gradients are accumulated for one optimizer step; may be set."""
        return self._accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self._accumulation.num_steps = as_count("gradient_accumulation_steps", value)
        self._prepared.watch.start()

    @property
    def step(self) -> int:
        """Number of ``accumulate`` blocks entered since a loader last ended; may be set.

        Prepared optimizers step whenever this number is a multiple of
        ``gradient_accumulation_steps``, and at the final batch of a loader, which sets the number
        to 0. With ``GradientAccumulationPlugin(sync_with_dataloader=False)``, the final batch has
        no such effects, and the number counts from the start of training.
        """
        return self._accumulation.step

    @step.setter
    def step(self, value: int) -> None:
        self._accumulation.step = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether a gradient overflow in fp16 made any prepared optimizer skip its newest step."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    # ---- what it was made with, to read and to set ----------------------------------------------

    @property
    def state(self) -> AcceleratorState:
        """An ``AcceleratorState``: rank and device, and the newest ``Accelerator``'s settings."""
        return AcceleratorState()

    @property
    def gradient_state(self) -> GradientState:
        """A ``GradientState``: the position of gradient accumulation and of the loader in use."""
        return GradientState(accumulation=self._accumulation)

    @property
    def multi_device(self) -> bool:
        """Whether there are several ranks, and ``distributed_type`` is not ``MULTI_CPU``."""
        alone = (DistributedType.NO, DistributedType.MULTI_CPU)
        return self.num_processes > 1 and self.distributed_type not in alone

    @property
    def should_save_model(self) -> bool:
        """Whether this rank is the one that writes the files of a model: True on rank 0 alone."""
        return self.is_main_process

    @property
    def fp8_enabled(self) -> bool:
        """Whether the mixed precision is "fp8"."""
        return self._request.precision.converts_layers

    @property
    def fp8_backend(self) -> FP8BackendType:
        """Library that computes in 8 bits: "AO" (torchao) with mixed precision "fp8", else "NO"."""
        return FP8BackendType.AO if self.fp8_enabled else FP8BackendType.NO

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """Configuration dictionary of DeepSpeed; None without DeepSpeed.

        ``prepare`` fills in its "auto" entries.
        """
        plugin = self.deepspeed_plugin
        return None if plugin is None else plugin.deepspeed_config

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The wrapper around DeepSpeed's engine, whose ``engine`` is the ``DeepSpeedEngine``.

        None before a model and its optimizer are prepared, and without DeepSpeed.
        """
        return getattr(self._strategy, "engine", None)

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """Device mesh of the ranks; None without ``parallelism_config`` or a sharding plugin."""
        return self._strategy.mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether weights are spread over a mesh: by FSDP, tensor or pipeline parallelism."""
        return self._strategy.spreads_weights

    @property
    def data_parallel_rank(self) -> int:
        """Index of the share of the data that this rank reads.

        Ranks with the same index read the same samples, as under tensor parallelism or in a
        pipeline. Ranks that read different samples have different indices.
        """
        return self._strategy.data_group.index

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this rank among the ranks that shard one copy of the model; 0 without shards."""
        return self._place_in("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of this rank among the ranks that compute each layer together (tensor parallelism).

        0 without tensor parallelism.
        """
        return self._place_in("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Index of this rank in its pipeline, in the order of the stages; 0 without a pipeline."""
        return self._place_in("pp")

    @property
    def context_parallel_rank(self) -> int:
        """Index of this rank among the ranks that divide each sequence (context parallelism).

        0 without context parallelism.
        """
        return self._place_in("cp")

    @property
    def _settings(self) -> AcceleratorSettings:
        return AcceleratorSettings(self._request.precision.name, self._strategy)

    @property
    def _data_group(self) -> DataGroup:
        return self._strategy.data_group

    def _place_in(self, dimension: str) -> int:
        mesh = self._strategy.mesh
        if mesh is None or dimension not in (mesh.mesh_dim_names or ()):
            return 0
        return mesh.get_local_rank(dimension)

    @property
    def device_placement(self) -> bool:
        """Whether ``prepare`` moves models and batches to the device; may be set."""
        return self._request.device_placement

    @device_placement.setter
    def device_placement(self, value: bool) -> None:
        self._request.device_placement = value

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether ``step()`` of a prepared scheduler needs a step of its optimizer; may be set.

        If True, ``step()`` has no effect while gradients accumulate or after a skipped step. If
        False, every call moves the schedule. A change applies to schedulers that are prepared
        later.
        """
        return self._request.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, value: bool) -> None:
        self._request.step_scheduler_with_optimizer = value

    @property
    def rng_types(self) -> list[str]:
        """Names of the random states that ranks copy from rank 0 when an epoch begins; may be set.

        "generator" is the random state that draws the order of the samples. A change applies to
        loaders that are prepared later.
        """
        return ["generator"] if self._request.rng_types is None else list(self._request.rng_types)

    @rng_types.setter
    def rng_types(self, value: Iterable[Any]) -> None:
        self._request.rng_types = _check_rng_types(value, self.device)

    @property
    def native_amp(self) -> bool:
        """Whether forwards run in mixed precision. Set it to False to compute in full precision.

        With ``mixed_precision="no"`` it is False, and setting it to True has no effect.
        """
        return self._request.precision.is_on and self._request.precision.dtype is not None

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        if value and self._request.precision.dtype is None:
            notice_once(
                "native_amp",
                'native_amp=True has no effect with mixed_precision="no": make the Accelerator '
                'with mixed_precision="bf16" or "fp16"',
            )
        self._request.precision.is_on = value

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The ``AutocastKwargs`` in use; None if torch's defaults apply. May be set."""
        return self._handler(AutocastKwargs)

    @autocast_handler.setter
    def autocast_handler(self, value: AutocastKwargs | None) -> None:
        self._set_handler(AutocastKwargs, value)
        self._request.precision.options = value or AutocastKwargs()

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """Settings of ``DistributedDataParallel``; None if torch's defaults apply.

        May be set, for models that are prepared later.
        """
        return self._handler(DistributedDataParallelKwargs)

    @ddp_handler.setter
    def ddp_handler(self, value: DistributedDataParallelKwargs | None) -> None:
        self._set_handler(DistributedDataParallelKwargs, value)

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """Settings that ``profile()`` uses; None if torch's defaults apply. May be set."""
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
        """Settings of 8-bit training by torchao; None if none were given and "fp8" is not used."""
        return self._handler(AORecipeKwargs) or self._request.precision.recipe

    @property
    def has_fp8_handler(self) -> bool:
        """Whether ``ao_recipe_handler`` is not None: there are settings of training in 8 bits."""
        return self.ao_recipe_handler is not None

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """Settings of the fp16 loss scaler, as given; None if torch's defaults apply."""
        return self._handler(GradScalerKwargs)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """Settings of the process group, as given; None if the device's defaults apply."""
        return self._handler(InitProcessGroupKwargs)

    def _handler(self, kind: type[_Handler]) -> _Handler | None:
        return next((one for one in self._request.handlers if isinstance(one, kind)), None)

    def _set_handler(self, kind: type[KwargsHandler], value: KwargsHandler | None) -> None:
        if value is not None and not isinstance(value, kind):
            raise ConfigError(
                f"this handler is a {kind.__name__} or None, and a {type(value).__name__} was given"
            )
        # In place: the strategy reads the same list.
        others = [one for one in self._request.handlers if not isinstance(one, kind)]
        self._request.handlers[:] = [*others, *([] if value is None else [value])]

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """Settings by which the ranks share the batches of a loader; may be set.

        A change applies to loaders that are prepared later.
        """
        return self._request.loaders

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        self._request.loaders = _resolve_loaders(value)

    @property
    def split_batches(self) -> bool:
        """Whether the ranks divide each batch of a loader; if False, each takes whole batches."""
        return self._request.loaders.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 alone reads the data, and sends each rank its part.

        None means True for iterable datasets whose batches are moved to the device, else False.
        """
        return self._request.loaders.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether all ranks get equally many batches, by repeating samples at the end of an epoch.

        May be set.
        """
        return self._request.loaders.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._request.loaders.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of samples depends only on the seed and the number of the epoch."""
        return self._request.loaders.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches in pinned memory are copied to the device while the CPU continues."""
        return self._request.loaders.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether prepared loaders are also ``StatefulDataLoader`` objects of torchdata.

        All prepared loaders have a ``state_dict``. That of torchdata includes the ``state_dict`` of
        the dataset, which then resumes without reading the earlier samples again.
        """
        return self._request.loaders.use_stateful_dataloader

    @property
    def project_dir(self) -> str | None:
        """Folder for numbered checkpoints and the files of trackers; None if it was not set."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Folder for the files of trackers; None if neither it nor ``project_dir`` was set."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Lowest number that the next numbered checkpoint may get.

        If checkpoints with this or a higher number exist, the next one is numbered after them.
        """
        return self.project_configuration.iteration

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            "an Accelerator cannot be pickled: its process group, device and trackers are its "
            "process's. Make one in the process that needs it"
        )


def _resolve_loaders(
    config: DataLoaderConfiguration | None, **given: bool | None
) -> DataLoaderConfiguration:
    """Return a copy of the loader configuration, changed by separate arguments of ``Accelerator``.

    Args:
        config: the argument ``dataloader_config``; None: the defaults.
        **given: fields of the configuration that were passed as arguments of their own, such as
            ``split_batches``. They override ``config`` unless they are None.
    """
    _check_type("dataloader_config", config, DataLoaderConfiguration)
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(config or DataLoaderConfiguration(), **fields)


def _check_type(name: str, given: object, expected: type) -> None:
    if given is not None and not isinstance(given, expected):
        raise ConfigError(
            f"{name} is a {type(given).__name__}: expected a {expected.__name__}, or None"
        )


def _refuse_unbuilt(others: dict[str, Any]) -> None:
    """Refuse further keyword arguments of ``Accelerator`` that are unknown or not supported.

    Args:
        others: the arguments by name. Those of a strategy's plugin are accepted. Accelerate's
            unsupported ones are accepted only with the values None and "no", which request nothing.
    """
    for name, value in others.items():
        if name in PLUGIN_ARGUMENTS:
            continue
        if name not in _UNBUILT:
            raise TypeError(f"Accelerator() got an unexpected keyword argument {name!r}")
        if value not in _NOTHING:
            shown = repr(value) if isinstance(value, str) else "..."
            raise ConfigError(f"Accelerator({name}={shown}): {_UNBUILT[name]}. Leave it out.")


def _check_rng_types(given: Iterable[Any], device: torch.device) -> tuple[str, ...]:
    """Check names of random states ("torch", "generator", "cuda", ...); return them as strings."""
    if isinstance(given, str):
        raise ConfigError(
            f'rng_types={given!r}: expected a list of names, such as ["torch", "generator"]'
        )
    names = tuple(str(getattr(kind, "value", kind)) for kind in given)
    known = ["torch", "generator"] + [device.type] * (device.type != "cpu")
    for name in names:
        if name not in known:
            raise ConfigError(
                f"rng_types={list(names)} has {name!r}, and this rank, on {device}, has the "
                f"random numbers {', '.join(map(repr, known))}: leave it out"
            )
    return names


def _check_handlers(handlers: Iterable[KwargsHandler]) -> list[KwargsHandler]:
    """Check the ``kwargs_handlers``, and return them as a list."""
    if not isinstance(handlers, Iterable):
        raise ConfigError(
            f"kwargs_handlers is a {type(handlers).__name__}: expected a list, such as "
            "kwargs_handlers=[AutocastKwargs(...)]"
        )
    checked: list[KwargsHandler] = []
    for handler in handlers:
        if not isinstance(handler, _HANDLERS):
            names = ", ".join(kind.__name__ for kind in _HANDLERS)
            raise ConfigError(
                f"kwargs_handlers has a {type(handler).__name__}: expected objects of {names}"
            )
        if any(type(other) is type(handler) for other in checked):
            raise ConfigError(f"kwargs_handlers has two {type(handler).__name__}: pass one")
        checked.append(handler)
    return checked
