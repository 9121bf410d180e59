"""Checkpoints of models in parts load under any other strategy, and training goes on the same.

Each run trains three steps, saves, and trains three more; whoever loads must get the losses of
those three, in float32 up to the order of sums (see ``meshes``).
"""

import pickle
import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from notebook_accel.utils import merge_fsdp_weights
from safetensors.torch import load_file, load_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from notebook_accel import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    NotebookAccelError,
    ParallelismConfig,
)
from notebook_accel.training.checkpoint.start import find_damage
from notebook_accel.training.collectives import gather_object
from tests.training.harness import on_ranks, run_ranks, runs_here, skip_unless_it_runs
from tests.training.meshes import (
    BY_RANK,
    FLOAT_ERROR,
    LAYOUTS,
    WORDS,
    Deep,
    accelerator_for,
    blocks,
    data,
    loss_of,
)
from tests.training.test_checkpoint import Evil

STEPS = 3
# Whoever trains has sharded the model before prepare.
GIVEN = "fully_shard, by hand"
RANKS = {**{name: ranks for name, (ranks, _, _) in LAYOUTS.items()}, "ddp": 2, "full": 2, GIVEN: 2}


def make_accelerator(mesh):
    if mesh == "full":
        from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig

        # As the articles write it.
        on_rank_0 = {"offload_to_cpu": True, "rank0_only": True}
        plugin = FullyShardedDataParallelPlugin(
            state_dict_config=FullStateDictConfig(**on_rank_0),
            optim_state_dict_config=FullOptimStateDictConfig(**on_rank_0),
        )
        return Accelerator(cpu=True, split_batches=True, fsdp_plugin=plugin)
    return accelerator_for(mesh if mesh in LAYOUTS else None, split_batches=True)


def train(mesh, folder, saves):
    accelerator = make_accelerator(mesh)
    torch.manual_seed(3 if saves else 4)  # a loaded model starts from other weights
    model = Deep()
    if mesh == GIVEN:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    weights = list(model.parameters())
    # Groups across stages, in another order than the model's.
    groups = [{"params": weights[:3:-1]}, {"params": weights[:4]}]
    # numpy, as a LambdaLR that computes with it leaves it.
    optimizer = torch.optim.AdamW(groups, lr=np.float64(1e-2) if saves else 1.0)
    loader = DataLoader(data(8), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def steps():
        losses = []
        for _ in range(STEPS):
            for inputs, targets in loader:
                loss = accelerator.forward_backward(model, inputs, targets, loss_of)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(accelerator.reduce(loss, "mean")))
        return losses

    if saves:
        steps()
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    return steps()


