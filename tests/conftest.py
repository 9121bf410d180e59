"""What all tests share: where runs are kept, which machine parts are there, and who is left."""

import gc
import os
import shutil
import signal
from collections.abc import Generator, Iterator

import pytest

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """The browser named by ``CHROMIUM``, else the first of the usual names on the path."""
    named = os.environ.get("CHROMIUM")
    if named:
        return named
    return next((path for path in map(shutil.which, _BROWSERS) if path), None)


def count_gpus() -> int:
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def pytest_configure() -> None:
    """Hear Ctrl-C in a background job too: a shell ignores it there, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    browser = [item for item in items if item.get_closest_marker("browser")]
    if browser and find_chromium() is None:
        _skip(browser, "no Chromium found: install it (Debian: apt-get install chromium)")
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and count_gpus() == 0:
        _skip(gpu, "no GPU found")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze what test files import: looking for garbage in it takes half a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def _skip(items: list[pytest.Item], reason: str) -> None:
    for item in items:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _folders_of_nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep runs, and the history of kernels, out of the folders of the person who tests.

    Kernels of all test processes would write into one history: while one of them holds it for five
    seconds, IPython prints in the output of the others that it gives up.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        yield


@pytest.fixture(scope="session")
def chromium() -> str:
    path = find_chromium()
    assert path, "a test that takes `chromium` carries @pytest.mark.browser"
    return path
