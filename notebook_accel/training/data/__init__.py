"""Prepared DataLoaders: which samples each rank gets, and how an epoch is resumed in its middle.

``distribute`` makes prepared loaders from the user's. If each rank reads its own samples,
``samplers`` chooses them; if rank 0 reads for all ranks, ``dispatch``
divides its batches. ``loaders`` and ``dispatch`` have the classes of prepared loaders, and
``IndexSource`` gives a resumed epoch the samples and random numbers that it would have had without
the interruption. ``stepping/active_loaders`` tells which loader is being iterated.

Three words are used throughout. A *round* is the samples on which all ranks work at the same step,
a *pass* is one run over a loader (``for batch in loader``), and a *share* is the part of the data
that one rank reads. Ranks that hold one model together (tensor parallelism, say) read the same
share (``DataGroup``).
"""
