"""Prepared optimizers: windows, whose gradients are cleared, and optimizers nobody prepared."""

import copy
import gc
import itertools
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from notebook_accel import (
    AcceleratedOptimizer,
    Accelerator,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)
from tests.training.single import Told, be

GRADIENTS = [1.0, 10.0, 100.0, 1000.0]


class Recorder(torch.optim.Optimizer):
    """Notes the gradient that each step uses."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})
        self.used = []

    def step(self, closure=None):
        if closure is not None:
            closure()
        (weight,) = self.param_groups[0]["params"]
        self.used.append(0.0 if weight.grad is None else weight.grad.item())


class Lookahead(torch.optim.Optimizer):
    """Wraps another one as torch_optimizer's does: without the base class's ``__init__``."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state, self.defaults = {}, {}
        self.steps = 0

    def step(self, closure=None):
        self.optimizer.step(closure)
        self.steps += 1

    def zero_grad(self):
        self.optimizer.zero_grad()


class Scalar(nn.Module):
    """One weight, whose gradient is the input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, factor):
        return self.weight * factor


def setup(steps=2, **settings):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **settings)
    model = Scalar()
    recorder = Recorder(model.parameters())
    model, optimizer = accelerator.prepare(model, recorder)
    return accelerator, model, optimizer, recorder


def loop(accelerator, model, optimizer, order):
    for gradient in GRADIENTS:
        if order == "before the block":
            optimizer.zero_grad()
        with accelerator.accumulate(model):
            if order == "first":
                optimizer.zero_grad()
            accelerator.backward(model(gradient))
            optimizer.step()
            if order == "last":
                optimizer.zero_grad()
        if order == "after the block":
            optimizer.zero_grad()


@pytest.mark.parametrize("order", ["first", "last", "before the block", "after the block"])
def test_zero_grad_may_stand_anywhere_in_the_loop(order):
    accelerator, model, optimizer, recorder = setup()
    loop(accelerator, model, optimizer, order)
    assert recorder.used == [5.5, 550.0]


@pytest.mark.parametrize("order", ["first", "last"])
def test_one_batch_a_window_clears_as_without_windows(order):
    accelerator, model, optimizer, recorder = setup(1)
    model.weight.grad = torch.tensor(7.0)  # of whatever came before
    loop(accelerator, model, optimizer, order)
    assert recorder.used == [1.0 + 7.0 * (order == "last"), *GRADIENTS[1:]]


def test_gradients_of_no_window_are_cleared_at_once():
    accelerator, model, optimizer, recorder = setup()
    accelerator.backward(model(4.0))
    optimizer.zero_grad()
    assert model.weight.grad is None
    accelerator.backward(model(4.0))
    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad == 0
    accelerator.backward(model(4.0))
    optimizer.step()
    assert recorder.used == [2.0], "outside of accumulate every step is real"


@pytest.mark.parametrize("by_state", [False, True])
def test_a_window_may_be_said_by_hand(by_state):
    """Code that counts batches itself says which of them is a window's last."""
    accelerator, model, optimizer, recorder = setup(steps=1)
    for index, gradient in enumerate(GRADIENTS):
        if by_state:
            accelerator.gradient_state._set_sync_gradients(index % 2 == 1)
        else:
            accelerator.sync_gradients = index % 2 == 1
        accelerator.backward(model(gradient))
        optimizer.step()
        optimizer.zero_grad()
    assert recorder.used == [11.0, 1100.0]


