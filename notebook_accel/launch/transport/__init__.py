"""How bytes travel between the processes of a run: channels, and counters in shared memory."""
