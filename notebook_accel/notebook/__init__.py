"""The notebook's user interface: launcher, magics, live panels and summaries.

No other package imports ipywidgets. IPython is imported here too, and elsewhere only in a rank that
displays something.
"""
