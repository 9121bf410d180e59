"""Training loops as published scripts have them, written once for both libraries.

Each takes the library as ``accelerate`` (that is the only import that a script would change) and a
folder of its own, and returns numbers that the two must share.
"""

from tests.training.scripts import control, images, text

LOOPS = {loop.__name__: loop for part in (text, images, control) for loop in part.LOOPS}
