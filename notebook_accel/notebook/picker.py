"""``config_picker``: the settings of a launch as a form, checked as the user fills it in.

    LaunchConfig's fields --> rows --what a person gives--> LaunchConfig --> code, YAML, Launch

Rows and their texts are made from the fields of ``LaunchConfig`` and from the table of plugins, so
there is no second list of settings. The value of a row is the input converted to the setting's
type; None if the row is left empty. Input that cannot be converted stays text. ``LaunchConfig``
then refuses it, and its error message is shown beside the row that the message names.
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations
from os import PathLike
from pathlib import Path
from types import FunctionType
from typing import Any

import ipywidgets
import yaml
from IPython.core.getipython import get_ipython
from markupsafe import Markup

from notebook_accel.config import LaunchConfig, default_config_path, given_settings, settings_of
from notebook_accel.config.launch_config import settings_in_file
from notebook_accel.config.plugins import PLUGINS
from notebook_accel.config.setting import Setting
from notebook_accel.errors import ConfigError, LaunchError
from notebook_accel.launch.engines import engine_for
from notebook_accel.launch.preflight import Machine, check_fits, crowding, look_at_machine
from notebook_accel.launch.rank_environment import rank_environment
from notebook_accel.launch.run import call_of
from notebook_accel.notebook.clicks import clicks_for
from notebook_accel.notebook.display_slot import DisplaySlot, start_thread, widget_view
from notebook_accel.notebook.launcher import check_leaves_notebook_free, launch_below
from notebook_accel.notebook.widgets import PanelWidgets
from notebook_accel.render.markup import copyable, element, join, style_element

# ---- The form: one row a setting, made from the setting's own type.

_OPEN = ""
_EACH_KEY: dict[str, Any] = {"continuous_update": True}
_Convert = Callable[[Any], Any]


class Row:
    """One setting in the form: its input, and a text beside it.

    ``read`` converts the value of the input to the setting's, ``write`` back.
    """

    def __init__(
        self, widgets: PanelWidgets, widget: Any, about: str, read: _Convert, write: _Convert
    ) -> None:
        self.widget, self._about, self._read, self._write = widget, about, read, write
        self._note = widgets.make(ipywidgets.HTML, classes="na-note")
        self.say(None)
        self.box = widgets.make(ipywidgets.HBox, [widget, self._note], classes="na-row")

    @property
    def value(self) -> Any:
        return self._read(self.widget.value)

    @value.setter
    def value(self, value: Any) -> None:
        self.widget.value = self._write(value)

    def say(self, text: str | None, kind: str = "na-wrong") -> None:
        """Show a message (CSS class ``kind``) beside the input; None: the description again."""
        kind, role = ("na-about", None) if text is None else (kind, "alert")
        self._note.value = str(element("span", text or self._about, class_=kind, role=role))


def setting_rows(widgets: PanelWidgets) -> dict[str, Row]:
    """Return a row for each setting and plugin's option, by names as in errors."""
    settings = settings_of(LaunchConfig).items()
    rows = {name: _row(one, widgets) for name, one in settings if name not in PLUGINS}
    for plugin, kind in PLUGINS.items():
        rows |= {_key(plugin, name): _row(one, widgets) for name, one in kind.options.items()}
    return rows


def _key(plugin: str, option: str) -> str:
    return f"{plugin}['{option}']"


def _row(one: Setting, widgets: PanelWidgets) -> Row:
    # An option is called by its own name, as the documentation of every library has it.
    label, about = one.label or one.name, f"{one.about}.".replace("``", "")
    value = one.fallback if one.default is None else one.default
    default = f"default: {one.unset or ('none' if value is None else value)}".replace("``", "")
    # A text is sent with each key, so that what is wrong is told while one types.
    kind: Any = ipywidgets.Text
    traits: dict[str, Any] = {"placeholder": default, **_EACH_KEY}
    read: _Convert = lambda text: one.from_text(text.strip()) if text.strip() else None  # noqa: E731
    write: _Convert = _text_of
    if one.name == "env":
        kind, traits = ipywidgets.Textarea, {"placeholder": "NAME: value", "rows": 2, **_EACH_KEY}
        read = _mapping_of
        as_typed: dict[str, Any] = {"allow_unicode": True, "sort_keys": False, "width": math.inf}
        write = lambda given: yaml.safe_dump(given, **as_typed) if given else ""  # noqa: E731
    elif one.choices or one.kind is bool:
        choices = [choice for choice in one.choices or (True, False) if choice != one.default]
        # None would mean that nothing is chosen, and be shown as an empty field.
        options = [(default, _OPEN), *((str(choice), choice) for choice in choices)]
        kind, traits = ipywidgets.Dropdown, {"options": options, "value": _OPEN}
        read = lambda chosen: None if chosen == _OPEN else chosen  # noqa: E731
        write = lambda value: _OPEN if value is None else value  # noqa: E731
    # The label belongs to the widget for a screen reader: its own description, widened by CSS.
    field = widgets.field(kind, label, about, classes="na-field", **traits)
    return Row(widgets, field, about, read, write)


