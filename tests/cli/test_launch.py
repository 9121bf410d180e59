"""Scripts that ``notebook-accel launch`` and its peers start, and what it refuses to start."""

import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from notebook_accel import notebook_launcher
from notebook_accel.cli import main
from notebook_accel.cli.launch import launch_parser
from notebook_accel.cli.options import resolve_options, spellings, typed_settings
from notebook_accel.config import LaunchConfig, settings_of
from notebook_accel.config.plugins import PLUGINS
from notebook_accel.system.processes import lives
from tests.cli.commands import ROOT, SCRIPT, losses, notebook_accel, run
from tests.engines.contract import BUSY
from tests.ports import free_port
from tests.waiting import eventually

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node=2")

# Each command imports torch anew, and so does each of its ranks.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.fixture(scope="module")
def in_notebook(tmp_path_factory):
    """The losses of the script's function on two ranks of notebook_launcher."""
    file = tmp_path_factory.mktemp("notebook") / "training_of_a_notebook.py"
    file.write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(file.parent)
        module = importlib.import_module(file.stem)
        result = notebook_launcher(module.main, num_processes=2, view="none")[0]
    del sys.modules[file.stem]
    return result


def accelerate_yaml(folder, **changed):
    """A file that ``accelerate config default`` has written, with some answers changed."""
    cli = "accelerate.commands.accelerate_cli"
    done = run("-m", cli, "config", "default", "--config_file", "theirs.yaml", folder=folder)
    assert done.returncode == 0, done.stderr
    file = folder / "theirs.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **changed}))
    return "theirs.yaml"


def test_a_script_trains_as_in_a_notebook(folder, in_notebook, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    assert main(["config", "default"]) == 0
    done = notebook_accel("launch", "--num_processes", "2", "train.py", folder=folder)
    assert losses(done) == ("2 MULTI_CPU no 1", in_notebook)
    assert "settings of " in done.stderr


@pytest.mark.long
def test_fsdp_trains_from_a_file_alone(folder, in_notebook):
    section = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "NO_WRAP"}
    file = accelerate_yaml(folder, num_processes=2, distributed_type="FSDP", fsdp_config=section)
    said, found = losses(notebook_accel("launch", "--config_file", file, "train.py", folder=folder))
    assert said == "2 FSDP no 1"
    assert found == pytest.approx(in_notebook, abs=1e-5)


def test_deepspeed_trains_from_a_file_alone(folder, in_notebook):
    """Run by: make test-deepspeed."""
    pytest.importorskip("deepspeed")
    section = {"zero_stage": 2, "offload_optimizer_device": "none", "gradient_clipping": 1000.0}
    kind = {"distributed_type": "DEEPSPEED", "use_cpu": True, "deepspeed_config": section}
    file = accelerate_yaml(folder, num_processes=2, **kind)
    # Where DeepSpeed finds ninja.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = notebook_accel("launch", "--config_file", file, "train.py", folder=folder, PATH=path)
    said, found = losses(done)
    assert said == "2 DEEPSPEED no 1"
    assert found == pytest.approx(in_notebook, abs=1e-4)


@pytest.mark.long
def test_a_script_obeys_other_launchers(folder, in_notebook):
    theirs = ("-m", "accelerate.commands.launch", "--num_processes=2", "--main_process_port=0")
    options = ("--use_fsdp", "--fsdp_version=2", "--fsdp_auto_wrap_policy=NO_WRAP")
    done = run(*theirs, *options, "--mixed_precision=bf16", "train.py", folder=folder)
    said, found = losses(done)
    assert said == "2 FSDP bf16 1"
    assert found == pytest.approx(in_notebook, abs=0.01)
    done = run("-m", *TORCHRUN, "train.py", folder=folder)
    assert losses(done) == ("2 MULTI_CPU no 1", in_notebook)


@pytest.mark.long
def test_a_module_a_program_and_a_seed(folder):
    (folder / "tool.py").write_text(
        "import os, random, sys\n"
        "import torch\n"
        "numbers = [random.random(), torch.rand(()).item()]\n"
        "said = [numbers, sys.argv[1:], __name__, os.environ['OF_MINE']]\n"
        "open(f'{sys.argv[-1]}-{os.environ[\"RANK\"]}', 'w').write(repr(said))\n"
    )
    options = ("--num-processes=2", "--env", "OF_MINE=x=1")
    for number in ("1", "2"):
        done = notebook_accel(
            "launch", *options, "--seed=3", "-m", "tool", "--seed", number, folder=folder
        )
        assert done.returncode == 0, done.stderr
    said = {number: (folder / f"{number}-0").read_text() for number in ("1", "2")}
    assert said["1"] == said["2"].replace("'2'", "'1'")
    assert "['--seed', '1'], '__main__', 'x=1'" in said["1"]
    assert (folder / "1-1").read_text() == said["1"]
    program = ("launch", *options, "--no_python", sys.executable, "tool.py", "3")
    assert notebook_accel(*program, folder=folder).returncode == 0
    assert (folder / "3-1").exists()


