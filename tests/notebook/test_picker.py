"""The form for the settings of a launch: its rows, texts and what it does with a bad value."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import threading
from dataclasses import fields, replace
from functools import partial
from html import unescape
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from ipykernel.compiler import XCachingCompiler
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from notebook_accel import ConfigError, LaunchConfig, config_picker
from notebook_accel.config import default_config_path
from notebook_accel.config.plugins import PLUGINS
from notebook_accel.launch.machine import Device, Machine
from notebook_accel.launch.run import call_of
from notebook_accel.launch.system.interrupts import Latch
from notebook_accel.notebook import display_slot, launcher
from notebook_accel.notebook import picker as picker_module
from notebook_accel.notebook.display_slot import DisplaySlot, widget_view
from notebook_accel.notebook.picker import (
    as_code,
    as_yaml,
    devices_line,
    plugin_rows,
    read_arguments,
    setting_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from notebook_accel.launch.request import LaunchRequest
    from notebook_accel.notebook.picker import ConfigPicker

FULL = LaunchConfig(
    num_processes=2,
    mixed_precision="bf16",
    engine="local",
    devices=(0, 2),
    backend="gloo",
    use_port=29501,
    env={"A": "1", "B": "x=y", "C": "two\nlines", "D": '"', "E": "", "F": "end\n"},
    grace=2.5,
    debug=True,
    gradient_accumulation_steps=4,
    seed=7,
    fsdp={"sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": False, "min_num_params": 100},
    parallelism={"dp_shard_size": 2},
)


def _shown_code(html: str) -> str:
    """The text of a code box, which has a button beside it."""
    return unescape(html.removeprefix("<pre>").partition("</pre>")[0])


@pytest.fixture(autouse=True)
def _folder_of_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.chdir(tmp_path)


def row(picker: ConfigPicker, name: str) -> Any:
    return picker._rows[name]


def test_every_setting_has_a_row() -> None:
    assert {*setting_rows(), *PLUGINS} == {field.name for field in fields(LaunchConfig)}
    for plugin in PLUGINS.values():
        assert [row.name for row in plugin_rows(plugin)] == list(plugin.options)


@pytest.mark.parametrize("config", [LaunchConfig(), FULL])
def test_a_form_gives_back_what_it_was_filled_with(config: LaunchConfig) -> None:
    assert config_picker(config).config == config


def test_the_code_and_the_yaml_mean_the_settings(tmp_path: Path) -> None:
    scope: dict[str, Any] = {}
    code = as_code(FULL, "train", "3e-4, epochs=2")
    assert code.endswith(
        "notebook_launcher(train, args=(0.0003,), kwargs={'epochs': 2}, config=config)"
    )
    exec(code.rpartition("\n")[0], scope)
    assert scope["config"] == FULL
    for config in (FULL, LaunchConfig()):
        assert LaunchConfig(**(yaml.safe_load(as_yaml(config)) or {})) == config
    picker = config_picker(FULL)
    shown = _shown_code(picker._yaml.value)
    assert LaunchConfig(**yaml.safe_load(shown)) == FULL
    picker._path.value = str(tmp_path / "a" / "b.yaml")
    picker._buttons["Save"].click()
    assert LaunchConfig.load(picker._path.value) == FULL
    other = config_picker(LaunchConfig())
    other._path.value = picker._path.value
    other._buttons["Load"].click()
    assert other.config == FULL


def test_the_code_of_an_infinite_number_runs() -> None:
    config = LaunchConfig(grace=inf, deepspeed={"zero_stage": 2, "gradient_clipping": inf})
    scope: dict[str, Any] = {}
    exec(as_code(config, None, "").rpartition("\n")[0], scope)
    assert scope["config"] == config
    assert LaunchConfig(**yaml.safe_load(as_yaml(config))) == config


def test_a_bad_value_is_told_beside_its_field_and_nothing_can_be_launched() -> None:
    picker = config_picker()
    row(picker, "num_processes").widget.value = "zero"
    assert "expected a whole number" in row(picker, "num_processes")._note.value
    assert "expected" not in row(picker, "seed")._note.value
    with pytest.raises(ConfigError):
        picker.config  # noqa: B018
    assert picker._buttons["Save"].disabled
    assert picker._buttons["Launch"].disabled
    row(picker, "num_processes").widget.value = "2"
    assert "expected" not in row(picker, "num_processes")._note.value
    assert picker.config == LaunchConfig(num_processes=2)
    assert not picker._buttons["Save"].disabled
    assert "Define a function in a cell" in picker._message.value


def test_two_settings_that_do_not_go_together_are_told() -> None:
    picker = config_picker({"num_processes": 2})
    row(picker, "engine").widget.value = "inline"
    assert "engine=&#39;inline&#39; has 1 rank" in row(picker, "engine")._note.value


# What a person types that makes no sense, field by field.
WRONG = {
    "num_processes": "zero",
    "num_nodes": "0",
    "max_restarts": "-1",
    "devices": "0, 0",
    "master_addr": "two words",
    "gradient_accumulation_steps": "0",
    "seed": "-1",
    "use_port": "70000",
    "grace": "soon",
    "env": "=value",
}


@pytest.mark.parametrize("name", WRONG)
def test_the_reason_stands_beside_the_field_that_it_is_about(name: str) -> None:
    picker = config_picker()
    row(picker, name).widget.value = WRONG[name]
    marked = [one.name for one in picker._all_rows() if "na-wrong" in one._note.value]
    assert marked == [name]
    assert "expected" in row(picker, name)._note.value
    assert "expected" not in picker._message.value


def test_every_field_that_takes_text_has_a_value_that_is_refused() -> None:
    typed = {name for name, one in setting_rows().items() if hasattr(one.widget, "placeholder")}
    assert typed == WRONG.keys()


def test_what_runs_in_the_cell_that_launches_cannot_be_launched_by_a_click(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Notebook(monkeypatch).define("train")
    picker = config_picker(LaunchConfig())
    row(picker, "engine").widget.value = "inline"
    assert "copy the code into a cell" in row(picker, "engine")._note.value
    assert picker._buttons["Launch"].disabled
    assert not picker._buttons["Save"].disabled
    row(picker, "engine").widget.value = ""
    assert "copy the code" not in row(picker, "engine")._note.value
    assert not picker._buttons["Launch"].disabled
    # The settings may come from elsewhere, too.
    monkeypatch.setenv("NOTEBOOK_ACCEL_ENGINE", "inline")
    with pytest.raises(ConfigError, match="copy the code into a cell"):
        launcher.launch_below(
            print,
            (),
            {},
            config=LaunchConfig(),
            slot=DisplaySlot(),
        )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_gpus": 2}, "no setting is called 'num_gpus'"),
        (5, "config=5: expected a LaunchConfig, a mapping"),
    ],
)
def test_what_it_cannot_start_with_is_named(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_picker(config)


def test_options_unfold_with_their_strategy_and_are_checked() -> None:
    picker = config_picker()
    boxes = picker._plugin_boxes

    def unfolded() -> set[str]:
        return {name for name, box in boxes.items() if box.layout.display is None}

    assert unfolded() == set()
    chosen = [names for _, names in picker._strategy.widget.options]
    assert {name for names in chosen for name in names} == PLUGINS.keys() == boxes.keys()
    for names in chosen:
        picker._strategy.widget.value = names
        assert unfolded() == {*names}
    picker._strategy.widget.value = ("fsdp",)
    assert picker.config.fsdp == {}
    smallest = next(row for row in picker._plugins["fsdp"] if row.name == "min_num_params")
    smallest.widget.value = "none"
    assert "expected a whole number" in smallest._note.value
    smallest.widget.value = "1000"
    assert picker.config.fsdp == {"min_num_params": 1000}
    # A mesh without a size is none; FSDP and DeepSpeed have defaults.
    picker._strategy.widget.value = ("parallelism",)
    assert picker.config == LaunchConfig()


def test_a_saved_file_is_where_it_was_asked_for_and_the_default_one_is_named(
    tmp_path: Path,
) -> None:
    picker = config_picker(FULL)
    picker._path.value = "~/c.yaml"
    picker._buttons["Save"].click()
    assert LaunchConfig.load(tmp_path / "home" / "c.yaml") == FULL
    assert "each launch" not in picker._message.value
    picker._path.value = str(default_config_path())
    picker._buttons["Save"].click()
    assert "each launch takes" in picker._message.value


def test_a_file_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    picker = config_picker()
    picker._path.value = str(tmp_path / "none.yaml")
    picker._buttons["Load"].click()
    assert "cannot be read" in picker._message.value
    # Of Accelerate's own file it is told what a launch here does not use.
    (tmp_path / "theirs.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\nnum_processes: 2\ndynamo_config:\n"
        "  dynamo_backend: INDUCTOR\n  dynamo_new_thing: much\n"
    )
    picker._path.value = str(tmp_path / "theirs.yaml")
    picker._buttons["Load"].click()
    assert picker.config.num_processes == 2
    assert "dynamo_new_thing=" in picker._message.value
    assert "not used here" in picker._message.value


def test_arguments_are_read_as_a_call_has_them() -> None:
    assert read_arguments("a, 2, b=[a]", {"a": 1}) == ((1, 2), {"b": [1]})
    assert read_arguments("", {}) == ((), {})
    with pytest.raises(SyntaxError):
        read_arguments("1) + (2", {})


class Notebook:
    """A notebook that displays nothing: its functions, and what was launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel = object()
        self.user_ns: dict[str, Any] = {}
        self.after_cell: list[Any] = []
        self.events = SimpleNamespace(register=lambda _, call: self.after_cell.append(call))
        self.launched: list[Any] = []
        self.given: dict[str, Any] = {}
        self.displayed: list[Any] = []
        monkeypatch.setattr(picker_module, "get_ipython", lambda: self)
        monkeypatch.setattr(picker_module, "launch_below", self.launch)
        monkeypatch.setattr(display_slot, "display", lambda data, **_: self.displayed.append(data))
        monkeypatch.setattr(display_slot, "update_display", lambda *_, **__: None)
        self.machine = Machine(kind="cpu", devices=(), num_cores=2, memory=2**30, free_memory=2**30)
        monkeypatch.setattr(picker_module, "look_at_machine", lambda: self.machine)

    def define(self, name: str) -> Any:
        """Run a cell that defines a function."""

        def function(rate: float) -> None: ...

        function.__module__ = "__main__"
        self.user_ns[name] = function
        for call in self.after_cell:
            call(None)
        return function

    def launch(self, function: Any, args: Any, kwargs: Any, **given: Any) -> Any:
        self.launched.append((function, args, kwargs))
        self.given = given
        return SimpleNamespace(id="calm-otter", _call=SimpleNamespace(ended=Latch()))


