"""A real JupyterLab, and the Notebook 7 of the same server, in a real browser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page

from tests.notebook.kernels import kernel_environment
from tests.ports import free_port

_TOKEN = "token"
# A page is megabytes of code, and its kernel starts meanwhile: on a busy machine that takes long.
_OPEN_MS = 120_000
_BROWSER_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_IS_IDLE = """() => {
  const widget = window.jupyterapp.shell.currentWidget, context = widget && widget.sessionContext;
  const kernel = context && context.session && context.session.kernel;
  return context && context.isReady && kernel && kernel.connectionStatus === 'connected'
    && kernel.status === 'idle';
}"""
_INSERT = """(text) => {
  const shown = window.jupyterapp.shell.currentWidget.content, number = shown.widgets.length;
  // An error in this cell must not abort one that is added meanwhile.
  const metadata = {trusted: true, tags: ['raises-exception']};
  const cell = {cell_type: 'code', source: text, metadata};
  shown.model.sharedModel.insertCell(number, cell);
  return number;
}"""
_HAS_THEME = """(theme) => document.body.dataset.jpThemeName === theme
  && getComputedStyle(document.body).getPropertyValue('--jp-code-font-family') !== ''"""
_THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
# Beside Jupyter's own defaults: no news, and on a busy machine Tab waits for the kernel's answer.
_SETTINGS: dict[str, dict[str, Any]] = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "completer-extension/manager": {"providerTimeout": 30_000},
}
# All that were opened, also those that are closed.
_notebooks: list[Notebook] = []


class Notebook:
    """A notebook in a page; ``elsewhere`` is what the page has asked other servers for."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.elsewhere: list[str] = []
        self.console: list[str] = []
        _notebooks.append(self)
        page.on("console", lambda message: self.console.append(_said(message)))
        page.on("pageerror", lambda error: self.console.append(f"{_clock()} uncaught: {error}"))
        page.on("request", lambda request: self._note_request(request.url))
        self.panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        self._wait_for_cells()

    def _note_request(self, url: str) -> None:
        if not url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:", "about:")):
            self.elsewhere.append(url)

    def _wait_for_cells(self) -> None:
        self.panel.locator(".jp-Cell").first.wait_for(timeout=_OPEN_MS)

    def wait_until_idle(self) -> None:
        self.page.wait_for_function(_IS_IDLE, timeout=_OPEN_MS)

    def run_all(self) -> None:
        run = "() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); return 0 }"
        self.page.evaluate(run)

    def run(self, cell: int) -> None:
        select = (
            "(cell) => { const shown = window.jupyterapp.shell.currentWidget.content;"
            " shown.deselectAll(); shown.activeCellIndex = cell;"
            " window.jupyterapp.commands.execute('notebook:run-cell'); return 0 }"
        )
        self.page.evaluate(select, cell)

    def insert(self, text: str) -> int:
        return int(self.page.evaluate(_INSERT, text))

    def add(self, text: str) -> Locator:
        number = self.insert(text)
        self.run(number)
        return self.output(number)

    def cell(self, number: int) -> Locator:
        return self.panel.locator(".jp-Cell").nth(number)

    def output(self, cell: int) -> Locator:
        return self.cell(cell).locator(".jp-Cell-outputArea")

    def prompt(self, cell: int) -> str:
        """ "[*]:" while the cell waits or runs."""
        return self.cell(cell).locator(".jp-InputPrompt").inner_text()

    def interrupt(self) -> None:
        self._tool("interrupt").click()

    def restart(self) -> None:
        self._tool("restart").click()
        self.page.locator(".jp-Dialog .jp-mod-accept").click()

    def _tool(self, name: str) -> Locator:
        item = self.panel.locator(f".jp-Toolbar [data-jp-item-name='{name}']")
        return item.locator(".jp-ToolbarButtonComponent")

    def choose_no_kernel(self) -> None:
        self.page.locator(".jp-Dialog button", has_text="No Kernel").click(timeout=60_000)

    def is_trusted(self) -> bool:
        cells = "window.jupyterapp.shell.currentWidget.content.widgets"
        return bool(self.page.evaluate(f"() => {cells}.every(cell => cell.model.trusted)"))

    def count_broken_links(self) -> int:
        """How many widgets Jupyter itself marks as those of a kernel that is gone."""
        marked = "[...document.querySelectorAll('.jupyter-widgets-disconnected')]"
        is_seen = "each => getComputedStyle(each, '::before').display !== 'none'"
        return int(self.page.evaluate(f"() => {marked}.filter({is_seen}).length"))

    def save(self) -> None:
        self.page.evaluate(
            "async () => { await window.jupyterapp.shell.currentWidget.context.save() }"
        )

    def reload(self) -> None:
        self.save()
        self.page.reload(timeout=_OPEN_MS)
        self._wait_for_cells()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Save the notebook, and have its page closed for the time of the block."""
        self.save()
        address = self.page.url
        self.page.goto("about:blank")
        yield
        self.page.goto(address, timeout=_OPEN_MS)
        self._wait_for_cells()

    def set_theme(self, name: str) -> None:
        """Set "light" or "dark"; returns once the page has its style sheet."""
        self.page.evaluate(
            "async (theme) => { await window.jupyterapp.commands.execute("
            "'apputils:change-theme', {theme}) }",
            _THEMES[name],
        )
        self.page.wait_for_function(_HAS_THEME, arg=_THEMES[name], timeout=30_000)

    def hide_sidebar(self) -> None:
        self.page.evaluate(
            "async () => { const shell = window.jupyterapp.shell; shell.collapseLeft?.(); }"
        )

    def close(self) -> None:
        shutdown = (
            "async () => { await window.jupyterapp.shell.currentWidget.sessionContext.shutdown() }"
        )
        self.page.evaluate(shutdown)
        self.page.close()


def describe_pages() -> list[tuple[str, str]]:
    """What each page that is open shows, and the last that it said, under a title of its own."""
    described = []
    for notebook in _notebooks:
        if notebook.page.is_closed():
            continue
        shown = notebook.panel.inner_text(timeout=10_000)
        described += [
            (f"page {notebook.page.url}", shown),
            ("console", "\n".join(notebook.console[-60:])),
        ]
    return described


def _said(message: ConsoleMessage) -> str:
    return f"{_clock()} {message.type}: {message.text}"


def _clock() -> str:
    return time.strftime("%H:%M:%S")


class Lab:
    """A running server and the folder that it serves."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        # What pages of one app load stays in the memory of their context: the next opens faster.
        self._contexts: dict[str, BrowserContext] = {}

    def write(self, name: str, cells: Sequence[str], kernel: str) -> Path:
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(text) for text in cells],
            metadata={"kernelspec": {"name": kernel, "display_name": kernel}},
        )
        path = self.folder / name
        nbformat.write(notebook, path)
        return path

    def open(self, browser: Browser, name: str, *, app: str = "lab", **viewport: int) -> Notebook:
        """Open a notebook in a new page: of "lab", in a workspace of its own, or of "notebook"."""
        if app not in self._contexts:
            self._contexts[app] = browser.new_context()
        page = self._contexts[app].new_page()
        page.set_viewport_size({"width": 1100, "height": 1000, **viewport})
        workspace = f"t{time.time_ns()}"
        paths = {
            "lab": f"lab/workspaces/{workspace}/tree/{name}?reset&",
            "notebook": f"notebooks/{name}?",
        }
        page.goto(f"{self.url}/{paths[app]}token={_TOKEN}", timeout=_OPEN_MS)
        return Notebook(page)


