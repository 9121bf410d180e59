"""Looks up the names behind Accelerate's paths: ours, else Accelerate's, if it is installed.

Such names are big-model loading and offloading with their hooks, checks for libraries, constants,
and most trackers. A module of ``compat/`` looks them up in Accelerate's module of the same path. If
Accelerate is not installed, the value is a :class:`Missing`: importing the name succeeds, and only
using it raises an error. Whatever has a name, ours or Accelerate's, is imported when the name is
first looked up.

Code may put this package in Accelerate's place (``sys.modules["accelerate"] = notebook_accel``).
Accelerate's own files are then imported as submodules of this module, whose ``__path__`` is
Accelerate's folder. That works since these files import each other by relative names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, NoReturn

from notebook_accel.training.processes import topology
from notebook_accel.training.processes.topology import Topology


def _folder() -> list[str]:
    """Ask the import finders: ``sys.modules["accelerate"]`` may be this package; [] for none."""
    for finder in sys.meta_path:
        spec = finder.find_spec("accelerate", None)
        if spec is not None:
            return [*(spec.submodule_search_locations or ())]
    return []


__path__ = _folder()


# This package's names, by module; every door has all of them.
_NAMES = {
    "config": "write_basic_config",
    "training.accelerator": "Accelerator",
    "training.collectives": "CannotPadNestedTensorWarning DistributedOperationException broadcast "
    "broadcast_object_list",
    "training.collectives.data_group": "gather gather_object pad_across_processes reduce",
    "training.collectives.nested": "convert_to_fp32 find_batch_size honor_type is_namedtuple "
    "is_torch_tensor recursively_apply send_to_device",
    "training.data": "prepare_data_loader",
    "training.data.dispatch": "DataLoaderDispatcher",
    "training.data.loader_wrapper": "SkipDataLoader skip_first_batches",
    "training.data.loaders": "DataLoaderShard DataLoaderStateMixin",
    "training.data.samplers": "BatchSamplerShard IterableDatasetShard SeedableRandomSampler "
    "SkipBatchSampler get_sampler",
    "training.files": "FSDP_MODEL_NAME OPTIMIZER_NAME SAFE_WEIGHTS_NAME SCALER_NAME WEIGHTS_NAME "
    "load save",
    "training.fsdp_functions": "load_fsdp_model load_fsdp_optimizer merge_fsdp_weights "
    "save_fsdp_model save_fsdp_optimizer",
    "training.local_sgd": "LocalSGD",
    "training.precision": "AORecipeKwargs convert_model_to_fp8_ao filter_linear_layers "
    "find_first_last_linear_layers",
    "training.preparing": "extract_model_from_parallel",
    "training.processes.device_memory": "clear_device_cache find_executable_batch_size "
    "release_memory should_reduce_batch_size",
    "training.processes.devices": "override_numa_affinity set_numa_affinity",
    "training.processes.logs": "MultiProcessAdapter get_logger tqdm",
    "training.processes.random_numbers": "set_seed synchronize_rng_state synchronize_rng_states",
    "training.processes.topology": "wait_for_everyone",
    "training.settings.environment": "disable_fsdp_ram_efficient_loading "
    "enable_fsdp_ram_efficient_loading",
    "training.settings.fsdp_plugin": "FullyShardedDataParallelPlugin",
    "training.settings.handlers": "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration "
    "DistributedDataParallelKwargs DistributedType FP8BackendType GradScalerKwargs "
    "GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler PrecisionType ProfileKwargs "
    "ProjectConfiguration RNGType",
    "training.settings.parallelism": "ParallelismConfig TorchContextParallelConfig "
    "TorchTensorParallelConfig",
    "training.state": "AcceleratorState PartialState get_active_deepspeed_plugin is_initialized",
    "training.stepping.accumulation": "GradientState",
    "training.stepping.optimizer": "AcceleratedOptimizer AcceleratedScheduler",
    "training.strategies.compiling": "DynamoBackend TorchDynamoPlugin compile_regions "
    "has_compiled_regions is_compiled_module",
    "training.strategies.deepspeed": "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper "
    "DeepSpeedSchedulerWrapper GatheredParameters",
    "training.strategies.deepspeed_plugin": "DeepSpeedPlugin DummyOptim DummyScheduler "
    "HfDeepSpeedConfig",
    "training.tracking": "LOGGER_TYPE_TO_CLASS LoggerType MLflowTracker TensorBoardTracker "
    "WandBTracker get_available_trackers register_tracker_class",
    "training.tracking.tracker": "GeneralTracker on_main_process",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
# Names of Accelerate that are called otherwise here.
_OTHERWISE = {
    "DataLoaderStateMixin": "PreparedLoader",
    "override_numa_affinity": "set_numa_affinity",
    "should_reduce_batch_size": "is_out_of_memory",
    "wait_for_everyone": "barrier",
}


def door(path: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of the module for Accelerate's ``path``.

    A name that is not ours comes from Accelerate; without Accelerate it is a :class:`Missing`.
    """

    def fetch(name: str) -> Any:
        if name in _MODULES:
            module = import_module(f"notebook_accel.{_MODULES[name]}")
            return getattr(module, _OTHERWISE.get(name, name))
        if name.startswith("__") or not (__path__ or name[0].isalpha()):
            raise AttributeError(f"module 'notebook_accel.{path}' has no attribute {name!r}")
        return getattr(_load(path), name) if __path__ else Missing(f"{path}.{name}")

    return fetch, lambda: [*_MODULES], [*_MODULES]


def open_below(package: str, path: str, names: Sequence[str]) -> None:
    """Make submodules ``names`` of ``package``, whose place below ``accelerate`` is ``path``."""
    for name in names:
        below = module_from_spec(ModuleSpec(f"{package}.{name}", None))
        attributes = zip(("__getattr__", "__dir__", "__all__"), door(f"{path}.{name}"), strict=True)
        vars(below).update(attributes)
        sys.modules[below.__name__] = below
        setattr(sys.modules[package], name, below)


def _load(path: str) -> ModuleType:
    is_replaced = sys.modules.get("accelerate") is sys.modules["notebook_accel"]
    root = __name__ if is_replaced else "accelerate"
    import_module(f"{root}.utils")  # its modules need each other in a circle, which begins there
    module = import_module(f"{root}.{path}")
    topology.tell(_make_state)
    return module


def _make_state(here: Topology) -> None:
    """Fill Accelerate's ``PartialState``, by which its trackers and loggers find the main process.

    By itself it sees several ranks only on GPUs: on the CPU each would be the main process.
    """
    for root in ("accelerate", __name__):
        module: Any = sys.modules.get(f"{root}.state")
        # Modules of Accelerate that name it in full come here while it is being imported.
        if hasattr(module, "PartialState"):
            module.PartialState._shared_state.update(
                _cpu=here.device.type == "cpu",
                backend=here.backend,
                debug=False,
                device=here.device,
                distributed_type=module.DistributedType(str(here.distributed_type)),
                fork_launched=False,
                local_process_index=here.local_process_index,
                num_processes=here.num_processes,
                process_index=here.process_index,
            )


class Missing:
    """Stands for a name of Accelerate that is not installed: to use it is an ImportError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<accelerate.{self._name}, which is not installed>"

    def _raise(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise ImportError(
            f"accelerate.{self._name} is none of notebook_accel's own names: it comes from Hugging "
            "Face Accelerate, which is not installed. Run pip install 'notebook-accel[accelerate]'"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # who copies, pickles or shows an object asks for such names
            raise AttributeError(name)
        self._raise()

    __call__ = __mro_entries__ = _raise
