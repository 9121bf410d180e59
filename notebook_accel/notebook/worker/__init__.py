"""A rank's side of a session: the requests that a notebook sends, and the shell that runs cells.

The notebook imports :mod:`.calls` to make its requests; only ranks import :mod:`.namespace`.
"""
