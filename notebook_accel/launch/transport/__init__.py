"""Communication between the processes of a run: message channels, counters in shared memory."""
