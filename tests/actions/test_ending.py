"""When a run's ranks are asked, interrupted, terminated and killed."""

import pytest

from notebook_accel.actions.ending import Ending, Stage, StepClock

ORDER = [Stage.STOP, Stage.INTERRUPT, Stage.DISCONNECT, Stage.TERMINATE, Stage.KILL]


def stages(ending, *, until, stuck=False, hears=False, leaving=False):
    """What is done by itself from 100 s on, seen every tenth of a second."""
    done = []
    for tick in range(1, int(until * 10) + 1):
        now = 100.0 + tick / 10
        stage = ending.next_stage(now=now, stuck=stuck, hears=hears, leaving=leaving)
        if stage is not None:
            done.append((round(now - 100, 1), stage))
            ending = ending.ask(stage, now=now)
    return done


def test_a_stop_that_ranks_do_not_hear_waits_for_the_grace():
    ending = Ending(grace=10).ask(Stage.STOP, now=100)
    assert stages(ending, until=60) == [
        (10.0, Stage.INTERRUPT),
        (11.0, Stage.DISCONNECT),
        (20.0, Stage.TERMINATE),
        (21.0, Stage.KILL),
    ]


def test_a_step_is_let_finish_beyond_the_grace_unless_ranks_are_stuck():
    ending = Ending(grace=10).ask(Stage.STOP, now=100)
    assert stages(ending, until=60, hears=True) == []
    assert stages(ending, until=1, hears=True, stuck=True) == [(0.1, Stage.INTERRUPT)]
    assert ending.ask(Stage.INTERRUPT, now=101).stage is Stage.INTERRUPT, "a second press"


def test_how_long_a_rank_may_make_no_progress():
    clock = StepClock(100)

    def stuck_at(since, grace=10):
        seconds = (number / 10 for number in range(10_000))
        return next(s for s in seconds if clock.is_stuck(since + s, since=since, grace=grace))

    assert stuck_at(200) == 1, "it trains nothing"
    clock.note((1, 0, 0), 210)
    assert stuck_at(210) == 60, "its first step may compile"
    assert clock.step == 0
    clock.note((1, 1, 0), 250)
    clock.note((2, 1, 0), 250.1)
    assert clock.step == 40
    assert stuck_at(260) == 120
    for number in range(20):
        clock.note((3 + number, 1, 0), 251 + number)
    assert clock.step == 1, "those that are recent count"
    assert stuck_at(290) == 5
    clock.note((22, 1, 1), 271)
    assert stuck_at(290) == 10, "it reads should_stop"
    clock.note((22, 1, 1), 400, is_paused=True)
    clock.note((23, 1, 1), 401)
    assert clock.step == 1, "a pause is no part of a step"


def test_a_loop_that_goes_on_does_not_hear_the_stop():
    clock = StepClock(100)
    assert not clock.hears, "without a loader, and it reads nothing"
    clock.note((1, 0, 0), 101)
    clock.stop_asked()
    heard = []
    for number in range(10):
        clock.note((1, number, 0), 102 + number)
        heard.append(clock.hears)
    assert heard == [True] * 8 + [False] * 2


def test_ranks_that_leave_on_their_own_are_left_in_peace():
    ending = Ending(grace=10).ask(Stage.STOP, now=100)
    assert stages(ending, until=60, stuck=True, leaving=True) == []


def test_an_interrupt_is_followed_up_after_the_grace():
    ending = Ending(grace=3).ask(Stage.INTERRUPT, now=100)
    # Handlers are left alone meanwhile, whatever they do; ranks in a collective are freed.
    freed = [(1.0, Stage.DISCONNECT)]
    assert stages(ending, until=2.9, stuck=True, leaving=True) == freed
    assert stages(ending, until=60) == [*freed, (3.0, Stage.TERMINATE), (4.0, Stage.KILL)]


def test_ranks_that_come_to_one_point_are_waited_for():
    ending = Ending(grace=3).ask(Stage.ALIGN, now=100)
    assert stages(ending, until=2.9) == []
    assert stages(ending, until=3) == [(3.0, Stage.INTERRUPT)]
    for seen in ({"stuck": True}, {"leaving": True}):
        assert stages(ending, until=0.5, **seen) == [(0.1, Stage.INTERRUPT)]
    clock = StepClock(100)
    clock.note((1, 1, 1), 101)
    clock.note((1, 2, 1), 101.5)
    assert not clock.is_stuck(103, since=101, grace=None)
    assert clock.is_stuck(103.5, since=101, grace=None)
    assert ending.failed(now=101) is ending, "the others get their grace"


@pytest.mark.parametrize("earlier", ORDER)
@pytest.mark.parametrize("later", ORDER)
def test_a_stage_that_is_passed_stays_passed(earlier, later):
    ending = Ending().ask(earlier, now=100)
    again = ending.ask(later, now=105)
    assert again.stage == max(earlier, later)
    assert (again is ending) == (later <= earlier)


def test_asking_once_more_does_not_prolong():
    ending = Ending(grace=10).ask(Stage.INTERRUPT, now=100).ask(Stage.INTERRUPT, now=109)
    assert ending.due == 101


def test_a_failure_ends_the_others_after_the_settle_window():
    ending = Ending(grace=10).failed(now=100)
    kinds = stages(ending, until=10)
    assert [stage for _, stage in kinds] == [Stage.TERMINATE, Stage.KILL]
    assert kinds[-1][0] < 1.0


def test_the_settle_window_lasts_until_every_rank_has_begun():
    ending = Ending(grace=10).failed(now=100)
    assert ending.next_stage(now=100.2, leaving=False, all_settle=True) is None
    assert ending.next_stage(now=104.9, leaving=False, all_settle=False) is None
    assert ending.next_stage(now=100.3, leaving=False, all_settle=True) is Stage.TERMINATE
    # Not for ever.
    assert ending.next_stage(now=105.0, leaving=False, all_settle=False) is Stage.TERMINATE


def test_the_settle_window_of_a_session_ends_in_an_interrupt():
    ending = Ending(grace=10, is_last=False).failed(now=100)
    assert stages(ending, until=1.5) == [(0.3, Stage.INTERRUPT), (1.3, Stage.DISCONNECT)]


def test_a_stop_does_not_prolong_the_settle_window():
    ending = Ending(grace=10, is_last=False).failed(now=100)
    assert ending.ask(Stage.STOP, now=100.1) is ending


def test_a_harder_stage_ends_the_settle_window():
    ending = Ending(grace=10).failed(now=100).ask(Stage.TERMINATE, now=100.1)
    assert ending.next_stage(now=100.3, leaving=False, all_settle=True) is None


def test_a_failure_during_a_stop_overrules_its_grace():
    ending = Ending(grace=10).ask(Stage.STOP, now=100).failed(now=100)
    assert stages(ending, until=10, leaving=True)[-1][0] < 1.0


def test_a_failure_during_an_interrupt_leaves_the_others_their_grace():
    ending = Ending(grace=10).ask(Stage.INTERRUPT, now=100)
    assert ending.failed(now=100.5) is ending