def _text_of(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _mapping_of(text: str) -> Any:
    """Return a mapping of texts from YAML; None for none."""
    found: Any = text
    with contextlib.suppress(yaml.YAMLError):
        found = yaml.load(text, yaml.BaseLoader) or None
    if not isinstance(found, dict | None):
        expected = "expected lines of NAME: value, with quotes around a value such as '*'"
        raise ConfigError(f"env is no YAML mapping: {expected}")
    return found


def _strategy_row(widgets: PanelWidgets) -> Row:
    """The row's value is a tuple of plugins that go together; () is plain DDP."""
    chosen = [
        names
        for number in range(1, len(PLUGINS) + 1)
        for names in combinations(PLUGINS, number)
        if number == 1 or all(PLUGINS[name].composes for name in names)
    ]
    options: list[tuple[str, tuple[str, ...]]] = [("Data parallel (DDP)", ())]
    options += [(" + ".join(PLUGINS[name].title for name in names), names) for names in chosen]
    about = "How ranks share the model and the data."
    field = widgets.field(
        ipywidgets.Dropdown, "Strategy", about, classes="na-field", options=options, value=()
    )
    return Row(widgets, field, about, tuple, tuple)


# ---- Its texts: what a machine has, code and YAML of settings, whose row an error is.

_GIB = 1024**3


def devices_line(machine: Machine | None) -> Markup:
    """Return devices, cores and memory; None while the devices are still being counted."""
    if machine is None:
        return element("div", "Looking for devices …", class_="na-devices na-about", role="status")
    host = (
        f"{machine.num_cores} CPU cores, {machine.memory / _GIB:.0f} GB of memory, "
        f"{machine.free_memory / _GIB:.0f} GB of it free"
    )
    named: list[str] = []
    found = machine.found
    for index, name in enumerate(found.names):
        memory = f", {found.memory[index] / _GIB:.0f} GB" if any(found.memory) else ""
        named.append(join([element("b", str(index)), f" {name}{memory}"]))
    if found.error:
        named = [element("span", found.error, class_="na-wrong")]
    without = machine.tpu or "No accelerator: ranks train on the CPU"
    rows = join(element("div", line) for line in (*(named or [without]), host))
    return element("div", rows, class_="na-devices", role="status", aria_label="Devices")


def as_code(config: LaunchConfig, function: str | None, arguments: str) -> str:
    """Return the source of a cell that launches; SyntaxError if ``arguments`` are none."""
    given = config.to_dict().items()
    settings = "".join(f"    {name}={_expression(value)},\n" for name, value in given)
    made = f"LaunchConfig(\n{settings})" if settings else "LaunchConfig()"
    call = _parse(arguments)
    args = f"args={ast.unparse(ast.Tuple(call.args, ast.Load()))}, " if call.args else ""
    named = ast.Call(ast.Name("dict"), [], call.keywords)
    args += f"kwargs={ast.unparse(named)}, " if call.keywords else ""
    return (
        "from notebook_accel import LaunchConfig, notebook_launcher\n\n"
        f"config = {made}\nrun = notebook_launcher({function or 'train'}, {args}config=config)"
    )


def _expression(value: object) -> str:
    if isinstance(value, dict):
        items = (f"{key!r}: {_expression(each)}" for key, each in value.items())
        return f"{{{', '.join(items)}}}"
    return 'float("inf")' if value == math.inf else repr(value)


def as_yaml(config: LaunchConfig) -> str:
    """Return the settings given; a comment line if none is."""
    is_default = not config.to_dict()
    return "# every setting is at its default" if is_default else config.to_yaml().rstrip()


def _parse(text: str) -> ast.Call:
    try:
        call = ast.parse(f"_({text})", mode="eval").body
    except SyntaxError:
        call = None
    # "1) + (2" would parse as well.
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise SyntaxError(f"Arguments: {text!r} is no list of arguments, such as 3e-4, epochs=2")
    return call


_INVALID = "Settings that make no sense have no code: change what is marked."
_NO_CALL = "Arguments that make no sense have no code: change them."
# What the default config file is for, which the form names first.
_USE_OF_DEFAULT_FILE = "from which each launch takes the settings that its call leaves open"
_SAVE_TOOLTIP = f"Write these settings to the file; the default is the one {_USE_OF_DEFAULT_FILE}"
# What a saved notebook has of the form.
_SAVED = "config_picker: a form, which only its kernel draws."
_IN_A_TERMINAL = (
    "config_picker: only a notebook draws the form. Elsewhere its settings are LaunchConfig(...), "
    "whose save(path) and load(path) keep them as YAML"
)
_FUNCTION_MISSING = "Define a function in a cell, then choose it here."


class ConfigPicker:
    """A form for the settings of a launch, shown where it is the last expression of a cell.

    Args:
        config: settings with which the form is filled at first.

    Attributes:
        run: the newest run that was launched from the form; None before the first.
        box: the form as a widget.

    Example:
        >>> from notebook_accel import ConfigPicker, LaunchConfig
        >>> picker = ConfigPicker(LaunchConfig(num_processes=2))
        >>> picker.config.num_processes
        2
    """

    def __init__(self, config: LaunchConfig) -> None:
        self.run: Any = None
        self._config = config
        self._error: ConfigError | None = None
        self._machine: Machine | None = None
        # Held while anything is done with the form: what a page sends is handled in a thread of its
        # own where the kernel has subshells, cells run meanwhile, and what is known of the machine
        # comes from one more.
        self._lock = threading.RLock()
        # Of the run's panel: only a cell can make it.
        self._slot = DisplaySlot()
        self._is_filling = False
        self._draws_between_cells = True
        self._has_call = False
        widgets = PanelWidgets()
        self._make = widgets.make
        self._rows = setting_rows(widgets)
        self._plugin_boxes: dict[str, Any] = {}
        self._devices = self._make(ipywidgets.HTML, str(devices_line(None)))
        self._strategy = _strategy_row(widgets)
        self._message = self._make(ipywidgets.HTML)
        self._code = self._make(ipywidgets.HTML, classes="na-code")
        self._yaml = self._make(ipywidgets.HTML, classes="na-code na-folded")
        path = str(default_config_path())
        self._path = self._make(ipywidgets.Text, path, description="File", **_EACH_KEY)
        self._function = self._make(ipywidgets.Dropdown, description="Function", options=[])
        self._arguments = self._make(
            ipywidgets.Text, description="Arguments", placeholder="3e-4, epochs=2", **_EACH_KEY
        )
        about = "Call the function with these settings, in the background"
        self._buttons = {
            name: widgets.button(name, tooltip, partial(self._on_click, call), "")
            for name, tooltip, call in (
                ("Save", _SAVE_TOOLTIP, self._save),
                ("Load", "Take the settings of the file", self._load),
                ("Launch", about, self._launch),
            )
        }
        self._buttons["Launch"].button_style = "primary"
        self.box = self._lay_out()
        fields = [row.widget for row in (*self._rows.values(), self._strategy)]
        for widget in (*fields, self._function, self._arguments):
            widget.observe(self._on_change, names="value")
        self.fill(config)

    @property
    def config(self) -> LaunchConfig:
        """The settings that the form has now.

        Raises:
            ConfigError: they are invalid, alone or together.
        """
        if self._error is not None:
            raise self._error
        return self._config

    def fill(self, config: LaunchConfig) -> None:
        """Set all fields of the form; settings that ``config`` leaves open become empty fields.

        Args:
            config: the new settings.
        """
        with self._lock:
            self._is_filling = True
            try:
                given = config.to_dict()
                for name in PLUGINS:
                    given |= {_key(name, key): one for key, one in given.get(name, {}).items()}
                for name, row in self._rows.items():
                    row.value = given.get(name)
                self._strategy.value = tuple(name for name in PLUGINS if name in given)
            finally:
                self._is_filling = False
            self._check()

    def _ipython_display_(self) -> None:
        shell: Any = get_ipython()
        if getattr(shell, "kernel", None) is None:
            print(_IN_A_TERMINAL)  # noqa: T201
            return
        clicks = clicks_for(shell.kernel)
        clicks.keep_order(_all_in(self.box))
        DisplaySlot().show(widget_view(self.box, _SAVED))
        # Shown once more, the form has the run below it there too.
        self._slot.place()
        # Registered twice it is called once. It displays nothing: that would show nowhere.
        shell.events.register("post_run_cell", self._after_cell)
        self._draws_between_cells = clicks.draws_between_cells
        if self._draws_between_cells:
            start_thread(self._look, name="notebook-accel-devices")
        else:
            self._look()

    def _after_cell(self, _result: Any) -> None:
        with self._lock:
            self._refresh_functions()
            if not self._draws_between_cells:
                # The end of a run was told to nobody.
                self._buttons["Launch"].send_state()

    def _look(self) -> None:
        # Counting devices takes a clean process, which may have to be started first.
        machine = look_at_machine()
        with self._lock:
            self._machine = machine
            self._devices.value = str(devices_line(machine))
            self._show_state()

    # ---- layout ----------------------------------------------------------------------------

    def _lay_out(self) -> Any:
        box, text = ipywidgets.VBox, ipywidgets.HTML
        boxes: dict[bool, list[Any]] = {True: [], False: []}
        for name, setting in settings_of(LaunchConfig).items():
            if name not in PLUGINS:
                boxes[setting.is_first].append(self._rows[name].box)
        for name, plugin in PLUGINS.items():
            title = self._make(text, str(element("h4", plugin.about)))
            rows = [title, *(self._rows[_key(name, option)].box for option in plugin.options)]
            own = ipywidgets.Layout(display="none")
            self._plugin_boxes[name] = self._make(box, rows, classes="na-plugin", layout=own)
        save, launch = self._buttons["Save"], self._buttons["Launch"]
        of_file = [self._path, save, self._buttons["Load"]]
        of_call = [self._function, self._arguments, launch]
        # A fold is opened by its style alone: Colab asks no kernel between cells.
        more, yaml = (
            self._make(ipywidgets.ToggleButton, description=title, classes="na-fold")
            for title in ("More settings", "YAML")
        )
        parts = [
            self._make(text, style_element("picker"), layout={"display": "none"}),
            self._devices,
            *boxes[True],
            self._strategy.box,
            *self._plugin_boxes.values(),
            more,
            self._make(box, boxes[False], classes="na-folded"),
            self._code,
            yaml,
            self._yaml,
            self._make(ipywidgets.HBox, of_file, classes="na-line"),
            self._make(ipywidgets.HBox, of_call, classes="na-line"),
            # Beside the buttons: whoever clicks there looks there.
            self._message,
        ]
        return self._make(box, parts, classes="na-picker")

    # ---- what a person does ----------------------------------------------------------------

    def _on_click(self, call: Callable[[], None], _run: Any = None) -> None:
        with self._lock:
            try:
                call()
            except Exception as error:  # arguments are any code: what a click raises shows nowhere
                self._say(f"{type(error).__name__}: {error}", "na-wrong")

    def _on_change(self, _change: Any) -> None:
        with self._lock:
            if not self._is_filling:
                self._check()

    def _check(self) -> None:
        for name, box in self._plugin_boxes.items():
            box.layout.display = None if name in self._strategy.value else "none"
        self._refresh_functions()
        said = ("", "na-fine") if self._function.options else (_FUNCTION_MISSING, "na-about")
        code = yaml = _INVALID
        self._has_call = False
        try:
            self._config, self._error = LaunchConfig(**self._values()), None
            yaml, code = as_yaml(self._config), _NO_CALL
            code = as_code(self._config, self._function.value, self._arguments.value)
            self._has_call = bool(self._function.value)
        except ConfigError as error:
            self._error = error
            if self._row_of(error) is None:
                said = str(error), "na-wrong"
        except SyntaxError as error:
            said = str(error), "na-wrong"
        self._code.value, self._yaml.value = (str(copyable("pre", each)) for each in (code, yaml))
        self._say(*said)
        self._show_state()

    def _values(self) -> dict[str, Any]:
        values = {name: row.value for name, row in self._rows.items() if "[" not in name}
        for name in self._strategy.value:
            options = {key: self._rows[_key(name, key)].value for key in PLUGINS[name].options}
            given = {key: value for key, value in options.items() if value is not None}
            values[name] = None if PLUGINS[name].needs_options and not given else given
        return {name: value for name, value in values.items() if value is not None}

    def _row_of(self, error: Exception) -> Row | None:
        """Return the row of the setting that an error's message begins with; None without a row."""
        found = re.match(r"(\w+(?:\['\w+'\])?)[= ]", str(error))
        return None if found is None else self._rows.get(found[1])

    def _show_state(self) -> None:
        refusal: Exception | None = self._error
        warning, processes = None, self._rows["num_processes"]
        if refusal is None:
            # Settings that make sense may not go together with this machine, or with a click.
            try:
                check_leaves_notebook_free(self._config)
                environment = rank_environment(self._config)
                engine_for(self._config).check_here(self._config, environment)
                if self._machine is not None:
                    check_fits(self._config, self._machine)
                    warning = crowding(self._config, self._machine) or None
            except (ConfigError, LaunchError) as error:
                refusal = error
        wrong_row = None if refusal is None else self._row_of(refusal)
        if self._error is None and wrong_row is None:
            wrong_row = processes
        for row in self._rows.values():
            row.say(str(refusal) if row is wrong_row and refusal is not None else None)
        if warning is not None:
            processes.say(warning, "na-warn")
        goes_on = self._goes_on
        launch = self._buttons["Launch"]
        launch.description = "Running" if goes_on else "Launch"
        launch.disabled = goes_on or refusal is not None or not self._has_call
        self._buttons["Save"].disabled = self._error is not None

    def _save(self) -> None:
        path = Path(self._path.value).expanduser()
        self.config.save(path)
        used = f", {_USE_OF_DEFAULT_FILE}" if path == default_config_path() else ""
        self._say(f"Saved to {path}{used}", "na-fine")

    def _load(self) -> None:
        settings, notices = settings_in_file(self._path.value)
        self.fill(LaunchConfig(**settings))
        lines = [f"Loaded from {self._path.value}", *notices]
        self._say(". ".join(lines), "na-warn" if notices else "na-fine")

    def _launch(self) -> None:
        if self._goes_on:  # a second click came before the page knew of the first
            return
        text, namespace = self._arguments.value, _namespace()
        _parse(text)
        args, kwargs = eval(f"(lambda *args, **kwargs: (args, kwargs))({text})", {**namespace})
        self._say("", "na-fine")
        function, slot = namespace[self._function.value], self._slot
        self.run = launch_below(function, args, kwargs, config=self.config, slot=slot)
        typed = f"import notebook_accel; run = notebook_accel.find_run({self.run.id!r})"
        self._say(
            join(["Launched. To have the run in a cell: ", copyable("code", typed)]), "na-fine"
        )
        self._show_state()
        # Another launch would take the place of this one's panel.
        self.run.add_done_callback(partial(self._on_click, self._show_state))

    @property
    def _goes_on(self) -> bool:
        return self.run is not None and not call_of(self.run).ended.is_set()

    def _refresh_functions(self) -> None:
        names = [
            name
            for name, value in _namespace().items()
            if isinstance(value, FunctionType) and value.__module__ == "__main__" and name[0] != "_"
        ]
        chosen = self._function.value
        if list(self._function.options) != names:
            self._function.options = names
            self._function.value = chosen if chosen in names else (names[-1] if names else None)

    def _say(self, text: str, kind: str) -> None:
        self._message.value = str(element("span", text, class_=kind, role="status"))


def config_picker(
    config: LaunchConfig | Mapping[str, Any] | str | PathLike[str] | None = None,
) -> ConfigPicker:
    """Return a form for the settings of a launch.

    It shows the machine's devices and checks settings while you type. It writes them as code and as
    YAML, saves and loads them, and launches a function of the notebook with them.

    Args:
        config: settings with which the form is filled: a ``LaunchConfig``, a mapping of its fields,
            or the path of a YAML file. None takes the defaults.

    Returns:
        The form. ``form.config`` has its settings, ``form.run`` is the newest run that it launched.

    Raises:
        ConfigError: ``config`` is invalid.

    Example:
        >>> from notebook_accel import config_picker
        >>> picker = config_picker({"num_processes": 2})
        >>> picker.config.to_dict()
        {'num_processes': 2}
    """
    return ConfigPicker(LaunchConfig(**given_settings({}, config)[0]))


def _all_in(box: Any) -> Iterator[Any]:
    for widget in getattr(box, "children", ()):
        yield widget
        yield from _all_in(widget)


def _namespace() -> dict[str, Any]:
    """An empty mapping outside of IPython."""
    shell = get_ipython()
    return {} if shell is None else shell.user_ns
