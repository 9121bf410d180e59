"""What takes eight ranks: three kinds of parallelism at once (``make test-eight``)."""

import pytest

from tests.training import test_matrix

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "strategy", [name for name, row in test_matrix.STRATEGIES.items() if row[0] == 8]
)
def test_a_strategy_equals_one_process(strategy):
    for of_rank in test_matrix.trained(8, test_matrix.kind_of(strategy)):
        for name, ours in of_rank[strategy].items():
            test_matrix.check(strategy, name, ours)