@pytest.mark.parametrize("shown_by", [0, 1, 2, 3])
def test_the_state_of_a_window_is_that_of_its_accelerator(shown_by):
    """It is asked and set while another Accelerator, of an evaluation say, is newer."""
    accelerator, model, optimizer, recorder = setup(steps=4)
    schedule = torch.optim.lr_scheduler.ConstantLR(recorder)
    others = accelerator.prepare(schedule, torch.utils.data.DataLoader([0.0]))
    newer = Accelerator(cpu=True)
    state = (accelerator, optimizer, *others)[shown_by].gradient_state
    shown = []
    for gradient in GRADIENTS:
        with accelerator.accumulate(model):
            shown.append(state.sync_gradients)
            accelerator.backward(model(gradient))
            optimizer.step()
            optimizer.zero_grad()
    assert (shown, recorder.used) == ([False] * 3 + [True], [sum(GRADIENTS) / 4])
    state._set_sync_gradients(False)
    assert (accelerator.sync_gradients, newer.sync_gradients) == (False, True)
    state.plugin_kwargs["num_steps"] = 2
    steps = (accelerator.gradient_accumulation_steps, newer.gradient_accumulation_steps)
    assert (state.num_steps, *steps, newer.gradient_state.num_steps) == (2, 2, 1, 1)


@pytest.mark.parametrize(
    ("counts_on", "num_batches", "expected"), [(True, 4, "FFTFFTFF"), (False, 7, "FFTFFTTFFTFFTT")]
)
def test_the_end_of_a_loader_closes_a_short_window_unless_a_plugin_counts_on(
    counts_on, num_batches, expected
):
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=not counts_on)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(num_batches), batch_size=1))
    synced = ""
    for _ in range(2):
        for _ in loader:
            with accelerator.accumulate():
                synced += "FT"[accelerator.sync_gradients]
    assert synced == expected


def test_a_loop_inside_that_was_left_hides_no_end_of_the_outer_one():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    six = torch.utils.data.DataLoader(range(6), batch_size=1)
    outer, inner = accelerator.prepare(six, copy.copy(six))
    left, synced = iter(inner), ""
    for _ in outer:
        with accelerator.accumulate():
            synced += "FT"[accelerator.sync_gradients]
        next(left)
    assert synced == "FFFTFT"


def whole(batch):
    return [batch]


def in_two(batch):
    return [batch, batch]


def without(*numbers):
    return lambda batch: [] if int(batch) in numbers else [batch]


