"""prepare_pippy: a model in stages gives what the whole model gives."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
from notebook_accel.utils import extract_model_from_parallel, set_seed
from torch import nn

from notebook_accel import ConfigError, prepare_pippy
from tests.training.big_modeling.models import Language
from tests.training.harness import run_ranks
from tests.training.single import fresh_rank  # noqa: F401

# What every rank would import as it traces.
TRACING = ("torch.export._trace",)


class Skips(nn.Module):
    """What makes a cut hard: an input and a state that later stages use, an expanded mask that
    crosses the cuts, outputs of earlier stages, inputs that are unused or no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(
        self, x: torch.Tensor, *, scale: float, more: dict[str, torch.Tensor], unused: torch.Tensor
    ) -> dict[str, Any]:
        mask = more["mask"][:, None].expand(-1, 4)
        states = [x]
        for block in self.blocks:
            states.append(torch.relu(block(states[-1])) * mask + more["shift"])
        return {"logits": states[-1] * scale, "states": tuple(states[1:3]), "cache": object()}


class Loss(nn.Sequential):
    """Gives a number that is not one a sample."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), x.sum()


def skips(num_samples: int) -> tuple[torch.Tensor, dict[str, Any]]:
    x = torch.arange(num_samples * 4, dtype=torch.float32).reshape(num_samples, 4) / 10
    mask, shift = torch.arange(num_samples) % 2, torch.arange(num_samples)[:, None] / 2
    more = {"mask": mask.float(), "shift": shift.float()}
    return x, {"scale": 2.0, "more": more, "unused": x[:, :1]}


def flat(outputs: Any) -> list[torch.Tensor] | None:
    """The tensors of ``Skips``; None where this rank has none."""
    if outputs is None:
        return None
    assert [*outputs] == ["logits", "states", "cache"]
    assert outputs["cache"] is None
    return [outputs["logits"], *outputs["states"]]


def pipelined(split_points: Any, gather_output: bool) -> dict[str, Any]:
    """What a rank sees of ``Skips`` in stages, with micro-batches of 2."""
    set_seed(0)
    model = Skips()
    whole = copy.deepcopy(model)
    args, kwargs = skips(2)
    prepared = prepare_pippy(
        model,
        split_points,
        example_args=(args,),
        example_kwargs=kwargs,
        num_chunks=2,
        gather_output=gather_output,
    )
    assert prepared is model
    assert all("forward" not in vars(part) for part in model.children())
    wanted, found = [], []
    # A micro-batch, less than one, two and a half, and more than are under way at once.
    for num_samples in (2, 1, 5, 7):
        args, kwargs = skips(num_samples)
        with torch.no_grad():
            wanted.append(flat({**whole(args, **kwargs), "cache": None}))
        kwargs["more"] = dict(reversed(kwargs["more"].items()))
        found.append(flat(model(args, **kwargs)))
    refusals = []
    args, kwargs = skips(2)
    for x, changed in (
        (args[:, :3], {}),
        (args.double(), {}),
        (args, {"scale": 3.0}),
        (args, {"scale": np.zeros(2)}),
        (args, {"more": {}}),
        (args[:1], {}),
    ):
        with pytest.raises(ConfigError) as caught:
            model(x, **{**kwargs, **changed})
        refusals.append(str(caught.value))
    own = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert own is model
    assert "forward" not in vars(model)
    with torch.no_grad():
        again = flat({**model(args, **kwargs), "cache": None})
    return {
        "wanted": wanted,
        "found": found,
        "again": again,
        "refusals": refusals,
        "points": model.hf_split_points,
    }


def on_two_ranks() -> tuple[dict[str, Any], dict[str, Any]]:
    return pipelined(["blocks.2"], gather_output=False), tied_and_refused()


@pytest.fixture(scope="module")
def two_ranks() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return run_ranks(on_two_ranks, 2, imports=TRACING)


def test_outputs_are_those_of_the_whole_model(two_ranks: list[Any]) -> None:
    two = [seen for seen, _ in two_ranks]
    assert [seen["points"] for seen in two] == [["blocks.2"]] * 2
    assert two[0]["found"] == [None] * 4
    torch.testing.assert_close(two[1]["found"], two[1]["wanted"])
    torch.testing.assert_close([seen["again"] for seen in two], [two[0]["wanted"][0]] * 2)
    expected = (
        r"args\[0\] is torch.float32 of shape \(samples, 3\), and .* \(samples, 4\)",
        r"args\[0\] is torch.float64",
        r"kwargs\['scale'\] is 3.0, and .* traced with 2.0",
        r"kwargs\['scale'\] is \[0\. 0\.\], and",
        r"called with .*and traced with .*kwargs\['more'\]\['mask'\]",
        r"the tensors have shapes",
    )
    for text, pattern in zip(two[0]["refusals"], expected, strict=True):
        assert re.search(pattern, text), text
    assert all("rank 0 refused" in text for text in two[1]["refusals"])


def test_stages_receive_from_several_and_give_to_all() -> None:
    for seen in run_ranks(pipelined, 3, "auto", True, imports=TRACING):
        assert seen["points"] == ["blocks.2", "blocks.3"]
        torch.testing.assert_close(seen["found"], seen["wanted"])


def tied_and_refused() -> dict[str, Any]:
    """A model with a tied weight in stages, and what is refused before anything travels."""
    set_seed(0)
    model = Language(3).eval()
    tokens = torch.arange(3)
    with torch.no_grad():
        wanted = model(tokens)
    numbers = (torch.zeros(1, 2),)
    layer = nn.Linear(2, 2)
    texts = []
    for refused, kwargs in (
        (model, {"split_points": ["layers.9"]}),
        (model, {"split_points": []}),
        (model, {"example_args": ()}),
        (model, {"example_args": (tokens, {1, 2})}),
        (model, {"num_chunks": 0}),
        (model, {"split_points": "layers.1"}),
        (nn.Sequential(layer), {"example_args": numbers}),
        (nn.Sequential(layer, layer), {"example_args": numbers, "split_points": ["0"]}),
        (Loss(), {"example_args": numbers}),
    ):
        with pytest.raises(ConfigError) as caught:
            prepare_pippy(refused, **{"example_args": (tokens[:1],), **kwargs})
        texts.append(str(caught.value))
    prepare_pippy(model, no_split_module_classes=["Block"], example_args=(tokens[:1],))
    return {
        "texts": texts,
        "points": model.hf_split_points,
        "tied": model.lmhead.weight is model.embed.weight,
        "wanted": wanted,
        "found": model(tokens),
    }


def test_tied_weights_and_what_is_refused(two_ranks: list[Any]) -> None:
    first, last = [seen for _, seen in two_ranks]
    assert first["found"] is None
    torch.testing.assert_close(last["found"], last["wanted"])
    assert not last["found"].requires_grad
    for seen in (first, last):
        assert (seen["points"], seen["tied"]) == (["layers.1"], True)
        for text, pattern in zip(seen["texts"], REFUSED, strict=True):
            assert pattern in text


REFUSED = (
    "'layers.9', and Language has no such module",
    "names 0 modules, and there are 2 ranks",
    "are none: expected one or more",
    "args[1] of the examples is a set",
    "num_chunks=0",
    'expected "auto" or a list of names',
    "has 1 modules that can begin a stage",
    "['0'] makes 3 stages of the model's forward, and there are 2 ranks",
    "outputs[1] of the model has shape () for 1 samples",
)


def test_one_process_has_the_whole_model() -> None:
    model = nn.Linear(2, 2)
    assert prepare_pippy(model) is model
    assert "forward" not in vars(model)