@contextmanager
def open_lab(folder: Path, versions: Sequence[str]) -> Iterator[Lab]:
    data = folder / "data"
    for version in versions:
        _write_kernel(data / "kernels" / version, version)
    work = folder / "work"
    work.mkdir()
    port = free_port()
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jupyterlab",
            "--no-browser",
            "--allow-root",
            f"--ServerApp.port={port}",
            "--ServerApp.port_retries=0",
            f"--IdentityProvider.token={_TOKEN}",
            f"--ServerApp.root_dir={work}",
            "--LabApp.expose_app_in_browser=True",
            "--JupyterNotebookApp.expose_app_in_browser=True",
            "--LabApp.news_url=None",
        ],
        env={**os.environ, **_folders(folder), "JUPYTER_PATH": str(data)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, server)
        yield Lab(url, work)
    finally:
        server.terminate()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            # It waits for what its pages left open; its kernels end when it is gone.
            server.kill()
            server.wait()


_KEEP_READING = (
    "from notebook_accel.notebook.warming import keep_reading; "
    "keep_reading(get_ipython().kernel); del keep_reading"
)


def _write_kernel(folder: Path, version: str) -> None:
    folder.mkdir(parents=True)
    spec = {
        "argv": [
            sys.executable,
            "-m",
            "ipykernel_launcher",
            "-f",
            "{connection_file}",
            # As the package does once a cell imports it: ipykernel 7.0 to 7.3 may be dead to its
            # page before that.
            f"--IPKernelApp.exec_lines={_KEEP_READING}",
        ],
        "display_name": version,
        "language": "python",
        "env": kernel_environment(version),
    }
    (folder / "kernel.json").write_text(json.dumps(spec))


def _folders(folder: Path) -> dict[str, str]:
    """Settings of the tests alone: none of the person's, none left behind."""
    names = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    found = {f"JUPYTER_{name}": str(folder / name.lower()) for name in names}
    # What the package itself keeps for a person.
    found |= {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("CONFIG", "STATE")}
    settings = folder / "settings"
    found["JUPYTERLAB_SETTINGS_DIR"] = str(settings)
    found["JUPYTERLAB_WORKSPACES_DIR"] = str(folder / "workspaces")
    for name, values in _SETTINGS.items():
        path = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values))
    return found


def _wait_for(url: str, server: subprocess.Popen[Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{url}/api?token={_TOKEN}", timeout=5):
                return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@contextmanager
def open_browser(executable: str) -> Iterator[Browser]:
    """A browser without a window; what a test expects of its pages may take half a minute."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=_BROWSER_ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()
