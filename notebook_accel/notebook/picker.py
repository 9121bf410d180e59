"""``config_picker``: the settings of a launch as a form, checked while one fills it in.

    LaunchConfig's fields --> rows --what a person gives--> LaunchConfig --> code, YAML, Launch

The rows come from the fields of ``LaunchConfig`` and from the table of plugins, their texts from
what is written under each field: there is no second list of settings. A value that makes no sense
is refused by ``LaunchConfig`` itself, and its words stand beside the row that they name.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import itertools
import os
import threading
import warnings
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets
import platformdirs
from IPython.core.getipython import get_ipython

from notebook_accel.config import (
    LaunchConfig,
    default_config_path,
    given_settings,
    settings_of,
)
from notebook_accel.config.plugins import PLUGINS
from notebook_accel.errors import ConfigError, LaunchError
from notebook_accel.launch.launcher import notebook_file
from notebook_accel.launch.machine import look_at_machine
from notebook_accel.launch.preflight import check_fits, crowding
from notebook_accel.notebook.clicks import clicks_for
from notebook_accel.notebook.display_slot import DisplaySlot, widget_view
from notebook_accel.notebook.launcher import check_leaves_notebook_free, launch_below
from notebook_accel.notebook.lost_widget import LostWidgetText
from notebook_accel.notebook.markup import copyable, element, join
from notebook_accel.notebook.picker_fields import StrategyRow, plugin_rows, setting_rows
from notebook_accel.notebook.picker_texts import (
    as_code,
    as_yaml,
    devices_line,
    is_of_notebook,
    read_arguments,
    row_of_error,
)
from notebook_accel.notebook.style import style_element

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from notebook_accel.launch.machine import Machine
    from notebook_accel.launch.run import Run
    from notebook_accel.notebook.picker_fields import Row

__all__ = ["ConfigPicker", "config_picker", "recall", "remember"]


# ---- The last settings that were picked in a folder of notebooks, kept in the user's state folder.


def remember(config: LaunchConfig) -> None:
    """Keep ``config`` for the notebook's folder, its variables aside, which may be secrets.

    Without a word where nothing can be written: nobody asked for it.
    """
    with contextlib.suppress(OSError, RuntimeError):
        replace(config, env=None).save(_path())


def recall() -> LaunchConfig | None:
    """What was kept for the notebook's folder; None where nothing was, or it makes no sense now."""
    with contextlib.suppress(OSError, RuntimeError, ConfigError):
        path = _path()
        return LaunchConfig.load(path) if path.is_file() else None
    return None


def _path() -> Path:
    # The folder's name could be long, or tell strangers what is trained there.
    name = hashlib.sha256(_folder().encode(errors="surrogateescape")).hexdigest()[:16]
    return Path(platformdirs.user_state_dir("notebook-accel")) / "picked" / f"{name}.yaml"


def _folder() -> str:
    """The notebook's, also after ``os.chdir``; the current folder where nobody says which it is."""
    file = notebook_file()
    return os.path.dirname(file) if os.path.isabs(file) else os.getcwd()


_INVALID = "Settings that make no sense have no code: change what is marked."
_NO_CALL = "Arguments that make no sense have no code: change them."
# What the default config file is for, which the form names first.
_USE_OF_DEFAULT_FILE = "from which each launch takes the settings that its call leaves open"
_SAVE_TOOLTIP = f"Write these settings to the file; the default is the one {_USE_OF_DEFAULT_FILE}"
# What a saved notebook has of the form.
_SAVED = "config_picker: a form, which only its kernel draws."
_LOST = "Where no form is above, its kernel is gone. Run the cell again to see it."
_IN_A_TERMINAL = (
    "config_picker: only a notebook draws the form. Elsewhere its settings are LaunchConfig(...), "
    "whose save(path) and load(path) keep them as YAML"
)
_FUNCTION_MISSING = "Define a function in a cell, then choose it here."


