import sys
from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError
from notebook_accel.notebook import magics, session


@pytest.fixture
def shell():
    """A shell that has the magic, the one that ``get_ipython`` gives."""
    main = sys.modules["__main__"]
    config = Config(HistoryManager={"enabled": False})
    made = InteractiveShell.instance(colors="nocolor", config=config)
    patch = pytest.MonkeyPatch()
    patch.setattr(magics, "prepare", lambda _shell: None)
    magics.load_ipython_extension(made)
    patch.undo()
    yield made
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = main


def shown(shell, text, capsys):
    """Whether the cell succeeds, and all that it shows, from the first non-empty line on."""
    capsys.readouterr()
    success = shell.run_cell(text, store_history=True).success
    return success, capsys.readouterr().out.strip()


def test_a_syntax_error_looks_as_in_any_other_cell(shell, capsys):
    plain = shown(shell, "a = 0\na = 1\nb = 2\nc = = 3", capsys)
    magic = shown(shell, "%%accelerate\na = 1\nb = 2\nc = = 3", capsys)
    assert "line 4\n    c = = 3\n        ^\nSyntaxError:" in magic[1]
    assert magic == (False, plain[1].replace("In[1]", "In[2]"))


def test_new_ranks_refuse_what_only_a_session_does(shell, capsys):
    for options in ("--ranks 0", "--bg --pull x", "--push x --no-push"):
        capsys.readouterr()
        shell.run_cell(f"%%accelerate --fresh {options}\n1")
        named = ", ".join(word for word in options.split() if word.startswith("-"))
        assert f"--fresh and {named}: new ranks" in "".join(capsys.readouterr())


def test_help_is_shown_and_the_cell_does_not_run(shell, capsys):
    for option in ("-h", "--help"):
        success, text = shown(shell, f"%%accelerate {option}\nno python", capsys)
        assert success
        assert shown(shell, f"%accelerate {option}", capsys) == (True, text)
        assert "debug" in text
        assert "%%accelerate [-h]" in text
        assert "Run the cell on several processes" in text
        assert "%accelerate pull a,b " in text


def test_what_the_line_magic_says_without_a_session(shell, capsys):
    assert "the first %%accelerate cell starts one" in shown(shell, "%accelerate", capsys)[1]
    assert "there is no session" in shown(shell, "%accelerate stop", capsys)[1]


def test_ranks_and_commands_that_make_no_sense_are_refused(shell, capsys):
    for ranks in ("0-99999999999", "2-1", "0,3-2", "1_0", "²", "-1", "1-", ""):
        capsys.readouterr()
        assert not shell.run_cell(f"%%accelerate --ranks={ranks}\n1").success
        said = "".join(capsys.readouterr())
        assert f"--ranks {ranks}: expected ranks such as 0,2-3, below 100,000" in said
    for command, words in (
        ("pull x", "an %%accelerate cell starts one"),
        ("begin", "expected one of start, stop, restart, status"),
        ("debug ²", "²: expected the number of one rank"),
        ("debug 0-1", "0-1: expected the number of one rank"),
        ('pull "a', "No closing quotation"),
    ):
        capsys.readouterr()
        assert not shell.run_cell(f"%accelerate {command}").success
        assert words in "".join(capsys.readouterr())


def test_only_what_a_call_itself_gives_must_fit_the_session(monkeypatch):
    has = LaunchConfig(debug=True, grace=3, devices=[0, 1], env={"KEY": "secret"})
    running = SimpleNamespace(config=has, world_size=2, lost_with_device=())
    monkeypatch.setattr(session, "_session", running)
    monkeypatch.setenv("NOTEBOOK_ACCEL_NUM_PROCESSES", "5")
    shell = None
    for fits in ({"num_processes": None}, {"num_processes": 2, "grace": 3}, {"devices": [0, 1]}):
        assert session.session_for(shell, fits) is running
    for given, held in (
        ({"debug": False}, "debug=True: `%accelerate stop`"),
        ({"grace": 10.0}, "grace=3.0: `%accelerate stop`"),
        ({"num_processes": 3}, "num_processes=2: `%accelerate restart -n 3`"),
        ({"env": {"KEY": "other"}}, "env of KEY: `%accelerate stop`"),
    ):
        with pytest.raises(ConfigError, match=f"was started with {held}") as caught:
            session.session_for(shell, {}, given)
        assert "secret" not in str(caught.value)


def test_a_quoted_option_is_what_stands_between_the_quotes(shell, capsys):
    for line in (
        "%%accelerate --config 'my settings.yaml'\n1",
        '%accelerate start --config="my settings.yaml"',
        "%accelerate config my\\ settings.yaml",
    ):
        assert not shell.run_cell(line).success
        assert "config file 'my settings.yaml'" in "".join(capsys.readouterr())
    assert not shell.run_cell("%%accelerate --write 'my script.py\n1").success
    assert "%%accelerate --write 'my script.py: No closing" in "".join(capsys.readouterr())


def test_names_are_written_as_python_writes_them(shell, monkeypatch):
    asked = []
    running = SimpleNamespace(push=asked.append, pull=lambda names, rank: asked.append(names))
    monkeypatch.setattr(session, "current_session", lambda: running)
    # A micro sign, which Python keeps as the Greek letter.
    for line in ("%accelerate push \u00b5,größe", "%accelerate pull \u00b5 größe --rank 1"):
        assert shell.run_cell(line).success
    assert asked == [("\u03bc", "größe")] * 2
