"""Which groups of frozen answers there are: what each records, into which files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.golden import commands, refusals, served

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

# A group's function has a new folder for itself, and returns its files: name to text.
GROUPS: Mapping[str, Callable[[Path], dict[str, str]]] = {
    "settings": commands.record_settings,
    "help": commands.record_help,
    "config": commands.record_checks,
    "refusals": refusals.record,
    "repository": served.record_repository,
    "platform": served.record_platform,
    "store": served.record_store,
    "single": served.record_single,
}
