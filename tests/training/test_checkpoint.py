"""Checkpoints: whole or not there, readable without trust, numbered without collisions."""

import argparse
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import json
import os
import random
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from notebook_accel import (
    Accelerator,
    ConfigError,
    GradScalerKwargs,
    NotebookAccelError,
    ProjectConfiguration,
)
from notebook_accel.training.processes.random_numbers import get_random_states, set_random_states
from tests.training.harness import on_ranks, warnings_about

FILES = {
    "model.safetensors",
    "optimizer.bin",
    "scheduler.bin",
    "scaler.pt",
    "random_states_0.pkl",
    "custom_checkpoint_0.pkl",
}


class Tied(nn.Module):
    """Two names for one weight, and a buffer that is a part of it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("part", self.embed.weight.detach()[:2])

    def forward(self, ids):
        return self.head(self.embed(ids))


class Counter:
    """Something of the user's that has a state."""

    def __init__(self):
        self.count = np.float64(0)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def setup(project=None, **settings):
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", project_config=project, **settings)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, model, optimizer, schedule, counter


def step(accelerator, model, optimizer, schedule, counter):
    accelerator.backward(model(torch.randint(6, (3,))).square().mean())
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    counter.count += random.random() + np.random.rand()


def state_of(accelerator, model, optimizer, schedule, counter):
    parts = [model.state_dict(), optimizer.state_dict(), schedule.state_dict(), counter.count]
    return repr([*parts, accelerator.scaler.state_dict()])


def test_each_optimizer_has_its_own_number_of_steps_back(tmp_path):
    def parts():
        accelerator = Accelerator(cpu=True)
        models = accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        return accelerator, list(accelerator.prepare(*optimizers))

    accelerator, (critic, generator) = parts()
    for optimizer in (critic, critic, critic, generator):
        optimizer.step()
    accelerator.save_state(tmp_path / "state")
    accelerator, optimizers = parts()
    assert accelerator.resume_or_start(tmp_path).step == 3
    assert [optimizer.num_steps for optimizer in optimizers] == [3, 1]


@pytest.mark.parametrize("safe", [True, False])
def test_training_goes_on_as_if_it_had_not_stopped(safe, tmp_path):
    whole = setup()
    step(*whole)
    folder = tmp_path / "new" / "state"
    # Accelerate hands other keywords on to engines that save models themselves.
    assert whole[0].save_state(folder, safe_serialization=safe, tag="mine") == str(folder)
    assert set(os.listdir(folder)) == (
        FILES if safe else FILES - {"model.safetensors"} | {"pytorch_model.bin"}
    )
    assert os.listdir(folder.parent) == ["state"], "nothing of the writing is left"
    step(*whole)
    resumed = setup()
    torch.manual_seed(99)
    resumed[0].load_state(str(folder), None, tag="mine")
    step(*resumed)
    assert state_of(*resumed) == state_of(*whole)
    assert resumed[1].head.weight is resumed[1].embed.weight


def test_a_state_that_is_there_is_replaced(tmp_path):
    parts = setup()
    folder = tmp_path / "state"
    parts[0].save_state(folder)
    (folder / "optimizer_7.bin").write_text("of a larger training")
    (folder / "notes.txt").write_text("mine")
    (folder / "logs").mkdir()
    log = (folder / "logs" / "events").open("w")
    step(*parts)
    before = load_file(folder / "model.safetensors")
    parts[0].save_state(folder)
    assert not torch.equal(load_file(folder / "model.safetensors")["embed.weight"], before["part"])
    log.write("goes on")
    log.close()
    assert set(os.listdir(folder)) == FILES | {"notes.txt", "logs"}
    assert (folder / "logs" / "events").read_text() == "goes on"
    assert os.listdir(tmp_path) == ["state"]


def numbered(folder, **settings):
    return ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, **settings)


def test_numbers_go_on_after_a_resume_and_old_ones_go_after_the_write(tmp_path):
    parts = setup(numbered(tmp_path, total_limit=2))
    names = [Path(parts[0].save_state()).name for _ in range(11)]
    assert names == [f"checkpoint_{number}" for number in range(11)]
    assert parts[0].save_iteration == 11
    folder = tmp_path / "checkpoints"
    assert sorted(os.listdir(folder)) == ["checkpoint_10", "checkpoint_9"]
    # One that died while it wrote leaves nothing that counts.
    for name in ("checkpoint_11", "rank_1"):  # of more ranks than now
        (folder / f".{name}.0123abcd.partial").mkdir()
    resumed = setup(numbered(tmp_path, total_limit=2))
    resumed[0].load_state()
    assert resumed[0].save_iteration == 11
    assert Path(resumed[0].save_state()).name == "checkpoint_11"
    fresh = setup(numbered(tmp_path))
    assert Path(fresh[0].save_state()).name == "checkpoint_12", "without a resume too"
    assert not any(name.startswith(".") for name in os.listdir(folder))
    assert fresh[0].save_state(tmp_path / "named") == str(tmp_path / "named")


