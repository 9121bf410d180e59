"""Settings of a launch: what is refused, where values come from, and their YAML."""

import errno
import os
import pydoc
import re
import stat
from dataclasses import FrozenInstanceError, fields
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import yaml

import notebook_accel
from notebook_accel import ConfigError
from notebook_accel.config import LaunchConfig, default_config_path, resolve, write_basic_config
from notebook_accel.config.checks import check_enough
from notebook_accel.config.plugins import PLUGINS
from notebook_accel.config.setting import settings_of

FULL = LaunchConfig(
    num_processes=2,
    mixed_precision="no",
    engine="local",
    devices=(0, 2),
    backend="nccl",
    use_port=29501,
    env={"A": "1"},
    grace=2.5,
    debug=True,
    gradient_accumulation_steps=2,
    seed=7,
    fsdp={"cpu_offload": True},
    parallelism={"dp_shard_size": 2},
)


@pytest.fixture(autouse=True)
def _settings_of_nobody(monkeypatch, tmp_path):
    for name in ("XDG_CONFIG_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for field in fields(LaunchConfig):
        monkeypatch.delenv(f"NOTEBOOK_ACCEL_{field.name.upper()}", raising=False)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    for plugin in PLUGINS.values():
        for variable in (plugin.switch, *(one.variable for one in plugin.options.values())):
            monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def path(tmp_path):
    """Where a test puts the file of settings that it loads."""
    return tmp_path / "config.yaml"


# ---- values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_processes", 0, "1 or more"),
        ("num_processes", "2", "whole number"),
        ("num_processes", True, "whole number"),
        ("mixed_precision", "fp7", "'bf16'"),
        ("mixed_precision", "float16", "'fp16'"),
        ("engine", "tpu", "'local', 'elastic', 'ray', 'inline', 'xla'"),
        ("engine", None, "'auto'"),
        ("num_nodes", 0, "1 or more"),
        ("max_restarts", -1, "0 or more"),
        ("master_addr", 5, "text"),
        ("devices", [], "different indices"),
        ("devices", [0, 0], "different indices"),
        ("devices", [True], "different indices"),
        ("devices", "gpu", "'cpu'"),
        ("devices", 2, "[0, 2]"),
        ("backend", "mpi", "'gloo'"),
        ("use_port", 65_536, "1 to 65535"),
        ("use_port", "29500", "1 to 65535"),
        ("grace", -1, "0 or more"),
        ("grace", float("nan"), "0 or more"),
        ("grace", True, "0 or more"),
        ("debug", "yes", "True or False"),
        ("gradient_accumulation_steps", 0, "1 or more"),
        ("seed", -1, "0 to "),
        ("fsdp", True, "mapping of FullyShardedDataParallelPlugin's fields"),
        ("deepspeed", 2, "mapping of DeepSpeedPlugin's fields"),
        ("parallelism", 2, "mapping of ParallelismConfig's fields"),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(name, value, expected):
    with pytest.raises(ConfigError) as caught:
        LaunchConfig(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert expected in str(caught.value)


def test_each_field_has_a_bad_value_in_the_test_above():
    marks = test_a_bad_value_is_named_with_what_was_expected.pytestmark
    tried = {row[0] for row in marks[0].args[1]}
    assert {*tried, "env"} == {field.name for field in fields(LaunchConfig)}


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (["KEY=secret"], "env is a list: expected a mapping of names to texts"),
        ({"KEY": b"secret"}, "env has 'KEY' of type bytes: expected a mapping"),
        ({"KEY": "secret", "N": 4}, "env has 'N' of type int: expected a mapping"),
        ({"KEY": "secret", 4: "4"}, "env has a name of type int"),
        ({"KEY": "secret", "": "1"}, "env has '': expected a name that is not empty"),
        ({"KEY=secret": "1"}, "env has 'KEY=': expected a name that is not empty and has no '='"),
        (
            {"KEY": "secret\x00"},
            "env has 'KEY': expected a name that is not empty and has no '=', and no NUL",
        ),
    ],
)
def test_bad_variables_are_named_without_their_texts(env, said):
    """A text may be a secret, and a notebook is saved with its errors."""
    with pytest.raises(ConfigError) as caught:
        LaunchConfig(env=env)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fsdp": {"cpu_offload": "yes"}}, "fsdp['cpu_offload']='yes': expected True or False"),
        ({"fsdp": {"sharding_strategy": "ALL"}}, "expected one of 'FULL_SHARD', 'SHARD_GRAD_OP'"),
        ({"fsdp": {"shards": 2}}, "no option is called so; there are fsdp_version, sharding"),
        ({"fsdp": {"min_num_params": -1}}, "expected a whole number, 0 or more"),
        ({"fsdp": {"fsdp_version": 3}}, "fsdp['fsdp_version']=3: expected a whole number, 1 to 2"),
        ({"deepspeed": {"zero_stage": 4}}, "expected a whole number, 1 to 3"),
        ({"parallelism": {"tp_size": True}}, "expected a whole number, 1 or more"),
    ],
)
def test_a_bad_option_of_a_plugin_is_named(given, said):
    with pytest.raises(ConfigError) as caught:
        LaunchConfig(**given)
    assert said in str(caught.value)


