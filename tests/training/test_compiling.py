"""Compiling whole models and repeated blocks; the backend is "eager", so that nothing is built."""

import copy
import pickle

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin as PeerPlugin
from accelerate.utils import compile_regions as peer_compile_regions
from torch import nn

from notebook_accel import Accelerator
from notebook_accel.errors import ConfigError
from notebook_accel.private.of_torch import original_module
from notebook_accel.training.strategies.compiling import (
    DynamoBackend,
    TorchDynamoPlugin,
    compile_in_place,
    compile_regions,
    has_compiled_regions,
    is_compiled_module,
)
from tests.training.harness import on_ranks
from tests.training.meshes import FLOAT_ERROR, LAYOUTS, check_run, train, twin
from tests.training.test_matrix import DECODER


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
        self.head = nn.Sequential(nn.Linear(4, 2), nn.ReLU())

    def forward(self, x):
        x = self.embed(x)
        for layer in self.body["layers"]:
            x = torch.relu(layer(x))
        return self.head(x)


def compiled_parts(model):
    return [name for name, module in model.named_modules() if is_compiled_module(module)]


def test_blocks_are_compiled_as_accelerate_compiles_them():
    model, x = Layered(), torch.tensor([1, 2])
    compiled = compile_regions(model, backend="eager")
    assert compiled_parts(compiled) == compiled_parts(peer_compile_regions(model, backend="eager"))
    assert compiled_parts(model) == []
    assert type(compiled) is Layered
    assert compiled.embed._orig_mod is model.embed
    assert original_module(compiled) is model
    assert has_compiled_regions(compiled)
    assert not is_compiled_module(compiled)
    assert torch.equal(compiled(x), model(x))
    compiled(x).sum().backward()
    assert model.body["layers"][0].weight.grad is not None


def test_a_model_without_repeated_blocks_is_compiled_as_a_whole():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert is_compiled_module(compile_regions(model, backend="eager"))


def test_a_plugin_that_leaves_fields_open_is_that_of_the_environment(monkeypatch):
    unsaid = dict.fromkeys(("backend", "mode", "fullgraph", "dynamic"))
    unsaid["use_regional_compilation"] = None
    for text in ("no", "inductor"):
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", text)
        assert TorchDynamoPlugin(**unsaid).to_dict() == PeerPlugin(**unsaid).to_dict()
    assert TorchDynamoPlugin().to_kwargs() == PeerPlugin().to_kwargs()
    assert [member.name for member in DynamoBackend] == [
        m.name for m in PeerPlugin().backend.__class__
    ]


REGIONS = TorchDynamoPlugin(backend=DynamoBackend.EAGER, use_regional_compilation=True)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("regions", [False, True])
def test_prepare_compiles(precision, regions, tmp_path):
    asked = {"dynamo_plugin": REGIONS} if regions else {"dynamo_backend": "eager"}
    accelerator = Accelerator(cpu=True, mixed_precision=precision, **asked)
    torch.manual_seed(2)
    model, x = Layered(), torch.tensor([1, 2])
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    assert is_compiled_module(prepared) is not regions
    assert has_compiled_regions(prepared)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with accelerator.autocast():
        expected = plain(x)
    torch.testing.assert_close(prepared(x), expected.float(), atol=1e-6, rtol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    accelerator.backward(prepared(x).sum())
    optimizer.step()
    assert not torch.equal(model.head[0].weight, plain.head[0].weight)

    assert has_compiled_regions(accelerator.unwrap_model(prepared))
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
    assert list(accelerator.get_state_dict(prepared)) == list(plain.state_dict())
    accelerator.save_state(tmp_path)
    kept = model.embed.weight.detach().clone()
    with torch.no_grad():
        model.embed.weight.zero_()
    accelerator.load_state(tmp_path)
    assert torch.equal(model.embed.weight, kept)
    inside = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False, keep_torch_compile=False)
    assert "forward" not in vars(inside)


def test_prepare_reads_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    assert is_compiled_module(Accelerator(cpu=True).prepare(Layered()))
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    assert type(Accelerator(cpu=True).prepare(Layered())) is Layered


def test_what_is_compiled_already_is_left_alone():
    mine = torch.compile(Layered(), backend="eager")
    assert Accelerator(cpu=True, dynamo_backend="eager").prepare(mine) is mine


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="dynamo_plugin and dynamo_backend='eager'"):
        Accelerator(cpu=True, dynamo_plugin=REGIONS, dynamo_backend="eager")
    with pytest.raises(ConfigError, match="is a str: expected a TorchDynamoPlugin"):
        Accelerator(cpu=True, dynamo_plugin="eager")


WHOLE = TorchDynamoPlugin(backend=DynamoBackend.EAGER)
SPREAD = {
    "replicas": (2, None, WHOLE),
    "fsdp": (2, "fsdp", WHOLE),
    "fsdp, forward twice": (2, "fsdp, forward twice", REGIONS),
    "tensor": (2, "tensor", TorchDynamoPlugin(backend=DynamoBackend.AOT_EAGER)),
    "fsdp x tensor": (4, "fsdp x tensor", REGIONS),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "ranks"), [(name, row[0]) for name, row in SPREAD.items()])
@on_ranks("ranks", timeout=180)
def test_a_compiled_model_that_is_spread_equals_one_process(name, ranks):
    _, layout, plugin = SPREAD[name]
    case = {"accumulate": 2}
    ours = train(layout, {**case, "settings": {"dynamo_plugin": plugin}})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    check_run(ours, twin(LAYOUTS[layout][1], case), case)


@on_ranks(2, timeout=180)
def test_the_blocks_of_a_pipeline_are_compiled():
    result = train("1F1B", {**DECODER, "settings": {"dynamo_backend": "eager"}})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert result["losses"] == pytest.approx(twin(1, DECODER)["losses"], abs=16 * FLOAT_ERROR)


def test_a_model_compiled_in_place_is_copied_and_pickled():
    torch.manual_seed(2)  # of some weights the outputs are 0, whatever the first layer gives
    model, x = Layered(), torch.tensor([1, 2])
    expected = model(x)
    compile_in_place(model, REGIONS)
    assert list(model.state_dict()) == list(Layered().state_dict())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.body["layers"][0].weight.zero_()
    assert torch.equal(model(x), expected)
    assert not torch.equal(other(x), expected)
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(x), expected)
