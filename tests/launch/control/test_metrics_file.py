"""Metrics on disk: all of them come back, a full disk costs no training, a sample is quick."""

import math
import os
from itertools import pairwise

from notebook_accel import wire
from notebook_accel.launch.control.metrics_file import MetricReader, MetricStore


def test_metrics_come_back_in_order(tmp_path):
    store = MetricStore(tmp_path)
    assert store.read() == []
    store.add([wire.Metric(wall=1.5, rank=0, step=None, values={"loss": 0.5, 'na"me\n': 1.0})])
    store.add([wire.Metric(wall=2.5, rank=1, step=7, values={"loss": 1 / 3})])
    expected = [
        {"time": 1.5, "rank": 0, "step": None, "name": "loss", "value": 0.5},
        {"time": 1.5, "rank": 0, "step": None, "name": 'na"me\n', "value": 1.0},
        {"time": 2.5, "rank": 1, "step": 7, "name": "loss", "value": 1 / 3},
    ]
    assert store.read() == expected
    store.close()
    assert store.read() == expected


def test_numbers_that_json_does_not_have(tmp_path):
    store = MetricStore(tmp_path)
    store.add(
        [wire.Metric(wall=0, rank=0, step=0, values={"a": math.nan, "b": math.inf, "c": -math.inf})]
    )
    store.close()
    a, b, c = (row["value"] for row in store.read())
    assert math.isnan(a)
    assert (b, c) == (math.inf, -math.inf)


def test_a_full_disk_ends_no_training_and_is_told(tmp_path, monkeypatch):
    full = "notebook_accel.launch.control.metrics_file.own_file"
    monkeypatch.setattr(full, lambda _, flags: os.open("/dev/full", flags))
    store = MetricStore(tmp_path)
    for step in range(2000):
        store.add([wire.Metric(wall=0, rank=0, step=step, values={"loss": 1.0})])
        store.flush()
    store.close()
    assert "disk full: metrics are lost" in store.lost_notice
    assert "NOTEBOOK_ACCEL_RUNS" in store.lost_notice


def test_lines_that_are_no_metrics_are_left_out(tmp_path):
    good = b'{"time":1.0,"rank":0,"step":1,"name":"a","value":2.0}'
    bad = [
        b"",
        b"\xff\x00",
        b"[1]",
        b'{"time":1.0}',
        b'{"time":1e999,"rank":0,"step":1,"name":"a","value":2.0}',
        b'{"time":1.0,"rank":0,"step":1,"name":["a"],"value":2.0}',
        b'{"time":1.0,"rank":0,"step":1,"name":"a","value":"__import__"}',
        b'{"time":1.0,"rank":0,"step":1,"name":"a","value":2.0,"x":' + b"[" * 100_000,
    ]
    is_being_written = b'{"time":1,"rank"'
    lines = [good, *bad, good, is_being_written]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    reader = MetricReader(tmp_path)
    assert [row["value"] for row in reader.read()] == [2.0, 2.0]
    assert len(reader.sample(10_000_000)) == 2


def test_a_sample_of_a_long_run_has_its_begin_its_end_and_what_lies_between(tmp_path):
    store = MetricStore(tmp_path)
    for step in range(50_000):
        store.add([wire.Metric(wall=0.0, rank=0, step=step, values={"loss": 1.0})])
    steps = [row["step"] for row in store.sample(200_000)]
    assert steps[0] == 0
    assert steps[-1] == 49_999
    assert steps == sorted(set(steps))
    assert len(steps) < 5_000
    assert max(after - before for before, after in pairwise(steps)) < 500
    assert store.sample(100_000_000) == store.read()
