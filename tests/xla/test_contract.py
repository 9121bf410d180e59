"""What every engine must do, by ranks that ``xmp.spawn`` starts on torch_xla's CPU device.

There the ranks of a launch are threads of one process, as on TPUs whose chips have two cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from notebook_accel.config import LaunchConfig
from notebook_accel.launch.launcher import launch
from notebook_accel.launch.view import View
from tests.engines.contract import EngineContract

if TYPE_CHECKING:
    from notebook_accel.launch.run import Run


# Cases that need a process for each rank, or ranks that begin within seconds of the launch: they
# make groups of torch.distributed (one a process), count on variables and random numbers of their
# own, fork or break their process, take its parent for the agent, set signals, sleep in C through
# an interrupt, hold the GIL while others go on, or outlive another. So do sessions. Deaths of ranks
# that share a process are in tests/xla/test_failures.py.
NEEDS_A_PROCESS = {
    "test_a_call_in_which_one_rank_raises_is_followed_by_a_good_one",
    "test_a_call_that_is_interrupted_is_followed_by_a_good_one",
    "test_a_daemon_of_a_rank_outlives_other_ranks_and_not_its_own",
    "test_a_dead_agent",
    "test_a_forked_child_that_comes_back_is_no_rank",
    "test_a_frozen_agent_is_told_and_the_run_goes_on_with_it",
    "test_a_function_that_never_asks_leaves_at_the_same_batch",
    "test_a_gigabyte_each_way",
    "test_a_killed_call_ends_the_session",
    "test_a_killed_kernel_leaves_nobody",
    "test_a_killed_rank_takes_its_loader_workers_and_daemons_along",
    "test_a_rank_dies",
    "test_a_rank_stuck_in_a_collective_of_a_group_that_somebody_keeps",
    "test_a_rank_that_breaks_its_connection",
    "test_a_rank_that_dies_between_calls_is_noticed",
    "test_a_rank_that_dies_in_a_call",
    "test_a_rank_that_goes_on_after_it_closed_its_connection",
    "test_a_rank_that_waits_for_one_that_has_returned",
    "test_an_interrupt_goes_on_by_itself_after_the_grace",
    "test_an_interrupt_reaches_handlers_and_the_cell_ends_with_the_ranks",
    "test_key_error_while_the_others_sit_in_a_collective",
    "test_kill",
    "test_launch_error_when_the_template_dies_while_forking",
    "test_one_rank_raises",
    "test_output_is_whole_and_in_order",
    "test_plain_groups_after_a_call_that_failed",
    "test_ranks_draw_what_the_notebook_would",
    "test_ranks_that_leave_after_a_call_that_failed_end_in_their_own_time",
    "test_ranks_that_wait_for_one_that_failed",
    "test_runs_beside_each_other",
    "test_should_stop_is_true_at_the_same_step",
    "test_stacks_of_a_rank_that_has_died",
    "test_stacks_of_a_rank_that_holds_the_gil",
    "test_stacks_of_ranks_that_have_only_just_been_forked",
    "test_the_notebooks_surroundings",
    "test_the_port_is_held_and_usable",
    "test_three_interrupts_end_anything",
    "test_what_is_left_to_do_after_the_return_is_bounded",
}


class TestXla(EngineContract):
    engine = "xla"

    @pytest.fixture(autouse=True)
    def _skips(self, request: pytest.FixtureRequest) -> None:
        uses_session = "session" in request.fixturenames
        if uses_session or request.node.originalname in NEEDS_A_PROCESS:
            pytest.skip("needs a process a rank")

    @pytest.fixture(autouse=True)
    def _devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NOTEBOOK_ACCEL_XLA_MODULES", "tests.xla.stand_in")
        monkeypatch.setenv("CPU_NUM_DEVICES", "2")
        self._set = monkeypatch.setenv

    def launch(self, function: Any, *args: Any, n: int = 2, **options: Any) -> Run:
        self._set("CPU_NUM_DEVICES", str(n))
        config = LaunchConfig(engine=self.engine, grace=options.pop("grace", 10.0))
        return launch(function, args, config=config, **{"view": View(), **options})
