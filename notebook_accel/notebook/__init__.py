"""The notebook's user interface: launcher, magics, live panels and summaries.

No other package of ``notebook_accel`` imports ipywidgets. IPython is imported here too; otherwise
only ranks that display something import it.
"""
