import math

import pytest

from notebook_accel.launch.text import wording


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (wording.clock(0.9), "0:00"),
        (wording.clock(3725), "1:02:05"),
        (wording.clock(-3), "0:00"),
        (wording.span(3.24), "3.2 s"),
        (wording.span(62), "1:02"),
        (wording.count(1240), "1,240"),
        (wording.count(1240.5), "1,240.50"),
        (wording.count(1e300), "1e300"),
        (wording.count(math.inf), "inf"),
        (wording.count(math.nan), "nan"),
        (wording.number(0.12345678), "0.1235"),
        (wording.number(2.5e-06), "2.5e-6"),
        (wording.number(1e9), "1e9"),
        (wording.number(3.0), "3"),
        (wording.number(math.nan), "nan"),
        (wording.number(-math.inf), "-inf"),
        (wording.memory(412_300_000), "412 MB"),
        (wording.memory(1_250_000_000), "1.2 GB"),
        (wording.rate(1234.5, "it"), "1,234 it/s"),
        (wording.rate(12.34, "it"), "12.3 it/s"),
        (wording.rate(0.4, "it"), "2.50 s/it"),
        (wording.rate(0.0, "it"), ""),
        (wording.rate(math.nan, "it"), ""),
        (wording.rank_list([2]), "rank 2"),
        (wording.rank_list([6, 0, 1, 3, 2]), "ranks 0-3 and 6"),
        (wording.rank_list([9, 0, 4, 3]), "ranks 0, 3-4 and 9"),
    ],
)
def test_numbers_read_as_a_person_writes_them(said, expected):
    assert said == expected
