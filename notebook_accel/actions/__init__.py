"""All ranks do one thing at one point of their training; ``scoreboard`` says how.

A stop, a save, a pause and a knob's new value are such things. ``common_actions`` is the kernel's
part, ``acting`` that of an agent, ``scoreboard`` that of a rank. ``ending`` has the stages by which
an agent ends a call.
"""