def test_the_options_of_a_plugin_are_its_fields():
    for name, plugin in PLUGINS.items():
        assert name in {field.name for field in fields(LaunchConfig)}
        assert settings_of(getattr(notebook_accel, plugin.plugin_class)) == plugin.options


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([0, 1], (0, 1)),
        ((3,), (3,)),
        ("0,2", (0, 2)),
        (" 1 ", (1,)),
        (range(2), (0, 1)),
        ("cpu", "cpu"),
        (None, None),
    ],
)
def test_devices_are_kept_in_one_form(given, kept):
    assert LaunchConfig(devices=given).devices == kept


def test_values_of_numpy_and_of_enums_are_kept_as_plain_ones(tmp_path):
    """YAML, which each run keeps of its settings, has no others."""

    class Precision(str, Enum):
        BF16 = "bf16"

    config = LaunchConfig(
        mixed_precision=Precision.BF16,
        use_port=np.int64(29_501),
        env={"A": np.str_("b")},
        deepspeed={"gradient_clipping": np.float64(0.5), "offload_param_device": np.str_("cpu")},
    )
    assert type(config.mixed_precision) is str
    config.save(tmp_path / "mine.yaml")
    assert LaunchConfig.load(tmp_path / "mine.yaml") == config
    assert LaunchConfig(devices=np.str_("cpu")).to_yaml() == "devices: cpu\n"


def test_a_config_does_not_change():
    env = {"A": "1"}
    config = LaunchConfig(env=env)
    env["A"] = "2"
    assert config.env == {"A": "1"}
    assert "env" not in repr(config), "a notebook is saved with what its cells show"
    with pytest.raises(FrozenInstanceError):
        config.num_processes = 3
    with pytest.raises(TypeError):
        LaunchConfig(2)


# ---- together ------------------------------------------------------------------------------


def test_inline_takes_one_process():
    assert LaunchConfig(engine="inline", num_processes=1).num_processes == 1
    with pytest.raises(ConfigError, match="num_processes=2") as caught:
        LaunchConfig(engine="inline", num_processes=2)
    assert "engine='local'" in str(caught.value)


def test_more_ranks_than_devices():
    with pytest.raises(ConfigError, match=r"num_processes=3.*devices=\[0, 1\]") as caught:
        LaunchConfig(num_processes=3, devices=[0, 1])
    for way_out in ("num_processes=2", "devices='cpu'", "gloo"):
        assert way_out in str(caught.value)
    assert LaunchConfig(num_processes=3, devices=[0, 1], backend="gloo").num_processes == 3
    assert LaunchConfig(num_processes=3, devices="cpu").num_processes == 3
    with pytest.raises(ConfigError, match="this machine has 1"):
        check_enough(2, 1, "this machine has 1")
    check_enough(2, 2, "")


def test_a_mesh_that_the_ranks_do_not_fill():
    sizes = {"tp_size": 2, "dp_shard_size": 2}
    with pytest.raises(ConfigError, match=r"parallelism=.*takes 4 ranks, and num_processes=6"):
        LaunchConfig(num_processes=6, parallelism=sizes)
    # A plugin that the function makes may spread the weights over the ranks that are left.
    assert LaunchConfig(num_processes=8, parallelism=sizes).parallelism == sizes
    assert LaunchConfig(parallelism=sizes).num_processes is None


