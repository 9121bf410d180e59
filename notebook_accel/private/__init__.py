"""The only place where private names of other libraries are used.

The docstring of each function says which private name the function uses, and mostly what would fail
without that name. A new release of a library may drop or change a private name without notice;
``tests/test_private_names.py`` checks each name, and fails for such a release.
"""
