"""Settings of libraries that are not used here: made as Accelerate's, refused where they count."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import accelerate.utils as peer
import pytest

from notebook_accel import Accelerator, ConfigError, ParallelismConfig, utils
from notebook_accel.training import refused
from tests.training.single import fresh_rank  # noqa: F401

NAMES = [
    "DeepSpeedSequenceParallelConfig",
    "FP8RecipeKwargs",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "TERecipeKwargs",
]


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_accelerates(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(kind, name)).parameters for kind in (utils, peer))
    assert [(each.name, each.default) for each in ours.values()] == [
        (each.name, each.default) for each in theirs.values()
    ]


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("DeepSpeedSequenceParallelConfig", {}),
        (
            "DeepSpeedSequenceParallelConfig",
            {
                "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "false",
                "PARALLELISM_CONFIG_SP_SEQ_LENGTH": "64",
                "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "flash_attention_2",
            },
        ),
        ("MSAMPRecipeKwargs", {}),
        ("MSAMPRecipeKwargs", {"ACCELERATE_FP8_OPT_LEVEL": "O1"}),
        ("MegatronLMPlugin", {}),
        (
            "MegatronLMPlugin",
            {
                "MEGATRON_LM_TP_DEGREE": "4",
                "MEGATRON_LM_SEQUENCE_PARALLELISM": "true",
                "MEGATRON_LM_GRADIENT_CLIPPING": "0.5",
                "MEGATRON_LM_RECOMPUTE_METHOD": "block",
                "MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS": "3",
                "MEGATRON_LM_ATTENTION_BACKEND": "no",
            },
        ),
    ],
)
def test_fields_are_accelerates(
    name: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, text in variables.items():
        monkeypatch.setenv(variable, text)
    ours = dataclasses.asdict(getattr(utils, name)())
    theirs = getattr(peer, name)()
    assert ours == {field: getattr(theirs, field) for field in ours}


def test_recipes_of_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {
        "use_autocast_during_eval": False,
        "margin": 0,
        "interval": 1,
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "most_recent",
        "override_linear_precision": (False, False, False),
        "use_mxfp8_block_scaling": False,
    }
    assert utils.TERecipeKwargs().to_dict() == expected
    for variable, text in {
        "ACCELERATE_FP8_FORMAT": "e4m3",
        "ACCELERATE_FP8_MARGIN": "2",
        "ACCELERATE_FP8_OVERRIDE_DGRAD": "true",
        "ACCELERATE_FP8_BACKEND": "msamp",
    }.items():
        monkeypatch.setenv(variable, text)
    changed = {"fp8_format": "E4M3", "margin": 2, "override_linear_precision": (False, True, False)}
    assert utils.TERecipeKwargs().to_dict() == {**expected, **changed}
    assert utils.FP8RecipeKwargs(margin=1).to_dict() == {
        **expected,
        **changed,
        "margin": 1,
        "opt_level": "O2",
        "backend": "MSAMP",
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: utils.TERecipeKwargs(fp8_format="E3M4"), r"fp8_format='E3M4'\): expected one of"),
        (lambda: utils.TERecipeKwargs(amax_compute_algo="min"), "expected one of max, most_recent"),
        (lambda: utils.MSAMPRecipeKwargs("O3"), r"opt_level='O3'\): expected one of O1, O2"),
        (lambda: utils.FP8RecipeKwargs(backend="AO"), "expected one of MSAMP, TE"),
        (
            lambda: utils.DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False),
            "needs sp_seq_length, or the variable",
        ),
        (
            lambda: utils.DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager"),
            "expected one of flash_attention_2, ",
        ),
        (
            lambda: ParallelismConfig(
                sp_size=2, sp_handler=utils.DeepSpeedSequenceParallelConfig(sp_seq_length=8)
            ),
            "Ulysses.*use cp_size",
        ),
        (
            lambda: Accelerator(cpu=True, megatron_lm_plugin=utils.MegatronLMPlugin(tp_degree=2)),
            r"megatron_lm_plugin=\.\.\.\): Megatron-LM is not there.*ParallelismConfig\(tp_size",
        ),
        *(
            (
                lambda kind=kind: Accelerator(cpu=True, kwargs_handlers=[kind()]),
                f"has a {kind.__name__}: 8-bit training by .*is not supported; by torchao it is",
            )
            for kind in (utils.TERecipeKwargs, utils.MSAMPRecipeKwargs, utils.FP8RecipeKwargs)
        ),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_what_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "two")
    with pytest.raises(ConfigError, match="MEGATRON_LM_TP_DEGREE='two': expected a value of type"):
        utils.MegatronLMPlugin()
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.raises(ConfigError, match="ACCELERATE_USE_MEGATRON_LM: Megatron-LM is not there"):
        Accelerator(cpu=True)


def test_a_script_that_makes_them_and_does_not_use_them_runs() -> None:
    handler = utils.DeepSpeedSequenceParallelConfig(sp_attn_implementation="org/flash-attn3")
    config = ParallelismConfig(sp_size=1, sp_handler=handler)
    assert Accelerator(cpu=True, parallelism_config=config, megatron_lm_plugin=None)


def test_what_drives_other_libraries_says_what_there_is() -> None:
    for name in refused.__all__:
        with pytest.raises(ConfigError, match=rf"{name}\(\): there is no .* here"):
            getattr(refused, name)(1, model=2)

    class Own(utils.GPTTrainStep):
        pass

    with pytest.raises(ConfigError, match=r"Own\(\): there is no Megatron-LM here; torch divides"):
        Own()


@pytest.mark.parametrize("door", ["launch", "megatron_lm", "torch_xla", "transformer_engine"])
def test_scripts_that_import_them_run(door: str) -> None:
    theirs = importlib.import_module(f"accelerate.utils.{door}")
    wanted = {
        name
        for name, value in vars(theirs).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == theirs.__name__
    }
    assert wanted
    assert wanted <= set(dir(importlib.import_module(f"notebook_accel.utils.{door}")))
