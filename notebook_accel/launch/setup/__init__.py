"""What the notebook's cells did to libraries, repeated in each rank before it gets the function.

    notebook: cell_setup.py reads the cells --> Step ... with the call ... --> rank: take_over

A fork of the notebook would have all of this; ranks come from a clean process. steps.py has what
travels, and libraries.py the table of settings that are known library by library.
"""
