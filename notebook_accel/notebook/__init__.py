"""What the person sees: the one place where IPython and ipywidgets are imported."""
