from .compat.big_modeling import cpu_offload as cpu_offload
from .compat.big_modeling import cpu_offload_with_hook as cpu_offload_with_hook
from .compat.big_modeling import disk_offload as disk_offload
from .compat.big_modeling import dispatch_model as dispatch_model
from .compat.big_modeling import infer_auto_device_map as infer_auto_device_map
from .compat.big_modeling import init_empty_weights as init_empty_weights
from .compat.big_modeling import init_on_device as init_on_device
from .compat.big_modeling import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from .compat.big_modeling import load_checkpoint_in_model as load_checkpoint_in_model
from .compat.inference import prepare_pippy as prepare_pippy
from .compat.utils import is_rich_available as is_rich_available
from .config import LaunchConfig as LaunchConfig
from .errors import ConfigError as ConfigError
from .errors import LaunchError as LaunchError
from .errors import NotebookAccelError as NotebookAccelError
from .errors import RunStopped as RunStopped
from .errors import WorkerError as WorkerError
from .launch.run import Run as Run
from .notebook.launcher import debug_launcher as debug_launcher
from .notebook.launcher import notebook_launcher as notebook_launcher
from .notebook.magics import load_ipython_extension as load_ipython_extension
from .notebook.picker import ConfigPicker as ConfigPicker
from .notebook.picker import config_picker as config_picker
from .notebook.runs import attach as attach
from .notebook.runs import compare as compare
from .notebook.runs import find_run as find_run
from .notebook.runs import last_run as last_run
from .notebook.runs import runs as runs
from .notebook.sweeps.sweep import Sweep as Sweep
from .notebook.sweeps.sweep import sweep as sweep
from .training.accelerator import Accelerator as Accelerator
from .training.collectives import broadcast as broadcast
from .training.collectives.data_group import gather_object as gather_object
from .training.data.dispatch import DataLoaderDispatcher as DataLoaderDispatcher
from .training.data.loader_wrapper import skip_first_batches as skip_first_batches
from .training.data.loaders import DataLoaderShard as DataLoaderShard
from .training.processes.device_memory import (
    find_executable_batch_size as find_executable_batch_size,
)
from .training.processes.random_numbers import set_seed as set_seed
from .training.processes.random_numbers import synchronize_rng_states as synchronize_rng_states
from .training.settings.fsdp_plugin import (
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
)
from .training.settings.handlers import AutocastKwargs as AutocastKwargs
from .training.settings.handlers import DataLoaderConfiguration as DataLoaderConfiguration
from .training.settings.handlers import DDPCommunicationHookType as DDPCommunicationHookType
from .training.settings.handlers import (
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
)
from .training.settings.handlers import DistributedType as DistributedType
from .training.settings.handlers import GradientAccumulationPlugin as GradientAccumulationPlugin
from .training.settings.handlers import GradScalerKwargs as GradScalerKwargs
from .training.settings.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from .training.settings.handlers import ProfileKwargs as ProfileKwargs
from .training.settings.handlers import ProjectConfiguration as ProjectConfiguration
from .training.settings.parallelism import ParallelismConfig as ParallelismConfig
from .training.state import AcceleratorState as AcceleratorState
from .training.state import PartialState as PartialState
from .training.stepping.accumulation import GradientState as GradientState
from .training.stepping.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from .training.stepping.optimizer import AcceleratedScheduler as AcceleratedScheduler
from .training.strategies.deepspeed_plugin import DeepSpeedPlugin as DeepSpeedPlugin

__version__: str