def test_ranks_of_a_launcher_launch_no_ranks(folder):
    (folder / "launches.py").write_text(
        "from notebook_accel import notebook_launcher\n"
        "notebook_launcher(print, ('trains',), num_processes=2)\n"
    )
    for launcher in (("notebook_accel", "launch", "--num_processes=2"), TORCHRUN):
        done = run("-m", *launcher, "launches.py", folder=folder)
        assert done.returncode == 1
        assert "of 2 that a launcher started" in done.stderr
        assert "trains" not in done.stdout


def test_a_rank_that_fails_is_named(folder):
    (folder / "fails.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(100)\n"
    )
    done = notebook_accel("launch", "--num_processes=2", "fails.py", folder=folder)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "notebook-accel: rank 1 failed (exit code 7)"


def test_nothing_is_left_of_a_launch_that_is_killed(folder):
    (folder / "sleeps.py").write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "open(f'pids-{os.environ[\"RANK\"]}', 'w').write(f'{os.getpid()} {child.pid} .')\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "notebook_accel", "launch", "--num_processes=2", "sleeps.py"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)

    def pids():
        texts = [file.read_text() for file in folder.glob("pids-*")]
        return [int(word) for text in texts if text.endswith(".") for word in text.split()[:2]]

    eventually(lambda: len(pids()) == 4, what="the ranks run")
    process.kill()
    process.wait()
    eventually(lambda: not any(map(lives, pids())), within=BUSY, what="they have ended")


