"""Checkpoints of models in parts load under any other strategy, and training goes on the same.

Each run trains three steps, saves, and trains three more; whoever loads must get the losses of
those three, in float32 up to the order of sums (see ``meshes``).
"""

import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from notebook_accel.utils import merge_fsdp_weights
from torch import nn
from torch.utils.data import DataLoader

from notebook_accel import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    NotebookAccelError,
    ParallelismConfig,
)
from notebook_accel.training.checkpoint.start import find_damage
from tests.training.harness import run_ranks, runs_here, skip_unless_it_runs
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
RANKS = {**{name: ranks for name, (ranks, _, _) in LAYOUTS.items()}, "ddp": 2, "full": 2}


def make_accelerator(mesh):
    if mesh == "full":
        from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig

        # As the articles write it.
        return Accelerator(
            cpu=True,
            split_batches=True,
            fsdp_plugin=FullyShardedDataParallelPlugin(
                state_dict_config=FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
                optim_state_dict_config=FullOptimStateDictConfig(
                    offload_to_cpu=True, rank0_only=True
                ),
            ),
        )
    return accelerator_for(mesh if mesh in LAYOUTS else None, split_batches=True)


def train(mesh, folder, saves):
    accelerator = make_accelerator(mesh)
    torch.manual_seed(3 if saves else 4)  # a loaded model starts from other weights
    model = Deep()
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


def write_all(writers, root):
    return {writer: train(writer, f"{root}/{writer}", True) for writer in writers}


def read_all(pairs, root):
    return {(writer, reader): train(reader, f"{root}/{writer}", False) for writer, reader in pairs}


GO_ON = [
    ("fsdp, blocks", "single"),
    ("single", "fsdp, blocks"),
    ("fsdp, blocks", "fsdp x tensor"),
    ("fsdp x tensor", "single"),
    ("fsdp x tensor", "ddp"),
    ("ddp", "fsdp x tensor"),
    ("tensor", "fsdp"),
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


class Saved(dict[str, tuple["Path", list[float]]]):
    """The checkpoint of each strategy that writes one, and the losses after it.

    All of one number of ranks are written together, when the first of them is asked for.
    """

    def __init__(self, root):
        self.root = root

    def __missing__(self, asked):
        skip_unless_it_runs(asked)
        ranks = RANKS[asked]
        of_them = {writer for writer, _ in GO_ON if RANKS[writer] == ranks}
        writers = sorted(filter(runs_here, of_them))
        results = run_ranks(write_all, ranks, writers, str(self.root))
        for writer in writers:
            losses = [result[writer] for result in results]
            assert all(one == pytest.approx(losses[0]) for one in losses)
            self[writer] = self.root / writer, losses[0]
        return self[asked]


class WentOn(dict[tuple[str, str], list[list[float]]]):
    """By writer and reader: the losses of each rank that loaded."""

    def __init__(self, saved):
        self.saved = saved

    def __missing__(self, asked):
        skip_unless_it_runs(asked)
        ranks = [RANKS[name] for name in asked]
        alike = [
            pair for pair in GO_ON if [RANKS[name] for name in pair] == ranks and runs_here(pair)
        ]
        for writer, _ in alike:
            assert self.saved[writer]
        results = run_ranks(read_all, ranks[1], alike, str(self.saved.root))
        for pair in alike:
            self[pair] = [result[pair] for result in results]
        return self[asked]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return Saved(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def went_on(saved):
    return WentOn(saved)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param(
            *pair, marks=[pytest.mark.long] if max(RANKS[name] for name in pair) > 2 else []
        )
        for pair in GO_ON
    ],
)
def test_whoever_loads_goes_on_as_the_writer_did(writer, reader, saved, went_on):
    _, expected = saved[writer]
    for losses in went_on[writer, reader]:
        assert losses == pytest.approx(expected, abs=10 * FLOAT_ERROR * STEPS)


