"""Starts, feeds, watches and ends ranks. It is plain Python and knows no notebook.

The way of a launch, from ``notebook_launcher(f)`` to ``f`` and back. Each line is a file below
``notebook_accel/``, which hands over to the next one::

    out, in the kernel
        notebook/launcher.py           notebook_launcher: the arguments -> one LaunchRequest
        launch/launcher.py             launch: checks, packs; launch_packed: plans; _begin_and_wait
        launch/engines/local.py        AgentEngine.begin: a RankPool (sends wire.Launch); the call
        launch/control/call.py         RankCall.sent: the call; inside of it the run is opened
        launch/control/pool.py         RankPool: sends each agent wire.BeginCall
    in the agent
        launch/agent/agent.py          main: forks the ranks; _begin_call: sends each the call
    in each rank
        launch/worker/main.py          main, serve_calls: reads the call; _run: calls  f
    back, through the same files: the agent relays what its ranks say (wire.Returned, ...)
        launch/control/pool.py         _take: hears it, in a thread of its own
        launch/control/call.py         take: a RunState; finish: the verdict, the view's end
        launch/launcher.py             _wait_in_cell: waits for that, raises the run's error
        launch/run.py                  Run: the results

What they call on the way gives its answer and hands nothing over: ``template/`` is the clean
process that forks an agent, ``payload/`` packs and unpacks, ``transport/`` and
``control/agent_link.py`` carry messages, ``agent/rank_process.py`` is a rank as its agent sees it,
``control/state.py`` and ``control/verdict.py`` are pure functions, ``control/results.py`` keeps
what ranks returned.

Four records go this way: ``LaunchRequest`` (what was asked), ``payload.PackedCall`` (what travels),
``control.call.Call`` (the kernel's side, with its ``RunState``) and ``Run`` (the person's handle).
A call of a session (``launcher.Session.call``) goes on to ``control/call.py``, since its ranks are
there.
"""