# Two tasks on this machine, as ``srun`` starts one on each node.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost
SLURM_NODEID=1 "$@" >of-the-other 2>&1 &
SLURM_NODEID=0 "$@" && wait $!
"""


@pytest.mark.long
def test_the_docs_job_trains_on_several_machines(folder, in_notebook):
    command = f'#!/bin/bash\nexec {sys.executable} -m notebook_accel "$@"\n'
    for name, script in {"srun": SRUN, "notebook-accel": command}.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    variables = {"SLURM_JOB_ID": "77", "SLURM_CPUS_PER_TASK": "2", "PATH": path}
    job = ("bash", str(ROOT / "docs/slurm.sbatch"))
    options = ("--num_processes=2", f"--main_process_port={free_port()}")
    done = run(*job, *options, "train.py", folder=folder, python=(), **variables)
    assert losses(done) == ("2 MULTI_CPU no 1", in_notebook)


# ---- what is refused -----------------------------------------------------------------------


def refused(capsys, *arguments):
    """The one line with which a command refuses its arguments."""
    assert main(["launch", *arguments]) == 2
    seen = capsys.readouterr()
    (line,) = seen.err.splitlines()
    assert seen.out == ""
    return line


def test_bad_input_is_one_line_and_status_2(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    (folder / "broken.yaml").write_text("num_processes: [2\n")
    (folder / "wrong.yaml").write_text("num_processes: -2\n")
    (folder / "typo.yaml").write_text("num_proceses: 2\n")
    assert "'broken.yaml': it cannot be read" in refused(capsys, "--config=broken.yaml", "train.py")
    assert "num_processes=-2: expected" in refused(capsys, "--config=wrong.yaml", "train.py")
    assert "no setting is called" in refused(capsys, "--config=typo.yaml", "train.py")
    assert "there is no script 'no.py' in" in refused(capsys, "no.py")
    assert "there is no module 'no.py' in" in refused(capsys, "-m", "no.py")
    assert "there is no program 'no.py'" in refused(capsys, "--no_python", "no.py")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = refused(capsys, "--main_process_port", port, "--num_processes=2", "train.py")
        assert f"use_port={port} cannot be had on this machine" in said
    said = refused(capsys, "--gpu_ids=0,1", "--num_processes=3", "train.py")
    assert "num_processes=3, but devices=[0, 1]: one accelerator a rank" in said
    assert "expected a multiple" in refused(
        capsys, "--num_processes=3", "--num_machines=2", "--main_process_ip=10.0.0.1", "train.py"
    )
    assert "no address" in refused(capsys, "--num_machines=2", "train.py")
    assert "engine='inline'" in refused(capsys, "--engine=inline", "train.py")
    assert "engine='xla'" in refused(capsys, "--tpu", "train.py")
    assert "--env A: expected NAME=VALUE" in refused(capsys, "--env", "A", "train.py")
    assert "there is no such option" in refused(capsys, "--no_such_option", "train.py")
    assert "--nproc_per_node abc: " in refused(capsys, "--nproc_per_node=abc", "train.py")
    assert main(["lunch"]) == 2
    assert "there is no command 'lunch'" in capsys.readouterr().err


# ---- options -------------------------------------------------------------------------------


def test_each_setting_is_an_option():
    known = launch_parser()._option_string_actions
    rows = [name for name in settings_of(LaunchConfig) if name not in PLUGINS]
    options = [name for plugin in PLUGINS.values() for name in plugin.options]
    missing = {text for text in spellings(*rows, *options) if text not in known}
    assert missing == set()


# Of kinds of launches that are not there.
_ABSENT = ("megatron_lm_", "tpu_cluster", "tpu_use", "aws", "vm", "help", "config_sp_")


def test_accelerates_options_are_understood(capsys):
    from accelerate.commands.launch import launch_command_parser

    known = launch_parser()._option_string_actions
    theirs = [
        text
        for action in launch_command_parser()._actions
        for text in action.option_strings
        if action.dest != "help"
    ]
    absent = [text for text in theirs if text not in known]
    assert len(theirs) - len(absent) > 100
    for option in absent:
        assert any(part in option.replace("-", "_") for part in _ABSENT), option
        said = refused(capsys, option, "1", "train.py")
        assert said.startswith(f"notebook-accel launch: {option}: ")
        assert "there is no such option" not in said
    line = (
        "--fp8_margin 1 --fp8_use_autocast_during_eval --parallelism_config_cp_backend torch t.py"
    )
    _, notices = typed_settings(launch_parser().parse_args(line.split()))
    assert notices == ["fp8_margin='1', fp8_use_autocast_during_eval=True: not used here"]


def test_options_become_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    line = """--multi_gpu --num_machines 1 --num-processes 4 --gpu_ids all --mixed_precision BF16
        --gradient_accumulation_steps=2 --use_fsdp --fsdp_version 1 --fsdp_sharding_strategy 2
        --fsdp_reshard_after_forward SHARD_GRAD_OP --fsdp-offload-params true
        --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_use_orig_params true
        --fsdp_transformer_layer_cls_to_wrap Block --dynamo_backend inductor --debug
        --main_process_port 0 --enable_cpu_affinity -q train.py --num_processes 9"""
    typed = launch_parser().parse_args(line.split())
    given, notices = typed_settings(typed)
    assert notices == []
    assert typed.training_script_args == ["--num_processes", "9"]
    assert LaunchConfig(**given) == LaunchConfig(
        num_processes=4,
        mixed_precision="bf16",
        gradient_accumulation_steps=2,
        debug=True,
        env={"ACCELERATE_DYNAMO_BACKEND": "inductor", "ACCELERATE_CPU_AFFINITY": "true"},
        fsdp={
            "fsdp_version": 1,
            "sharding_strategy": "SHARD_GRAD_OP",
            "cpu_offload": True,
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": "Block",
        },
    )


def test_an_option_goes_before_the_file_and_the_file_before_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("NOTEBOOK_ACCEL_NUM_PROCESSES", "5")
    monkeypatch.setenv("NOTEBOOK_ACCEL_SEED", "7")
    file = tmp_path / "theirs.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 4\n"
        "num_machines: 2\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\nmain_process_port: 3000\n"
        "fsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\n"
    )
    options = ("--config_file", str(file), "--fsdp_offload_params=false", "--num_processes=2")
    config, machines, _ = resolve_options(launch_parser().parse_args([*options, "train.py"]))
    assert (config.num_processes, config.seed, config.use_port) == (2, 7, 3000)
    assert config.fsdp == {"fsdp_version": 2, "cpu_offload": False}
    assert machines == {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1"}


@pytest.mark.parametrize("of_torchrun", [None, 29500])
def test_the_typed_port_or_a_free_one_is_taken_whatever_torchruns_default_is(
    of_torchrun, monkeypatch, tmp_path
):
    from torch.distributed import run

    from notebook_accel.cli import launch

    made = run.get_args_parser

    def with_default():
        parser = made()
        parser.set_defaults(master_port=of_torchrun)
        return parser

    monkeypatch.setattr(run, "get_args_parser", with_default)
    file = tmp_path / "mine.yaml"
    file.write_text("use_port: 3000\n")
    places = []
    for words in (["--main_process_port", "4321"], ["--config_file", str(file)], []):
        typed = launch_parser().parse_args([*words, "train.py"])
        config, found, _ = resolve_options(typed)
        launch._place_machines(typed, found, config)
        places.append((str(typed.master_port), typed.rdzv_endpoint))
    assert places[:2] == [("4321", ""), ("3000", "")]
    assert places[2][1] == "localhost:0", "several launches may run at once"
