"""docs/accelerate_names.md says what is so of the installed Accelerate."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import accelerate
import pytest

import notebook_accel
from tests.public import PACKAGE

if TYPE_CHECKING:
    from types import ModuleType

ROOT = PACKAGE.parent

# What scripts use of Accelerate and must find here, whatever release of it is installed: names by
# module, then members and arguments by class.
NAMES = {
    "": """
        Accelerator AutocastKwargs DataLoaderConfiguration DDPCommunicationHookType DeepSpeedPlugin
        DistributedDataParallelKwargs DistributedType FullyShardedDataParallelPlugin
        GradScalerKwargs InitProcessGroupKwargs ParallelismConfig PartialState ProfileKwargs
        cpu_offload cpu_offload_with_hook debug_launcher disk_offload dispatch_model
        find_executable_batch_size infer_auto_device_map init_empty_weights init_on_device
        load_checkpoint_and_dispatch load_checkpoint_in_model notebook_launcher prepare_pippy
        skip_first_batches synchronize_rng_states""",
    "accelerator": "Accelerator",
    "big_modeling": """
        attach_layerwise_casting_hooks cpu_offload cpu_offload_with_hook disk_offload
        dispatch_model init_empty_weights init_on_device load_checkpoint_and_dispatch""",
    "data_loader": """
        BatchSamplerShard DataLoaderDispatcher DataLoaderShard IterableDatasetShard
        SeedableRandomSampler SkipBatchSampler SkipDataLoader prepare_data_loader
        skip_first_batches""",
    "hooks": """
        AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook
        UserCpuOffloadHook add_hook_to_module remove_hook_from_module
        remove_hook_from_submodules""",
    "inference": "prepare_pippy",
    "launchers": "debug_launcher notebook_launcher",
    "local_sgd": "LocalSGD",
    "logging": "get_logger",
    "optimizer": "AcceleratedOptimizer",
    "scheduler": "AcceleratedScheduler",
    "state": "AcceleratorState GradientState PartialState",
    "tracking": """
        AimTracker ClearMLTracker CometMLTracker DVCLiveTracker GeneralTracker MLflowTracker
        SwanLabTracker TensorBoardTracker TrackioTracker WandBTracker register_tracker_class""",
    "utils": """
        AORecipeKwargs BnbQuantizationConfig ComputeEnvironment DataLoaderConfiguration
        DynamoBackend GradientAccumulationPlugin KwargsHandler LoggerType OffloadedWeightsLoader
        PrecisionType ProjectConfiguration RNGType SageMakerDistributedType
        TorchContextParallelConfig TorchDynamoPlugin TorchTensorParallelConfig
        TorchTensorParallelPlugin align_module_device broadcast broadcast_object_list
        calculate_maximum_sizes clear_environment compile_regions compute_module_sizes concatenate
        convert_outputs_to_fp32 convert_to_fp32 extract_model_from_parallel find_batch_size
        find_device find_executable_batch_size find_tied_parameters fsdp2_apply_ac
        fsdp2_load_full_state_dict fsdp2_prepare_model fsdp2_switch_optimizer_parameters gather
        gather_object get_balanced_memory get_grad_scaler get_max_memory
        get_mixed_precision_context_manager has_offloaded_params honor_type infer_auto_device_map
        is_bf16_available is_cuda_available is_datasets_available is_deepspeed_available
        is_fp16_available is_fp8_available is_mlflow_available is_rich_available
        is_tensorboard_available is_torch_version is_torchao_available is_transformers_available
        is_wandb_available listify load load_and_quantize_model load_checkpoint_in_model
        merge_fsdp_weights offload_state_dict pad_across_processes pad_input_tensors
        patch_environment purge_accelerate_environment recursively_apply reduce release_memory
        retie_parameters save send_to_device set_seed slice_tensors synchronize_rng_state
        synchronize_rng_states tqdm wait_for_everyone write_basic_config""",
    "utils.dataclasses": "FP8BackendType",
    "utils.environment": "set_numa_affinity",
    "utils.memory": "clear_device_cache find_executable_batch_size release_memory",
    "utils.operations": "DistributedOperationException",
}
MEMBERS = {
    "Accelerator": """
        accumulate autocast backward check_trigger clear clip_grad_norm_ clip_grad_value_
        context_parallel_rank data_parallel_rank data_parallel_shard_rank
        deepspeed_ulysses_dl_adapter deepspeed_plugin device dispatch_batches distributed_type
        end_training even_batches fp8_backend free_memory gather gather_for_metrics
        get_state_dict get_tracker gradient_accumulation_steps gradient_state init_trackers
        is_composable_parallelism_enabled is_fsdp2 is_last_process is_local_main_process
        is_main_process join_uneven_inputs load_state local_main_process_first
        local_process_index log logging_dir lomo_backward main_process_first
        maybe_context_parallel mixed_precision multi_device no_sync non_blocking num_processes
        on_last_process on_local_main_process on_local_process on_main_process on_process
        optimizer_step_was_skipped pad_across_processes parallelism_config pipeline_parallel_rank
        prepare prepare_data_loader prepare_model prepare_optimizer prepare_scheduler print
        process_index profile project_dir reduce register_for_checkpointing
        register_load_state_pre_hook register_save_state_pre_hook save save_iteration save_model
        save_state set_trigger should_save_model skip_first_batches split_batches
        split_between_processes state sync_gradients tensor_parallel_rank torch_device_mesh
        trigger_sync_in_backward unscale_gradients unwrap_model use_distributed
        use_seedable_sampler use_stateful_dataloader verify_device_map wait_for_everyone""",
    "AcceleratedOptimizer": "step step_was_skipped zero_grad",
    "data_loader.DataLoaderDispatcher": "set_epoch total_batch_size total_dataset_length",
    "data_loader.DataLoaderShard": "set_epoch total_batch_size total_dataset_length",
    "DDPCommunicationHookType": "BATCHED_POWER_SGD BF16 FP16 NO POWER_SGD",
    "DistributedType": """
        DEEPSPEED FSDP MEGATRON_LM MULTI_CPU MULTI_GPU MULTI_HPU MULTI_MLU MULTI_MUSA MULTI_NEURON
        MULTI_NPU MULTI_SDAA MULTI_XPU NO XLA""",
    "tracking.GeneralTracker": """
        finish log main_process_only start store_init_configuration""",
    "ProfileKwargs": "build",
    "utils.KwargsHandler": "to_kwargs",
}
ARGUMENTS = {
    "Accelerator": """
        cpu dataloader_config deepspeed_plugin deepspeed_plugins device_placement dynamo_backend
        dynamo_plugin fsdp_plugin gradient_accumulation_plugin gradient_accumulation_steps
        kwargs_handlers log_with mixed_precision parallelism_config project_config project_dir
        rng_types split_batches step_scheduler_with_optimizer""",
    "AutocastKwargs": "cache_enabled enabled",
    "DataLoaderConfiguration": """
        data_seed dispatch_batches even_batches non_blocking split_batches use_seedable_sampler
        use_stateful_dataloader""",
    "debug_launcher": "args function num_processes",
    "DistributedDataParallelKwargs": """
        broadcast_buffers bucket_cap_mb check_reduction comm_hook comm_state_option comm_wrapper
        dim find_unused_parameters gradient_as_bucket_view static_graph""",
    "GradientAccumulationPlugin": """
        adjust_scheduler num_steps sync_each_batch sync_with_dataloader""",
    "GradScalerKwargs": "backoff_factor enabled growth_factor growth_interval init_scale",
    "InitProcessGroupKwargs": "backend init_method timeout",
    "local_sgd.LocalSGD": "accelerator enabled local_sgd_steps model",
    "notebook_launcher": """
        args function log_line_prefix_template master_addr max_restarts mixed_precision
        monitor_interval node_rank num_nodes num_processes rdzv_backend rdzv_conf rdzv_endpoint
        rdzv_id use_port""",
    "ParallelismConfig": """
        cp_backend cp_size dp_replicate_size dp_shard_size sp_backend sp_size tp_size""",
    "ProfileKwargs": """
        activities on_trace_ready output_trace_dir profile_memory record_shapes schedule_option
        with_flops with_modules with_stack""",
    "ProjectConfiguration": """
        automatic_checkpoint_naming iteration logging_dir project_dir save_on_each_node
        total_limit""",
    "utils.TorchDynamoPlugin": """
        backend disable dynamic fullgraph mode options use_regional_compilation""",
}
# Without a library or a device that is not here these say so; they are there all the same.
THERE = {
    "utils": """
        DeepSpeedSequenceParallelConfig FP8RecipeKwargs MSAMPRecipeKwargs MegatronLMPlugin
        TERecipeKwargs""",
}


@pytest.fixture(scope="module")
def coverage() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_coverage", ROOT / "docs" / "coverage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find(path: str) -> Any:
    """What stands at a path under our package; None for nothing."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"notebook_accel.{module}".rstrip(".")), name, None)