def test_what_cannot_be_loaded_says_what_there_is(tmp_path):
    accelerator, model, *_ = setup()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*which is not there"):
        accelerator.load_state(tmp_path / "missing")
    (tmp_path / "readme.md").write_text("")
    with pytest.raises(FileNotFoundError, match=r"it holds: readme\.md"):
        accelerator.load_state(tmp_path)
    with pytest.raises(ConfigError, match="no folder was given"):
        accelerator.load_state()
    with pytest.raises(ConfigError, match="no folder was given"):
        accelerator.save_state()
    empty = setup(numbered(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*checkpoints.*Save one first"):
        empty[0].load_state()
    accelerator.save_state(tmp_path / "state")
    (tmp_path / "state" / "optimizer.bin").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"optimizer\.bin is not in .*holds: custom.*Give prepare\("
    ):
        accelerator.load_state(tmp_path / "state")
    with pytest.raises(ConfigError, match=r"register_for_checkpointing\(\) got int, list"):
        accelerator.register_for_checkpointing(1, model, [])


def test_states_of_fewer_ranks_and_other_precisions_load_with_a_word(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Tied())
    accelerator.save_state(tmp_path / "state")
    (tmp_path / "state" / "random_states_0.pkl").unlink()
    other = Accelerator(cpu=True, mixed_precision="fp16")
    other.prepare(Tied())
    with pytest.warns(match="no loss scale"), pytest.warns(match="no random states for rank 0"):
        other.load_state(tmp_path / "state")


def test_hooks_take_over_weights_and_can_be_removed(tmp_path):
    accelerator, model, *_ = setup()
    seen = []

    def on_save(models, states, folder):
        seen.append((models, len(states)))
        torch.save(states.pop(), Path(folder) / "own.bin")

    def on_load(models, folder):
        seen.append(models.pop())
        assert (Path(folder) / "own.bin").exists()

    handles = [
        accelerator.register_save_state_pre_hook(on_save),
        accelerator.register_load_state_pre_hook(on_load),
    ]
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    assert seen == [([model], 1), model]
    assert not (tmp_path / "state" / "model.safetensors").exists()
    for handle in handles:
        handle.remove()
    accelerator.save_state(tmp_path / "state")
    assert len(seen) == 2
    assert set(os.listdir(tmp_path / "state")) == FILES | {"own.bin"}


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("evil",))


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Best:
    epoch: int
    history: list[float]


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    epoch: int


class Pair(NamedTuple):
    a: int
    b: int


COMMON = {
    "datetime": dt.datetime.now(dt.timezone.utc),
    "time": dt.timedelta(seconds=1),
    "path": Path("a/b"),
    "defaultdict": collections.defaultdict(list, {"a": [1]}),
    "counting": collections.defaultdict(int, {"a": 1}),
    "deque": collections.deque([1.0, 2.0], maxlen=5),
    "enum": Colour.RED,
    "dataclass": Best(1, [0.5]),
    "frozen": Frozen(2),
    "namedtuple": Pair(1, 2),
    "namespace": SimpleNamespace(lr=0.1, weights=torch.ones(2)),
    "arguments": argparse.Namespace(lr=0.1),
    "float32": np.float32(1.5),
    "int64": np.int64(3),
    "bool": np.bool_(True),
    "date": np.datetime64("2020-01-01"),
    "array": np.arange(3.0),
    "texts": np.array(["a"]),
    "uuid": uuid.UUID(int=7),
    "decimal": decimal.Decimal("1.5"),
    "set": {1, 2},
    "half": torch.ones(2, dtype=torch.bfloat16),
    "dtype": torch.float16,
}


def test_states_of_common_types_come_back(tmp_path):
    accelerator, _, _, _, counter = setup()
    counter.count = COMMON
    accelerator.save_state(tmp_path / "state")
    resumed = setup()
    resumed[0].load_state(tmp_path / "state")
    loaded = resumed[4].count
    assert {k: type(v) for k, v in loaded.items()} == {k: type(v) for k, v in COMMON.items()}
    assert {k: repr(v) for k, v in loaded.items()} == {k: repr(v) for k, v in COMMON.items()}


