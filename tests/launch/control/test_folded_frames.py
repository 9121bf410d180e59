"""Frames of libraries are folded, those of the user's code stay."""

from __future__ import annotations

from notebook_accel.launch.control.stacks import fold_frames

_LIBRARY = "/env/lib/python3.11/site-packages"
_GROUP = f"""  + Exception Group Traceback (most recent call last):
  |   File "/home/me/train.py", line 3, in train
  |     step()
  |     ^^^^^^
  |   File "{_LIBRARY}/torch/a.py", line 1, in a
  |     b()
  |   File "{_LIBRARY}/accelerate/b.py", line 2, in b
  |   File "{_LIBRARY}/six.py", line 2, in c
  |     raise ExceptionGroup("many", found)
  | ExceptionGroup: many (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   Cell In[3], line 2, in g
    |     lone()
    |   File "{_LIBRARY}/torch/a.py", line 1, in lone
    |     raise ValueError
    | ValueError
    +------------------------------------
"""


def test_runs_of_library_frames_are_counted_by_library() -> None:
    before, _, rest = _GROUP.partition(f'  |   File "{_LIBRARY}/torch')
    after = rest[rest.index("  | ExceptionGroup") :]
    folded = "  |   ... 3 frames of torch, accelerate and six ...\n"
    assert fold_frames(_GROUP) == before + folded + after


def test_a_traceback_of_libraries_alone_is_whole() -> None:
    frame = f'  File "{_LIBRARY}/torch/a.py", line 1, in a\n    b()\n'
    text = f"Traceback (most recent call last):\n{frame}{frame}ValueError: no\n"
    assert fold_frames(text) == text
