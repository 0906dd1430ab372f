"""The settings of the server: declared in `schema`, read by `reader`."""

from __future__ import annotations

from container.settings.parsers import GrpcCompression, LogFormat, Mode, PingMode, RateLimit, SettingsError
from container.settings.places import SingleModel, choose_single_model
from container.settings.reader import read_settings
from container.settings.schema import ALL_MODELS, Settings, settings_table

__all__ = [
    "ALL_MODELS",
    "GrpcCompression",
    "LogFormat",
    "Mode",
    "PingMode",
    "RateLimit",
    "Settings",
    "SettingsError",
    "SingleModel",
    "choose_single_model",
    "read_settings",
    "settings_table",
]