def test_nccl_on_the_cpu():
    with pytest.raises(ConfigError, match="backend='nccl'") as caught:
        LaunchConfig(devices="cpu", backend="nccl")
    assert "gloo" in str(caught.value)


# ---- YAML ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LaunchConfig(), FULL, LaunchConfig(devices="cpu")])
def test_what_is_saved_is_loaded(config, tmp_path):
    path = tmp_path / "deep" / "config.yaml"
    config.save(path)
    assert LaunchConfig.load(path) == config
    assert LaunchConfig.load(str(path)) == config


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path, monkeypatch):
    folder = tmp_path / "settings"
    path, link = folder / "config.yaml", folder / "link.yaml"
    umask = os.umask(0o027)
    try:
        LaunchConfig(num_processes=2).save(path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640, "as the umask says"
    path.chmod(0o604)
    link.symlink_to(path)
    with path.open() as reader:
        LaunchConfig(num_processes=3).save(link)
        assert reader.read() == "num_processes: 2\n", "who reads it meanwhile has the old one whole"
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o604

    def fail(*_):
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        LaunchConfig(num_processes=4).save(path)
    assert LaunchConfig.load(path) == LaunchConfig(num_processes=3)
    assert sorted(os.listdir(folder)) == ["config.yaml", "link.yaml"]
    LaunchConfig().save(os.devnull)
    assert not os.path.isfile(os.devnull)


def test_a_path_in_the_home_folder(tmp_path):
    config = LaunchConfig(num_processes=2)
    config.save("~/deep/config.yaml")
    assert (tmp_path / "home" / "deep" / "config.yaml").is_file()
    assert LaunchConfig.load("~/deep/config.yaml") == config
    assert resolve({}, "~/deep/config.yaml")[0] == config
    assert write_basic_config(save_location="~/deep/config.yaml") is False
    for call in (LaunchConfig.load, config.save):
        with pytest.raises(ConfigError, match=r"nobody-at-all.*: there is no such home"):
            call("~nobody-at-all/a.yaml")


def test_a_file_written_by_hand(path):
    path.write_text("# mine\nmixed_precision: no\ndevices: 0,1\ngrace: 3\n")
    assert LaunchConfig.load(path) == LaunchConfig(mixed_precision="no", devices=(0, 1), grace=3)
    path.write_text("# nothing yet\n")
    assert LaunchConfig.load(path) == LaunchConfig()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"- a\n- b\n", "holds a list"),
        (b"a: [\n", "cannot be read"),
        (b"env:\n  KEY: secret: 1\n", "mapping values are not allowed here (line 2)"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"num_proceses: 2\n", "'num_proceses'"),
        (b"1: 2\n", "1"),
        (b"engine: tpu\n", "'local'"),
        (b"seed: 2024-99-99\n", "it cannot be read: month must be in 1..12"),
        (b"seed: " + b"9" * 5000 + b"\n", ""),
        (b"seed: !!timestamp now\n", "it cannot be read"),
    ],
)
def test_a_file_that_makes_no_sense_is_named(text, said, path):
    with pytest.raises(ConfigError, match="cannot be read"):
        LaunchConfig.load(path)
    path.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        LaunchConfig.load(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_accelerates_file(path):
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: MULTI_GPU\n"
        "downcast_bf16: 'no'\nenable_cpu_affinity: false\ngpu_ids: 1,3\nmachine_rank: 0\n"
        "main_process_port: 29512\nmain_training_function: main\nmixed_precision: bf16\n"
        "num_machines: 1\nnum_processes: 2\nrdzv_backend: static\nsame_network: true\ntpu_env: []\n"
        "use_cpu: false\n"
    )
    assert LaunchConfig.load(path) == LaunchConfig(
        devices=(1, 3), use_port=29512, mixed_precision="bf16", num_processes=2
    )
    path.write_text(
        "distributed_type: MULTI_CPU\nuse_cpu: true\nenable_cpu_affinity: true\ngpu_ids: all\n"
    )
    expected = LaunchConfig(devices="cpu", env={"ACCELERATE_CPU_AFFINITY": "true"})
    assert LaunchConfig.load(path) == expected


