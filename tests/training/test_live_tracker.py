"""The notebook's own tracker, and the blank one of ranks that don't track."""

from __future__ import annotations

import pytest

from notebook_accel import Accelerator, ConfigError
from tests.training.harness import run_ranks
from tests.training.single import Told, be, fresh_rank  # noqa: F401


def test_the_live_tracker_shows_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    be(told, monkeypatch)
    accelerator = Accelerator(cpu=True)
    # Scripts draw their images for each of them by its name, and warn of a name unknown to them.
    assert accelerator.trackers == []
    live = accelerator.get_tracker("notebook")
    live.log({"loss": 0.5}, step=3)
    live.store_init_configuration({"lr": 1})
    live.finish()
    assert told.metrics == [({"loss": 0.5}, 3)]
    assert type(accelerator.get_tracker("notebook", unwrap=True)) is type(live)
    with pytest.raises(ConfigError, match=r"get_tracker\('wandb'\).*'notebook'"):
        accelerator.get_tracker("wandb")


def track() -> tuple[str, int]:
    accelerator = Accelerator(cpu=True)
    tracker = accelerator.get_tracker("notebook" if accelerator.is_main_process else "wandb")
    tracker.log({"loss": 1.0}, step=1)
    return tracker.name, len(accelerator.trackers)


def test_other_ranks_get_a_blank_one() -> None:
    assert run_ranks(track, 2) == [("notebook", 0), ("blank", 0)]
