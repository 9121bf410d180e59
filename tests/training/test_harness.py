"""What runs functions on ranks, for the other tests."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from tests.training import harness
from tests.training.harness import run_ranks


@torch.no_grad()
def computes_gradients():
    return torch.is_grad_enabled()


def test_a_decorated_function_is_found_and_one_without_a_place_is_named():
    assert run_ranks(computes_gradients, 1) == [False]
    with pytest.raises(TypeError, match=r"there is no .*<lambda> in tests.training.test_harness"):
        run_ranks(lambda: None, 1)


def test_no_later_call_gets_the_answer_to_one_that_was_left(monkeypatch):
    def reach_the_limit(*streams):
        raise KeyboardInterrupt

    helper = object.__new__(harness._Helper)
    monkeypatch.setattr(harness, "select", SimpleNamespace(select=reach_the_limit))
    with subprocess.Popen(
        ["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as helper.process:
        with pytest.raises(KeyboardInterrupt):
            helper.ask((), 1)
        assert helper.process.poll() is not None, "its answer may still come"