def test_accelerates_file_for_two_machines_counts_their_processes_together(path):
    text = (
        "distributed_type: MULTI_CPU\nnum_machines: 2\nnum_processes: {}\nmachine_rank: 0\n"
        "main_process_ip: 10.0.0.1\nmain_process_port: 29500\n"
    )
    path.write_text(text.format(4))
    config = LaunchConfig.load(path)
    assert (config.engine, config.num_nodes, config.num_processes) == ("elastic", 2, 2)
    assert (config.master_addr, config.use_port) == ("10.0.0.1", 29500)
    path.write_text(text.format(3))
    with pytest.raises(ConfigError, match="num_processes: 3 on num_machines: 2"):
        LaunchConfig.load(path)


@pytest.mark.parametrize(
    "line", ["machine_rank: 1", "distributed_type: MEGATRON_LM", "mixed_precision: fp7"]
)
def test_what_of_accelerates_file_cannot_be_had_is_named(line, path):
    path.write_text(f"compute_environment: LOCAL_MACHINE\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        LaunchConfig.load(path)
    name, value = line.split(": ")
    assert name in str(caught.value)
    assert value in str(caught.value)
    assert str(path) in str(caught.value)


def test_accelerates_file_for_fsdp_and_a_mesh(path):
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_transformer_layer_cls_to_wrap: BertLayer\n  fsdp_offload_params: 'No'\n"
        "  fsdp_use_orig_params: true\n  fsdp_version: 2\nnum_processes: 4\nparallelism_config:\n"
        "  parallelism_config_dp_shard_size: 2\n  parallelism_config_tp_size: 2\n"
    )
    assert LaunchConfig.load(path) == LaunchConfig(
        num_processes=4,
        fsdp={
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": "BertLayer",
            "cpu_offload": False,
            "fsdp_version": 2,
        },
        parallelism={"dp_shard_size": 2, "tp_size": 2},
    )
    path.write_text(  # all that `accelerate config` asks for in version 1
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_activation_checkpointing: false\n"
        "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_backward_prefetch: BACKWARD_PRE\n"
        "  fsdp_cpu_ram_efficient_loading: true\n  fsdp_forward_prefetch: false\n"
        "  fsdp_min_num_params: 100000000\n  fsdp_offload_params: false\n"
        "  fsdp_reshard_after_forward: HYBRID_SHARD_ZERO2\n"
        "  fsdp_state_dict_type: SHARDED_STATE_DICT\n  fsdp_sync_module_states: true\n"
        "  fsdp_use_orig_params: true\n  fsdp_version: 1\n"
    )
    assert LaunchConfig.load(path).fsdp == {
        "activation_checkpointing": False,
        "auto_wrap_policy": "size_based_wrap",
        "cpu_ram_efficient_loading": True,
        "min_num_params": 100_000_000,
        "cpu_offload": False,
        "sharding_strategy": "HYBRID_SHARD_ZERO2",
        "state_dict_type": "SHARDED_STATE_DICT",
        "sync_module_states": True,
        "fsdp_version": 1,
    }
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_moon: 1\n")
    with pytest.raises(ConfigError, match="fsdp_config: fsdp_moon: not supported"):
        LaunchConfig.load(path)


@pytest.mark.parametrize(
    ("section", "fsdp"),
    [
        ({"fsdp_sharding_strategy": 2}, {"sharding_strategy": "SHARD_GRAD_OP"}),
        ({"fsdp_sharding_strategy": "5"}, {"sharding_strategy": "HYBRID_SHARD_ZERO2"}),
        ({"fsdp_reshard_after_forward": 3}, {"sharding_strategy": "NO_SHARD"}),
        ({"fsdp_reshard_after_forward": 1}, {"reshard_after_forward": True}),
        ({"fsdp_state_dict_type": 3}, {"state_dict_type": "SHARDED_STATE_DICT"}),
        ({"fsdp_offload_params": 1}, {"cpu_offload": True}),
        ({"fsdp_sync_module_states": 0}, {"sync_module_states": False}),
    ],
)
def test_numbers_in_accelerates_file(section, fsdp, path):
    """Of a choice it is torch's, which counts from 1; of a flag, 1 or 0."""
    path.write_text(yaml.safe_dump({"distributed_type": "FSDP", "fsdp_config": section}))
    assert LaunchConfig.load(path).fsdp == fsdp


