"""How the objects of a training loop are made ready."""
