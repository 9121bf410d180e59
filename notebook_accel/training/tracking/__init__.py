"""Where numbers of a training go."""