def flags_of(steps, samples, *, size=1, fetched=1, cut=whole):
    """``sync_gradients`` of two epochs, T and F: of loops that fetch batches in groups, and cut
    each into blocks or leave it out."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(samples), batch_size=size))
    flags = []
    for _ in range(2):
        epoch, batches = "", iter(loader)
        while group := list(itertools.islice(batches, fetched)):
            for _ in itertools.chain(*map(cut, group)):
                with accelerator.accumulate():
                    epoch += "FT"[accelerator.sync_gradients]
        flags.append(epoch)
    return flags


LOOPS = {
    "a window is fetched ahead": ({"steps": 3, "samples": 6, "fetched": 3}, "FFTFFT"),
    "and the last one is short": ({"steps": 3, "samples": 5, "fetched": 3}, "FFTFT"),
    "or has one batch": ({"steps": 3, "samples": 4, "fetched": 3}, "FFTT"),
    "or is the only one": ({"steps": 3, "samples": 2, "fetched": 2}, "FT"),
    "a batch is cut": ({"steps": 2, "samples": 2, "cut": in_two}, "FTFT"),
    "into half a window": ({"steps": 4, "samples": 3, "cut": in_two}, "FFFTFT"),
    "a batch is left out": ({"steps": 2, "samples": 6, "cut": without(2, 4)}, "FTFT"),
    "in the last, short window": ({"steps": 3, "samples": 6, "cut": without(4)}, "FFTFT"),
    "before the last window": ({"steps": 2, "samples": 4, "cut": without(0, 1, 2)}, "T"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_steps_once_in_its_last_window(name):
    loop, expected = LOOPS[name]
    assert flags_of(**loop) == [expected] * 2


@pytest.mark.parametrize(
    ("samples", "size", "expected"),
    [(21, 2, "FFFT FFFT FFT"), (17, 2, "FFFT FFFT T"), (21, 3, "FFFTFF FT"), (16, 2, "FFFT FFFT")],
)
def test_a_short_last_batch_closes_its_window(samples, size, expected):
    flags = flags_of(4, samples, size=8, cut=lambda batch: batch.split(size))
    assert flags == [expected.replace(" ", "")] * 2


def test_a_window_that_the_end_of_a_loader_leaves_open_is_named(monkeypatch):
    be(told := Told(), monkeypatch)
    cuts = iter([4, 4, 2] * 2)
    flags = flags_of(4, 24, size=8, cut=lambda batch: batch.tensor_split(next(cuts)))
    assert flags == ["FFFTFFFTFF", "FTFFFTFFFT"]
    assert [text.partition(",")[0] for text in told.notices] == [
        "a loader ended within an accumulation window"
    ]


BAD = float("nan")


@pytest.mark.parametrize("found", ["after backward", "before backward"])
@pytest.mark.parametrize("order", ["first", "last", "guarded"])
@pytest.mark.parametrize("plain", [False, True], ids=["accelerator.backward", "loss.backward"])
def test_a_bad_window_is_dropped_and_training_goes_on(found, order, plain):
    accelerator, model, optimizer, recorder = setup()
    for gradient in [1.0, BAD, 100.0, 1000.0]:
        with accelerator.accumulate(model):
            if order == "first":
                optimizer.zero_grad()
            loss = model(gradient)
            if found == "before backward" and gradient != gradient:
                optimizer.zero_grad()
                continue
            loss = loss / 2 if plain else loss
            loss.backward() if plain else accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
                if not torch.isfinite(norm):
                    optimizer.zero_grad()
                    continue
            if accelerator.sync_gradients or order != "guarded":
                optimizer.step()
            if order == "last" or (order == "guarded" and accelerator.sync_gradients):
                optimizer.zero_grad()
    assert recorder.used == [550.0]


def test_a_window_is_dropped_for_the_optimizer_alone_that_says_so():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    critic, maker = Scalar(), Scalar()
    judging, making = Recorder(critic.parameters()), Recorder(maker.parameters())
    critic, maker, judge, make = accelerator.prepare(critic, maker, judging, making)
    for gradient in GRADIENTS:
        with accelerator.accumulate(critic, maker):
            judge.zero_grad()
            accelerator.backward(critic(gradient))
            judge.step()
            # First in its own half, but after a backward of the other one.
            make.zero_grad()
            accelerator.backward(maker(gradient))
            make.step()
    assert judging.used == making.used == [5.5, 550.0]


@pytest.mark.parametrize("of_model", [False, True], ids=["optimizer", "model"])
def test_a_dropped_batch_of_fp16_is_unscaled_once_and_lowers_the_scale(of_model):
    accelerator, model, optimizer, recorder = setup(1, mixed_precision="fp16")
    before = accelerator.scaler.get_scale()
    for gradient in [BAD, 2.0, 3.0]:
        accelerator.backward(model(gradient))
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
        if not torch.isfinite(norm):
            (model if of_model else optimizer).zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    assert recorder.used == [2.0, 3.0]
    assert accelerator.scaler.get_scale() == before / 2


def test_gradients_of_fp16_are_unscaled_once_a_window():
    accelerator, model, _, _ = setup(2, mixed_precision="fp16")
    with accelerator.accumulate(model):
        accelerator.backward(model(1.0))
        accelerator.unscale_gradients()
    with accelerator.accumulate(model):
        accelerator.backward(model(10.0))
        with pytest.raises(RuntimeError, match="of Recorder were divided by the loss scale, and"):
            accelerator.unscale_gradients()


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_what_a_backward_takes_is_handed_on(precision):
    options = [GradScalerKwargs(init_scale=4.0)]
    accelerator = Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=options)
    model = accelerator.prepare(nn.Linear(2, 1))
    loss = model(torch.ones(1, 2)).sum()
    weight, bias = model.weight, model.bias
    accelerator.backward(loss, retain_graph=True, inputs=[weight])
    assert bias.grad is None
    once = weight.grad.clone()
    accelerator.backward(loss)
    assert torch.equal(weight.grad, 2 * once)
    assert bias.grad is not None
    with pytest.raises(RuntimeError, match="second time"):
        accelerator.backward(loss)


@pytest.mark.filterwarnings("error")
def test_an_optimizer_that_wraps_another_is_prepared_whole():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
    model = Scalar()
    recorder = Recorder(model.parameters())
    outer = Lookahead(recorder)
    model, optimizer = accelerator.prepare(model, outer)
    for gradient in GRADIENTS:
        with accelerator.accumulate(model):
            accelerator.backward(model(gradient))
            if accelerator.sync_gradients:
                accelerator.unscale_gradients(optimizer)
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.optimizer is outer
    assert accelerator.prepare(optimizer) is optimizer
    assert outer.steps == 2
    assert recorder.used == [5.5, 550.0]


def test_other_code_sees_an_optimizer():
    _, model, optimizer, recorder = setup()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert optimizer.param_groups is recorder.param_groups
    assert optimizer.state is recorder.state
    assert optimizer.defaults == {"lr": 1.0}
    assert optimizer.used is recorder.used
    optimizer.state[model.weight]["seen"] = torch.ones(())
    loaded = optimizer.state_dict()
    optimizer.load_state_dict(loaded)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(()))]})
    assert len(recorder.param_groups) == 2
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in recorder.param_groups] == [0.5, 0.5]
    assert "Recorder" in repr(optimizer)
    assert optimizer.__notebook_accel_unwrap__() is recorder
    with pytest.raises(AttributeError, match="nothing"):
        _ = optimizer.nothing


def test_hooks_and_closures_reach_the_wrapped_optimizer():
    accelerator, model, optimizer, recorder = setup(1)
    seen = []
    optimizer.register_step_pre_hook(lambda stepped, *_: seen.append(stepped))
    optimizer.step(lambda: accelerator.backward(model(3.0)))
    assert seen == [recorder]
    assert recorder.used == [3.0]


def step_unprepared(*, precision="no", steps=1, guarded=False):
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=steps
    )
    model = nn.Linear(2, 1)
    model, other = accelerator.prepare(model, torch.optim.SGD(nn.Linear(2, 1).parameters()))
    bare = torch.optim.SGD(model.parameters())
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            if accelerator.sync_gradients or not guarded:
                bare.step()
                other.step()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"precision": "fp16"}, "SGD was stepped without .*loss scale"),
        ({"steps": 2}, "SGD was stepped without .*not complete"),
    ],
)
def test_an_optimizer_that_was_not_prepared_is_named_once(settings, reason):
    # Not of all categories: Python warns of files that other tests left open as it collects them.
    with pytest.warns(UserWarning, match=reason) as caught:
        step_unprepared(**settings)
    assert len([one for one in caught if issubclass(one.category, UserWarning)]) == 1


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"steps": 2, "guarded": True}])
def test_an_optimizer_that_needs_no_preparing_is_not_named(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_unprepared(**settings)


@pytest.mark.parametrize("at", ["before", "after"])
def test_an_accelerator_is_collected_amid_a_step(at):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    held = [accelerator, accelerator.prepare(optimizer)]
    gone = [*map(weakref.ref, held)]
    del accelerator

    def collect(*_):
        held.clear()
        gc.collect()

    of_all = register_optimizer_step_pre_hook
    register = of_all if at == "before" else optimizer.register_step_post_hook
    # Torch loops over hooks: one that goes before the last breaks that.
    handles = [register(collect), register(collect)]
    optimizer.step()
    assert [one() for one in gone] == [None, None]
    for handle in handles:
        handle.remove()


class ScheduleFree(Recorder):
    def train(self):
        self.mode = "train"

    def eval(self):
        self.mode = "eval"


def test_an_optimizer_with_two_modes_gets_them():
    accelerator, _, optimizer, _ = setup()
    optimizer.train()  # most have none
    optimizer.eval()
    free = ScheduleFree([nn.Parameter(torch.zeros(()))])
    prepared = accelerator.prepare(free)
    for mode in ("train", "eval"):
        getattr(prepared, mode)()
        assert free.mode == mode
