"""Stacks are read by people: the cell's own names, nothing of ours, and libraries folded."""

from notebook_accel.launch.control.stacks import fold_frames, readable, stacks_text

_DUMP = """Thread 0x04 (most recent call first):
  File "/site-packages/notebook_accel/launch/worker/main.py", line 200 in _watch
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap_inner
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x01 (most recent call first):
  File "/site-packages/notebook_accel/training/accelerator.py", line 331 in log
  File "/tmp/ipykernel_1/123.py", line 9 in of_the_user
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x02 (most recent call first):
  File "/tmp/ipykernel_1/123.py", line 4 in slow
  File "/site-packages/notebook_accel/launch/worker/main.py", line 171 in _run
  File "/site-packages/notebook_accel/launch/worker/main.py", line 90 in main
  File "/usr/lib/python3.11/multiprocessing/process.py", line 108 in run
"""


def test_the_users_line_comes_first_and_our_frames_are_gone():
    told = stacks_text([(3, _DUMP)], {"/tmp/ipykernel_1/123.py": "Cell In[16]"})
    lines = told.splitlines()
    assert lines[:3] == [
        "rank 3",
        "Current thread 0x02 (most recent call first):",
        "  Cell In[16], line 4 in slow",
    ]
    assert "  Cell In[16], line 9 in of_the_user" in lines
    assert "in _run" not in told


def test_a_rank_that_is_in_no_call_or_gives_no_answer_says_so():
    waits = """Current thread 0x02 (most recent call first):
  File "/site-packages/notebook_accel/launch/worker/main.py", line 90 in main
  File "/usr/lib/python3.11/multiprocessing/process.py", line 108 in run
"""
    told = stacks_text([(0, waits), (1, "the rank did not answer\n")], {})
    assert told == f"rank 0\n{waits}\nrank 1\nthe rank did not answer\n"


def test_threads_of_the_launcher_are_left_out():
    ours = _DUMP.splitlines(keepends=True)[0] + (
        '  File "/site-packages/notebook_accel/launch/worker/groups.py", line 223 in follow\n'
    )
    own = 'Thread 0x0a (most recent call first):\n  File "/me/train.py", line 3 in follow\n'
    assert readable(f"{ours}\n{own}", {}) == own


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


def test_runs_of_library_frames_are_counted_by_library():
    before, _, rest = _GROUP.partition(f'  |   File "{_LIBRARY}/torch')
    after = rest[rest.index("  | ExceptionGroup") :]
    folded = "  |   ... 3 frames of torch, accelerate and six ...\n"
    assert fold_frames(_GROUP) == before + folded + after


def test_a_traceback_of_libraries_alone_is_whole():
    frame = f'  File "{_LIBRARY}/torch/a.py", line 1, in a\n    b()\n'
    text = f"Traceback (most recent call last):\n{frame}{frame}ValueError: no\n"
    assert fold_frames(text) == text
