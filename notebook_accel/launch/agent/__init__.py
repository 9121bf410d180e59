"""One a machine and run: it starts, feeds, watches, reaps and ends the ranks there."""