def test_accelerates_file_for_deepspeed(path):
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n"
        "  deepspeed_multinode_launcher: standard\n  gradient_accumulation_steps: auto\n"
        "  gradient_clipping: 1\n  offload_optimizer_device: none\n  zero3_init_flag: 'true'\n"
        "  zero_stage: 3\nnum_processes: 2\n"
    )
    given = {"gradient_clipping": 1, "offload_optimizer_device": "none", "zero3_init_flag": True}
    expected = LaunchConfig(num_processes=2, deepspeed={**given, "zero_stage": 3})
    assert LaunchConfig.load(path) == expected
    assert PLUGINS["deepspeed"].variables(expected.deepspeed or {}) == {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_CLIPPING": "1",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    }
    path.write_text("distributed_type: DEEPSPEED\n")
    assert LaunchConfig.load(path) == LaunchConfig(deepspeed={})
    path.write_text("distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_version: 2\n")
    assert LaunchConfig.load(path) == LaunchConfig(), "the section of another type is not used"
    with pytest.raises(ConfigError, match="fsdp and deepspeed were given"):
        LaunchConfig(deepspeed={}, fsdp={})


def test_how_accelerates_file_compiles_and_computes_in_8_bits(path):
    """What reaches its ranks by variables reaches ours by them; what nothing reads is named."""
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndowncast_bf16: 'yes'\ndynamo_config:\n"
        "  dynamo_backend: INDUCTOR\n  dynamo_use_dynamic: false\nfp8_config:\n  backend: AO\n"
        "  enable_fsdp_float8_all_gather: false\n  margin: 2\n  pad_inner_dim: false\n"
        "mixed_precision: fp8\nmpirun_config: {}\n"
    )
    variables = {
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_FP8_PAD_INNER_DIM": "False",
    }
    line = f"config file {str(path)!r}: fp8_margin=2, downcast_bf16: not used here"
    config, notices = resolve({}, path)
    assert config == LaunchConfig(mixed_precision="fp8", env=variables)
    assert notices == [line]
    with pytest.warns(UserWarning, match="not used here") as caught:
        assert LaunchConfig.load(path) == config
    assert [str(one.message) for one in caught] == [line]
    assert [one.filename for one in caught] == [__file__]
    path.write_text(
        "distributed_type: 'NO'\ndynamo_config:\n  backend: NO\nfp8_config: {margin: 2}\n"
    )
    assert resolve({}, path) == (LaunchConfig(), []), "neither is asked for"
    path.write_text("distributed_type: 'NO'\ndynamo_config: 3\n")
    with pytest.raises(ConfigError, match="dynamo_config: 3: expected names with values below it"):
        LaunchConfig.load(path)


# ---- where values come from ----------------------------------------------------------------


def test_the_order(monkeypatch):
    """An argument, config=, our environment, Accelerate's, the saved file, the default."""

    def found(**arguments):
        config = arguments.pop("config", None)
        return resolve(arguments, config)[0].mixed_precision

    assert found() is None
    LaunchConfig(mixed_precision="fp16", grace=3).save(default_config_path())
    assert found() == "fp16"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert found() == "bf16"
    monkeypatch.setenv("NOTEBOOK_ACCEL_MIXED_PRECISION", "no")
    assert found() == "no"
    assert found(config={"mixed_precision": "fp16"}) == "fp16"
    assert found(config={"mixed_precision": "fp16"}, mixed_precision="bf16") == "bf16"
    # Settings that nobody else gives come from further back, each on its own.
    assert resolve({"mixed_precision": "no"})[0].grace == 3


