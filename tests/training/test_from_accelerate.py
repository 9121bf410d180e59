"""What is not ours comes from Accelerate by our doors, and works in ranks of ours."""

from pathlib import Path

import accelerate
import accelerate.tracking
import pytest
import torch
from torch import nn

import notebook_accel
from notebook_accel import Accelerator, notebook_launcher, tracking, utils
from tests.interpreters import run_script
from tests.public import DOORS

NOT_INSTALLED = """
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *rest: (
    None if name.split(".")[0] == "accelerate" else find(name, *rest)
)
"""
WITHOUT = f"""
import copy, importlib, pickle
for door in {DOORS}:
    importlib.import_module(door)
from notebook_accel.utils import set_seed, is_wandb_available, operations, CPU_WORD
from notebook_accel.hooks import ModelHook
import notebook_accel
from notebook_accel import init_empty_weights, Accelerator, prepare_pippy
set_seed(1)
assert operations.gather is notebook_accel.utils.memory.gather is notebook_accel.utils.gather
assert "accelerate" not in sys.modules
for moved in (copy.copy(ModelHook), pickle.loads(pickle.dumps(ModelHook))):
    assert repr(moved) == "<accelerate.hooks.ModelHook, which is not installed>"
uses = [
    is_wandb_available,
    lambda: init_empty_weights(),
    lambda: exec("class Own(ModelHook): ..."),
    lambda: ModelHook.init_hook,
]
for use in uses:
    try:
        use()
    except ImportError as error:
        assert "pip install 'notebook-accel[accelerate]'" in str(error), error
    else:
        raise AssertionError("no error")
for name in ("no_such_name", "_private"):
    assert not hasattr(notebook_accel, name)
assert not hasattr(notebook_accel.utils, "_private")
"""
REPLACED = """
import pickle, sys
import notebook_accel
sys.modules["accelerate"] = notebook_accel
from accelerate import Accelerator, init_empty_weights
from accelerate.hooks import AlignDevicesHook, PartialState
from accelerate.utils import is_bf16_available, named_module_tensors
from accelerate.utils.constants import FSDP_AUTO_WRAP_POLICY
from accelerate.tracking import GeneralTracker, CometMLTracker
assert is_bf16_available() and "SIZE_BASED_WRAP" in FSDP_AUTO_WRAP_POLICY
assert Accelerator is notebook_accel.Accelerator
assert PartialState is notebook_accel.PartialState, "a name that is ours is ours at every path"
assert notebook_accel.hooks.AlignDevicesHook is AlignDevicesHook
assert pickle.loads(pickle.dumps(AlignDevicesHook)) is AlignDevicesHook
assert sys.modules["accelerate"] is notebook_accel
try:
    from accelerate.utils import no_such_name
except ImportError:
    pass
else:
    raise AssertionError("no error")
"""


@pytest.mark.parametrize("script", [NOT_INSTALLED + WITHOUT, REPLACED], ids=["absent", "replaced"])
def test_doors_open_without_accelerate_and_past_an_alias(script, tmp_path):
    run_script(script, folder=tmp_path)


class Written(accelerate.tracking.GeneralTracker):
    """A tracker by Accelerate's base, which writes a line for each call that reaches it."""

    name = "written"
    requires_logging_directory = True

    def __init__(self, project, logging_dir):
        super().__init__()
        self.file = Path(logging_dir) / project

    @property
    def tracker(self):
        return self.file

    def write(self, text):
        with self.file.open("a") as file:
            file.write(f"{text}\n")

    @accelerate.tracking.on_main_process
    def store_init_configuration(self, values):
        self.write(f"config {values}")

    @accelerate.tracking.on_main_process
    def log(self, values, step=None, **kwargs):
        self.write(f"log {values} {step}")

    @accelerate.tracking.on_main_process
    def finish(self):
        self.write("finish")


def track(folder):
    made = Written("by hand", folder)
    accelerator = Accelerator(log_with=[Written, Written("made", folder)], project_dir=folder)
    accelerator.init_trackers("class", {"rate": 1})
    accelerator.log({"loss": 0.5}, step=3)
    accelerator.get_tracker("written").log({"more": 1})
    accelerator.end_training()
    # The door has seen to it that Accelerate knows of the ranks.
    assert tracking.CometMLTracker.name == "comet_ml"
    made.log({"loss": 0.25}, step=4)
    return bool(accelerate.PartialState().is_main_process)


def test_trackers_of_accelerate_are_taken_and_write_once(tmp_path):
    run = notebook_launcher(track, (str(tmp_path),), num_processes=2, view="none")
    assert list(run) == [True, False]
    lines = {path.name: path.read_text().splitlines() for path in tmp_path.iterdir()}
    logged = ["config {'rate': 1}", "log {'loss': 0.5} 3"]
    assert lines["class"] == [*logged, "log {'more': 1} None", "finish"]
    assert lines["made"] == [*logged, "finish"]
    assert lines["by hand"] == ["log {'loss': 0.25} 4"]


def make_blocks():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1))


def load_and_offload(folder):
    accelerator = Accelerator(mixed_precision="bf16")
    whole, inputs = make_blocks(), torch.ones(1, 2)
    with torch.no_grad(), accelerator.autocast():
        expected = whole(inputs)
    if accelerator.is_main_process:
        accelerator.save_model(whole, folder)
    accelerator.wait_for_everyone()
    with notebook_accel.init_empty_weights():
        model = make_blocks()
    assert model[0].weight.is_meta
    spread = {"0": "cpu", "1": "disk", "2": "cpu"}
    model = notebook_accel.load_checkpoint_and_dispatch(
        model, folder, device_map=spread, offload_folder=f"{folder}/of {accelerator.process_index}"
    )
    if accelerator.num_processes > 1:  # where a model that is spread over devices is refused
        with torch.no_grad(), accelerator.autocast():
            assert torch.equal(model(inputs), expected)
        return
    prepared = accelerator.prepare(model)
    kept = utils.modeling.get_state_dict_offloaded_model(accelerator.unwrap_model(prepared))
    with pytest.raises(notebook_accel.ConfigError, match="get_state_dict_offloaded_model"):
        accelerator.get_state_dict(prepared)
    assert prepared[1].weight.is_meta
    assert torch.equal(prepared(inputs), expected.float())
    assert all(torch.equal(kept[name], weight) for name, weight in whole.state_dict().items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_models_are_loaded_and_offloaded_and_pass_prepare(ranks, tmp_path):
    notebook_launcher(load_and_offload, (str(tmp_path),), num_processes=ranks, view="none")
