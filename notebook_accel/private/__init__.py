"""The only place where private names of other libraries are used, one file for each library.

Each name is used in functions whose docstrings say what the name is for and what fails without it.
A new release of a library may drop or change a private name without notice;
``tests/test_private_names.py`` checks each name, and fails for such a release.
"""
