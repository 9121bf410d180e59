import gc
import weakref

import pytest

from notebook_accel import Accelerator, ConfigError, compare, notebook_launcher, runs
from notebook_accel.launch.control.curves import metric_curves, number_steps, plot_together
from notebook_accel.notebook.comparison import original_of


def row(name, value, *, rank=0, step=None):
    return {"time": 1.0, "rank": rank, "step": step, "name": name, "value": value}


def test_a_value_without_a_step_has_its_own_count():
    rows = [
        row("a", 1.0),
        row("b", 2.0),
        row("a", 3.0),
        row("a", 4.0, rank=1),
        row("a", 5.0, step=9),
    ]
    assert [found["step"] for found in number_steps(rows)] == [0, 0, 1, 0, 9]
    assert metric_curves(rows) == {
        "a": {0: [(0.0, 1.0), (1.0, 3.0), (9.0, 5.0)], 1: [(0.0, 4.0)]},
        "b": {0: [(0.0, 2.0)]},
    }
    assert rows[0]["step"] is None


def test_a_table_has_steps_and_datetimes():
    pandas = pytest.importorskip("pandas")

    def train():
        accelerator = Accelerator()
        for value in (3.0, 2.0):
            accelerator.log({"loss": value})

    table = notebook_launcher(train, num_processes=1, view="none").to_pandas()
    assert list(table["step"]) == [0, 1]
    assert pandas.api.types.is_datetime64_any_dtype(table["time"])
    assert abs(table["time"].iloc[0] - pandas.Timestamp.now("UTC")) < pandas.Timedelta(minutes=5)


def test_many_metrics_make_a_figure_that_a_page_need_not_shrink():
    pytest.importorskip("matplotlib").use("agg")
    names = [f"m{number}" for number in range(5)]
    rows = [row(name, 1.0, step=step) for name in names for step in (0, 1)]
    axes = plot_together({"run": rows}, ())
    assert [axis.get_title() for axis in axes] == names
    (figure,) = {axis.figure for axis in axes}
    assert figure.get_size_inches()[0] <= 9
    assert figure.axes == axes


def test_runs_are_drawn_together_by_their_names():
    pytest.importorskip("matplotlib").use("agg")

    def train(factor):
        accelerator = Accelerator()
        for step in range(3):
            accelerator.log({"loss": factor * step, "lr": 0.1}, step=step)

    runs = [
        notebook_launcher(train, (factor,), num_processes=1, view="none", name=name)
        for factor, name in ((1.0, "slow"), (2.0, "fast"), (3.0, None), (4.0, None))
    ]
    assert [run.name for run in runs] == ["slow", "fast", "train", "train"]
    loss, lr = compare(*runs)
    assert (loss.get_title(), lr.get_title()) == ("loss", "lr")
    drawn = {line.get_label(): list(line.get_ydata()) for line in loss.get_lines()}
    assert drawn["slow"] == [0.0, 1.0, 2.0]
    assert drawn["fast"] == [0.0, 2.0, 4.0]
    assert list(drawn)[2:] == [f"train ({run.id})" for run in runs[2:]]
    assert [axis.get_title() for axis in compare(runs[0], names=["lr"])] == ["lr"]
    with pytest.raises(ConfigError, match="no metric is called 'acc'; these runs logged 'loss'"):
        compare(*runs, names=["acc"])
    with pytest.raises(ConfigError, match=r"names='loss': expected a list, such as names=\['loss"):
        compare(*runs, names="loss")
    with pytest.raises(ConfigError, match=r"compare\(\) got 3"):
        compare(3)
    with pytest.raises(ConfigError, match="got nothing"):
        compare()
    for wrong, session in (("", False), (7, False), ("a", True)):
        with pytest.raises(ConfigError, match="name="):
            notebook_launcher(train, (1.0,), name=wrong, session=session)


def test_runs_are_sorted_by_any_of_thousands_of_metrics():
    def train():
        Accelerator().log({f"m{number}": number for number in range(2_001)})

    run = notebook_launcher(train, num_processes=1, view="none")
    assert runs(sort="m2000")[0] is run


def test_the_curves_of_an_original_keep_none_of_its_results():
    def train(rate):
        Accelerator().log({"loss": rate})

    run = notebook_launcher(train, (0.5,), num_processes=1, view="none")
    clone = run.clone(rate=0.25, block=True)
    label, read_curves = original_of(clone)
    handle = weakref.ref(run)
    del run
    gc.collect()
    assert handle() is None
    assert (label, read_curves()["loss"].last) == ("train (rate=0.5)", 0.5)
