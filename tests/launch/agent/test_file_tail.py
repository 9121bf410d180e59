"""Following a growing file."""

import random
import subprocess

import pytest

from notebook_accel.launch.agent.file_tail import FileTail

LIVE = 32_768


class Growing:
    """A file that is written to, and the tail that follows it."""

    def __init__(self, path):
        path.touch()
        self.file = path.open("ab", buffering=0)
        self.tail = FileTail(path)

    def then(self, data):
        self.file.write(data.encode() if isinstance(data, str) else data)
        return self.tail.read()


@pytest.fixture
def growing(tmp_path):
    growing = Growing(tmp_path / "log")
    yield growing
    growing.file.close()
    growing.tail._file.close()


def test_any_text_cut_anywhere(growing):
    draw = random.Random(0)
    text = "".join(draw.choices("aü€🤗\n\r", k=300))
    data, arrived = text.encode(), ""
    while data:
        size = draw.randint(1, 7)
        arrived += growing.then(data[:size])[0]
        data = data[size:]
    assert arrived == text


def test_of_a_flood_the_newest_lines_come_and_the_others_are_counted(growing):
    lines = [f"line {n}\n" for n in range(20_000)]
    text, skipped = growing.then("".join(lines))
    shown = text.splitlines(keepends=True)
    assert 0 < len(text) <= LIVE
    assert shown == lines[-len(shown) :], "whole lines, the last ones"
    assert skipped + len(shown) == len(lines)
    assert growing.then("after\n") == ("after\n", 0)


@pytest.mark.parametrize("before", ["", "short\n" * 3])
def test_a_line_that_is_longer_than_all_that_is_shown(growing, before):
    text, skipped = growing.then(before + "€" * 200_000)
    mark = "[notebook-accel: a part of this line is in the rank's log only] "
    assert text.startswith(mark)
    text = text.removeprefix(mark)
    assert set(text) == {"€"}, "no broken character where it was cut"
    assert len(text.encode()) <= LIVE
    assert skipped == before.count("\n")


def test_a_file_that_was_cut_short_is_read_from_its_start(growing):
    assert growing.then("one\ntwo, and no newli") == ("one\ntwo, and no newli", 0)
    # What `echo warning > /dev/stderr` in a program does to the file that its stderr is.
    subprocess.run(["sh", "-c", f"echo warning > {growing.file.name}"], check=True)
    text, skipped = growing.tail.read()
    assert skipped == 0
    lines = text.splitlines()
    assert lines[0] == "", "what is said of it begins a line of its own"
    assert "erased" in lines[1]
    assert lines[2:] == ["warning"]
    assert (growing.tail.start, growing.tail.position) == (0, 8)
    assert growing.then("last\n") == ("last\n", 0)
    assert (growing.tail.start, growing.tail.position) == (8, 13)
    growing.file.truncate(0)
    text, _ = growing.tail.read()
    assert text.count("\n") == 1, "said too where nothing was printed since"
    assert growing.tail.read() == ("", 0)
