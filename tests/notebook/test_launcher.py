import inspect
from types import SimpleNamespace

import pytest

from notebook_accel import ConfigError, notebook_launcher, runs
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.view.plain import PlainView
from notebook_accel.notebook import clicks, launcher
from notebook_accel.notebook.rank_displays import OnDemand
from notebook_accel.notebook.views import Dashboard, Transcript, choose_view

ACCELERATES = """
function args num_processes mixed_precision use_port master_addr node_rank num_nodes
rdzv_backend rdzv_endpoint rdzv_conf rdzv_id max_restarts monitor_interval
log_line_prefix_template
"""


def train():
    raise AssertionError("nothing may be started")


def kernel_that(*, live):
    """A kernel as the choice of a view sees it."""
    return SimpleNamespace(get_parent=lambda _: {"content": {"allow_stdin": live}})


def test_the_first_arguments_are_accelerates_and_the_rest_are_keywords():
    parameters = inspect.signature(notebook_launcher).parameters
    positional = [
        name
        for name, parameter in parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert positional == ACCELERATES.split()
    assert parameters["grace"].default == 10.0
    assert parameters["view"].default == "auto"


def test_an_argument_that_nobody_knows_is_refused_in_a_line():
    launch = notebook_launcher
    with pytest.raises(ConfigError, match=r"'num_proceses'; did you mean num_processes\?"):
        launch(train, num_proceses=2)
    with pytest.raises(ConfigError, match=r"notebook_launcher\(\): missing a required argument"):
        launch()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"view": "pretty"}, ["view='pretty'", "'auto'", "'widgets'", "'text'", "'none'"]),
        ({"view": "widgets"}, ["view='widgets'", "kernel", "view='text'"]),
        ({"num_nodes": 2, "engine": "local"}, ["num_nodes=2", "engine='elastic'"]),
        ({"node_rank": 1}, ["node_rank=1", "num_nodes=1", "0 to 0"]),
        ({"num_nodes": 2, "node_rank": 1}, ["node_rank=1", "join_token", "machine 0"]),
        (
            {"num_nodes": 2, "node_rank": 1, "rdzv_endpoint": "host:1", "join_token": "secret"},
            ["join token", "6 characters", "64"],
        ),
        ({"num_nodes": 2, "rdzv_endpoint": "host"}, ["'host'", "HOST:PORT"]),
        ({"session": True}, ["session=True", "runs in none", "leave it out"]),
        ({"join_token": "secret"}, ["join_token", "other machines", "leave it out"]),
        ({"view": ["text"]}, ["view=['text']", "'auto'"]),
        ({"args": (1,)}, ["train()", "too many positional"]),
    ],
)
def test_bad_input_says_what_was_given_and_what_to_do(arguments, words):
    before = runs()
    with pytest.raises(ConfigError) as caught:
        notebook_launcher(train, **arguments)
    assert [word for word in words if word not in str(caught.value)] == []
    assert runs() == before


def test_what_a_call_says_wins_also_where_it_is_the_default(monkeypatch):
    seen = []
    monkeypatch.setattr(launcher, "launch", lambda request: seen.append(request.config))
    config = LaunchConfig(debug=True, grace=3.0, engine="inline", num_processes=1)
    notebook_launcher(train, config=config)
    notebook_launcher(train, config=config, debug=False, grace=10.0, engine="auto")
    assert [(c.debug, c.grace, c.engine) for c in seen] == [
        (True, 3.0, "inline"),
        (False, 10.0, "auto"),
    ]
    assert seen[1].num_processes == 1


def test_a_call_may_be_spelled_as_for_accelerates_launcher(monkeypatch):
    seen = []
    monkeypatch.setattr(launcher, "launch", seen.append)
    notebook_launcher(train, mixed_precision="FP16", use_port="29500")
    # Defaults that are spelled out are no wish for what is absent.
    notebook_launcher(train, (), 1, "No", num_nodes=1, node_rank=0, master_addr="127.0.0.1")
    configs = [request.config for request in seen]
    assert [config.mixed_precision for config in configs] == ["fp16", "no"]
    assert configs[0].use_port == 29500
    assert seen[1].notices == ()


@pytest.mark.parametrize(
    ("name", "live", "draws_updates", "expected"),
    [
        ("auto", None, True, PlainView),
        ("auto", False, True, Transcript),
        ("auto", True, True, Dashboard),
        ("text", None, True, PlainView),
        ("text", True, True, Transcript),
        ("widgets", False, True, Dashboard),
        ("widgets", True, False, Transcript),
        ("none", True, True, OnDemand),
    ],
)
def test_the_view_fits_where_the_code_runs(monkeypatch, name, live, draws_updates, expected):
    kernel = None if live is None else kernel_that(live=live)
    monkeypatch.setattr(clicks, "find_kernel", lambda: kernel)
    monkeypatch.setattr(clicks, "draws_updates", lambda kernel: draws_updates)
    assert type(choose_view(name)) is expected
