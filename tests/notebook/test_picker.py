"""The form for the settings of a launch: its rows, texts and what it does with a bad value."""

import re
import resource
import threading
from dataclasses import replace
from html import unescape
from math import inf
from types import SimpleNamespace

import ipywidgets
import pytest
import yaml

from notebook_accel import ConfigError, LaunchConfig, config_picker
from notebook_accel.config import default_config_path, settings_of
from notebook_accel.config.plugins import PLUGINS
from notebook_accel.launch.preflight import Machine
from notebook_accel.launch.run import Run, call_of
from notebook_accel.notebook import display_slot, launcher
from notebook_accel.notebook import picker as picker_module
from notebook_accel.notebook.display_slot import DisplaySlot, widget_view
from notebook_accel.notebook.picker import as_yaml, devices_line
from notebook_accel.system.interrupts import Latch
from notebook_accel.wire import Devices
from tests.notebook.widgets import classes, field, inside
from tests.test_config import FULL as SETTINGS
from tests.waiting import eventually

FULL = replace(
    SETTINGS,
    mixed_precision="bf16",
    backend="gloo",
    env={"A": "1", "B": "x=y", "C": "two\nlines", "D": '"', "E": "", "F": "end\n"},
    fsdp={"sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": False, "min_num_params": 100},
)
INFINITE = LaunchConfig(grace=inf, deepspeed={"zero_stage": 2, "gradient_clipping": inf})
LABELS = {name: one.label for name, one in settings_of(LaunchConfig).items()}


@pytest.fixture(autouse=True)
def _folder_of_nobody(monkeypatch, tmp_path):
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.chdir(tmp_path)


class Form:
    """A form as a person has it before him."""

    def __init__(self, config=None):
        self.picker = config_picker(config)
        self.box = self.picker.box
        self.save, self.load, self.launch = (
            self.field(name) for name in ("Save", "Load", "Launch")
        )
        self.message = self.box.children[-1]
        self.plugins = [one for one in self.box.children if "na-plugin" in classes(one)]

    def field(self, name):
        """The field of a setting, or one with that label."""
        return field(self.box, LABELS.get(name) or name)

    def note(self, name):
        """What stands beside a field."""
        rows = (one.children for one in inside(self.box) if "na-row" in classes(one))
        return next(note.value for widget, note in rows if widget is self.field(name))

    @property
    def texts(self):
        """The code and the YAML, each of which has a button beside it."""
        shown = (one.value for one in self.box.children if "na-code" in classes(one))
        boxes = (value.removeprefix("<pre>").partition("</pre>")[0] for value in shown)
        return [unescape(text) for text in boxes]


def test_an_open_field_says_which_default_is_taken():
    form = Form()
    fields = [form.field(name) for name in LABELS.keys() - PLUGINS.keys()]
    fields += [one for box in form.plugins for one in inputs_in(box)]
    shown = {
        one.description: one.options[0][0] if hasattr(one, "options") else one.placeholder
        for one in fields
        # Lines of variables say so themselves.
        if not isinstance(one, ipywidgets.Textarea)
    }
    assert all(re.fullmatch("default: .{1,34}", text) for text in shown.values()), shown
    assert shown["Processes"] == "default: one for each accelerator, else 1"
    assert shown["sharding_strategy"] == "default: FULL_SHARD"
    assert shown["zero_stage"] == "default: 2"
    assert shown["transformer_cls_names_to_wrap"] == "default: the model's _no_split_modules"


def inputs_in(box):
    return [one for one in inside(box) if hasattr(one, "description") and one.description]


@pytest.mark.parametrize("config", [LaunchConfig(), FULL, INFINITE])
def test_a_form_gives_back_what_it_was_filled_with(config, tmp_path):
    form = Form(config)
    assert form.picker.config == config
    code, text = form.texts
    scope = {}
    exec(code.rpartition("\n")[0], scope)
    assert scope["config"] == config
    assert LaunchConfig(**(yaml.safe_load(text) or {})) == config
    path = str(tmp_path / "a" / "b.yaml")
    form.field("File").value = path
    form.save.click()
    assert LaunchConfig.load(path) == config
    other = Form(LaunchConfig(num_processes=5))
    other.field("File").value = path
    other.load.click()
    assert other.picker.config == config


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


