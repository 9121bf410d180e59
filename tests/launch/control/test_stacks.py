"""Stacks are read by people: the cell's own names, nothing of ours."""

from __future__ import annotations

from notebook_accel.launch.control.stacks import stacks_text

_DUMP = """Thread 0x01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x02 (most recent call first):
  File "/tmp/ipykernel_1/123.py", line 4 in slow
  File "/site-packages/notebook_accel/launch/worker/call.py", line 171 in _run
  File "/site-packages/notebook_accel/launch/worker/main.py", line 90 in main
  File "/usr/lib/python3.11/multiprocessing/process.py", line 108 in run
"""


def test_cells_have_their_labels_and_our_frames_are_gone() -> None:
    told = stacks_text([(3, _DUMP)], {"/tmp/ipykernel_1/123.py": "Cell In[16]"})
    assert told.splitlines() == [
        "rank 3",
        "Thread 0x01 (most recent call first):",
        '  File "/usr/lib/python3.11/threading.py", line 331 in wait',
        "",
        "Current thread 0x02 (most recent call first):",
        "  Cell In[16], line 4 in slow",
    ]
