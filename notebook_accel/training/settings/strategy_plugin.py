"""What all plugins that choose a strategy have: they are arguments of an ``Accelerator``.

    argument, or variable --resolve--> plugin --> Request.plugins --> the strategy

A strategy's plugin derives from :class:`StrategyPlugin`; the table of ``strategies/__init__.py``
has the name of its argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from notebook_accel.errors import ConfigError
from notebook_accel.training.settings import environment

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["StrategyPlugin"]


class StrategyPlugin:
    """Settings by which a user chooses a strategy.

    Attributes:
        switch: variable, without its prefix, that asks for the plugin's defaults where it is true.
        composes: whether other plugins may be given beside it.
        divides_layers: whether ranks compute a layer together, which fp8 does not support.
    """

    switch: ClassVar[str]
    composes: ClassVar[bool] = True
    divides_layers: bool = False

    @classmethod
    def resolve(cls, argument: str, given: Any) -> StrategyPlugin | None:
        """Return the plugin that was given; else one of the environment, if its switch is true.

        Raises:
            ConfigError: an object of another class was given; the message names the ``argument``.
        """
        if given is None:
            return cls() if environment.read_flag(cls.switch) else None
        if not isinstance(given, cls):
            raise ConfigError(f"{argument} is a {type(given).__name__}: expected a {cls.__name__}")
        return given

    def check_ranks(
        self, plugins: Mapping[str, Any], num_processes: int, local_num_processes: int
    ) -> None:
        """Refuse a number of ranks that does not fit, before any rank waits for another.

        Args:
            plugins: all plugins in use, by their arguments.
            num_processes: number of ranks.
            local_num_processes: number of ranks of this machine.

        Raises:
            ConfigError: they do not fit.
        """

    def resolve_precision(self, asked: str | None) -> str | None:
        """Return the mixed precision, of which the ``Accelerator`` was asked for this one."""
        return asked

    def resolve_steps(self, asked: int | None) -> int | None:
        """Return the batches a step, of which the ``Accelerator`` was asked for this number."""
        return asked