def test_variables_of_a_plugin_go_before_the_saved_file(monkeypatch):
    fsdp = {"sharding_strategy": "FULL_SHARD", "cpu_offload": True}
    env = {"ACCELERATE_LOG_LEVEL": "info", "MINE": "1"}
    LaunchConfig(fsdp=fsdp, env=env).save(default_config_path())
    assert resolve({})[0] == LaunchConfig(fsdp=fsdp, env=env)
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "debug")
    monkeypatch.setenv("MINE", "2")
    expected = LaunchConfig(fsdp={"cpu_offload": True}, env={"MINE": "1"})
    assert resolve({})[0] == expected, "ranks have the others from the environment"
    assert resolve({}, {"fsdp": fsdp, "env": env})[0] == LaunchConfig(fsdp=fsdp, env=env)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    assert resolve({})[0].fsdp is None
    assert resolve({"fsdp": {}})[0].fsdp == {}
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "maybe")
    with pytest.raises(ConfigError, match="ACCELERATE_USE_FSDP='maybe'"):
        resolve({})


def test_a_plugin_of_the_saved_file_gives_way_to_another(monkeypatch):
    LaunchConfig(fsdp={}).save(default_config_path())
    assert resolve({"deepspeed": {}})[0] == LaunchConfig(deepspeed={})
    assert resolve({"parallelism": {"tp_size": 2}})[0].fsdp == {}
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert resolve({})[0].fsdp is None


def test_an_engine_of_one_rank_is_asked_for_no_more_by_the_environment_or_the_saved_file(
    monkeypatch,
):
    """The person can leave nothing out that the call does not say."""
    LaunchConfig(num_processes=2, seed=3).save(default_config_path())
    assert resolve({"engine": "inline"})[0] == LaunchConfig(engine="inline", seed=3)
    assert resolve({"engine": "local"})[0].num_processes == 2
    with pytest.raises(ConfigError, match="num_processes=2 cannot be had"):
        resolve({"engine": "inline"}, {"num_processes": 2})
    monkeypatch.setenv("NOTEBOOK_ACCEL_NUM_PROCESSES", "3")
    assert resolve({"engine": "inline"})[0].num_processes is None


def test_every_form_of_config(tmp_path):
    path = tmp_path / "mine.yaml"
    expected = LaunchConfig(num_processes=2, mixed_precision="bf16")
    expected.save(path)
    mapping = {"num_processes": 2, "mixed_precision": "bf16"}
    for form in (expected, mapping, path, str(path)):
        assert resolve({}, form)[0] == expected
    with pytest.raises(ConfigError, match="config=7"):
        resolve({}, 7)


@pytest.mark.parametrize("given", ["arguments", "config"])
def test_unknown_names_are_named_with_those_that_there_are(given):
    with pytest.raises(ConfigError, match="'num_gpus'") as caught:
        resolve({"num_gpus": 2}) if given == "arguments" else resolve({}, {"num_gpus": 2})
    assert all(field.name in str(caught.value) for field in fields(LaunchConfig))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("NOTEBOOK_ACCEL_NUM_PROCESSES", "2", {"num_processes": 2}),
        ("NOTEBOOK_ACCEL_MIXED_PRECISION", "bf16", {"mixed_precision": "bf16"}),
        ("NOTEBOOK_ACCEL_DEVICES", "0,1", {"devices": (0, 1)}),
        ("NOTEBOOK_ACCEL_GRACE", "2.5", {"grace": 2.5}),
        ("NOTEBOOK_ACCEL_DEBUG", "1", {"debug": True}),
        ("NOTEBOOK_ACCEL_DEBUG", "no", {"debug": False}),
        ("ACCELERATE_USE_CPU", "true", {"devices": "cpu"}),
        ("ACCELERATE_USE_CPU", "1", {"devices": "cpu"}),
        ("ACCELERATE_USE_CPU", "false", {}),
    ],
)
def test_the_environment(name, text, value, monkeypatch):
    monkeypatch.setenv(name, text)
    assert resolve({})[0] == LaunchConfig(**value)
    monkeypatch.setenv(name, "")
    assert resolve({})[0] == LaunchConfig()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("NOTEBOOK_ACCEL_NUM_PROCESSES", "two"),
        ("NOTEBOOK_ACCEL_USE_PORT", "any"),
        ("NOTEBOOK_ACCEL_MIXED_PRECISION", "fp7"),
        ("ACCELERATE_MIXED_PRECISION", "fp7"),
        ("ACCELERATE_USE_CPU", "perhaps"),
        ("ACCELERATE_DEBUG_MODE", "perhaps"),
    ],
)
def test_a_bad_variable_is_named(variable, text, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=f"{variable}='{text}'"):
        resolve({})


