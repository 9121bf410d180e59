"""The settings of a launch: their names, checks, and the places that their values come from."""

from __future__ import annotations

from notebook_accel.config.launch_config import LaunchConfig, shares_devices
from notebook_accel.config.setting import settings_of
from notebook_accel.config.sources import (
    default_config_path,
    given_settings,
    resolve,
    write_basic_config,
)

__all__ = [
    "LaunchConfig",
    "default_config_path",
    "given_settings",
    "resolve",
    "settings_of",
    "shares_devices",
    "write_basic_config",
]
