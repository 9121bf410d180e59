"""What a notebook's cells import, its ranks have without importing it again."""

import psutil
import pytest

from notebook_accel.notebook.warming import imports_at_start
from tests.kernel.notebooks import SLOW, open_notebook
from tests.waiting import eventually

# Says whether a rank had a module before the function was called, and imports another one.
FUNCTION = """
def function(name, other=None):
    import sys
    has = name in sys.modules
    if other:
        __import__(other)
    return has
"""


def library(folder, name, code=""):
    """Write a library that notes its imports, beside others in a folder as pip has it."""
    (folder / "site-packages").mkdir(exist_ok=True)
    noting = f"print({name!r}, file=open({str(folder / 'log')!r}, 'a'))\n"
    (folder / "site-packages" / f"{name}.py").write_text(noting + code)


def test_ranks_have_what_cells_and_earlier_ranks_imported(notebook, tmp_path):
    for name in ("early_lib", "late_lib", "lazy_lib"):
        library(tmp_path, name)
    (tmp_path / "own_module.py").write_text("import late_lib\nvalue = 1")
    path = [str(tmp_path / "site-packages"), str(tmp_path)]
    notebook.run(f"import sys; sys.path += {path!r}\nimport early_lib")
    notebook.run("from notebook_accel import notebook_launcher" + FUNCTION)
    notebook.run("import own_module")
    run = "print(list(notebook_launcher(function, {}, 2, view='none')))"
    assert notebook.run(run.format(("early_lib", "lazy_lib"))).strip() == "[True, True]"
    # Its own file is imported in each rank, the library below it is not.
    assert notebook.run(run.format(("own_module",))).strip() == "[False, False]"
    assert notebook.run(run.format(("late_lib",))).strip() == "[True, True]"
    eventually(
        lambda: (tmp_path / "log").read_text().split().count("lazy_lib") == 3,
        within=SLOW,
        what="what two ranks had to import, the template has imported",
    )
    assert notebook.run(run.format(("lazy_lib",))).strip() == "[True, True]"
    # The kernel and the template, once each, whatever the number of launches.
    assert (tmp_path / "log").read_text().split().count("early_lib") == 2
    # With other variables, ranks import all themselves.
    run = run.format(("early_lib",)).replace("view", "env={'OF_A_LIBRARY': '1'}, view")
    assert notebook.run(run).strip() == "[False, False]"


def test_ranks_find_modules_that_the_path_no_longer_leads_to(notebook, tmp_path):
    # `sys.path.append("src")`, an import, and `%cd` elsewhere: a fork would have the modules.
    for name in ("repo/src/of_src", "repo/beside", "taken_out/of_once"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").write_text(f"value = {name!r}")
    (tmp_path / "repo/package").mkdir()
    (tmp_path / "repo/package/inner.py").write_text("value = 'inner'")
    (tmp_path / "elsewhere").mkdir()
    notebook.run(f"""
        import os, sys
        from notebook_accel import notebook_launcher
        os.chdir({str(tmp_path / "repo")!r})
        sys.path.append("src")
        sys.path.append({str(tmp_path / "taken_out")!r})
        import beside, of_src, of_once, package.inner
        sys.path.pop()
        os.chdir({str(tmp_path / "elsewhere")!r})
        def function():
            import other_of_src
            return of_src.value, beside.value, of_once.value, package.inner.value, os.getcwd()
    """)
    (tmp_path / "repo/src/other_of_src.py").write_text("")
    printed = notebook.run("print(notebook_launcher(function, (), 2, view='none')[1])")
    values = ("repo/src/of_src", "repo/beside", "taken_out/of_once", "inner")
    assert printed.strip() == repr((*values, str(tmp_path / "elsewhere")))


def test_a_session_has_them_and_cells_of_any_kind_run_on(notebook, tmp_path):
    library(tmp_path, "some_lib")
    notebook.run(f"import sys; sys.path.append({str(tmp_path / 'site-packages')!r})")
    notebook.run("%load_ext notebook_accel")
    for bad in ("import some_lib as", "import not_installed_lib", "from . import x", "1 +"):
        notebook.fails(bad)
    notebook.run("!true\n%time import some_lib")
    notebook.run("%%accelerate -n 2\nimport sys\nassert 'some_lib' in sys.modules")
    assert "libraries: some_lib" in notebook.run("%accelerate status")


def test_an_import_for_its_effect_that_fails_in_ranks_ends_no_call(notebook, tmp_path):
    fails = "import sys\nif 'ipykernel' not in sys.modules:\n    raise ImportError('no kernel')\n"
    library(tmp_path, "effect_lib", fails)
    notebook.run(f"import sys; sys.path.append({str(tmp_path / 'site-packages')!r})")
    notebook.run("from effect_lib import *\nfrom notebook_accel import notebook_launcher")
    notebook.run("run = notebook_launcher(lambda: 3, (), 2, view='none')\nprint(list(run))")
    said = "`from effect_lib import *`, as the notebook has it, failed in the ranks: ImportError"
    assert said in notebook.run("print(run.state.notices)")


def test_the_environment_turns_it_off(tmp_path):
    """As well as the template that is started before the first launch."""
    library(tmp_path, "off_lib")
    with open_notebook({"NOTEBOOK_ACCEL_WARM": "0"}) as notebook:
        notebook.run("from notebook_accel import notebook_launcher\n%load_ext notebook_accel")
        assert notebook.others() == []
        notebook.run(f"import sys; sys.path.append({str(tmp_path / 'site-packages')!r})")
        notebook.run("from notebook_accel import notebook_launcher\nimport off_lib" + FUNCTION)
        launch = "print(list(notebook_launcher(function, ('off_lib',), 2, view='none')))"
        assert notebook.run(launch).strip() == "[False, False]"
        (template,) = psutil.Process(notebook.pid).children()
        eventually(
            lambda: not psutil.Process(template.pid).children(), within=SLOW, what="ranks ended"
        )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import a, b.c as d\nfrom e.f import g, h", ["a", "b.c", "e.f:g,h"]),
        ("from .a import b\nfrom e import *", ["e"]),
        ("x = 1\ndef f():\n    os.environ['A'] = '1'\nimport a", ["a"]),
        ("import os\nos.environ['A'] = '1'\nimport a", ["os"]),
        ("import sys\nsys.path.insert(0, 'x')\nimport a", ["sys"]),
        ("if x:\n    import a\ntry:\n    import b\nexcept ImportError:\n    pass\nimport c", ["c"]),
        ("get_ipython().run_line_magic('matplotlib', 'inline')\nimport a", ["a"]),
        ("get_ipython().run_line_magic('pip', 'install a')\nimport a", []),
        ("get_ipython().system('pip install a')\nimport a", []),
        ("import a as", []),
        ("\0", []),
    ],
)
def test_which_imports_of_a_cell_can_be_made_at_its_start(code, expected):
    found = [
        i.module + (f":{','.join(i.names)}" if i.names else "") for i in imports_at_start(code)
    ]
    assert found == expected
