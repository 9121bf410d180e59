r"""Sweeps: many runs of one function, each with other arguments, as many at a time as fit.

    sweep (sweep.py) --> Arguments (space.py)   which arguments the next trial gets; Optuna
                    \--> Leases (space.py)      which devices are free for it
                    \--> Sweep (sweep.py)       starts trials, follows and ends them, in one thread
                              \--> panel.py     how they stand: live, as text and as HTML

A trial (trial.py) is a run like any other, launched by ``notebook_launcher`` without a view.
"""
