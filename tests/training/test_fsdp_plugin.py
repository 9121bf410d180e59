"""How plugins take their fields: from code, and as Accelerate's do from the environment.

Of the variables, these are not compared, since they differ on purpose: FSDP_BACKWARD_PREFETCH,
FSDP_FORWARD_PREFETCH and FSDP_USE_ORIG_PARAMS (without effect here), FSDP_SYNC_MODULE_STATES where
it is true (the default here; Accelerate's then wants a device),
ACCELERATE_GRADIENT_ACCUMULATION_STEPS (the Accelerator's here, whose argument goes before),
ACCELERATE_FP8_BACKEND=MSAMP and PARALLELISM_CONFIG_SP_* (not there), and
ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES (read here as the plugin is made).
"""

import copy
import json

import accelerate.utils as peer
import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin as PeerPlugin
from accelerate import ParallelismConfig as PeerConfig
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import wrap

from notebook_accel import ConfigError, FullyShardedDataParallelPlugin, ParallelismConfig, utils
from notebook_accel.training.settings.parallelism import fit_sizes
from notebook_accel.training.strategies import mesh
from notebook_accel.training.strategies.mesh import checkpoint_activations, choose_modules, units

Plugin = FullyShardedDataParallelPlugin
CPU = torch.device("cpu")
SAVES, RESHARDS = "saves_shards", "reshard_after_forward"


@pytest.mark.parametrize(
    ("given", "field", "expected"),
    [
        ({"state_dict_config": fsdp.FullStateDictConfig(), "fsdp_version": 2}, SAVES, False),
        ({"state_dict_config": fsdp.ShardedStateDictConfig()}, SAVES, True),
        ({"state_dict_type": "sharded_state_dict"}, SAVES, True),
        ({"state_dict_type": fsdp.StateDictType.FULL_STATE_DICT, "fsdp_version": 2}, SAVES, False),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, RESHARDS, False),
        ({"sharding_strategy": 1}, RESHARDS, True),
        ({"reshard_after_forward": fsdp.ShardingStrategy.SHARD_GRAD_OP}, RESHARDS, False),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, RESHARDS, False),
        ({"sharding_strategy": "HYBRID_SHARD_ZERO2"}, RESHARDS, False),
        ({"reshard_after_forward": "false"}, RESHARDS, False),
        ({"reshard_after_forward": False, "fsdp_version": 2}, RESHARDS, False),
    ],
)
def test_what_is_saved_in_parts_and_kept_whole_after_forward(given, field, expected):
    assert getattr(Plugin(**given), field) is expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
        ("fp16", fsdp.MixedPrecisionPolicy(torch.float16, torch.float16)),
        (fsdp.MixedPrecision(torch.float16, torch.float32), (torch.float16, torch.float32)),
        ({"param_dtype": "bfloat16"}, fsdp.MixedPrecisionPolicy(torch.bfloat16)),
        (fsdp.MixedPrecisionPolicy(torch.float16), fsdp.MixedPrecisionPolicy(torch.float16)),
    ],
)
def test_precision_policies(given, expected):
    if isinstance(expected, tuple):
        expected = fsdp.MixedPrecisionPolicy(*expected)
    assert Plugin(mixed_precision_policy=given).precision_policy(torch.bfloat16) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": "ReLU"},
        {
            "auto_wrap_policy": wrap.transformer_auto_wrap_policy,
            "transformer_cls_names_to_wrap": ["Linear", "ReLU"],
        },
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 7},
        {"auto_wrap_policy": wrap.size_based_auto_wrap_policy, "min_num_params": 7},
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
    plugin = Plugin(auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Linear}))
    assert choose_modules(model, plugin) == [model[0]]


