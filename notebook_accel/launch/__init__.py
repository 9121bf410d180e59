"""Starts, feeds, watches and ends ranks. It is plain Python and knows no notebook.

The way of a launch, from ``notebook_launcher(f)`` to ``f`` and back. Each line is a file, which
hands over to the next one::

    notebook/launcher.py       the person's arguments -> one LaunchRequest -> launch
    launch/launcher.py         launch: checks and packs; _begin_and_wait: has the engine begin
    engines/local.py           AgentEngine.begin: an agent, its ranks, the call; LocalEngine
    template/handle.py         Template.fork_agent: asks the template for an agent
    ---- another process ----
    template/process.py        Server: forks the agent
    agent/agent.py             Agent.start forks the ranks; relay passes messages on, both ways
    worker/main.py             a rank: reads the call, unpacks it and calls  f
    ---- back in the kernel, in the thread of the pool ----
    control/pool.py            hears the agents: Returned, Raised, Metrics, RankEnded, ...
    control/call.py            RankCall: folds them into a RunState; the verdict at the end
    run.py                     the handle: results, or the error of the rank at fault

What they call on the way gives its answer and hands nothing over: ``payload/`` packs and unpacks,
``transport/`` carries bytes, ``control/state.py`` and ``control/verdict.py`` are pure functions.

Four records go this way: ``LaunchRequest`` (what was asked), ``payload.PackedCall`` (what travels),
``control.call.Call`` (the kernel's side, with its ``RunState``) and ``Run`` (the person's handle).
A call of a session (``launcher.Session``) begins at the pool, whose ranks are there already.
"""
