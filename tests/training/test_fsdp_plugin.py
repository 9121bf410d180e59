"""How plugins take their fields: from code, and as Accelerate's do from the environment.

Of the variables, these are not compared, since they differ on purpose: FSDP_BACKWARD_PREFETCH,
FSDP_FORWARD_PREFETCH and FSDP_USE_ORIG_PARAMS (without effect here), FSDP_SYNC_MODULE_STATES where
it is true (the default here; Accelerate's then wants a device),
ACCELERATE_GRADIENT_ACCUMULATION_STEPS (the Accelerator's here, whose argument goes before),
ACCELERATE_FP8_BACKEND=MSAMP and PARALLELISM_CONFIG_SP_* (not there), and
ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES (read here as the plugin is made). ACCELERATE_DYNAMO_* are
compared in ``test_compiling``.
"""

import copy
import json

import accelerate.utils as peer
import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin as PeerPlugin
from accelerate import ParallelismConfig as PeerConfig
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    wrap,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from notebook_accel import ConfigError, FullyShardedDataParallelPlugin, ParallelismConfig, utils
from notebook_accel.training.settings.parallelism import fit_sizes
from notebook_accel.training.strategies import mesh
from notebook_accel.training.strategies.mesh import checkpoint_activations, choose_modules, units

Plugin = FullyShardedDataParallelPlugin
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("given", "saves_shards"),
    [
        ({"state_dict_config": FullStateDictConfig(), "fsdp_version": 2}, False),
        ({"state_dict_config": ShardedStateDictConfig()}, True),
        ({"state_dict_type": "sharded_state_dict"}, True),
        ({"state_dict_type": StateDictType.FULL_STATE_DICT, "fsdp_version": 2}, False),
    ],
)
def test_how_checkpoints_are_written(given, saves_shards):
    assert Plugin(**given).saves_shards is saves_shards


@pytest.mark.parametrize(
    ("given", "reshards"),
    [
        ({"sharding_strategy": "SHARD_GRAD_OP"}, False),
        ({"sharding_strategy": 1}, True),
        ({"reshard_after_forward": ShardingStrategy.SHARD_GRAD_OP}, False),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, False),
        ({"sharding_strategy": "HYBRID_SHARD_ZERO2"}, False),
        ({"reshard_after_forward": "false"}, False),
        ({"reshard_after_forward": False, "fsdp_version": 2}, False),
    ],
)
def test_what_is_kept_whole_after_forward(given, reshards):
    assert Plugin(**given).reshard_after_forward is reshards


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
        ("fp16", MixedPrecisionPolicy(torch.float16, torch.float16)),
        (MixedPrecision(torch.float16, torch.float32), (torch.float16, torch.float32)),
        ({"param_dtype": "bfloat16"}, MixedPrecisionPolicy(torch.bfloat16)),
        (MixedPrecisionPolicy(torch.float16), MixedPrecisionPolicy(torch.float16)),
    ],
)
def test_precision_policies(given, expected):
    if isinstance(expected, tuple):
        expected = MixedPrecisionPolicy(*expected)
    assert Plugin(mixed_precision_policy=given).precision_policy(torch.bfloat16) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": "ReLU"},
        {
            "auto_wrap_policy": transformer_auto_wrap_policy,
            "transformer_cls_names_to_wrap": ["Linear", "ReLU"],
        },
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 7},
        {"auto_wrap_policy": size_based_auto_wrap_policy, "min_num_params": 7},
    ],
)
def test_a_policy_is_made_a_function_as_accelerate_makes_it(given):
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    ours = Plugin(**given)
    theirs = PeerPlugin(**given)
    theirs.set_auto_wrap_policy(model)
    assert ours.wrap_policy(model).func is theirs.auto_wrap_policy.func
    assert ours.wrap_policy(model).keywords == theirs.auto_wrap_policy.keywords


