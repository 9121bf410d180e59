"""The launcher: starts the ranks of a run, sends them calls, watches them and ends them.

A rank is one process of a run. This package does not depend on Jupyter: the code that shows a run
in a notebook is in ``notebook_accel/notebook/``.

A launch goes from ``notebook_launcher(f)`` in the kernel to ``f`` in each rank, and back. Each line
names a file below ``notebook_accel/`` and what runs there; it hands over to the next line::

    out, in the kernel
        notebook/launcher.py           notebook_launcher: the arguments -> one LaunchRequest
        launch/launcher.py             launch: checks, packs; launch_packed: plans; _begin_and_wait
        launch/engines/local.py        AgentEngine.begin: makes a RankPool, which sends wire.Launch
        launch/control/call.py         RankCall.sent: has the call sent; then the run is shown
        launch/control/pool.py         RankPool: sends each agent wire.BeginCall
    in the agent
        launch/agent/__init__.py       main: forks the ranks; _begin_call: sends each the call
    in each rank
        launch/worker/main.py          main, serve_calls: reads the call; _run: calls f
    back, through the same files: the agent relays what its ranks say (wire.Returned, ...)
        launch/control/pool.py         _take: gets each message, in the pool's own thread
        launch/control/call.py         take: updates the RunState; finish: decides how it ended
        launch/launcher.py             _wait_in_cell: waits for the end, raises the run's error
        launch/run.py                  Run: the results

The other modules are helpers of these: ``template/`` is the clean process from which agents are
forked, ``payload/`` pickles and unpickles calls and results, ``transport/``
carries messages, ``agent/rank_process.py`` is the agent's record of a rank,
``control/run_state.py`` and ``control/verdict.py`` are pure functions, ``control/results.py`` keeps
what ranks returned.

Four objects describe a launch, one after the other: ``LaunchRequest`` (what the user asked for),
``payload.PackedCall`` (the pickled function and arguments), ``control.call.Call`` (the kernel's
record of the call, with its ``RunState``) and ``Run`` (the user's handle). A call of a session
(``launcher.Session.call``) skips the engine and goes straight to ``control/call.py``, because the
ranks of a session run already.
"""