def test_the_reason_stands_beside_the_field_that_it_is_about():
    form = Form()
    # Two settings that do not go together.
    form.field("num_processes").value = "2"
    form.field("engine").value = "inline"
    assert "engine=&#39;inline&#39; has 1 rank" in form.note("engine")
    with pytest.raises(ConfigError):
        form.picker.config  # noqa: B018
    form.field("engine").value = ""
    form.field("num_processes").value = ""
    # An option stands below its strategy; a mesh without a size is none.
    form.field("Strategy").value = ("fsdp",)
    form.field("min_num_params").value = "none"
    assert "expected a whole number" in form.note("min_num_params")
    form.field("Strategy").value = ("parallelism",)
    assert form.picker.config == LaunchConfig()
    names = LABELS.keys() - PLUGINS.keys()
    assert {name for name in names if hasattr(form.field(name), "placeholder")} == WRONG.keys()
    for name, wrong in WRONG.items():
        before, form.field(name).value = form.field(name).value, wrong
        assert [one for one in names if "na-wrong" in form.note(one)] == [name]
        assert "expected" in form.note(name)
        assert "expected" not in form.message.value
        form.field(name).value = before


@pytest.mark.parametrize("typed", ["NAME=value", "A: 1\nB=2", "A:1", "GLOB: *.txt", "- A"])
def test_variables_that_are_no_yaml_are_told_how_the_form_has_them(typed):
    form = Form()
    form.field("env").value = typed
    assert "NAME: value" in form.note("env")
    form.field("env").value = "N: 1\nIS_ON: true\nGLOB: '*.txt'"
    assert form.picker.config.env == {"N": "1", "IS_ON": "true", "GLOB": "*.txt"}
    # As they were given they stand there.
    form = Form(LaunchConfig(env={"B": "\xe9", "A": "word " * 30 + "1"}))
    assert form.field("env").value == f"B: \xe9\nA: {'word ' * 30}1\n"


def test_what_runs_in_the_cell_that_launches_cannot_be_launched_by_a_click(notebook, monkeypatch):
    notebook.define("train")
    form = Form(LaunchConfig())
    form.field("engine").value = "inline"
    assert "copy the code into a cell" in form.note("engine")
    assert form.launch.disabled
    assert not form.save.disabled
    form.field("engine").value = ""
    assert "copy the code" not in form.note("engine")
    assert not form.launch.disabled
    # The settings may come from elsewhere, too.
    monkeypatch.setenv("NOTEBOOK_ACCEL_ENGINE", "inline")
    with pytest.raises(ConfigError, match="copy the code into a cell"):
        launcher.launch_below(print, (), {}, config=LaunchConfig(), slot=DisplaySlot())


def test_a_saved_file_is_where_it_was_asked_for_and_the_default_one_is_named(tmp_path):
    form = Form(FULL)
    form.field("File").value = "~/c.yaml"
    form.save.click()
    assert LaunchConfig.load(tmp_path / "home" / "c.yaml") == FULL
    assert "each launch" not in form.message.value
    form.field("File").value = str(default_config_path())
    form.save.click()
    assert "each launch takes" in form.message.value


def test_a_file_that_cannot_be_used_is_told(tmp_path):
    form = Form()
    form.field("File").value = str(tmp_path / "none.yaml")
    form.load.click()
    assert "cannot be read" in form.message.value
    # Of Accelerate's own file it is told what a launch here does not use.
    (tmp_path / "theirs.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\nnum_processes: 2\ndynamo_config:\n"
        "  dynamo_backend: INDUCTOR\n  dynamo_new_thing: much\n"
    )
    form.field("File").value = str(tmp_path / "theirs.yaml")
    form.load.click()
    assert form.picker.config.num_processes == 2
    assert "dynamo_new_thing=" in form.message.value
    assert "not used here" in form.message.value


