"""The paths by which code imports Accelerate lead to the same names under ours."""

import logging
import os
from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate.logging import get_logger as peer_get_logger

import notebook_accel
from notebook_accel.rank import this_rank
from tests.training.harness import on_ranks
from tests.training.single import be


def test_a_basic_config_is_written_once(tmp_path):
    from notebook_accel.utils import write_basic_config

    path = tmp_path / "config.yaml"
    assert write_basic_config("bf16", path) == path
    assert notebook_accel.LaunchConfig.load(path).mixed_precision == "bf16"
    assert write_basic_config("no", path) is False
    assert notebook_accel.LaunchConfig.load(path).mixed_precision == "bf16"


def test_what_was_saved_loads_without_trust(tmp_path):
    from notebook_accel.utils import load, save

    save({"path": tmp_path, "w": torch.ones(2)}, tmp_path / "w.bin")
    assert load(tmp_path / "w.bin")["path"] == tmp_path
    assert load(tmp_path / "w.bin", map_location="meta")["w"].is_meta
    trusted = load(tmp_path / "w.bin", weights_only=False)
    assert torch.equal(trusted["w"], torch.ones(2))
    with (tmp_path / "w.bin").open("rb") as opened, pytest.raises(Exception, match="weights_only"):
        load(opened)


def two_ranks(word):
    state = notebook_accel.PartialState()
    precision = notebook_accel.Accelerator().mixed_precision
    place = f"{state.process_index} of {state.num_processes} on {state.device}"
    return f"{word} {place}, {precision}"


def test_the_debug_launcher_runs_on_the_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    debug_launcher = notebook_accel.launchers.debug_launcher
    for given, number in (({}, 2), ({"num_processes": 3}, 3)):
        run = debug_launcher(two_ranks, args=("rank",), **given)
        assert list(run) == [f"rank {rank} of {number} on cpu, no" for rank in range(number)]


def test_a_loader_is_prepared_by_accelerates_arguments():
    from notebook_accel.data_loader import prepare_data_loader

    loader = torch.utils.data.DataLoader(range(8), batch_size=2)
    second = prepare_data_loader(loader, None, 2, 1, put_on_device=True)
    assert [batch.tolist() for batch in second] == [[2, 3], [6, 7]]
    halves = prepare_data_loader(loader, num_processes=2, process_index=0, split_batches=True)
    assert [batch.tolist() for batch in halves] == [[0], [2], [4], [6]]
    mesh = SimpleNamespace(
        mesh=torch.arange(8).reshape(2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp")
    )
    for index in (4, 5):  # they hold one model together, as the third of four
        part = prepare_data_loader(loader, process_index=index, torch_device_mesh=mesh)
        assert [batch.tolist() for batch in part] == [[4, 5]]


def logger_of(name, index, monkeypatch):
    from notebook_accel.logging import get_logger

    context = this_rank.RankContext(rank=index, local_rank=index, world_size=2, local_world_size=2)
    be(context, monkeypatch)
    return get_logger(name, "INFO")


def test_a_logger_writes_on_rank_0_unless_told_otherwise(monkeypatch, caplog):
    for index in (0, 1):
        logger = logger_of(f"compat.{index}", index, monkeypatch)
        logger.info("once %d", 1)
        logger.warning("all", main_process_only=False)
        logger.warning_once("again")
        logger.warning_once("again")
        logger.debug("never")
    said = [record.getMessage() for record in caplog.records]
    assert said == ["[RANK 0] once 1", "[RANK 0] all", "[RANK 0] again", "[RANK 1] all"]
    assert {record.filename for record in caplog.records} == {"test_compat.py"}


@on_ranks(2)
def test_a_logger_can_go_rank_by_rank(tmp_path):
    """Our logger and Accelerate's write the same lines, each into one file of all ranks."""
    from notebook_accel.logging import get_logger

    accelerate.PartialState(cpu=True)
    for get, name in ((get_logger, "ours"), (peer_get_logger, "theirs")):
        logging.getLogger(f"compat.{name}").addHandler(logging.FileHandler(tmp_path / name))
        logger = get(f"compat.{name}", "INFO")
        letter = "ab"[int(os.environ["RANK"])]
        logger.info(letter, in_order=True)
        logger.info(letter, in_order=True, main_process_only=True)
        logger.info(letter, in_order=True, main_process_only=False)
        logger.debug("never", in_order=True)
        logger.info(letter, in_order=False)
        notebook_accel.PartialState(cpu=True).wait_for_everyone()
        written = (tmp_path / name).read_text().splitlines()
        assert written == ["[RANK 0] a", "[RANK 1] b"] * 3 + ["[RANK 0] a"]


def test_the_environment_says_from_which_level_on(monkeypatch, caplog):
    from notebook_accel.logging import get_logger

    caplog.set_level(logging.root.level)  # the root has this level again after the test
    for get, name in ((get_logger, "ours"), (peer_get_logger, "theirs")):
        logging.root.setLevel("ERROR")
        get(f"compat.level.{name}")
        assert logging.root.level == logging.ERROR
        monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "debug")
        get(f"compat.level.{name}")
        assert logging.getLogger(f"compat.level.{name}").level == logging.root.level == 10
        get(f"compat.level.{name}", "info")
        assert logging.getLogger(f"compat.level.{name}").level == logging.root.level == 20
        monkeypatch.delenv("ACCELERATE_LOG_LEVEL")


@on_ranks(2)
def test_the_main_process_alone_saves_and_shows_a_bar(tmp_path):
    from notebook_accel.utils import save, tqdm, wait_for_everyone

    rank = int(os.environ["RANK"])
    save({"rank": rank}, tmp_path / f"of_{rank}.pt")
    save({"w": torch.ones(1)}, tmp_path / f"w_{rank}.safetensors", safe_serialization=True)
    wait_for_everyone()
    assert sorted(os.listdir(tmp_path)) == ["of_0.pt", "w_0.safetensors"]
    assert torch.load(tmp_path / "of_0.pt") == {"rank": 0}
    bars = [tqdm([1]), tqdm([1], main_process_only=False), tqdm([1], disable=True)]
    assert [bar.disable for bar in bars] == [rank > 0, False, True]
    assert [list(bar) for bar in bars] == [[1]] * 3


def test_wrappers_inside_a_model_are_taken_off_too():
    from notebook_accel.utils import extract_model_from_parallel

    for extract in (extract_model_from_parallel, accelerate.utils.extract_model_from_parallel):
        parts = [torch.nn.Linear(1, 1) for _ in range(3)]
        wrap = torch.nn.DataParallel
        deep = torch.nn.Sequential(wrap(parts[1]), torch.nn.Sequential(wrap(parts[2])))
        model = wrap(torch.nn.Sequential(parts[0], deep))
        inner = extract(model)
        assert inner is model.module
        assert inner[1] is deep
        assert type(deep[0]) is wrap
        assert extract(model, recursive=True) is inner
        assert [inner[0], inner[1][0], inner[1][1][0]] == parts
