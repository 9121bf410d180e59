"""Seeds, and the same random state on every rank."""

import random

import numpy as np
import pytest
import torch

from notebook_accel.training.collectives import gather_object, this_rank
from notebook_accel.training.processes.random_numbers import (
    get_random_states,
    set_random_states,
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)
from tests.training.harness import on_ranks


@pytest.fixture(autouse=True)
def _own_random_numbers():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.use_deterministic_algorithms(False)


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_seed_sets_all_three():
    set_seed(3)
    first = draw()
    set_seed(3)
    assert draw() == first
    set_seed(4)
    assert not set(draw()) & set(first)
    set_seed(2**40 + 1)  # more than numpy takes


def test_deterministic_algorithms():
    set_seed(3, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.PCG64])
def test_saved_states_give_the_same_numbers_again(generator, tmp_path):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(generator(5))
    try:
        draw(), np.random.randn(), random.gauss(0, 1)  # of normal numbers the second waits
        torch.save(get_random_states(torch.device("cpu")), tmp_path / "states")
        following = draw(), np.random.randn(3).tolist(), random.gauss(0, 1)
        set_random_states(torch.load(tmp_path / "states"), torch.device("cpu"))
        assert (draw(), np.random.randn(3).tolist(), random.gauss(0, 1)) == following
    finally:
        np.random.set_bit_generator(before)


@on_ranks(2)
def test_ranks_draw_alike_or_their_own():
    set_seed(7)
    first, second = gather_object([draw()])
    assert first == second
    set_seed(7, device_specific=True)
    first, second = gather_object([draw()])
    assert not set(first) & set(second)
    generator = torch.Generator().manual_seed(this_rank())
    synchronize_rng_states(["torch", "generator"], generator)
    drawn = float(torch.rand(())), float(torch.rand((), generator=generator))
    assert gather_object([drawn]) == [drawn] * 2


def test_what_cannot_be_synchronized_is_refused():
    with pytest.raises(ValueError, match="generator=None: pass the generator"):
        synchronize_rng_state("generator")
    with pytest.raises(ValueError, match="rng_type='dice': expected 'torch'"):
        synchronize_rng_state("dice")
