"""What notebooks import is imported once for all ranks, unless it would not survive a fork."""

import os
import signal
import subprocess
import sys
from textwrap import dedent

import psutil
import pytest

from notebook_accel import wire
from notebook_accel.launch.template import handle
from notebook_accel.launch.template.handle import Template
from tests.engines.processes import gone
from tests.templates import import_little
from tests.waiting import eventually


class Libraries:
    """A folder of libraries, and a template that imports them."""

    def __init__(self, folder, source):
        self.folder = folder
        self.source = source
        self.log = folder.parent / "log"

    def write(self, name, code=""):
        """Make a library whose import writes its name into the log."""
        path = self.folder / f"{name}.py"
        noting = f"print({name!r}, file=open({str(self.log)!r}, 'a'), flush=True)\n"
        path.write_text(noting + dedent(code))
        return path

    def want(self, *names, folders=(), **environment):
        message = wire.Import(
            items=tuple(map(wire.ImportItem, names)),
            environment={**os.environ, **environment},
            path=(*sys.path, str(self.folder), *folders),
        )
        self.source.import_soon(message)

    def imported(self):
        """Wait until all is imported."""
        eventually(lambda: not self.source.imports().importing, what="it imports")
        return self.source.imports()

    def times(self, name):
        """How often it was imported."""
        return self.log.read_text().split().count(name) if self.log.exists() else 0


@pytest.fixture(scope="module", name="little")
def _little():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle, "_BOOT", handle._BOOT)
        import_little()
        source = Template(os.environ)
    yield source
    source.close()


@pytest.fixture(name="libraries")
def _libraries(tmp_path, little):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    return Libraries(folder, little)


def test_each_is_imported_once_and_with_the_variables_of_its_time(libraries):
    libraries.write("first_lib", "import os; assert os.environ['OF_A_CELL'] == '1'")
    libraries.write("second_lib", "import os; assert 'OF_A_CELL' not in os.environ")
    libraries.want("first_lib", OF_A_CELL="1")
    libraries.want("first_lib", "second_lib", "json.decoder")
    found = libraries.imported()
    assert {"first_lib", "second_lib"} <= set(found.libraries)
    assert not {"first_lib", "second_lib"} & set(found.left_out)
    assert libraries.times("first_lib") == libraries.times("second_lib") == 1
    # Those of earlier imports are gone.
    eventually(
        lambda: len(psutil.Process(libraries.source.pid).children()) == 1,
        what="the prepared template is left",
    )


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [
        (
            "threads",
            "import threading, time; threading.Thread(target=time.sleep, args=(99,)).start()",
            "a thread",
        ),
        ("listens", "import socket; s = socket.create_server(('127.0.0.1', 0))", "a socket"),
        ("spawns", "import subprocess; p = subprocess.Popen(['sleep', '99'])", "a process"),
        ("ends", "import os; os._exit(0)", "ended the process"),
    ],
)
def test_what_does_not_survive_a_fork_is_left_out(name, code, why, libraries):
    libraries.write(f"before_{name}")
    libraries.write(name, code)
    libraries.write(f"after_{name}")
    libraries.want(f"before_{name}", name, f"after_{name}")
    found = libraries.imported()
    assert why in found.left_out[name]
    assert {f"before_{name}", f"after_{name}"} <= set(found.libraries)
    assert name not in found.libraries
    assert psutil.Process(found.pid).num_threads() == 1


def test_a_library_that_does_not_survive_a_fork_is_tried_twice(libraries):
    starts = "import threading, time; threading.Thread(target=time.sleep, args=(99,)).start()"
    package = libraries.folder / "wide_lib"
    package.mkdir()
    libraries.write("wide_lib/__init__", starts)
    names = [f"part_{number}" for number in range(20)]
    for name in names:
        libraries.write(f"wide_lib/{name}")
    libraries.want(*(f"wide_lib.{name}" for name in names), "after_wide")
    libraries.write("after_wide")
    found = libraries.imported()
    assert "after_wide" in found.libraries
    assert "a thread" in found.left_out["wide_lib"]
    assert libraries.times("wide_lib/__init__") == 2


