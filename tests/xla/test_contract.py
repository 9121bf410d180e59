"""What every engine must do, by ranks that ``xmp.spawn`` starts on torch_xla's CPU device.

One rank has its process for itself, as on TPUs whose chips have one core. Two ranks are threads of
one process there, as on those whose chips have two.
"""

from typing import Any, ClassVar

import pytest

from tests.engines import contract
from tests.engines.contract import EngineContract

pytestmark = pytest.mark.timeout(400)

SESSION = "sessions are refused where ranks share a process"
GROUP = "a process has one default group of torch.distributed"
SHARED = "ranks share what Python and C have once a process"
TOGETHER = "ranks of one process die together, as tests/xla/test_failures.py has it"
C_CODE = "no interrupt reaches a thread in C code, as tests/xla/test_failures.py has it for Python"

# The cases that need a process for each rank, and why.
NEEDS_A_PROCESS = {
    "test_a_daemon_of_a_rank_outlives_other_ranks_and_not_its_own": TOGETHER,
    "test_a_killed_kernel_leaves_nobody": SESSION,
    "test_a_killed_rank_takes_its_loader_workers_and_daemons_along": TOGETHER,
    "test_a_rank_dies": TOGETHER,
    "test_a_rank_that_breaks_its_connection": TOGETHER,
    "test_a_rank_that_waits_for_one_that_has_returned": GROUP,
    "test_an_interrupt_reaches_handlers_and_the_cell_ends_with_the_ranks": C_CODE,
    "test_one_rank_raises": GROUP,
    "test_output_is_whole_and_in_order": SHARED,
    "test_ranks_that_leave_after_a_call_that_failed_end_in_their_own_time": SESSION,
    "test_stacks_of_a_rank_that_holds_the_gil": SHARED,
    "test_stacks_of_ranks_that_have_only_just_been_forked": SHARED,
    "test_the_port_is_held_and_usable": GROUP,
    "test_what_is_left_to_do_after_the_return_is_bounded": SHARED,
}


class OnXla(EngineContract):
    engine = "xla"
    settings: ClassVar[dict[str, Any]] = {}
    uses_cpu = "false"

    @pytest.fixture(autouse=True)
    def _devices(self, monkeypatch):
        monkeypatch.setenv("NOTEBOOK_ACCEL_XLA_MODULES", "tests.xla.stand_in")
        monkeypatch.setenv("CPU_NUM_DEVICES", str(self.world_size))
        # Every launch imports torch_xla: seconds, and on a busy machine many.
        for name in ("SOON", "CLEAN", "BUSY"):
            monkeypatch.setattr(contract, name, 100.0)
        self._set = monkeypatch.setenv

    def config(self, n=None, **options):
        self._set("CPU_NUM_DEVICES", str(n or self.world_size))
        return super().config(n, **options)


class TestOneRank(OnXla):
    world_size = local_world_size = 1

    # These are about several ranks.
    test_a_daemon_of_a_rank_outlives_other_ranks_and_not_its_own = None
    test_a_rank_speaks_for_itself_alone = None
    test_a_rank_that_waits_for_one_that_has_returned = None
    test_all_ranks_leave_at_the_same_point = None
    test_ranks_that_leave_after_a_call_that_failed_end_in_their_own_time = None
    test_ranks_that_wait_for_one_that_failed = None
    test_results_come_back_in_the_order_of_ranks = None
    test_stacks_of_ranks_that_have_only_just_been_forked = None
    test_the_port_is_held_and_usable = None
    test_what_is_left_to_do_after_the_return_is_bounded = None


class TestTwoRanks(OnXla):
    # Between them is the leader, whose child has the ranks.
    agent_above = 2

    @pytest.fixture(autouse=True)
    def _skips(self, request):
        if "session" in request.fixturenames:
            pytest.skip(SESSION)
        if request.node.originalname in NEEDS_A_PROCESS:
            pytest.skip(NEEDS_A_PROCESS[request.node.originalname])