class Averaging(Deep):
    """BatchNorm in a block and behind the blocks, with averages of each rank's own samples."""

    def __init__(self):
        super().__init__()
        self.blocks[0] = nn.Sequential(self.blocks[0], nn.BatchNorm1d(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, tokens):
        return self.norm(super().forward(tokens))


def averages(asked, folder):
    """What running averages are after a step, and after they were saved and loaded."""
    mesh = ParallelismConfig(**asked) if asked else None
    found = []
    for saves in (True, False):
        accelerator = Accelerator(cpu=True, fsdp_plugin=blocks(), parallelism_config=mesh)
        model = accelerator.prepare(Averaging())
        inputs, targets = data(8).tensors
        if saves:
            share = slice(0, 4) if accelerator.is_main_process else slice(4, 8)
            share = slice(8) if asked else share
            accelerator.forward_backward(model, inputs[share], targets[share], loss_of)
            accelerator.save_state(folder)
        else:
            accelerator.load_state(folder)
        state = accelerator.get_state_dict(model)
        found.append({name: state[name].tolist() for name in state if "running" in name})
    return found


def test_averages_of_batches_are_those_of_the_rank_that_counts(tmp_path):
    """The first rank's, as in whole weights; of a pipeline those of the stage that runs them."""
    (first, loaded), (other, also) = run_ranks(averages, 2, {}, str(tmp_path / "shards"))
    assert first != other
    assert loaded == also == first
    for trained, read in run_ranks(averages, 2, {"pp_size": 2}, str(tmp_path / "stages")):
        assert trained == read
        assert all(any(values) for name, values in read.items() if "mean" in name)


def test_full_state_dicts_are_the_plain_files(saved):
    for writer in filter(runs_here, ("full", "1F1B")):
        files = {entry.name for entry in saved[writer][0].iterdir()}
        assert {"model.safetensors", "optimizer.bin"} <= files


def test_sharded_ones_hold_every_rank_s_parts(saved):
    for writer, ranks in (("fsdp, blocks", 2), (BY_RANK, 4)):
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            assert len(list((saved[writer][0] / name).glob("*.distcp"))) == ranks


def test_another_model_is_no_damage(saved):
    accelerator = Accelerator(cpu=True)
    model = Deep()
    model.blocks[0].up = nn.Linear(model.blocks[0].up.in_features, 3)
    accelerator.prepare(model)
    with pytest.raises(RuntimeError, match=r"nothing was loaded\. size mismatch for blocks\.0"):
        accelerator.resume_or_start(saved["fsdp, blocks"][0])


def test_an_optimizer_with_other_groups_is_told(saved):
    accelerator = Accelerator(cpu=True)
    model = Deep()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"optimizer_0 holds .* of 2 groups .* AdamW here has 1"):
        accelerator.load_state(saved["fsdp, blocks"][0])


def test_parts_are_merged_into_one_file(saved, tmp_path):
    """Ours, of a checkpoint and of a model's folder, and those that Accelerate writes."""
    import torch.distributed.checkpoint as dcp
    from accelerate.utils import merge_fsdp_weights as theirs
    from safetensors.torch import load_file

    folder = saved["fsdp x tensor"][0]
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
    folder = shutil.copytree(saved["fsdp, blocks"][0], tmp_path / "state")
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


def save_weights(folder):
    """What the documentation shows: unwrap, state_dict, save; and plain weights back."""
    accelerator = accelerator_for("fsdp x tensor")
    torch.manual_seed(3)
    plain = Deep().state_dict()
    model = accelerator.prepare(Deep())
    accelerator.unwrap_model(model).load_state_dict(plain)
    accelerator.save(accelerator.unwrap_model(model).state_dict(), f"{folder}/weights.pt")
    accelerator.save_model(model, f"{folder}/model")
    with pytest.raises((FileNotFoundError, NotebookAccelError), match="no sharded weights"):
        merge_fsdp_weights(f"{folder}/none", folder)
    wrapped = accelerator.get_state_dict(model, unwrap=False)
    assert all(torch.equal(value, plain[name]) for name, value in wrapped.items())
    accelerator.wait_for_everyone()
    with pytest.raises(RuntimeError, match="size mismatch for head"):
        model.load_state_dict({**plain, "head.weight": torch.zeros(1)})
    loaded = torch.load(f"{folder}/weights.pt", weights_only=True)
    return {name: torch.equal(value, plain[name]) for name, value in loaded.items()}


def test_whole_weights_are_saved_and_loaded_by_hand(tmp_path):
    for result in run_ranks(save_weights, 4, str(tmp_path)):
        assert set(result) == set(Deep().state_dict())
        assert all(result.values())
    from safetensors.torch import load_model

    model = Deep()
    load_model(model, tmp_path / "model" / "model.safetensors")
    torch.manual_seed(3)
    assert torch.equal(model.embed.weight, Deep().embed.weight)


