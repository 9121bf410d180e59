"""What runs inside a rank: the Accelerator and its parts, on torch and never on IPython."""
