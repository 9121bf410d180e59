"""What a rank forks after a tokenizer has used its threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own, as in a rank: what is registered for a fork stays.
_SCENE = """
import os

from notebook_accel.launch.worker import forked_tokenizers

forked_tokenizers.install()
from tokenizers import Tokenizer, models

tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
tokenizer.encode_batch(["a a a"] * 1000)
for _ in range(2):
    child = os.fork()
    if not child:
        print(os.environ["TOKENIZERS_PARALLELISM"], len(tokenizer.encode_batch(["a"] * 1000)))
        os._exit(0)
    os.waitpid(child, 0)
print(os.environ.get("TOKENIZERS_PARALLELISM"))
"""


@pytest.mark.parametrize(("said", "in_child"), [(None, "false"), ("0", "0")])
def test_a_forked_process_has_no_threads_unless_the_user_says_so(
    said: str | None, in_child: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if said is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", said)
    done = subprocess.run(
        [sys.executable, "-u", "-c", _SCENE],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == [f"{in_child} 1000"] * 2 + [str(said)]
    assert "forked" not in done.stderr
