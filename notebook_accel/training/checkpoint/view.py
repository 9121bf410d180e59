"""What an ``Accelerator`` saves and loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError
from notebook_accel.training.checkpoint.weights import save_object
from notebook_accel.training.configured import ConfiguredView
from notebook_accel.training.prepare import extract_model_from_parallel

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle

    from notebook_accel.training.checkpoint import Checkpoints
    from notebook_accel.training.checkpoint.start import Start
    from notebook_accel.training.strategies import Strategy

    Path_ = str | os.PathLike[str]

__all__ = ["CheckpointView"]


class CheckpointView(ConfiguredView):
    """Part of ``Accelerator``: checkpoints, and weights on their own."""

    _checkpoints: Checkpoints
    _strategy: Strategy

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