GO_ON = [
    ("fsdp, blocks", "single"),
    ("single", "fsdp, blocks"),
    ("fsdp, blocks", "fsdp x tensor"),
    ("fsdp x tensor", "single"),
    ("fsdp x tensor", "ddp"),
    ("ddp", "fsdp x tensor"),
    ("tensor", "fsdp"),
    ("ddp", GIVEN),
    (GIVEN, "single"),
    ("full", "single"),
    ("full", "full"),
    ("fsdp, blocks", "full"),
    ("1F1B", "single"),
    ("single", "1F1B"),
    ("Interleaved1F1B", "1F1B, replicas"),
    (BY_RANK, "single"),
    (BY_RANK, "1F1B, tensor"),
    ("1F1B, tensor", "1F1B, shards"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that gives the checkpoint of a strategy, and the losses after it."""
    root = tmp_path_factory.mktemp("saved")

    @cache
    def saved_by(writer):
        skip_unless_it_runs(writer)
        first, *others = run_ranks(train, RANKS[writer], writer, str(root / writer), True)
        assert all(losses == pytest.approx(first) for losses in others)
        return root / writer, first

    return saved_by


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param(*pair, marks=[pytest.mark.long] if max(map(RANKS.get, pair)) > 2 else [])
        for pair in GO_ON
    ],
)
def test_whoever_loads_goes_on_as_the_writer_did(writer, reader, saved):
    skip_unless_it_runs(reader)
    folder, expected = saved(writer)
    for losses in run_ranks(train, RANKS[reader], reader, str(folder), False):
        assert losses == pytest.approx(expected, abs=10 * FLOAT_ERROR * STEPS)


class Averaging(Deep):
    """BatchNorm in a block and behind the blocks, with averages of each rank's own samples."""

    def __init__(self):
        super().__init__()
        self.blocks[0] = nn.Sequential(self.blocks[0], nn.BatchNorm1d(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, tokens):
        return self.norm(super().forward(tokens))


@pytest.mark.parametrize("sizes", [{}, {"pp_size": 2}], ids=["shards", "stages"])
@on_ranks(2)
def test_averages_of_batches_are_those_of_the_rank_that_counts(sizes, tmp_path):
    """The first rank's, as in whole weights; of a pipeline those of the stage that runs them."""
    mesh = ParallelismConfig(**sizes) if sizes else None

    def prepared():
        accelerator = Accelerator(cpu=True, fsdp_plugin=blocks(), parallelism_config=mesh)
        return accelerator, accelerator.prepare(Averaging())

    def averages(accelerator, model):
        state = accelerator.get_state_dict(model)
        return {name: state[name].tolist() for name in state if "running" in name}

    accelerator, model = prepared()
    inputs, targets = data(8).tensors
    share = slice(8) if sizes else slice(4) if accelerator.is_main_process else slice(4, 8)
    accelerator.forward_backward(model, inputs[share], targets[share], loss_of)
    accelerator.save_state(tmp_path)
    trained = averages(accelerator, model)
    assert all(any(values) for name, values in trained.items() if "mean" in name)
    of_ranks = gather_object([trained])
    assert (of_ranks[0] == of_ranks[1]) == bool(sizes)
    accelerator, model = prepared()
    accelerator.load_state(tmp_path)
    assert averages(accelerator, model) == of_ranks[0]


def test_full_state_dicts_are_the_plain_files_and_sharded_ones_hold_every_rank_s_parts(saved):
    for writer in filter(runs_here, ("full", "1F1B")):
        files = {entry.name for entry in saved(writer)[0].iterdir()}
        assert {"model.safetensors", "optimizer.bin"} <= files
    for writer, ranks in (("fsdp, blocks", 2), (BY_RANK, 4)):
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            assert len(list((saved(writer)[0] / name).glob("*.distcp"))) == ranks


def test_an_optimizer_with_other_groups_is_told_and_another_model_is_no_damage(saved):
    accelerator, folder = Accelerator(cpu=True), saved("fsdp, blocks")[0]
    model = Deep()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"optimizer_0 holds .* of 2 groups .* AdamW here has 1"):
        accelerator.load_state(folder)
    model.blocks[0].up = nn.Linear(model.blocks[0].up.in_features, 3)
    with pytest.raises(RuntimeError, match=r"nothing was loaded\. size mismatch for blocks\.0"):
        accelerator.resume_or_start(folder)


def test_parts_are_merged_into_one_file(saved, tmp_path):
    """Ours, of a checkpoint and of a model's folder, and those that Accelerate writes."""
    import torch.distributed.checkpoint as dcp
    from accelerate.utils import merge_fsdp_weights as theirs

    folder = saved("fsdp x tensor")[0]
    merge_fsdp_weights(folder, tmp_path / "a" / "b")
    merge_fsdp_weights(str(folder / "pytorch_model_fsdp_0"), tmp_path, safe_serialization=False)
    merged = load_file(tmp_path / "a" / "b" / "model.safetensors")
    plain = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    theirs(str(folder / "pytorch_model_fsdp_0"), str(tmp_path / "theirs"))
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    assert merged.keys() == plain.keys() == expected.keys() == Deep().state_dict().keys()
    for name, value in expected.items():
        assert torch.equal(merged[name], value)
        assert torch.equal(plain[name], value)

    written = tmp_path / "checkpoint"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": expected}, checkpoint_id=written / "pytorch_model_fsdp_0", no_dist=True)
    merge_fsdp_weights(written, tmp_path / "c", remove_checkpoint_dir=True)
    assert not written.exists()
    found = load_file(tmp_path / "c" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    (tmp_path / "d" / "optimizer_0").mkdir(parents=True)
    with pytest.raises(
        FileNotFoundError, match=r"such as pytorch_model_fsdp_0.*holds: optimizer_0"
    ):
        merge_fsdp_weights(tmp_path / "d", tmp_path)


def test_the_index_of_parts_is_not_trusted(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Deep())
    folder = shutil.copytree(saved("fsdp, blocks")[0], tmp_path / "state")
    index = folder / "pytorch_model_fsdp_0" / ".metadata"
    whole = index.read_bytes()

    def refused(told):
        for load in (accelerator.load_state, lambda it: merge_fsdp_weights(it, tmp_path)):
            with pytest.raises(NotebookAccelError, match=told):
                load(folder)
        assert re.search(told, find_damage(folder) or "")

    index.write_bytes(pickle.dumps(Evil()))
    refused(r"\.metadata names \w+\.mkdir, which is not read")
    assert not (tmp_path / "evil").exists()
    index.write_bytes(whole[:-20])
    refused(r"\.metadata could not be read")
    index.write_bytes(pickle.dumps([]))
    refused(r"\.metadata holds a list")
    led_out = pickle.loads(whole)
    for part in led_out.storage_data.values():
        part.relative_path = f"../{part.relative_path}"
    index.write_bytes(pickle.dumps(led_out))
    refused(r"\.metadata names the file '\.\./__0_0\.distcp'")


@pytest.mark.parametrize(("layout", "ranks"), [("fsdp x tensor", 4), ("1F1B", 2)])
@on_ranks("ranks")
def test_whole_weights_are_saved_and_loaded_by_hand(layout, ranks, tmp_path):
    """What the documentation shows: unwrap, state_dict, save; and plain weights back."""
    accelerator = accelerator_for(layout)
    torch.manual_seed(3)
    plain = Deep().state_dict()
    model = accelerator.prepare(Deep())
    accelerator.unwrap_model(model).load_state_dict(plain)
    accelerator.save(accelerator.unwrap_model(model).state_dict(), tmp_path / "weights.pt")
    accelerator.save_model(model, tmp_path / "model")
    with pytest.raises((FileNotFoundError, NotebookAccelError), match="no sharded weights"):
        merge_fsdp_weights(tmp_path / "none", tmp_path)
    wrapped = accelerator.get_state_dict(model, unwrap=False)
    accelerator.wait_for_everyone()
    with pytest.raises(RuntimeError, match="size mismatch for head"):
        model.load_state_dict({**plain, "head.weight": torch.zeros(1)})
    loaded = torch.load(tmp_path / "weights.pt", weights_only=True)
    from_model = Deep()
    load_model(from_model, tmp_path / "model" / "model.safetensors")
    for state in (wrapped, loaded, from_model.state_dict()):
        assert state.keys() == plain.keys()
        assert all(torch.equal(value, plain[name]) for name, value in state.items())


class Keeps(nn.Linear):
    """A module that keeps something beside its weights."""

    def __init__(self, kept):
        super().__init__(2, 2)
        self.kept = kept

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


@on_ranks(2)
def test_two_models_and_an_optimizer_that_is_prepared_later(tmp_path):
    """Two models and their optimizers in one ``prepare``, one optimizer later than its model."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=blocks())
    torch.manual_seed(5)
    one, other = Deep(), nn.Linear(WORDS, 1)
    first = torch.optim.SGD([*one.parameters()], lr=0.1)
    second = torch.optim.Adam(other.parameters(), lr=0.1)
    late = other.weight
    one, other, first = accelerator.prepare(one, other, first)
    assert late is not other.weight
    second = accelerator.prepare(second)
    tokens, targets = data(4).tensors
    loss = other(one(tokens)).square().mean() + loss_of(one(tokens), targets)
    accelerator.backward(loss)
    first.step()
    before = accelerator.get_state_dict(other)
    second.step()
    assert not torch.equal(before["weight"], accelerator.get_state_dict(other)["weight"])
    # A model with more than tensors in its state, which is rank 0's where ranks differ.
    keeps = nn.Sequential(Keeps({"rank": accelerator.process_index}), Keeps(torch.ones(2)))
    keeps = accelerator.prepare(keeps)
    accelerator.save_state(tmp_path / "parts")
    # As scripts do before their last save.
    accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    accelerator.save_state(tmp_path / "whole")
    keeps[0].kept, keeps[1].kept = None, torch.zeros(2)
    accelerator.load_state(tmp_path / "parts")
    assert (keeps[0].kept, keeps[1].kept.tolist()) == ({"rank": 0}, [1.0, 1.0])
    parts, whole = (
        {each.name for each in (tmp_path / name).iterdir()} for name in ("parts", "whole")
    )
    assert parts >= {"pytorch_model_fsdp_0", "optimizer_0"}
    assert whole >= {"model.safetensors", "model_1.safetensors", "optimizer.bin"}
    assert not any(name.startswith(("model", "optimizer.bin")) for name in parts)
    assert not any(name.startswith(("pytorch_model_fsdp", "optimizer_0")) for name in whole)


@on_ranks(2)
def test_only_who_writes_holds_what_was_joined(tmp_path):
    """The host of many ranks has no room for one copy each."""
    accelerator = make_accelerator("full")
    accelerator.state.fsdp_plugin.state_dict_config = None
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.forward_backward(model, *data(4).tensors, loss_of)
    optimizer.step()
    held = []
    accelerator.register_save_state_pre_hook(
        lambda _, weights, __: held.extend(sorted(each) for each in weights)
    )
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "model")
    names = sorted(Deep().state_dict())
    assert held == [names if accelerator.is_main_process else []]
    assert len(accelerator.get_state_dict(model)) == len(names)
    for folder in ("state", "model"):
        assert (tmp_path / folder / "model.safetensors").exists()
    state = torch.load(tmp_path / "state" / "optimizer.bin", weights_only=True)["state"]
    assert state[0]["exp_avg"].shape == Deep().embed.weight.shape


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@on_ranks(2)
def test_hooks_of_all_ranks_have_one_folder_and_take_over_weights(kind, tmp_path):
    accelerator = Accelerator(cpu=True, fsdp_plugin=blocks())
    accelerator.state.fsdp_plugin.set_state_dict_type(kind)
    model = Deep()
    _, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def on_save(_, weights, place):
        if accelerator.is_main_process:
            Path(place, "own").mkdir()
        accelerator.wait_for_everyone()
        Path(place, "own", str(accelerator.process_index)).touch()
        weights.clear()

    accelerator.register_save_state_pre_hook(on_save)
    accelerator.register_load_state_pre_hook(lambda models, _: models.clear())
    optimizer.param_groups[0]["lr"] = 0.5
    accelerator.save_state(tmp_path)
    optimizer.param_groups[0]["lr"] = 0.25
    accelerator.load_state(tmp_path)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert {path.name for path in (tmp_path / "own").iterdir()} == {"0", "1"}
    assert not [*tmp_path.glob("*model*")]
