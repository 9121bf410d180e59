"""Kills kernels, templates, agents, ranks and workers at random, stops some, and looks for what is
left.

``python -m tests.chaos --events 200 --seed 1``, or ``make test-chaos``. The seed makes the choices
again, not the moments: those are the machine's.
"""
