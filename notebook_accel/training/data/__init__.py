"""Prepared loaders: who gets which samples, and how an epoch goes on in its middle.

``distribute`` makes them. Who gets which samples is in ``samplers`` and ``iterable_datasets`` (each
rank reads its own) and ``rounds`` (rank 0 reads for all), what a prepared loader does in
``loaders`` and ``dispatch``, and how a resumed epoch reads up to its place in ``replay``. Which
loader is being iterated is in ``stepping/active_loaders``.

Three words are used throughout. A *round* is the samples on which all ranks work at the same step,
a *pass* is one run over a loader (``for batch in loader``), and a *share* is the part of the data
that one rank reads. Ranks that hold one model together read the same share (``DataGroup``).
"""
