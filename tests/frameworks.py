"""The frameworks that `make frameworks` installs, for tests that make models with them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

import pytest

sys.modules.setdefault("openvino_telemetry", None)  # importing OpenVINO reports to nobody from here, as in the server


def framework(name: str) -> Any:
    """The module of that name. Without it the tests are skipped, or fail where REQUIRE_FRAMEWORKS=1.

    At the head of a test module, or in a fixture that its tests share.
    """
    if os.environ.get("REQUIRE_FRAMEWORKS") == "1":
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed: make frameworks")


def framework_later(name: str) -> Any:
    """The same, imported by the first test that wants something of it: each worker collects all tests, and runs a part."""
    package = name.partition(".")[0]
    return _Later(name) if importlib.util.find_spec(package) else framework(package)


class _Later:
    """A module that is not imported before it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks at all that a test module holds: for fixtures, by such names
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
