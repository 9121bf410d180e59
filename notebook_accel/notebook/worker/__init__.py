"""A rank's side of a session: the shell that runs its cells, and what the notebook asks of it.

The notebook imports :mod:`.calls` to make what it sends; :mod:`.shell` is imported by ranks.
"""
