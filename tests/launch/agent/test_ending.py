"""When a run's ranks are asked, interrupted, terminated and killed."""

from __future__ import annotations

import pytest

from notebook_accel.launch.agent.ending import Ending, Stage

ORDER = [Stage.STOP, Stage.INTERRUPT, Stage.TERMINATE, Stage.KILL]


def stages(
    ending: Ending, *, until: float, idle: float = 0.0, leaving: bool = False
) -> list[tuple[float, Stage]]:
    """What is done by itself from 100 s on, seen every tenth of a second."""
    done = []
    for tick in range(1, int(until * 10) + 1):
        now = 100.0 + tick / 10
        stage = ending.next_stage(now=now, idle=idle, leaving=leaving)
        if stage is not None:
            done.append((round(now - 100, 1), stage))
            ending = ending.ask(stage, now=now)
    return done


def test_nothing_happens_by_itself() -> None:
    assert stages(Ending(), until=60, idle=60) == []


def test_a_stop_of_ranks_that_make_progress_waits_for_the_grace() -> None:
    ending = Ending(grace=10).ask(Stage.STOP, now=100)
    assert stages(ending, until=60) == [
        (10.0, Stage.INTERRUPT),
        (20.0, Stage.TERMINATE),
        (21.0, Stage.KILL),
    ]


def test_a_stop_of_ranks_without_progress_interrupts_after_a_second() -> None:
    ending = Ending(grace=10).ask(Stage.STOP, now=100)
    assert ending.next_stage(now=100.9, idle=0.9, leaving=False) is None
    assert ending.next_stage(now=101.0, idle=1.0, leaving=False) is Stage.INTERRUPT


def test_ranks_that_leave_on_their_own_are_left_in_peace() -> None:
    ending = Ending(grace=10).ask(Stage.STOP, now=100)
    assert stages(ending, until=60, idle=60, leaving=True) == []


def test_an_interrupt_is_followed_up_after_the_grace() -> None:
    ending = Ending(grace=3).ask(Stage.INTERRUPT, now=100)
    # Handlers are left alone meanwhile, whatever they do.
    assert stages(ending, until=2.9, idle=60, leaving=True) == []
    assert stages(ending, until=60) == [(3.0, Stage.TERMINATE), (4.0, Stage.KILL)]


def test_a_grace_of_its_own() -> None:
    ending = Ending(grace=10).ask(Stage.STOP, now=100, grace=0.5)
    assert stages(ending, until=60) == [
        (0.5, Stage.INTERRUPT),
        (1.0, Stage.TERMINATE),
        (2.0, Stage.KILL),
    ]


def test_no_grace_at_all() -> None:
    ending = Ending(grace=0).ask(Stage.STOP, now=100)
    assert [stage for _, stage in stages(ending, until=3)] == ORDER[1:]


def test_after_a_kill_nothing_is_due() -> None:
    ending = Ending().ask(Stage.KILL, now=100)
    assert stages(ending, until=60, idle=60) == []


@pytest.mark.parametrize("earlier", ORDER)
@pytest.mark.parametrize("later", ORDER)
def test_a_stage_that_is_passed_stays_passed(earlier: Stage, later: Stage) -> None:
    ending = Ending().ask(earlier, now=100)
    again = ending.ask(later, now=105)
    assert again.stage == max(earlier, later)
    assert (again is ending) == (later <= earlier)


def test_asking_once_more_does_not_prolong() -> None:
    ending = Ending(grace=10).ask(Stage.INTERRUPT, now=100).ask(Stage.INTERRUPT, now=109)
    assert ending.due == 110


def test_a_harder_stage_starts_its_own_time() -> None:
    ending = Ending(grace=10).ask(Stage.STOP, now=100).ask(Stage.INTERRUPT, now=108)
    assert ending.due == 118


def test_a_failure_ends_the_others_after_the_settle_window() -> None:
    ending = Ending(grace=10).failed(now=100)
    kinds = stages(ending, until=10)
    assert [stage for _, stage in kinds] == [Stage.TERMINATE, Stage.KILL]
    assert kinds[-1][0] < 1.0


def test_the_settle_window_lasts_until_every_rank_has_begun() -> None:
    ending = Ending(grace=10).failed(now=100)
    assert ending.next_stage(now=100.2, idle=0, leaving=False, all_settle=True) is None
    assert ending.next_stage(now=101.9, idle=0, leaving=False, all_settle=False) is None
    assert ending.next_stage(now=100.3, idle=0, leaving=False, all_settle=True) is Stage.TERMINATE
    # Not for ever.
    assert ending.next_stage(now=102.0, idle=0, leaving=False, all_settle=False) is Stage.TERMINATE


def test_the_settle_window_of_a_session_ends_in_an_interrupt() -> None:
    ending = Ending(grace=10, is_last=False).failed(now=100)
    assert stages(ending, until=1.5) == [(0.3, Stage.INTERRUPT), (1.3, Stage.DISCONNECT)]


def test_a_stop_does_not_prolong_the_settle_window() -> None:
    ending = Ending(grace=10, is_last=False).failed(now=100)
    assert ending.ask(Stage.STOP, now=100.1) is ending


def test_a_harder_stage_ends_the_settle_window() -> None:
    ending = Ending(grace=10).failed(now=100).ask(Stage.TERMINATE, now=100.1)
    assert ending.next_stage(now=100.3, idle=0, leaving=False, all_settle=True) is None


def test_a_failure_during_a_stop_overrules_its_grace() -> None:
    ending = Ending(grace=10).ask(Stage.STOP, now=100).failed(now=100)
    assert stages(ending, until=10, leaving=True)[-1][0] < 1.0


def test_more_failures_do_not_prolong() -> None:
    ending = Ending().failed(now=100)
    assert ending.failed(now=100.2) is ending


def test_a_failure_during_an_interrupt_leaves_the_others_their_grace() -> None:
    ending = Ending(grace=10).ask(Stage.INTERRUPT, now=100)
    assert ending.failed(now=100.5) is ending
