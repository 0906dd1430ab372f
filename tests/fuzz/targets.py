"""All that is fuzzed, by name."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from tests.fuzz import archives, codecs, wires

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.fuzz.hunt import Target

TARGETS: Mapping[str, Target] = {target.name: target for target in (*codecs.TARGETS, *wires.TARGETS, *archives.TARGETS)}


def available(target: Target) -> bool:
    """Whether what the target needs is installed."""
    return not target.needs or importlib.util.find_spec(target.needs) is not None