class Notebook:
    """A notebook that displays nothing: its functions, and what was launched."""

    def __init__(self, monkeypatch):
        self.kernel = object()
        self.user_ns = {}
        self.after_cell = []
        self.events = SimpleNamespace(register=lambda _, call: self.after_cell.append(call))
        self.launched = []
        self.given = {}
        self.displayed = []
        monkeypatch.setattr(picker_module, "get_ipython", lambda: self)
        monkeypatch.setattr(picker_module, "launch_below", self.launch)
        monkeypatch.setattr(display_slot, "display", lambda data, **_: self.displayed.append(data))
        monkeypatch.setattr(display_slot, "update_display", lambda *_, **__: None)
        host = {"num_cores": 2, "memory": 2**30, "free_memory": 2**30}
        self.machine = Machine(found=Devices(kind="cpu"), **host)
        monkeypatch.setattr(picker_module, "look_at_machine", lambda: self.machine)

    def define(self, name):
        """Run a cell that defines a function."""

        def function(rate): ...

        function.__module__ = "__main__"
        self.user_ns[name] = function
        for call in self.after_cell:
            call(None)
        return function

    def show(self, form, *, has):
        """Run a cell that shows a form, which then looks at the machine until it has a text."""
        form.picker._ipython_display_()
        eventually(lambda: has in form.box.children[1].value, what=has)

    def launch(self, function, args, kwargs, **given):
        self.launched.append((function, args, kwargs))
        self.given = given
        state = SimpleNamespace(name="train", detached=False, hang=None)
        call = SimpleNamespace(
            folder=SimpleNamespace(id="calm-otter"),
            config=None,
            state=state,
            ended=Latch(),
            check_waiting=lambda: None,
        )
        return Run(call)


@pytest.fixture
def notebook(monkeypatch):
    return Notebook(monkeypatch)


def test_a_form_knows_functions_that_later_cells_define(notebook):
    form = Form(LaunchConfig())
    notebook.show(form, has="2 CPU cores")
    assert "Define a function" in form.message.value
    assert form.launch.disabled
    notebook.define("train")
    function = form.field("Function")
    assert function.value == "train"
    assert "Define a function" not in form.message.value
    assert not form.launch.disabled
    notebook.define("evaluate")
    assert (function.options, function.value) == (("train", "evaluate"), "train")


def test_what_the_machine_cannot_carry_is_told_before_it_is_launched(notebook, monkeypatch):
    notebook.define("train")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    form = Form(LaunchConfig())

    def told(number):
        form.field("num_processes").value = number
        assert not form.save.disabled, "the settings make sense elsewhere"
        return form.note("num_processes"), form.launch.disabled

    before = told("100000")
    assert before == (told("2")[0], False), "nothing is known of the machine yet"
    told("100000")
    notebook.show(form, has="No accelerator")
    eventually(lambda: form.launch.disabled, what="refused")
    assert "100000 ranks need about" in form.note("num_processes")
    text, is_disabled = told("64")
    assert "64 ranks share 2 CPU cores, and take about 16.0 GB" in text
    assert "na-warn" in text
    assert not is_disabled
    assert told("2") == before
    # With accelerators there is one a rank, unless ranks train on the CPU.
    found = Devices(kind="cuda", names=("H200",), memory=(2**37,))
    notebook.machine = replace(notebook.machine, found=found)
    notebook.show(form, has="H200")
    eventually(lambda: form.launch.disabled, what="refused")
    assert "but this machine has 1" in form.note("num_processes")
    form.field("devices").value = "cpu"
    assert told("2") == before
    form.field("devices").value = "0, 5"
    assert "this machine has the accelerators 0:" in form.note("devices")
    assert form.launch.disabled
    form.field("devices").value = "0"
    assert "this machine has" not in form.note("devices")
    assert not told("1")[1]


def test_a_form_that_is_shown_again_shows_its_run_there_too(notebook):
    notebook.define("train")
    form = Form(LaunchConfig())
    notebook.show(form, has="2 CPU cores")
    form.launch.click()
    panel = {"text/plain": "the panel"}
    notebook.given["slot"].show(panel)
    shown, *places = notebook.displayed
    # A file has no widgets: what it keeps of the form says what it was.
    assert shown == widget_view(form.box, shown["text/plain"])
    assert places == [{"text/plain": "", "text/html": ""}]
    notebook.show(form, has="2 CPU cores")
    assert notebook.displayed[2:] == [shown, panel]