def test_a_variable_that_is_overruled_is_not_looked_at(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp7")
    monkeypatch.setenv("NOTEBOOK_ACCEL_NUM_PROCESSES", "two")
    given = {"mixed_precision": "bf16", "num_processes": 2}
    assert resolve(given)[0] == LaunchConfig(**given)


def test_accelerates_variable_against_an_argument_and_the_cpu_of_the_saved_file(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert resolve({"devices": [0]})[0].devices == (0,)
    LaunchConfig(devices="cpu").save(default_config_path())
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert resolve({})[0].devices is None
    assert resolve({"devices": "cpu"})[0].devices == "cpu"
    monkeypatch.setenv("NOTEBOOK_ACCEL_DEVICES", "cpu")
    assert resolve({})[0].devices == "cpu", "our variable goes before Accelerate's"
    monkeypatch.delenv("NOTEBOOK_ACCEL_DEVICES")
    LaunchConfig(devices=[0]).save(default_config_path())
    assert resolve({})[0].devices == (0,), "which is no CPU"


def test_the_saved_file_is_named():
    """As used, and where it is broken."""
    assert resolve({})[1] == []
    LaunchConfig(num_processes=2).save(default_config_path())
    config, (line,) = resolve({})
    assert config.num_processes == 2
    assert str(default_config_path()) in line
    default_config_path().write_text("num_processes: 0\n")
    with pytest.raises(ConfigError, match=rf"{default_config_path()}.*num_processes=0"):
        resolve({})


def test_a_mode_of_torch_that_kills_ranks_is_named(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    assert resolve({"debug": True})[1] == []
    for env in ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, None):
        (line,) = resolve({"env": env})[1]
        assert "DETAIL is set: with it, torch ends a rank by SIGSEGV" in line
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert resolve({"env": {"TORCH_DISTRIBUTED_DEBUG": "OFF"}})[1] == []


@pytest.mark.parametrize("config", [{"debug": False, "grace": 10.0}, "debug: false\ngrace: 10.0\n"])
def test_a_value_that_is_the_default_is_a_value(config, monkeypatch, tmp_path):
    """What was written wins over what comes after it, whatever it says."""
    if isinstance(config, str):
        (tmp_path / "mine.yaml").write_text(config)
        config = tmp_path / "mine.yaml"
    monkeypatch.setenv("NOTEBOOK_ACCEL_DEBUG", "1")
    monkeypatch.setenv("NOTEBOOK_ACCEL_GRACE", "3")
    found, _ = resolve({}, config)
    assert (found.debug, found.grace) == (False, 10.0)
    found, _ = resolve({"debug": False, "grace": 10.0}, LaunchConfig(debug=True, grace=4))
    assert (found.debug, found.grace) == (False, 10.0)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "config.yaml").touch()
    os.truncate(tmp_path / "config.yaml", 1 << 40)
    with pytest.raises(ConfigError, match=r"config\.yaml.* 1 GB"):
        LaunchConfig.load(tmp_path / "config.yaml")


def test_help_shows_each_setting_with_its_type_default_and_meaning():
    text = pydoc.plain(pydoc.render_doc(LaunchConfig))
    (start,) = re.findall(r"^ \|  Settings:\n(.*?)\n \|  Methods", text, flags=re.DOTALL | re.M)
    told = re.findall(r"^ \|      (\w+): (.+) = (.+)\n \|          \S", start, flags=re.M)
    defaults = [(one.name, one.type, repr(one.default)) for one in fields(LaunchConfig)]
    assert told == defaults
    assert "    grace: float = 10.0\n |          Seconds that ranks get to leave: after" in start
    assert "Settings of a launch, checked at construction" in text