def test_what_scripts_use_is_here(coverage: ModuleType) -> None:
    def answer(path: str) -> str:
        return coverage.is_here(find(path))

    names = [f"{module}.{name}" for module, text in NAMES.items() for name in text.split()]
    lost = [name for name in names if answer(name) != "yes"]
    there = [f"{module}.{name}" for module, text in THERE.items() for name in text.split()]
    lost += [name for name in there if answer(name) == "no"]
    lost += [
        f"{path}.{name}"
        for path, text in MEMBERS.items()
        for name in text.split()
        if not coverage.has_member(find(path), name)
    ]
    lost += [
        f"{path}({name}=)"
        for path, text in ARGUMENTS.items()
        for name in text.split()
        if name not in inspect.signature(find(path)).parameters
    ]
    assert lost == []


def test_what_a_module_has_imported_is_under_its_path_too(coverage: ModuleType) -> None:
    """Transformers imports ``check_device_map`` from ``big_modeling``, which only uses it."""
    # Kernels import the launchers, and what else is there would make them wait for torch.
    paths = {*coverage.MODULES, *coverage._modules_of_utils()} - {"launchers"}
    here = [importlib.import_module(f"notebook_accel.{name}") for name in ("utils", "state")]
    lost = []
    for path in sorted(paths):
        theirs = importlib.import_module(f"accelerate.{path}".rstrip("."))
        for name, value in vars(theirs).items():
            is_theirs = str(getattr(value, "__module__", "")).startswith("accelerate.")
            if name.startswith("_") or inspect.ismodule(value) or not is_theirs:
                continue
            if any(hasattr(door, name) for door in here) and find(f"{path}.{name}") is None:
                lost.append(f"{path}.{name}")
    assert lost == []