class Trusted:
    value = 3


def test_what_would_not_be_read_is_refused_when_it_is_saved_and_files_run_no_code(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    accelerator, _, _, _, counter = setup()
    accelerator.save_state("state")
    for value, told in [
        (Evil(), r"the state of Counter holds \w+\.mkdir.*plain values"),
        (nn.Linear(1, 1), r"custom_checkpoint_0\.pkl: .* holds torch\.nn\.modules\.linear\.Linear"),
        (lambda: 1, "custom_checkpoint_0.*Counter cannot be saved"),
        (Trusted(), r"Trusted.*add_safe_globals"),
    ]:
        counter.count = value
        with pytest.raises(ConfigError, match=told):
            accelerator.save_state("state")
    counter.count = 5
    accelerator.load_state("state")
    assert counter.count == 0, "the one that could be saved is still there"
    torch.save({"count": Evil()}, "state/custom_checkpoint_0.pkl")
    told = r'custom_checkpoint_0\.pkl.*"weights_only": False'
    with pytest.raises(NotebookAccelError, match=told):
        accelerator.load_state("state")
    assert not Path("evil").exists()
    accelerator.load_state("state", load_kwargs={"weights_only": False})
    assert Path("evil").exists()
    counter.count = Trusted()
    with torch.serialization.safe_globals([Trusted]):
        accelerator.save_state("state")
        accelerator.load_state("state")
    assert counter.count.value == 3


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("damage", ["empty", "cut", "noise"])
def test_a_broken_file_is_named(name, damage, tmp_path):
    parts = setup()
    parts[0].save_state(tmp_path / "state")
    path = tmp_path / "state" / name
    whole = path.read_bytes()
    damaged = {"empty": b"", "cut": whole[: len(whole) // 2], "noise": bytes(range(256))}
    path.write_bytes(damaged[damage])
    state = "is empty" if damage == "empty" else r"could not be read \([\d,]+ bytes\)"
    with pytest.raises(NotebookAccelError, match=rf"{name} {state}.*earlier checkpoint"):
        parts[0].load_state(tmp_path / "state")


def test_save_writes_whole_files(tmp_path):
    accelerator = Accelerator(cpu=True)
    path = tmp_path / "weights.bin"
    accelerator.save({"w": torch.ones(2)}, path)
    assert torch.equal(torch.load(path)["w"], torch.ones(2))
    with pytest.raises(Exception, match="pickle"):
        accelerator.save({"w": (i for i in ())}, path)
    assert torch.equal(torch.load(path)["w"], torch.ones(2)), "the old one is still there"
    accelerator.save({"w": torch.ones(2)}, str(tmp_path / "w.safetensors"), safe_serialization=True)
    assert set(load_file(tmp_path / "w.safetensors")) == {"w"}
    with (tmp_path / "open.bin").open("wb") as opened:
        accelerator.save([1], opened)
    assert sorted(os.listdir(tmp_path)) == ["open.bin", "w.safetensors", "weights.bin"]


def test_a_model_is_saved_in_pieces_of_a_limited_size(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))
    accelerator.save_model(model, tmp_path / "m", max_shard_size="0.3 kb")
    names = sorted(os.listdir(tmp_path / "m"))
    assert names[0] == "model-00001-of-00003.safetensors"
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3 * (64 + 8) * 4
    loaded = {
        name: load_file(tmp_path / "m" / file)[name] for name, file in index["weight_map"].items()
    }
    model.load_state_dict(loaded)
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    accelerator.save_model(model, tmp_path / "m", max_shard_size=1e6)
    assert sorted(os.listdir(tmp_path / "m")) == ["model.safetensors", "tokenizer.json"]
    accelerator.save_model(model, tmp_path / "m", safe_serialization=False)
    assert sorted(os.listdir(tmp_path / "m")) == ["pytorch_model.bin", "tokenizer.json"]
    for size in ("much", None):
        with pytest.raises(ConfigError, match=f"max_shard_size={size!r}"):
            accelerator.save_model(model, tmp_path / "m", max_shard_size=size)


class Side:
    """A training under one of the two libraries, and what its rank drew after it was saved."""

    def __init__(self, accelerator, seed):
        self.accelerator = accelerator
        torch.manual_seed(seed)
        models = [nn.Linear(2, 2), nn.Linear(2, 1)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
        schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 1)
        loader = DataLoader(range(8), batch_size=2, shuffle=True)
        prepared = accelerator.prepare(*models, *optimizers, schedule, loader)
        self.parts, self.counter = prepared[:5], Counter()
        accelerator.register_for_checkpointing(self.counter)
        for model, optimizer in zip(self.parts[:2], self.parts[2:4], strict=True):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
        self.parts[4].step()
        self.counter.count = seed
        for begin in (random.seed, np.random.seed, torch.manual_seed):
            begin(seed + accelerator.process_index)

    def save(self, folder, safe):
        self.accelerator.save_state(folder, safe_serialization=safe)
        self.accelerator.wait_for_everyone()
        self.state, self.drawn = self.now(), self.draw()

    def now(self):
        states = [part.state_dict() for part in self.parts]
        return repr([*states, self.counter.count, self.accelerator.scaler.state_dict()])

    def draw(self):
        return random.random(), np.random.rand(), float(torch.rand(()))


@pytest.mark.parametrize("safe", [True, False])
@on_ranks(2)
def test_checkpoints_of_accelerate_load_here_and_ours_load_there(safe, tmp_path):
    from accelerate import Accelerator as Peer

    scaler = {"init_scale": 2.0**10, "growth_interval": 1}
    peer = Peer(cpu=True)
    # On a CPU it makes none, and reads and writes what there is.
    peer.scaler = torch.amp.GradScaler("cpu", **scaler)
    own = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**scaler)]
    )
    theirs, ours = Side(peer, 10), Side(own, 20)
    for side, name in ((theirs, "theirs"), (ours, "ours")):
        side.save(tmp_path / name, safe)
        models = (tmp_path / name).glob("model*.safetensors" if safe else "pytorch_model*.bin")
        assert len([*models]) == 2
    assert theirs.state != ours.state
    with warnings_about("dl_state_dict") as told:
        own.load_state(tmp_path / "theirs")
        assert (ours.now(), ours.draw()) == (theirs.state, theirs.drawn)
        peer.load_state(tmp_path / "ours")
        assert (theirs.now(), theirs.draw()) == (ours.state, ours.drawn)
        # As a loader of torchdata leaves it there.
        (tmp_path / "theirs" / "dl_state_dict.bin").touch()
        own.load_state(tmp_path / "theirs")
    assert len(told) == own.is_main_process, "said once"
    line = "Accelerate keeps them (dl_state_dict.bin), and they are not read"
    assert all(line in text for text in told)