class Keeps(nn.Linear):
    """A module that keeps something beside its weights."""

    def __init__(self, kept):
        super().__init__(2, 2)
        self.kept = kept

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


def two_models(folder):
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
    after = accelerator.get_state_dict(other)
    # A model with more than tensors in its state, which is rank 0's where ranks differ.
    keeps = nn.Sequential(Keeps({"rank": accelerator.process_index}), Keeps(torch.ones(2)))
    keeps = accelerator.prepare(keeps)
    accelerator.save_state(f"{folder}/parts")
    # As scripts do before their last save.
    accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    accelerator.save_state(f"{folder}/whole")
    keeps[0].kept, keeps[1].kept = None, torch.zeros(2)
    accelerator.load_state(f"{folder}/parts")
    return {
        "moved": not torch.equal(before["weight"], after["weight"]),
        "loss": float(loss),
        "kept": [keeps[0].kept, keeps[1].kept.tolist()],
    }


def test_two_models_and_an_optimizer_that_is_prepared_later(tmp_path):
    results = run_ranks(two_models, 2, str(tmp_path))
    assert all(result["moved"] for result in results)
    assert results[0] == results[1]
    assert results[0]["kept"] == [{"rank": 0}, [1.0, 1.0]]
    parts, whole = (
        {each.name for each in (tmp_path / name).iterdir()} for name in ("parts", "whole")
    )
    assert parts >= {"pytorch_model_fsdp_0", "optimizer_0"}
    assert whole >= {"model.safetensors", "model_1.safetensors", "optimizer.bin"}
    assert not any(name.startswith(("model", "optimizer.bin")) for name in parts)
    assert not any(name.startswith(("pytorch_model_fsdp", "optimizer_0")) for name in whole)


def hold_while_saving(folder):
    """What this rank holds of whole weights and states while rank 0 writes them."""
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
    accelerator.save_state(f"{folder}/state")
    accelerator.save_model(model, f"{folder}/model")
    whole = accelerator.get_state_dict(model)
    return {"held": held, "whole": len(whole)}


def test_only_who_writes_holds_what_was_joined(tmp_path):
    """The host of many ranks has no room for one copy each."""
    names = sorted(Deep().state_dict())
    for rank, result in enumerate(run_ranks(hold_while_saving, 2, str(tmp_path))):
        assert result["held"] == [[] if rank else names]
        assert result["whole"] == len(names)
    for folder in ("state", "model"):
        assert (tmp_path / folder / "model.safetensors").exists()
    state = torch.load(tmp_path / "state" / "optimizer.bin", weights_only=True)["state"]
    assert state[0]["exp_avg"].shape == Deep().embed.weight.shape


def saves_by_hooks(folder):
    """The rate that an optimizer of shards has loaded, whose model is saved by hooks."""
    accelerator = make_accelerator("fsdp")
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_save_state_pre_hook(lambda _, weights, __: weights.clear())
    accelerator.register_load_state_pre_hook(lambda models, _: models.clear())
    optimizer.param_groups[0]["lr"] = 0.5
    accelerator.save_state(folder)
    optimizer.param_groups[0]["lr"] = 0.25
    accelerator.load_state(folder)
    return float(optimizer.param_groups[0]["lr"])


def test_hooks_take_over_weights_of_shards(tmp_path):
    assert run_ranks(saves_by_hooks, 2, str(tmp_path)) == [0.5, 0.5]
    assert not (tmp_path / "pytorch_model_fsdp_0").exists()


def hooks_meet(folder):
    accelerator = Accelerator(cpu=True, fsdp_plugin=blocks())
    accelerator.prepare(Deep())

    def hook(_, __, place):
        if accelerator.is_main_process:
            Path(place, "own").mkdir()
        accelerator.wait_for_everyone()
        Path(place, "own", str(accelerator.process_index)).touch()

    accelerator.register_save_state_pre_hook(hook)
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        accelerator.state.fsdp_plugin.set_state_dict_type(kind)
        accelerator.save_state(f"{folder}/{kind}")
        assert {path.name for path in Path(folder, kind, "own").iterdir()} == {"0", "1"}


def test_hooks_of_all_ranks_have_one_folder(tmp_path):
    run_ranks(hooks_meet, 2, str(tmp_path))