def test_a_form_knows_functions_that_later_cells_define(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch)
    picker = config_picker(LaunchConfig())
    picker._ipython_display_()
    assert "Define a function" in picker._message.value
    assert picker._buttons["Launch"].disabled
    notebook.define("train")
    assert picker._function.value == "train"
    assert "Define a function" not in picker._message.value
    assert not picker._buttons["Launch"].disabled
    notebook.define("evaluate")
    assert (picker._function.options, picker._function.value) == (("train", "evaluate"), "train")


def test_what_the_machine_cannot_carry_is_told_before_it_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notebook = Notebook(monkeypatch)
    notebook.define("train")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    picker = config_picker(LaunchConfig())
    processes = row(picker, "num_processes")
    launch, save = picker._buttons["Launch"], picker._buttons["Save"]

    def told(number: str) -> tuple[str, bool]:
        processes.widget.value = number
        assert not save.disabled, "the settings make sense elsewhere"
        return processes._note.value, launch.disabled

    before = told("100000")
    assert before == (told("2")[0], False), "nothing is known of the machine yet"
    told("100000")
    picker._look()
    assert "100000 ranks need about" in processes._note.value
    assert launch.disabled
    text, is_disabled = told("64")
    assert "64 ranks share 2 CPU cores, and take about 16.0 GB" in text
    assert "na-warn" in text
    assert not is_disabled
    assert told("2") == before
    # With accelerators there is one a rank, unless ranks train on the CPU.
    device = Device(index=0, name="H200", memory=2**37)
    notebook.machine = replace(notebook.machine, devices=(device,))
    picker._look()
    assert "but this machine has 1" in processes._note.value
    assert launch.disabled
    row(picker, "devices").widget.value = "cpu"
    assert told("2") == before
    row(picker, "devices").widget.value = "0, 5"
    assert "this machine has the accelerators 0:" in row(picker, "devices")._note.value
    assert launch.disabled
    row(picker, "devices").widget.value = "0"
    assert "this machine has" not in row(picker, "devices")._note.value
    assert not told("1")[1]