def test_a_load_leaves_nothing_of_the_window_before(tmp_path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)

    def batch(value):
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(model(torch.full((1, 2), value)).sum())
            optimizer.step()

    accelerator.save_state(tmp_path / "begun")
    before = model.weight.detach().clone()
    batch(1.0)
    accelerator.save_state(tmp_path / "open")
    batch(1.0)
    accelerator.load_state(tmp_path / "open")
    batch(1.0)
    batch(3.0)
    torch.testing.assert_close(model.weight, before - 0.1 * (1.0 + 3.0) / 2)
    batch(float("nan"))
    accelerator.load_state(tmp_path / "begun")
    assert model.weight.grad is None


def test_a_home_is_found_for_every_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    parts = setup(numbered(Path("~/runs")))
    parts[0].save_state("~/state")
    parts[0].load_state("~/state")
    assert parts[0].save_state() == str(tmp_path / "runs" / "checkpoints" / "checkpoint_0")
    parts[0].load_state()
    assert sorted(os.listdir(tmp_path)) == ["runs", "state"]


def test_states_that_nothing_was_registered_for_are_told(tmp_path):
    parts = setup()
    parts[0].register_for_checkpointing(Counter())
    parts[0].save_state(tmp_path / "state")
    fewer = setup()
    for load in (
        lambda: fewer[0].load_state(tmp_path / "state"),
        lambda: fewer[0].resume_or_start(tmp_path),
    ):
        with pytest.raises(RuntimeError, match=r"custom_checkpoint_1\.pkl\), and 1 are registered"):
            load()


def test_a_device_takes_its_own_of_the_random_states_of_all(monkeypatch):
    """As Accelerate writes them on GPUs: a list."""
    seen = []
    kind = SimpleNamespace(set_rng_state=lambda state, device: seen.append((state, device.index)))
    monkeypatch.setattr(torch, "get_device_module", lambda device: kind)
    host = get_random_states(torch.device("cpu"))
    for states in (["of 0", "of 1"], ["the only one"], "ours"):
        set_random_states({**host, "torch_cuda_manual_seed": states}, torch.device("cuda:1"))
    assert seen == [("of 1", 1), ("the only one", 1), ("ours", 1)]
