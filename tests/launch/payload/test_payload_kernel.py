"""The payload in a real kernel, whose namespace, cell files and reloads are IPython's own."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.kernels import kernel_manager

_ROOT = Path(__file__).parents[3]
_SECONDS = 60

_LAUNCHER = """
    import linecache, sys
    from notebook_accel.launch import payload
    from tests.launch.payload.clean_ranks import Raised, Ranks
    ranks = Ranks()

    def launch(function, *args):
        files = get_ipython().compile._filename_map.items()
        sources = [payload.CellSource(f, f"Cell In[{n}]", "".join(linecache.getlines(f)))
                   for f, n in files]
        packed = payload.pack_call(function, args, sources=sources)
        reply, buffers = ranks.call(packed)
        if reply["kind"] == "raised":
            raise Raised(reply["text"], None)
        return payload.unpack_result(payload.Packed(buffers), packed.registry)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Runs a cell in a kernel; gives what it printed."""
    monkeypatch.setenv("PYTHONPATH", str(_ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    with kernel_manager() as manager:
        manager.kernel_spec.argv[0] = sys.executable
        manager.start_kernel(cwd=str(tmp_path))
        client = manager.client()
        client.start_channels()

        def run(text: str) -> str:
            printed: list[str] = []

            def show(message: dict[str, Any]) -> None:
                printed.append(message["content"].get("text", ""))

            client.wait_for_ready(timeout=_SECONDS)
            reply = client.execute_interactive(
                textwrap.dedent(text), timeout=_SECONDS, output_hook=show, allow_stdin=False
            )
            assert reply["content"]["status"] == "ok", "\n".join(reply["content"]["traceback"])
            return "".join(printed)

        yield run
        client.stop_channels()


def test_cells_of_a_kernel(run: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def value(): return 1\nclass Thing:\n    n = 1\n")
    run(_LAUNCHER)
    run("""
        %load_ext autoreload
        %autoreload 2
        import torch
        from beside import Thing, value
        torch.set_num_threads(2)
        big = torch.randn(300, 300, requires_grad=True)
        (big @ big).sum().backward()
    """)
    run("""
        def helper(): return "old"
        class Net(torch.nn.Linear):
            def go(self): return helper()
        model = Net(2, 2)
        def fail():
            raise ValueError("too bad")
        def train(kind):
            if kind == "fail":
                fail()
            torch.ones(300, 300) @ big
            return value(), Thing.n, Thing(), model.go(), model
    """)
    run("""
        *numbers, thing, said, net = launch(train, "work")
        assert (numbers, said) == ([1, 1], "old"), numbers
        assert type(thing) is Thing and type(net) is Net
        assert train.__globals__ is globals() and Net.go.__globals__ is globals()
    """)
    run("def helper(): return 'new'")
    run("assert net.go() == 'new'")
    (tmp_path / "beside.py").write_text("def value(): return 22\nclass Thing:\n    n = 22\n")
    run("""
        *numbers, thing, said, net = launch(train, "work")
        assert (numbers, said) == ([22, 22], "new"), numbers
        assert type(thing) is Thing
    """)
    printed = run("""
        try:
            launch(train, "fail")
        except Raised as error:
            print(error)
    """)
    assert 'Cell In[3], line 6, in fail\n    raise ValueError("too bad")' in printed
    printed = run("""
        def shell():
            !nvidia-smi
        def timed():
            %time train("work")
        def leaves():
            exit()
        for function in (shell, timed, leaves):
            try:
                payload.pack_call(function)
            except Exception as error:
                print(error)
    """)
    shell, timed, leaves = printed.splitlines()
    assert "used in shell, cannot travel; ranks have no shell" in shell
    assert 'of `!command` write subprocess.run("command", shell=True)' in shell
    assert "used in timed, cannot travel" in timed
    assert "of `%time` use time.perf_counter()" in timed
    assert leaves.startswith("`exit` (")
    assert leaves.endswith("call `sys.exit()` instead")
