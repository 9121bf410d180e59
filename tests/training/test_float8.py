"""Training in 8 bits by torchao: emulated where that is installed, else refused with a reason."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from notebook_accel import (
    Accelerator,
    ConfigError,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    utils,
)
from notebook_accel.training import precision as precisions
from notebook_accel.training.processes import topology
from tests.training.harness import run_ranks

ASKED = {"cpu": True, "mixed_precision": "fp8"}


def recipe(**fields):
    """One whose configuration says no more than what is looked at before anything is converted."""
    fields = {"emulate": False, "enable_fsdp_float8_all_gather": False, **fields}
    return utils.AORecipeKwargs(config=SimpleNamespace(**fields))


def test_without_torchao_it_says_so(monkeypatch):
    monkeypatch.setattr(precisions, "is_installed", lambda _: False)
    for ask in (
        lambda: Accelerator(**ASKED),
        utils.AORecipeKwargs,
        lambda: utils.convert_model_to_fp8_ao(nn.Linear(1, 1)),
    ):
        with pytest.raises(ConfigError, match=r"bf16.*pip install torchao"):
            ask()
    assert Accelerator(cpu=True).fp8_backend == utils.FP8BackendType.NO == "NO"


def test_what_does_not_multiply_in_8_bits_is_refused(monkeypatch):
    monkeypatch.setattr(precisions, "is_installed", lambda _: True)
    with pytest.raises(ConfigError, match=r"on cpu: 8-bit products need .*8\.9.*emulate=True"):
        Accelerator(**ASKED, kwargs_handlers=[recipe()])
    with pytest.raises(ConfigError, match="enable_fsdp_float8_all_gather=True is not supported"):
        recipe(enable_fsdp_float8_all_gather=True)
    monkeypatch.setattr(topology, "count_ranks", lambda **_: (2, 2))
    with pytest.raises(ConfigError, match=r"converts whole linear layers.*tensor parallelism"):
        Accelerator(
            **ASKED,
            kwargs_handlers=[recipe(emulate=True)],
            parallelism_config=ParallelismConfig(tp_size=2),
        )


def test_other_code_computes_as_the_emulating_accelerator(monkeypatch):
    monkeypatch.setattr(precisions, "is_installed", lambda _: True)
    given = recipe(emulate=True)
    accelerator = Accelerator(**ASKED, kwargs_handlers=[given])
    assert accelerator.has_fp8_handler
    assert accelerator.ao_recipe_handler is given
    with accelerator.autocast():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16


def make():
    torch.manual_seed(0)
    inner = [nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()]
    return nn.Sequential(*inner, nn.Linear(32, 17), nn.Linear(17, 1))


def learn(strategy, accumulation=1, emulate=True):
    """Ten steps with products in 8 bits, and with none; emulated on the CPU, or on a GPU.

    Each is of as many parts of the samples as ``accumulation`` says.
    """
    from torchao.float8 import Float8LinearConfig

    losses = {}
    asked = {}
    if strategy == "fsdp":
        asked["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    if strategy == "pipeline":
        asked["parallelism_config"] = ParallelismConfig(pp_size=2)
    recipes = [utils.AORecipeKwargs(config=Float8LinearConfig(emulate=emulate))]
    for precision, handlers in (("no", []), ("fp8", recipes)):
        accelerator = Accelerator(
            cpu=emulate,
            mixed_precision=precision,
            kwargs_handlers=handlers,
            gradient_accumulation_steps=accumulation,
            **asked,
        )
        model = make()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inputs = torch.linspace(-1, 1, 64, device=accelerator.device).reshape(16, 4)
        losses[precision] = []
        for number in range(10 * accumulation):
            part = inputs[number % accumulation :: accumulation]
            with accelerator.accumulate(model):
                loss = accelerator.forward_backward(
                    model, part, part.sum(1, keepdim=True), nn.functional.mse_loss
                )
                optimizer.step()
                optimizer.zero_grad()
            losses[precision].append(float(loss))
    # An 8-bit number has 3 bits behind the point: a product of two moves by 2**-3 at most.
    assert losses["fp8"] == pytest.approx(losses["no"], rel=2.0**-3)
    assert losses["fp8"] != pytest.approx(losses["no"], rel=2.0**-10)
    assert losses["fp8"][-1] < losses["fp8"][0] / 2
    assert set(accelerator.get_state_dict(model)) == set(make().state_dict())
    assert accelerator.fp8_backend == "AO"
    if strategy != "pipeline":  # there a rank has the layers of its stage
        kinds = [type(part).__name__ for part in accelerator.unwrap_model(model)]
        # Neither the first and the last, nor one whose sizes do not fit.
        linear = [kind for kind in kinds if "Linear" in kind]
        assert linear == ["Linear", "Float8Linear", "Linear", "Linear"]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "pipeline"])
def test_emulated_training_stays_near_full_precision(strategy, accumulation):
    pytest.importorskip("torchao", reason="torchao is not installed")
    run_ranks(learn, 1 if strategy == "single" else 2, strategy, accumulation)


@pytest.mark.gpu
def test_a_gpu_multiplies_in_8_bits():
    pytest.importorskip("torchao", reason="torchao is not installed")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")
    learn("single", emulate=False)
