import math
from argparse import Namespace
from dataclasses import dataclass

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


@dataclass
class Config:
    rate: float = 1e-3
    epochs: int = 3
    tags: tuple[str, ...] = ("a",)


def test_configurations_show_their_settings_and_other_objects_their_type():
    given = (
        Config(),
        Config(rate=0.1, epochs=9),
        Namespace(lr=0.1, of=object(), **dict.fromkeys("abc", 1)),
    )
    assert wording.arguments(given, {"each": [Config(epochs=1)]}) == (
        "Config, Config(rate=0.1, epochs=9), Namespace(lr=0.1, of=object, a=1, b=1, ...), "
        "each=[Config(epochs=1)]"
    )
