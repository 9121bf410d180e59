"""Models that are larger than one device's memory.

From the measuring to the running: ``sizes`` and ``ties`` say what a model weighs, ``memory_limits``
what each device may hold, ``inference`` turns the two into a device map (module name -> device),
``loading`` and ``offload_store`` bring weights there, and ``dispatch`` attaches the ``hooks`` that
fetch a module's weights when its forward runs.
"""