def test_a_form_that_is_shown_again_shows_its_run_there_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notebook = Notebook(monkeypatch)
    notebook.define("train")
    picker = config_picker(LaunchConfig())
    picker._ipython_display_()
    picker._buttons["Launch"].click()
    panel = {"text/plain": "the panel"}
    notebook.given["slot"].show(panel)
    form, lost, *places = notebook.displayed
    # A file has no widgets: what it keeps of the form says how to have it.
    assert form == widget_view(picker._box, form["text/plain"])
    assert lost["text/plain"].endswith("Run the cell again to see it.")
    # In a page that draws the form, the form hides that.
    (its_class,) = re.findall("class='(na-lost-.*?)'", lost["text/html"])
    assert f".{its_class} {{ display: none; }}" in picker._box.children[0].value
    assert places == [{"text/plain": "", "text/html": ""}]
    picker._ipython_display_()
    assert notebook.displayed[3:] == [form, lost, panel]


class Launcher:
    """What the launcher is asked to do in a real shell, in which nothing starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = Config(HistoryManager={"enabled": False})
        # As a kernel does, it names cells by their text.
        self.shell: Any = InteractiveShell.instance(config=config, compiler_class=XCachingCompiler)
        self.given: Any = None
        self.is_held = False
        monkeypatch.setattr(display_slot, "display", lambda *_, **__: None)
        monkeypatch.setattr(display_slot, "update_display", lambda *_, **__: None)
        for name, is_held in (("launch", False), ("launch_for_debugger", True)):
            monkeypatch.setattr(launcher, name, partial(self._launch, is_held))

    def _launch(self, is_held: bool, request: LaunchRequest) -> Any:
        self.is_held, self.given = is_held, request
        return SimpleNamespace(id="calm-otter", _call=SimpleNamespace(ended=Latch()))

    def run(self, *cells: str) -> None:
        for cell in cells:
            assert self.shell.run_cell(cell, store_history=True).success

    def click(self, config: LaunchConfig, arguments: str = "") -> None:
        """Launch the newest function by a form."""
        picker = config_picker(config)
        picker._arguments.value = arguments
        picker._buttons["Launch"].click()
        assert self.given is not None, picker._message.value


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    main = sys.modules["__main__"]
    yield Launcher(monkeypatch)
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = main


def test_a_click_launches_as_the_code_of_the_form_does(
    started: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    LaunchConfig(num_processes=2, seed=5).save(default_config_path())
    monkeypatch.setenv("NOTEBOOK_ACCEL_SEED", "6")
    started.run("def train(rate=1): ...")
    # A setting of the form, one of the environment and one of the default file.
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "true")
    for form in (LaunchConfig(mixed_precision="bf16"), LaunchConfig(debug=True)):
        started.click(form)
        by_click = started.given
        code = config_picker(form)._code.value
        code = _shown_code(code)
        started.run(code.replace("config=config)", "config=config, block=False)"))
        assert started.given.config == by_click.config
        assert started.given.notices == by_click.notices
        assert not started.is_held, "no cell waits for it"
        assert by_click.config.seed == 6
        assert by_click.config.num_processes == 2
        assert by_click.config.debug


def test_one_run_at_a_time_is_launched_and_bad_arguments_have_no_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notebook = Notebook(monkeypatch)
    train = notebook.define("train")
    picker = config_picker(LaunchConfig())
    button = picker._buttons["Launch"]
    picker._arguments.value = "0.5, epochs="
    assert button.disabled
    assert "is no list of arguments" in picker._message.value
    assert "Arguments that make no sense" in picker._code.value
    picker._arguments.value = "0.5, **{}"
    assert "args=(0.5,), kwargs={**{}}" in picker._code.value
    picker._arguments.value = "0.5, epochs=3"
    assert "args=(0.5,), kwargs={&#39;epochs&#39;: 3}" in picker._code.value
    button.click()
    button.click()
    assert notebook.launched == [(train, (0.5,), {"epochs": 3})]
    assert "run = notebook_accel.find_run(&#39;calm-otter&#39;)" in picker._message.value
    assert (button.disabled, button.description) == (True, "Running")
    told = threading.Event()
    button.observe(lambda _: told.set(), names="disabled")
    call_of(picker.run).ended.set()
    assert told.wait(10)
    assert (button.disabled, button.description) == (False, "Launch")


def test_a_click_that_comes_while_a_change_is_checked_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A kernel with subshells calls listeners in two threads, and a check clears what was said."""
    file = tmp_path / "picked.yaml"
    LaunchConfig(fsdp={"min_num_params": 1000}).save(file)
    picker = config_picker(LaunchConfig(num_processes=1))
    picker._path.value = str(file)
    click = threading.Thread(target=picker._buttons["Load"].click, daemon=True)
    refresh = picker._refresh_functions

    def refresh_while_a_click_comes() -> None:
        monkeypatch.setattr(picker, "_refresh_functions", refresh)
        click.start()
        # One that did not wait would be over long before.
        click.join(0.5)
        refresh()

    monkeypatch.setattr(picker, "_refresh_functions", refresh_while_a_click_comes)
    row(picker, "seed").widget.value = "7"
    click.join(10)
    assert not click.is_alive()
    assert "Loaded from" in picker._message.value
    assert picker.config == LaunchConfig(fsdp={"min_num_params": 1000})


def test_devices_are_listed_with_their_memory_and_names_are_escaped() -> None:
    host: dict[str, Any] = {"num_cores": 8, "memory": 64 * 2**30, "free_memory": 2**30}
    device = Device(index=0, name="<i>H200</i>", memory=139 * 2**30)
    text = devices_line(Machine(kind="cuda", devices=(device,), **host))
    assert "&lt;i&gt;H200" in text
    assert "139 GB" in text
    assert "8 CPU cores, 64 GB of memory, 1 GB of it free" in text
    assert "No accelerator" in devices_line(Machine(kind="cpu", devices=(), **host))
    assert "no driver" in devices_line(Machine(kind="cpu", devices=(), error="no driver", **host))


LOOK = """
import sys
from notebook_accel import config_picker
picker = config_picker({})
picker._look()
print("CPU cores" in picker._devices.value, "torch" in sys.modules)
"""


def test_devices_are_looked_at_by_another_process() -> None:
    """This one could wake a device by torch alone, which it does not even import."""
    command = [sys.executable, "-c", LOOK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "True False\n", done.stderr
