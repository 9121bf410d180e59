"""What takes eight ranks: three kinds of parallelism at once (``make test-eight``).

Trainings, twins and tolerances are those of ``test_matrix`` and ``test_context``.
"""

import pytest

from tests.training import test_context, test_matrix
from tests.training.harness import run_ranks
from tests.training.meshes import FLOAT_ERROR

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "strategy", [name for name, row in test_matrix.STRATEGIES.items() if row[0] == 8]
)
def test_a_strategy_equals_one_process(strategy):
    for of_rank in test_matrix.trained(8):
        for precision, ours in of_rank[strategy].items():
            test_matrix.check(strategy, precision, ours, FLOAT_ERROR)


@pytest.mark.parametrize(
    "context", [name for name, row in test_context.CONTEXTS.items() if row[0] == 8]
)
def test_divided_sequences_equal_one_process(context):
    run_ranks(test_context.check, 8, context, timeout=180)