def test_the_page_is_fresh(coverage: ModuleType) -> None:
    written = coverage.PAGE.read_text()
    if f"accelerate {version('accelerate')}:" not in written:
        pytest.skip("another release of accelerate is installed than the page is about")
    assert written == coverage.page(), "run: .venv/bin/python docs/coverage.py"


def test_what_only_refuses_is_told_from_what_is_here(coverage: ModuleType) -> None:
    from notebook_accel.utils import MegatronLMPlugin

    from notebook_accel import Accelerator

    found = [coverage.is_here(value) for value in (Accelerator, MegatronLMPlugin, None)]
    assert found == ["yes", "refused", "no"]


def test_differences_of_arguments_are_found(coverage: ModuleType) -> None:
    def theirs(a: int, b: int = 1, *args: int, c: int = 0) -> None: ...

    def fewer(a: int) -> None: ...

    def later(a: int, c: int = 0, b: int = 2) -> None: ...

    def named(a: int, *, b: int, c: int = 0) -> None: ...

    def anything(a: int, **kwargs: int) -> None: ...

    assert coverage.differences(theirs, theirs) == []
    assert coverage.differences(theirs, fewer) == ["without `b`, `c`"]
    assert coverage.differences(theirs, later) == ["by name alone: `b`", "`b=2`, there `1`"]
    assert coverage.differences(theirs, named) == ["by name alone: `b`", "`b=needed`, there `1`"]
    assert coverage.differences(theirs, anything) == ["without `b`, `c`"]
    coverage.TAKEN["anything"] = {"b"}
    coverage.REFUSED["anything"] = {"c"}
    assert coverage.differences(theirs, anything, "anything") == ["refuses `c`"]
    assert coverage.differences("1.15", "1.15") == []
    assert coverage.differences("1.15", "1.14") == ["another value"]


@lru_cache
def cached() -> None: ...


def test_members_of_each_kind_are_found(coverage: ModuleType) -> None:
    """Members of an enumeration, fields, methods, properties, and what is assigned to self."""
    there = {
        accelerate.DistributedType: {"MULTI_CPU", "XLA"},
        accelerate.ProfileKwargs: {"activities", "build", "to_kwargs"},
        accelerate.optimizer.AcceleratedOptimizer: {"optimizer", "step", "step_was_skipped"},
    }
    for kind, names in there.items():
        assert names <= set(coverage.members(kind))
    theirs = coverage.members(accelerate.optimizer.AcceleratedOptimizer)
    assert "register_step_post_hook" not in theirs, "it is torch's"
    names = ["tp_size", "device_mesh", "tp_enabled", "get_device_mesh", "gone"]
    kind = notebook_accel.ParallelismConfig
    assert [name for name in names if not coverage.has_member(kind, name)] == ["gone"]


def test_names_of_each_kind_are_own(coverage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("accelerate.utils.constants")
    assert {"FSDP_SHARDING_STRATEGY", "MODEL_NAME"} <= set(coverage.public_names(module))
    monkeypatch.setattr(cached, "__module__", module.__name__)
    monkeypatch.setattr(module, "cached", cached, raising=False)
    assert "cached" in coverage.public_names(module)
