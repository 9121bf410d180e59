"""Replacing folders: killed at any step, the folder that was good last is the one that loads."""

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, ConfigError, NotebookAccelError
from notebook_accel.training.files import atomic, state_files
from tests.training.test_sharded_checkpoint import Keeps

# What changes a disk, as Python's audit hooks name it.
_STEPS = {"os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "open"}
_WAYS = ["links", "no links", "current folder"]


def _is_ours(name):
    return name.startswith("part")


def _make(folder, version):
    """A folder of which versions have different entries."""
    folder.mkdir(exist_ok=True)
    for name in ("part_a", "part_b", f"part_of_{version}", f"extra_of_{version}"):
        (folder / name).write_text(version)
    (folder / "part_folder").mkdir()
    (folder / "part_folder" / f"of_{version}").write_text(version)
    return folder


def _ours(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    found = {str(path.relative_to(folder)): path.read_text() for path in files}
    return {name: text for name, text in found.items() if _is_ours(name)}


def _expected(version):
    names = ("part_a", "part_b", f"part_of_{version}", f"part_folder/of_{version}")
    return dict.fromkeys(names, version)


def _save(final, version):
    staged = atomic.StagedFolder.of(final)
    _make(staged.path, version)
    staged.publish(is_ours=_is_ours)


def _cannot(*_, **__):
    raise OSError("not on this disk")


def _is_killed(action, step):
    """Run ``action`` in a child that is killed before this step; False where it ended first."""
    child = os.fork()
    if not child:
        left = step

        def hook(event, arguments):
            nonlocal left
            is_step = event in _STEPS and (event != "open" or "w" in str(arguments[1]))
            left -= is_step
            if is_step and left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            sys.addaudithook(hook)
            action()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), "the child failed"
    return status != 0


@pytest.mark.parametrize("way", _WAYS)
def test_a_kill_at_any_step_leaves_the_last_good_one(way, tmp_path, monkeypatch):
    if way == "no links":
        monkeypatch.setattr(os, "link", _cannot)
    step, seen = 0, set()
    is_killed = True
    while is_killed:
        root = tmp_path / str(step)
        root.mkdir()
        final = _make(root / "state", "old")
        (final / "notes").mkdir()
        (final / "notes" / "mine").write_text("mine")
        if way == "current folder":
            monkeypatch.chdir(final)
        is_killed = _is_killed(lambda final=final: _save(final, "new"), step)

        loaded = _ours(atomic.complete_version(final))
        version = "new" if "part_of_new" in loaded else "old"
        assert loaded == _expected(version), f"torn at step {step}"
        assert (final / "notes" / "mine").read_text() == "mine"
        seen.add(version)

        (final / "later").write_text("mine")
        _save(final, "third")
        assert atomic.complete_version(final) == final
        assert _ours(final) == _expected("third"), f"after a kill at step {step}"
        assert (final / "notes" / "mine").read_text() == "mine"
        assert (final / "later").read_text() == "mine"
        assert os.listdir(root) == ["state"], "nothing of the writing is left"
        assert not [name for name in os.listdir(final) if name.startswith(".")]
        if way == "current folder":
            assert Path.cwd().samefile(final), "a process that sits in the folder keeps it"
        step += 1
    assert step > 5
    assert seen == {"old", "new"}


def test_what_is_taken_in_is_not_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", _cannot)
    added, final = _make(tmp_path / "added", "new"), _make(tmp_path / "final", "old")
    (added / "part_link").symlink_to("part_a")
    names = ("part_a", "part_folder/of_new", "part_of_new")
    written = {name: (added / name).stat().st_ino for name in names}
    assert atomic.add_entries(added, final, lambda _: True)
    assert {name: (final / name).stat().st_ino for name in names} == written
    assert _ours(final) == {**_expected("old"), **_expected("new"), "part_link": "new"}
    assert (final / "part_link").is_symlink()
    assert not added.exists()


def test_a_folder_that_is_not_there_yet_is_there_whole_or_not_at_all(tmp_path):
    step, is_killed = 0, True
    while is_killed:
        final = tmp_path / str(step) / "state"
        final.parent.mkdir()
        is_killed = _is_killed(lambda final=final: _save(final, "new"), step)
        assert not final.exists() or _ours(final) == _expected("new")
        step += 1
    assert final.exists()


@pytest.mark.parametrize("name", ["model", "run[1]", "a*", "a.b"])
def test_only_what_is_left_of_this_name_is_swept(name, tmp_path):
    final = tmp_path / name
    live = [atomic.staging_path(tmp_path / other) for other in (f"{name}.best", "another")]
    for folder in live:
        _make(folder, "live")
    _make(atomic.staging_path(final), "left")
    atomic.staging_path(final).write_text("a file that was being written")
    (tmp_path / f".{name}.mine.partial").write_text("the user's")
    atomic.StagedFolder.of(final).discard()
    kept = {folder.name for folder in live} | {f".{name}.mine.partial"}
    assert set(os.listdir(tmp_path)) == kept


def test_an_update_that_came_from_elsewhere_reaches_nothing_outside(tmp_path):
    final, outside = _make(tmp_path / "state", "old"), tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    update = final / atomic._UPDATE
    (update / "linked").mkdir(parents=True)
    (update / "linked" / "mine").write_text("theirs")
    (final / "linked").symlink_to(outside)
    removed = ["../outside", str(outside), "..", "", 3, "part_a"]
    (update / atomic._REMOVED).write_text(json.dumps(removed))
    _save(final, "new")
    assert _ours(final) == _expected("new")
    (final / atomic._UPDATE).symlink_to(outside)
    assert atomic.complete_version(final) == final
    _save(final, "third")
    assert _ours(final) == _expected("third")
    assert (outside / "mine").read_text() == "mine"
    assert os.listdir(outside) == ["mine"]


def _fail(error):
    raise error


@pytest.mark.parametrize(
    "write",
    [
        lambda: torch.save(torch.ones(1_000_000), "/dev/full"),
        lambda: Path("/dev/full").write_text("text"),
        lambda: _fail(SafetensorError("I/O error: No space left on device (os error 28)")),
    ],
    ids=["torch", "python", "safetensors"],
)
def test_a_full_disk_is_told_as_that(write):
    with (
        pytest.raises(NotebookAccelError, match=r"in /dev could not be written.*the disk is full"),
        atomic.naming_full_disk(Path("/dev")),
    ):
        write()


# States in files.


class Trusted:
    """What a pickle may name for none but those who trust it."""


@dataclass
class Plain:
    size: int


@dataclass
class Doing:
    """Its constructor is its own, and does what it likes with what it is given."""

    name: str

    def __init__(self, name):
        self.name = name


def setup():
    """A training that has made a step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Keeps(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(range(4))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
    return accelerator, model


def test_every_file_is_read_where_it_is_trusted(tmp_path):
    accelerator, model = setup()
    accelerator.save_state(tmp_path)
    model.kept = Trusted()
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: the state of the model holds"):
        accelerator.save_state(tmp_path)
    for name in ("pytorch_model.bin", "loader.bin", "random_states_0.pkl"):
        path = tmp_path / name
        states = torch.load(path, weights_only=False)
        torch.save({**states, "_extra_state": Trusted()}, path)
        with pytest.raises(NotebookAccelError, match=rf'{name} names .*"weights_only": False'):
            accelerator.load_state(tmp_path)
        accelerator.load_state(tmp_path, load_kwargs={"weights_only": False})
        torch.save(states, path)
    accelerator.load_state(tmp_path, load_kwargs={"map_location": torch.device("cpu")})
    assert model.kept == 1


def test_a_file_calls_no_constructor_of_a_users_class(tmp_path):
    state_files.write_state(Plain(2), tmp_path / "plain", "it")
    assert state_files.read_state(tmp_path / "plain") == Plain(2)
    with pytest.raises(ConfigError, match="Doing"):
        state_files.write_state(Doing("a"), tmp_path / "doing", "it")
    with pytest.raises(NotebookAccelError, match=r"names .*Doing"):
        state_files.read_state(tmp_path / "doing")


def test_wrong_options_are_no_damage(tmp_path):
    accelerator, _ = setup()
    accelerator.save_state(tmp_path)
    told = r"optimizer\.bin is whole, and cannot be read with .*"
    with pytest.raises(ConfigError, match=told + "cuda:99"):
        accelerator.load_state(tmp_path, load_kwargs={"map_location": "cuda:99"})
    with pytest.raises(ConfigError, match=r"is whole, and cannot be read with .*misspelt"):
        accelerator.load_state(tmp_path, load_kwargs={"misspelt": True})
    (tmp_path / "optimizer.bin").write_bytes(b"noise")
    with pytest.raises(NotebookAccelError, match=r"optimizer\.bin could not be read"):
        accelerator.load_state(tmp_path, load_kwargs={"map_location": "cuda:99"})


@pytest.mark.parametrize("kind", [PermissionError, MemoryError])
def test_no_older_one_is_taken_where_nothing_is_wrong_with_the_newest(kind, tmp_path, monkeypatch):
    accelerator, _ = setup()
    for number in range(2):
        accelerator.save_state(tmp_path / f"checkpoint_{number}")
    plain = torch.load

    def read(path, **options):
        if "checkpoint_1" in path.parts and path.name == "optimizer.bin":
            raise kind(f"not {path}")
        return plain(path, **options)

    monkeypatch.setattr(torch, "load", read)
    with pytest.raises(kind, match=r"checkpoint_1"):
        accelerator.resume_or_start(tmp_path)


def test_a_model_that_keeps_more_than_tensors_is_saved_whole(tmp_path):
    accelerator, model = setup()
    accelerator.save_model(model, tmp_path / "one")
    accelerator.save_model(model, tmp_path / "two", max_shard_size=8)
    one = torch.load(tmp_path / "one" / "pytorch_model.bin")
    index = json.loads((tmp_path / "two" / "pytorch_model.bin.index.json").read_text())
    assert index["metadata"] == {"total_size": 24}
    files = {
        name: torch.load(tmp_path / "two" / file) for name, file in index["weight_map"].items()
    }
    for name, value in model.state_dict().items():
        assert repr(one[name]) == repr(files[name][name]) == repr(value)
