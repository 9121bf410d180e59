"""The notebook's user interface: launcher, magics, live panels and summaries."""
