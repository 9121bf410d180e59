"""The base class of plugins: the arguments of ``Accelerator`` that choose a kind of parallelism.

A strategy is the class that does one kind of parallelism, such as FSDP or DeepSpeed::

    argument, or environment variable --resolve--> plugin --> Request.plugins --> the strategy

A strategy's plugin derives from :class:`StrategyPlugin`. The table ``PLUGIN_ARGUMENTS`` of
``strategies/__init__.py`` has the plugin classes by their arguments of ``Accelerator``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from notebook_accel.errors import ConfigError
from notebook_accel.training.settings import environment


class StrategyPlugin:
    """Base class of the settings by which a user chooses a strategy (a kind of parallelism)."""

    switch: ClassVar[str]
    composes: ClassVar[bool] = True
    divides_layers: bool = False

    @classmethod
    def resolve(cls, argument: str, given: Any) -> StrategyPlugin | None:
        """Return the plugin that was given; else a default one if ``switch`` is true, else None.

        Args:
            argument: name of the argument of ``Accelerator``, for error messages.
            given: value of that argument; None if the user gave none.

        Raises:
            ConfigError: an object of another class was given.
        """
        if given is None:
            return cls() if environment.read_flag(cls.switch) else None
        if not isinstance(given, cls):
            raise ConfigError(f"{argument} is a {type(given).__name__}: expected a {cls.__name__}")
        return given

    def check_ranks(
        self, plugins: Mapping[str, Any], num_processes: int, local_num_processes: int
    ) -> None:
        """Raise if these settings cannot use this number of ranks; the base class accepts any.

        It is called before ranks connect, so that each rank fails and none waits for another.

        Args:
            plugins: all plugins in use, by the names of their arguments.
            num_processes: number of ranks.
            local_num_processes: number of ranks of this machine.

        Raises:
            ConfigError: the number of ranks does not fit the settings.
        """

    def resolve_precision(self, asked: str | None) -> str | None:
        """Return the mixed precision to use; the base class returns ``asked``.

        Args:
            asked: the ``mixed_precision`` of ``Accelerator``; None if the user gave none.
        """
        return asked

    def resolve_steps(self, asked: int | None) -> int | None:
        """Return the batches per optimizer step; the base class returns ``asked``.

        Args:
            asked: the ``gradient_accumulation_steps`` of ``Accelerator``; None if the user gave
                none.
        """
        return asked