def test_a_click_launches_as_the_code_of_the_form_does(notebook, monkeypatch):
    LaunchConfig(num_processes=2, seed=5).save(default_config_path())
    monkeypatch.setenv("NOTEBOOK_ACCEL_SEED", "6")
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "true")
    notebook.define("train")
    given = []

    def launch(request):
        given.append(request)
        return notebook.launch(request.function, request.args, request.kwargs)

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(picker_module, "launch_below", launcher.launch_below)
    # A setting of the form, one of the environment and one of the default file.
    for config in (LaunchConfig(mixed_precision="bf16"), LaunchConfig(debug=True)):
        form = Form(config)
        form.field("Arguments").value = "3"
        form.launch.click()
        code = form.texts[0].replace("config=config)", "config=config, block=False)")
        exec(code, {**notebook.user_ns})
        by_click, by_code = given[-2:]
        assert by_click.config == by_code.config
        assert by_click.notices == by_code.notices
        assert type(by_click.new_view(waits=True)) is type(by_code.new_view(waits=True))
        assert by_click.config.seed == 6
        assert by_click.config.num_processes == 2
        assert by_click.config.debug
    assert [args for _, args, _ in notebook.launched] == [(3,)] * 4


def test_one_run_at_a_time_is_launched_and_bad_arguments_have_no_code(notebook):
    train = notebook.define("train")
    form = Form(LaunchConfig())
    button, arguments = form.launch, form.field("Arguments")
    arguments.value = "0.5, epochs="
    assert button.disabled
    assert "is no list of arguments" in form.message.value
    assert "Arguments that make no sense" in form.texts[0]
    arguments.value = "0.5, **{}"
    assert "args=(0.5,), kwargs=dict(**{})" in form.texts[0]
    arguments.value = "0.5, epochs=3"
    assert "args=(0.5,), kwargs=dict(epochs=3)" in form.texts[0]
    button.click()
    button.click()
    assert notebook.launched == [(train, (0.5,), {"epochs": 3})]
    assert "run = notebook_accel.find_run(&#39;calm-otter&#39;)" in form.message.value
    assert (button.disabled, button.description) == (True, "Running")
    told = threading.Event()
    button.observe(lambda _: told.set(), names="disabled")
    call_of(form.picker.run).ended.set()
    assert told.wait(100)
    assert (button.disabled, button.description) == (False, "Launch")


def test_a_click_that_comes_while_a_change_is_checked_waits_for_it(monkeypatch, tmp_path):
    """A kernel with subshells calls listeners in two threads, and a check clears what was said."""
    file = tmp_path / "picked.yaml"
    LaunchConfig(fsdp={"min_num_params": 1000}).save(file)
    form = Form(LaunchConfig(num_processes=1))
    form.field("File").value = str(file)
    click = threading.Thread(target=form.load.click, daemon=True)

    def as_yaml_while_a_click_comes(config):
        monkeypatch.setattr(picker_module, "as_yaml", as_yaml)
        click.start()
        # One that did not wait would be over long before.
        click.join(0.5)
        return as_yaml(config)

    monkeypatch.setattr(picker_module, "as_yaml", as_yaml_while_a_click_comes)
    form.field("seed").value = "7"
    click.join(100)
    assert not click.is_alive()
    assert "Loaded from" in form.message.value
    assert form.picker.config == LaunchConfig(fsdp={"min_num_params": 1000})


def test_devices_are_listed_with_their_memory_and_names_are_escaped():
    host = {"num_cores": 8, "memory": 64 * 2**30, "free_memory": 2**30}
    found = Devices(kind="cuda", names=("<i>H200</i>",), memory=(139 * 2**30,))
    text = devices_line(Machine(found=found, **host))
    for words in ("&lt;i&gt;H200", "139 GB", "8 CPU cores, 64 GB of memory, 1 GB of it free"):
        assert words in text
    broken = Devices(kind="cpu", error="no driver")
    assert "no driver" in devices_line(Machine(found=broken, **host))