class ConfigPicker:
    """A form for the settings of a launch; shown where it is a cell's last expression.

    Args:
        config: what the form starts with.

    Attributes:
        run: what was launched from the form last; None before that.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self.run: Any = None
        self._config = config
        self._error: ConfigError | None = None
        self._is_refused = False
        self._machine: Machine | None = None
        # Held while anything is done with the form: what a page sends is handled in a thread of its
        # own where the kernel has subshells, cells run meanwhile, and what is known of the machine
        # comes from one more.
        self._lock = threading.RLock()
        # Of the run's panel, and of what is said below it: only a cell can make them.
        self._slot, self._below = DisplaySlot(), DisplaySlot()
        self._lost_text = LostWidgetText(_LOST)
        self._is_filling = False
        self._draws_between_cells = True
        self._has_call = False
        self._rows = setting_rows()
        self._plugins = {name: plugin_rows(plugin) for name, plugin in PLUGINS.items()}
        self._plugin_boxes: dict[str, Any] = {}
        self._devices = ipywidgets.HTML(str(devices_line(None)))
        self._strategy = StrategyRow()
        self._message = ipywidgets.HTML()
        self._code, self._yaml = ipywidgets.HTML(), ipywidgets.HTML()
        self._path = ipywidgets.Text(description="File", continuous_update=True)
        self._function = ipywidgets.Dropdown(description="Function", options=[])
        self._arguments = ipywidgets.Text(
            description="Arguments", placeholder="3e-4, epochs=2", continuous_update=True
        )
        self._buttons = {
            name: ipywidgets.Button(description=name, tooltip=tooltip)
            for name, tooltip in (
                ("Save", _SAVE_TOOLTIP),
                ("Load", "Take the settings of the file"),
                ("Launch", "Call the function with these settings, in the background"),
            )
        }
        self._buttons["Launch"].button_style = "primary"
        self._box = self._lay_out()
        self._listen()
        self.fill(config)

    @property
    def config(self) -> LaunchConfig:
        """The settings that the form says.

        Raises:
            ConfigError: they make no sense, alone or together.
        """
        if self._error is not None:
            raise self._error
        return self._config

    def fill(self, config: LaunchConfig) -> None:
        """Make the form say ``config``."""
        with self._lock:
            self._is_filling = True
            try:
                given = config.to_dict()
                for name, row in self._rows.items():
                    row.value = given.get(name)
                for name, rows in self._plugins.items():
                    for row in rows:
                        row.value = given.get(name, {}).get(row.name)
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
        clicks.keep_order(_all_in(self._box))
        DisplaySlot().show(widget_view(self._box, _SAVED))
        self._lost_text.place()
        # Shown once more, the form has the run below it there too.
        for slot in (self._slot, self._below):
            slot.place()
        # Registered twice it is called once. It displays nothing: that would show nowhere.
        shell.events.register("post_run_cell", self._after_cell)
        self._draws_between_cells = clicks.draws_between_cells
        if self._draws_between_cells:
            _start_thread(self._look, name="notebook-accel-devices")
        else:
            self._look()

    def _after_cell(self, _result: Any) -> None:
        """A cell has run, which may have defined a function."""
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
            self._show_fit()

    # ---- layout ----------------------------------------------------------------------------

    def _lay_out(self) -> Any:
        settings = settings_of(LaunchConfig)
        first = [row.box for name, row in self._rows.items() if settings[name].is_first]
        rest = [row.box for name, row in self._rows.items() if not settings[name].is_first]
        more = ipywidgets.Accordion(children=[ipywidgets.VBox(rest)], selected_index=None)
        more.set_title(0, "More settings")
        for name, rows in self._plugins.items():
            title = ipywidgets.HTML(str(element("h4", PLUGINS[name].about)))
            self._plugin_boxes[name] = ipywidgets.VBox([title, *(row.box for row in rows)])
            self._plugin_boxes[name].add_class("na-plugin")
        shown = ipywidgets.Tab(children=[self._code, self._yaml])
        for index, title in enumerate(("Code", "YAML")):
            shown.set_title(index, title)
        save = ipywidgets.HBox([self._path, self._buttons["Save"], self._buttons["Load"]])
        start = ipywidgets.HBox([self._function, self._arguments, self._buttons["Launch"]])
        for line in (save, start):
            line.add_class("na-line")
        for widget in (self._path, self._function, self._arguments):
            widget.style.description_width = "75px"
        style = ipywidgets.HTML(
            f"{style_element('picker')}{self._lost_text.hiding_style}",
            layout=ipywidgets.Layout(display="none"),
        )
        box = ipywidgets.VBox(
            [
                style,
                self._devices,
                *first,
                self._strategy.box,
                *self._plugin_boxes.values(),
                more,
                shown,
                save,
                start,
                # Beside the buttons: whoever clicks there looks there.
                self._message,
            ]
        )
        box.add_class("na-picker")
        return box

    def _listen(self) -> None:
        self._path.value = str(default_config_path())
        for row in (
            *self._rows.values(),
            *(row for rows in self._plugins.values() for row in rows),
        ):
            row.on_change(self._on_change)
        self._strategy.on_change(self._on_change)
        for widget in (self._function, self._arguments):
            widget.observe(lambda _: self._on_change(), names="value")
        calls: dict[str, Callable[[], None]] = {
            "Save": self._save,
            "Load": self._load,
            "Launch": self._launch,
        }
        for name, button in self._buttons.items():
            button.on_click(partial(self._on_click, calls[name]))

    # ---- what a person does ----------------------------------------------------------------

    def _on_click(self, call: Callable[[], None], _button: Any) -> None:
        with self._lock:
            try:
                call()
            except Exception as error:  # arguments are any code: what a click raises shows nowhere
                self._say(f"{type(error).__name__}: {error}", "na-wrong")

    def _on_change(self) -> None:
        with self._lock:
            if not self._is_filling:
                self._check()

    def _check(self) -> None:
        for name, box in self._plugin_boxes.items():
            box.layout.display = None if name in self._strategy.value else "none"
        self._refresh_functions()
        try:
            self._config = LaunchConfig(**self._values())
            self._error = None
        except ConfigError as error:
            self._error = error
        self._show_error()
        self._show_fit()
        is_wrong = self._error is not None
        code, yaml = _INVALID, _INVALID
        if not is_wrong:
            yaml = as_yaml(self._config)
            try:
                code = as_code(self._config, self._function.value, self._arguments.value)
            except SyntaxError as error:
                code = _NO_CALL
                self._say(str(error), "na-wrong")
        self._buttons["Save"].disabled = is_wrong
        self._has_call = code not in (_INVALID, _NO_CALL) and bool(self._function.value)
        self._show_whether_launched()
        self._code.value, self._yaml.value = (str(copyable("pre", each)) for each in (code, yaml))

    def _values(self) -> dict[str, Any]:
        """The settings that the form gives, those left open aside."""
        values = {name: row.value for name, row in self._rows.items()}
        for name in self._strategy.value:
            options = {row.name: row.value for row in self._plugins[name]}
            given = {key: value for key, value in options.items() if value is not None}
            values[name] = None if PLUGINS[name].needs_options and not given else given
        return {name: value for name, value in values.items() if value is not None}

    def _show_error(self) -> None:
        text = None if self._error is None else str(self._error)
        wrong_row = None if text is None else row_of_error(text, self._rows, self._plugins)
        for row in self._all_rows():
            row.say(text if row is wrong_row else None)
        if text is not None and wrong_row is None:
            self._say(text, "na-wrong")
        elif self._function.options:
            self._say("", "na-fine")
        else:
            self._say(_FUNCTION_MISSING, "na-about")

    def _show_fit(self) -> None:
        """Say beside its row why settings that make sense cannot be launched from here, or hurt."""
        self._is_refused = False
        if self._error is None:
            row = self._rows["num_processes"]
            try:
                check_leaves_notebook_free(self._config)
                if self._machine is not None:
                    check_fits(self._config, self._machine)
                    row.say(crowding(self._config, self._machine) or None, "na-warn")
            except (ConfigError, LaunchError) as error:
                self._is_refused = True
                (row_of_error(str(error), self._rows, self._plugins) or row).say(str(error))
        self._show_whether_launched()

    def _all_rows(self) -> list[Row]:
        return [*self._rows.values(), *itertools.chain(*self._plugins.values())]

    def _save(self) -> None:
        path = self._file
        self.config.save(path)
        remember(self.config)
        used = f", {_USE_OF_DEFAULT_FILE}" if path == default_config_path() else ""
        self._say(f"Saved to {path}{used}", "na-fine")

    def _load(self) -> None:
        # A click's own output would appear nowhere.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = LaunchConfig.load(self._file)
        self.fill(config)
        lines = [f"Loaded from {self._file}", *(str(one.message) for one in caught)]
        self._say(". ".join(lines), "na-warn" if caught else "na-fine")

    @property
    def _file(self) -> Path:
        return Path(self._path.value).expanduser()

    def _launch(self) -> None:
        if self._goes_on:  # a second click came before the page knew of the first
            return
        arguments = read_arguments(self._arguments.value, _namespace())
        remember(self.config)
        self._say("", "na-fine")
        self.run = launch_below(
            _namespace()[self._function.value],
            arguments,
            config=self.config,
            slot=self._slot,
            below=self._below,
        )
        typed = f"import notebook_accel; run = notebook_accel.find_run({self.run.id!r})"
        self._say(
            join(["Launched. To have the run in a cell: ", copyable("code", typed)]), "na-fine"
        )
        self._show_whether_launched()
        # Another launch would take the place of this one's panel.
        _start_thread(partial(self._await_end, self.run), name="notebook-accel-picker")

    def _await_end(self, run: Run) -> None:
        while not run._conductor.ended.wait(1.0):
            pass
        with self._lock:
            self._show_whether_launched()

    @property
    def _goes_on(self) -> bool:
        """Whether what was launched from the form has not ended."""
        return self.run is not None and not self.run._conductor.ended.is_set()

    def _show_whether_launched(self) -> None:
        goes_on = self._goes_on
        button = self._buttons["Launch"]
        button.description = "Running" if goes_on else "Launch"
        button.disabled = goes_on or not self._has_call or self._is_refused

    def _refresh_functions(self) -> None:
        names = [name for name, value in _namespace().items() if is_of_notebook(name, value)]
        chosen = self._function.value
        if list(self._function.options) != names:
            self._function.options = names
            self._function.value = chosen if chosen in names else (names[-1] if names else None)

    def _say(self, text: str, kind: str) -> None:
        self._message.value = str(element("span", text, class_=kind, role="status"))


def _start_thread(act: Callable[[], None], *, name: str) -> None:
    """Start a thread that may change widgets: ipykernel 7.0 finds the cell or the click to which
    their messages belong by the thread's context alone."""
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(act,), name=name, daemon=True).start()


def config_picker(
    config: LaunchConfig | Mapping[str, Any] | str | PathLike[str] | None = None,
) -> ConfigPicker:
    """A form in the notebook for the settings of a launch.

    It shows the devices, checks what is given as it is given, writes the code and the YAML that
    mean the same, saves, loads, and launches a function of the notebook.

    Args:
        config: what it starts with: a ``LaunchConfig``, a mapping of its fields or the path of a
            YAML file; None takes what was picked last in this folder, else the defaults.

    Returns:
        The form; its ``config`` is the result, its ``run`` what it launched last.

    Raises:
        ConfigError: ``config`` makes no sense.
    """
    if config is None:
        return ConfigPicker(recall() or LaunchConfig())
    if isinstance(config, (str, PathLike)):
        return ConfigPicker(LaunchConfig.load(config))
    return ConfigPicker(LaunchConfig(**given_settings({}, config)))


def _all_in(box: Any) -> Iterator[Any]:
    """The widgets in a box, and in the boxes in it."""
    for widget in getattr(box, "children", ()):
        yield widget
        yield from _all_in(widget)


def _namespace() -> dict[str, Any]:
    """The notebook's variables."""
    shell = get_ipython()
    return {} if shell is None else shell.user_ns