def test_an_import_that_fails_asks_or_prints_hurts_nothing(libraries):
    libraries.write("raises", "1 / 0")
    libraries.write("asks", "input('name?')")
    libraries.write("prints", "import sys; print('banner'); print('banner', file=sys.stderr)")
    libraries.want("raises", "asks", "prints", "not_installed_at_all")
    found = libraries.imported()
    assert found.left_out["raises"] == "ZeroDivisionError: division by zero"
    assert "EOFError" in found.left_out["asks"]
    assert "ModuleNotFoundError" in found.left_out["not_installed_at_all"]
    assert "prints" not in found.left_out
    assert "banner" not in libraries.source.error_output


def test_one_that_imports_a_file_of_the_notebook_is_left_out(libraries, tmp_path):
    (tmp_path / "own_file.py").write_text("x = 1")
    libraries.write("uses_own", "import own_file")
    libraries.want("uses_own", folders=(str(tmp_path),))
    assert "own_file.py, which may be edited" in libraries.imported().left_out["uses_own"]


def test_a_library_whose_file_has_changed_is_imported_again(libraries):
    path = libraries.write("edited_lib")
    libraries.want("edited_lib")
    before = libraries.imported()
    os.utime(path, ns=(1, 1))
    after = libraries.imported()
    assert libraries.times("edited_lib") == 2
    assert after.pid not in (0, before.pid)


def test_a_prepared_template_that_is_killed_is_made_again(libraries):
    libraries.write("again_lib")
    libraries.want("again_lib")
    before = libraries.imported()
    os.kill(before.pid, signal.SIGKILL)
    eventually(lambda: libraries.times("again_lib") == 2, what="a second import")
    assert libraries.imported().pid not in (0, before.pid)


def test_no_process_is_left_of_a_kernel_that_ends_while_its_template_imports(libraries):
    libraries.write("slow_lib", "import time; time.sleep(99)")
    code = f"""
import sys, time, psutil
from tests.templates import import_little
from notebook_accel import wire
from notebook_accel.launch.template.handle import template
import_little()
source = template()
source.import_soon(wire.Import(
    items=(wire.ImportItem("slow_lib"),), environment={{}},
    path=(*sys.path, {str(libraries.folder)!r}),
))
print("started", flush=True)
time.sleep(99)
"""
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with kernel.stdout:
        assert kernel.stdout.readline() == "started\n"
    eventually(lambda: libraries.times("slow_lib"), what="it imports")
    below = [child.pid for child in psutil.Process(kernel.pid).children(recursive=True)]
    assert len(below) == 2
    kernel.kill()
    kernel.wait()
    eventually(lambda: gone(below), what="all processes are gone")


def _template_with(setting, monkeypatch):
    before = f"from notebook_accel.launch.template import process; process.{setting}; "
    monkeypatch.setattr(handle, "_BOOT", handle._BOOT)
    import_little()
    monkeypatch.setattr(
        handle, "_BOOT", handle._BOOT.replace("from notebook", before + "from notebook", 1)
    )
    return Template(os.environ)


def test_an_import_that_hangs_is_left_out(libraries, monkeypatch):
    libraries.source = _template_with("_IMPORT_SECONDS = 2.0", monkeypatch)
    libraries.write("hangs", "import time; time.sleep(99)")
    libraries.write("after_hang")
    libraries.want("hangs", "after_hang")
    found = libraries.imported()
    libraries.source.close()
    assert "took longer than 2 s" in found.left_out["hangs"]
    assert found.libraries == ("after_hang",)


def test_with_little_memory_ranks_import_themselves_and_one_line_says_so(libraries, monkeypatch):
    libraries.source = _template_with("_LITTLE_MEMORY = 1 << 60", monkeypatch)
    libraries.write("large_lib")
    libraries.want("large_lib")
    found = libraries.imported()
    libraries.source.close()
    assert (found.pid, found.libraries) == (0, ())
    assert "GB of memory are free" in found.problem
    assert libraries.times("large_lib") == 0
