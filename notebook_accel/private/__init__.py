"""The only place where private names of other libraries are used, one file for each library.

Each has a function that says what the name is for and what fails without it. A new release of the
library may drop or change a private name without notice; ``tests/test_private_names.py`` checks
each one, so that such a release fails there.
"""
