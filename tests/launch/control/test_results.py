"""Results in files: read again by any process of the user, and refused where they are damaged."""

import os

import numpy as np
import pytest

from notebook_accel.launch.control.results import StoredResults
from notebook_accel.launch.payload import pack, pack_result
from tests.descriptors import open_descriptors


def keep(folder, value):
    results = StoredResults(folder)
    packet, fds = pack(pack_result(value))
    results.keep(1, packet, list(fds))
    return results


@pytest.mark.parametrize("length", [3, 1_000_000])
def test_a_result_is_read_by_another_process(tmp_path, length):
    before = open_descriptors()
    keep(tmp_path, {"weights": np.arange(length), "name": "net"})
    read = StoredResults(tmp_path)
    assert read.has(1)
    assert not read.has(0)
    assert read.get(1)["name"] == "net"
    assert read.get(1) is read.get(1)
    weights = read.get(1)["weights"]
    weights += 1  # its memory is this process's own
    assert weights[-1] == length
    assert not open_descriptors() - before
    assert os.listdir(tmp_path) == ["result-1.pickle"]
    assert (tmp_path / "result-1.pickle").stat().st_mode & 0o077 == 0


def test_a_damaged_result_is_refused(tmp_path):
    keep(tmp_path, np.arange(1000))
    path = tmp_path / "result-1.pickle"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match="not all there"):
        StoredResults(tmp_path).get(1)


def test_a_result_that_cannot_be_written_is_told(tmp_path):
    results = keep(tmp_path / "deleted", 1)
    assert not results.has(1)
    assert "logs and metrics are lost" in results.lost[0]
