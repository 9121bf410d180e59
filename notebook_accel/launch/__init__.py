"""What starts, feeds, watches and ends ranks: plain Python, no IPython."""
