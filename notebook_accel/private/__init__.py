"""Private names of libraries: used here and nowhere else, one file a library.

A function for each, which says what the name is for and what happens without it. A new release may
drop or change it without a word; ``tests/test_private_names.py`` then fails with that sentence.
"""
