"""Starts, feeds, watches and ends ranks. It is plain Python and knows no notebook.

The way of a launch, from ``notebook_launcher(f)`` to ``f`` and back; each line is a file::

    notebook/launcher.py       the person's arguments -> one LaunchRequest
    launch/launcher.py         checks it, packs f (payload/), has the engine plan the ranks
    engines/local.py           agents for the plan -> RankPool; RankCall.start sends wire.BeginCall
    template/handle.py         asks the template for an agent
    ---- another process ----
    template/process.py        forks the agent
    agent/agent.py             forks the ranks, passes the call on to them
    worker/main.py             a rank: reads the call, unpacks it and calls  f
    ---- back in the kernel, in the thread of the pool ----
    control/pool.py            hears the agents: Returned, Raised, Metrics, RankEnded, ...
    control/call.py            folds them into a RunState; the verdict at the end; the view draws
    run.py                     the handle: results, or the error of the rank at fault

Four records go this way: ``LaunchRequest`` (what was asked), ``payload.PackedCall`` (what travels),
``control.call.Call`` (the kernel's side, with its ``RunState``) and ``Run`` (the person's handle).
A call of a session (``launcher.Session``) begins at the pool, whose ranks are there already.
"""