@pytest.mark.parametrize(
    ("version", "given", "offloads"),
    [
        (1, True, True),
        (2, True, True),
        (1, fsdp.CPUOffload(offload_params=True), True),
        (2, fsdp.CPUOffloadPolicy(pin_memory=True), True),
        (1, fsdp.CPUOffload(offload_params=False), False),
        (2, fsdp.OffloadPolicy(), False),
    ],
)
def test_offloading_pins_no_memory_where_there_is_no_device(version, given, offloads):
    policy = Plugin(fsdp_version=version, cpu_offload=given).offload_policy(CPU)
    assert policy == (fsdp.CPUOffloadPolicy(pin_memory=False) if offloads else fsdp.OffloadPolicy())
    assert (
        Plugin(cpu_offload=fsdp.CPUOffloadPolicy()).offload_policy(torch.device("cuda")).pin_memory
    )


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
    "variable",
    [
        "FSDP_VERSION",
        "FSDP_MIN_NUM_PARAMS",
        *(f"PARALLELISM_CONFIG_{name}" for name in ("TP_SIZE", "CP_BACKEND", "SP_BACKEND")),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(variable, monkeypatch):
    monkeypatch.setenv(variable, "ring")
    with pytest.raises(ConfigError, match=f"{variable}='ring': expected "):
        Plugin() if variable.startswith("FSDP") else ParallelismConfig()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plugin(fsdp_version=3), "fsdp_version=3: expected 1 or 2"),
        (lambda: Plugin(sharding_strategy="HALF"), "expected one of FULL_SHARD, "),
        (lambda: Plugin(auto_wrap_policy="all"), "expected one of .*, or a function"),
        (
            lambda: Plugin(auto_wrap_policy=wrap.CustomPolicy(lambda _: True)),
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


# ---- the environment: variables as in a shell, and the fields in which they show

_FSDP = """fsdp_version sharding_strategy reshard_after_forward auto_wrap_policy min_num_params
    transformer_cls_names_to_wrap cpu_offload state_dict_type sync_module_states
    cpu_ram_efficient_loading activation_checkpointing activation_checkpointing_offload
    ignored_modules forward_prefetch use_orig_params"""
_DEEPSPEED = """zero_stage gradient_clipping offload_optimizer_device offload_optimizer_nvme_path
    offload_param_device offload_param_nvme_path zero3_init_flag zero3_save_16bit_model"""
_DYNAMO = "backend mode fullgraph dynamic disable use_regional_compilation"
_PARALLELISM = "dp_replicate_size dp_shard_size tp_size cp_size cp_handler total_size"
_VARIABLES = {
    ("FullyShardedDataParallelPlugin", "FSDP_", _FSDP): [
        "SYNC_MODULE_STATES=false",
        """SYNC_MODULE_STATES=false VERSION=2 RESHARD_AFTER_FORWARD=false OFFLOAD_PARAMS=yes
            AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP TRANSFORMER_CLS_TO_WRAP=A,B
            STATE_DICT_TYPE=FULL_STATE_DICT IGNORED_MODULES=layers.*
            ACTIVATION_CHECKPOINTING=true ACTIVATION_CHECKPOINTING_OFFLOAD=true""",
        "VERSION=2 RESHARD_AFTER_FORWARD=True CPU_RAM_EFFICIENT_LOADING=true",
        """SYNC_MODULE_STATES=false SHARDING_STRATEGY=shard_grad_op OFFLOAD_PARAMS=true
            AUTO_WRAP_POLICY=size_based_wrap STATE_DICT_TYPE=sharded_state_dict""",
        """SYNC_MODULE_STATES=false SHARDING_STRATEGY=HYBRID_SHARD_ZERO2
            AUTO_WRAP_POLICY=SIZE_BASED_WRAP MIN_NUM_PARAMS=100000000""",
        "SYNC_MODULE_STATES=false SHARDING_STRATEGY=4 ACTIVATION_CHECKPOINTING=true",
    ],
    ("DeepSpeedPlugin", "ACCELERATE_DEEPSPEED_", _DEEPSPEED): [
        "",
        "ZERO_STAGE=3",
        """ZERO_STAGE=3 ZERO3_INIT=false ZERO3_SAVE_16BIT_MODEL=true OFFLOAD_OPTIMIZER_DEVICE=cpu
            OFFLOAD_PARAM_DEVICE=cpu""",
        """ZERO_STAGE=3 OFFLOAD_OPTIMIZER_DEVICE=nvme OFFLOAD_OPTIMIZER_NVME_PATH=/fast
            OFFLOAD_PARAM_DEVICE=nvme OFFLOAD_PARAM_NVME_PATH=/faster""",
    ],
    ("DeepSpeedPlugin", "ACCELERATE_", "gradient_clipping"): [
        "GRADIENT_CLIPPING=0.5",
        "GRADIENT_CLIPPING=auto",
    ],
    ("TorchDynamoPlugin", "ACCELERATE_DYNAMO_", _DYNAMO): [
        "",
        """BACKEND=inductor MODE=max-autotune USE_FULLGRAPH=1 USE_DYNAMIC=true
            USE_REGIONAL_COMPILATION=yes""",
    ],
    ("ParallelismConfig", "PARALLELISM_CONFIG_", _PARALLELISM): [
        "",
        "CP_SIZE=2",
        "DP_REPLICATE_SIZE=3",
        "DP_REPLICATE_SIZE=2 DP_SHARD_SIZE=2 TP_SIZE=2",
        "DP_SHARD_SIZE=2 CP_SIZE=2 CP_COMM_STRATEGY=alltoall",
    ],
}
_NOT_SAID = [(f"offload_{what}_nvme_path", "none") for what in ("optimizer", "param")]
_WRAPS = {
    wrap.transformer_auto_wrap_policy: "transformer_based_wrap",
    wrap.size_based_auto_wrap_policy: "size_based_wrap",
    None: "no_wrap",
}


@pytest.mark.parametrize(
    ("plugin", "prefix", "fields", "variables"),
    [(*plugin, row) for plugin, rows in _VARIABLES.items() for row in rows],
)
def test_fields_from_the_environment(plugin, prefix, fields, variables, monkeypatch):
    for assignment in variables.split():
        name, text = assignment.split("=")
        monkeypatch.setenv(prefix + name, text)
    ours, theirs = getattr(utils, plugin)(), getattr(peer, plugin)()
    for field in fields.split():
        mine, expected = getattr(ours, field), getattr(theirs, field)
        if field == "auto_wrap_policy":
            expected = _WRAPS[expected]
        elif field == "cp_handler" and mine is not None:
            mine, expected = mine.cp_comm_strategy, expected.cp_comm_strategy
        # Accelerate has None in fields of another version, and "none" for no path.
        if expected is not None and (field, expected) not in _NOT_SAID:
            assert mine == expected, field