def test_a_policy_by_size_without_a_size_chooses_nothing():
    """As Accelerate's; torch's own function would choose activations too, one by one."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    ours, theirs = (kind(auto_wrap_policy="size_based_wrap") for kind in (Plugin, PeerPlugin))
    theirs.set_auto_wrap_policy(model)
    assert theirs.auto_wrap_policy is None
    with pytest.warns(UserWarning, match="min_num_params=0 wraps nothing"):
        assert ours.wrap_policy(model) is None


def test_modules_are_chosen_by_torchs_policy_of_classes():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    plugin = Plugin(auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert choose_modules(model, plugin) == [model[0]]


@pytest.mark.parametrize(
    ("version", "given", "offloads"),
    [
        (1, True, True),
        (2, True, True),
        (1, CPUOffload(offload_params=True), True),
        (2, CPUOffloadPolicy(pin_memory=True), True),
        (1, CPUOffload(offload_params=False), False),
        (2, OffloadPolicy(), False),
    ],
)
def test_offloading_pins_no_memory_where_there_is_no_device(version, given, offloads):
    policy = Plugin(fsdp_version=version, cpu_offload=given).offload_policy(CPU)
    assert policy == (CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy())
    assert Plugin(cpu_offload=CPUOffloadPolicy()).offload_policy(torch.device("cuda")).pin_memory


NAMES = [
    *("active_mesh_dims", "dp_dim_names", "non_dp_dim_names", "dp_shard_cp_dim_names"),
    *("dp_cp_dim_names", "fsdp_dim_names", "cp_backend", "sp_backend", "sp_enabled"),
    *("dp_replicate_enabled", "dp_shard_enabled", "tp_enabled", "cp_enabled"),
    *("total_size", "data_parallel_size", "non_data_parallel_size"),
]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dp_replicate_size": 2},
        {"dp_shard_size": 2},
        {"tp_size": 2},
        {"cp_size": 2},
        {"dp_replicate_size": 2, "dp_shard_size": 2},
        {"dp_shard_size": 2, "tp_size": 2},
        {"dp_shard_size": 2, "cp_size": 3},
        {"dp_replicate_size": 5, "dp_shard_size": 4, "tp_size": 2, "cp_size": 3},
    ],
    ids=str,
)
def test_names_of_dimensions_are_accelerates(given):
    ours = ParallelismConfig(**given)
    theirs = PeerConfig(**given)
    for name in NAMES:
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("tp_handler", "cp_handler", "sp_handler"):
        handlers = [getattr(config, name) for config in (ours, theirs)]
        assert len({type(handler).__name__ for handler in handlers}) == 1, name
    assert (
        json.loads(json.dumps(ours.to_json())).items() >= {**given, "cp_backend": "torch"}.items()
    )


@pytest.mark.parametrize("name", ["cp_backend", "sp_backend"])
def test_a_backend_of_a_variable_is_as_one_of_an_argument(name, monkeypatch):
    assert getattr(ParallelismConfig(**{name: None}), name) == getattr(PeerConfig(), name)
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}", "ring")
    with pytest.raises(ConfigError, match=f"PARALLELISM_CONFIG_{name.upper()}='ring': expected"):
        ParallelismConfig()


def test_modules_are_ignored_by_name():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert Plugin(ignored_modules="0").ignored_parts(model) == [model[0]]
    with pytest.warns(UserWarning, match="ignored_modules='head' matches the name of no module"):
        assert Plugin(ignored_modules="head").ignored_parts(model) == []
    given = Plugin(ignored_modules=(part for part in model[1:]))
    for _ in range(2):  # models, or the blocks of a pipeline
        assert given.ignored_parts(model) == [model[1]]


def test_weights_that_rank_0_alone_has_read_are_those_of_all():
    with pytest.warns(UserWarning, match="rank 0 alone has read the weights"):
        plugin = Plugin(cpu_ram_efficient_loading=True, sync_module_states=False)
    assert plugin.sync_module_states is True


@pytest.mark.parametrize(
    ("strategy", "ranks", "asked", "expected"),
    [
        # Of two machines with four ranks each: how many replicas, and shards of each.
        ("FULL_SHARD", 8, {}, (1, 8)),
        ("NO_SHARD", 8, {}, (8, 1)),
        ("HYBRID_SHARD", 8, {}, (2, 4)),
        ("HYBRID_SHARD_ZERO2", 8, {}, (2, 4)),
        ("HYBRID_SHARD", 8, {"tp_size": 2}, (2, 2)),
        ("HYBRID_SHARD", 8, {"tp_size": 2, "cp_size": 2}, (2, 1)),
        ("HYBRID_SHARD", 8, {"pp_size": 2}, (1, 4)),
        ("FULL_SHARD", 8, {"tp_size": 2}, (1, 4)),
        ("NO_SHARD", 8, {"tp_size": 2}, (4, 1)),
        # Layers that are divided over both machines, and one machine of six.
        ("HYBRID_SHARD", 8, {"tp_size": 8}, (1, 1)),
        ("HYBRID_SHARD", 6, {}, (1, 6)),
        # What the sizes say counts.
        ("FULL_SHARD", 8, {"dp_replicate_size": 2, "dp_shard_size": 4}, (2, 4)),
    ],
    ids=str,
)
def test_a_sharding_strategy_takes_the_ranks_that_are_left(strategy, ranks, asked, expected):
    plugin = Plugin(sharding_strategy=strategy)
    config = ParallelismConfig(**asked) if asked else None
    sizes = fit_sizes(config, plugin, num_processes=ranks, local_num_processes=4).sizes
    assert (sizes["dp_replicate"], sizes["dp_shard"]) == expected


@pytest.mark.parametrize(
    ("variable", "make"),
    [
        ("FSDP_VERSION", Plugin),
        ("FSDP_MIN_NUM_PARAMS", Plugin),
        ("PARALLELISM_CONFIG_TP_SIZE", ParallelismConfig),
    ],
)
def test_a_variable_that_is_no_number_is_named(variable, make, monkeypatch):
    monkeypatch.setenv(variable, "two")
    with pytest.raises(ConfigError, match=f"{variable}='two': expected a whole number"):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plugin(fsdp_version=3), "fsdp_version=3: expected 1 or 2"),
        (lambda: Plugin(sharding_strategy="HALF"), "expected one of FULL_SHARD, "),
        (lambda: Plugin(auto_wrap_policy="all"), "expected one of .*, or a function"),
        (
            lambda: Plugin(auto_wrap_policy=CustomPolicy(lambda _: True)),
            r"auto_wrap_policy is a CustomPolicy: expected .* ModuleWrapPolicy\(\{Block\}\)",
        ),
        (lambda: Plugin(state_dict_type="X"), "expected one of FULL_STATE_DICT"),
        (lambda: Plugin(mixed_precision_policy="half"), "'half': expected one of bf16, fp16"),
        (lambda: Plugin(mixed_precision_policy={"output_dtype": None}), "MixedPrecision of fsdp_v"),
        (lambda: Plugin(cpu_offload="no"), "cpu_offload='no': expected True, False"),
        (lambda: Plugin(activation_checkpointing_offload=True), "set activation_checkpointing=T"),
        (lambda: ParallelismConfig(tp_size=0), r"tp_size=0: expected a whole number, 1 or more"),
        (lambda: ParallelismConfig(pp_size=2, cp_size=2), "does not compose with divided sequ"),
        (lambda: ParallelismConfig(pp_size=4, num_microbatches=3), "expects 4 or more"),
        (
            lambda: ParallelismConfig(pp_size=2, pp_schedule="Interleaved1F1B", num_microbatches=3),
            "num_microbatches=3.: this schedule expects a multiple of 2",
        ),
        (lambda: ParallelismConfig(cp_backend="ring"), r"cp_backend='ring'\): expected 'torch'"),
        (lambda: ParallelismConfig(pp_schedule="2F"), "expected one of .*1F1B"),
        (
            lambda: ParallelismConfig(num_microbatches=0),
            "num_microbatches=0: expected a whole number, 1",
        ),
        (
            lambda: ParallelismConfig(num_microbatches="4"),
            "='4': expected a whole number, 1 or more",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


class Counting(nn.Linear):
    calls = 0

    def forward(self, inputs):
        self.calls += 1
        return torch.tanh(super().forward(inputs))


@pytest.mark.parametrize("offload", [False, True])
def test_what_is_kept_of_activations(offload, monkeypatch):
    """Offloaded or not, a forward is computed again; to the host go its inputs alone."""
    kept = []
    hooks = torch.autograd.graph.save_on_cpu

    class Seen(hooks):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            pack = self.pack_hook
            self.pack_hook = lambda value: kept.append(tuple(value.shape)) or pack(value)

    monkeypatch.setattr(mesh, "save_on_cpu", Seen)
    plugin = Plugin(activation_checkpointing=True, activation_checkpointing_offload=offload)
    torch.manual_seed(0)
    model = nn.Sequential(Counting(2, 3), Counting(3, 2))
    blocks, plain, names = list(model), copy.deepcopy(model), list(model.state_dict())
    checkpoint_activations(blocks, plugin)
    assert list(model) == blocks
    assert [unit for unit, _ in units(model, blocks, blocks)] == blocks
    inputs = torch.ones(4, 2, requires_grad=True)
    model(inputs).sum().backward()
    plain(inputs).sum().backward()
    assert [block.calls for block in blocks] == [2, 2]
    assert [shape for shape in kept if len(shape) == 2] == ([(4, 2), (4, 3)] if offload else [])
    assert list(model.state_dict()) == names
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


# ---- the environment

_FSDP = [
    ("fsdp_version", {}),
    ("fsdp_version", {"VERSION": "2"}),
    ("sharding_strategy", {}),
    *(
        ("sharding_strategy", {"SHARDING_STRATEGY": text})
        for text in ("FULL_SHARD", "shard_grad_op", "NO_SHARD", "HYBRID_SHARD_ZERO2", "4")
    ),
    ("reshard_after_forward", {"VERSION": "2"}),
    ("reshard_after_forward", {"VERSION": "2", "RESHARD_AFTER_FORWARD": "false"}),
    ("reshard_after_forward", {"VERSION": "2", "RESHARD_AFTER_FORWARD": "True"}),
    ("auto_wrap_policy", {}),
    ("auto_wrap_policy", {"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}),
    ("auto_wrap_policy", {"AUTO_WRAP_POLICY": "size_based_wrap"}),
    (
        "transformer_cls_names_to_wrap",
        {"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "TRANSFORMER_CLS_TO_WRAP": "A,B"},
    ),
    ("min_num_params", {"AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}),
    ("min_num_params", {"AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "MIN_NUM_PARAMS": "100000000"}),
    ("cpu_offload", {}),
    ("cpu_offload", {"OFFLOAD_PARAMS": "true"}),
    ("cpu_offload", {"OFFLOAD_PARAMS": "yes", "VERSION": "2"}),
    ("state_dict_type", {}),
    ("state_dict_type", {"VERSION": "2"}),
    ("state_dict_type", {"STATE_DICT_TYPE": "sharded_state_dict"}),
    ("state_dict_type", {"STATE_DICT_TYPE": "FULL_STATE_DICT", "VERSION": "2"}),
    ("sync_module_states", {"SYNC_MODULE_STATES": "false"}),
    ("forward_prefetch", {}),
    ("use_orig_params", {}),
    ("cpu_ram_efficient_loading", {"CPU_RAM_EFFICIENT_LOADING": "true", "VERSION": "2"}),
    ("activation_checkpointing", {}),
    ("activation_checkpointing", {"ACTIVATION_CHECKPOINTING": "true"}),
    (
        "activation_checkpointing_offload",
        {
            "ACTIVATION_CHECKPOINTING": "true",
            "ACTIVATION_CHECKPOINTING_OFFLOAD": "true",
            "VERSION": "2",
        },
    ),
    ("ignored_modules", {"IGNORED_MODULES": "layers.*"}),
]
_NVME = "DEEPSPEED_OFFLOAD_OPTIMIZER_"
_DEEPSPEED = [
    ("zero_stage", {}),
    ("zero_stage", {"DEEPSPEED_ZERO_STAGE": "3"}),
    ("gradient_clipping", {}),
    ("gradient_clipping", {"GRADIENT_CLIPPING": "0.5"}),
    ("gradient_clipping", {"GRADIENT_CLIPPING": "auto"}),
    ("offload_optimizer_device", {}),
    ("offload_optimizer_device", {f"{_NVME}DEVICE": "cpu"}),
    ("offload_optimizer_nvme_path", {f"{_NVME}DEVICE": "nvme", f"{_NVME}NVME_PATH": "/fast"}),
    (
        "offload_param_device",
        {"DEEPSPEED_ZERO_STAGE": "3", "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"},
    ),
    (
        "offload_param_nvme_path",
        {
            "DEEPSPEED_ZERO_STAGE": "3",
            "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
            "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/fast",
        },
    ),
    ("zero3_init_flag", {}),
    ("zero3_init_flag", {"DEEPSPEED_ZERO_STAGE": "3"}),
    ("zero3_init_flag", {"DEEPSPEED_ZERO_STAGE": "3", "DEEPSPEED_ZERO3_INIT": "false"}),
    ("zero3_save_16bit_model", {}),
    ("zero3_save_16bit_model", {"DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"}),
]
_SIZES = [(f"{name}_size", f"{name.upper()}_SIZE") for name in ("dp_shard", "tp", "cp")]
_PARALLELISM = [
    *((field, {}) for field, _ in _SIZES),
    *((field, {variable: "2"}) for field, variable in _SIZES),
    ("dp_replicate_size", {"DP_REPLICATE_SIZE": "3"}),
    ("total_size", {"DP_REPLICATE_SIZE": "2", "DP_SHARD_SIZE": "2", "TP_SIZE": "2"}),
    ("cp_handler", {"CP_SIZE": "2"}),
    ("cp_handler", {"CP_SIZE": "2", "CP_COMM_STRATEGY": "alltoall"}),
]
_CASES = [
    *(("FullyShardedDataParallelPlugin", "FSDP_", *case) for case in _FSDP),
    *(("DeepSpeedPlugin", "ACCELERATE_", *case) for case in _DEEPSPEED),
    *(("ParallelismConfig", "PARALLELISM_CONFIG_", *case) for case in _PARALLELISM),
]
_WRAPS = {
    wrap.transformer_auto_wrap_policy: "transformer_based_wrap",
    wrap.size_based_auto_wrap_policy: "size_based_wrap",
    None: "no_wrap",
}


def in_our_words(field, value):
    """A field of Accelerate's plugin as ours spells it."""
    if field == "auto_wrap_policy":
        return _WRAPS[value]
    return getattr(value, "cp_comm_strategy", value)


@pytest.mark.parametrize(("plugin", "prefix", "field", "variables"), _CASES)
def test_fields_from_the_environment(plugin, prefix, field, variables, monkeypatch):
    for name, text in variables.items():
        monkeypatch.setenv(prefix + name, text)
    ours = getattr(getattr(utils, plugin)(), field)
    theirs = getattr(getattr(peer, plugin)(), field)
    assert getattr(ours, "cp_comm_strategy", ours) == in_our_words(field, theirs)
