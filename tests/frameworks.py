"""The frameworks that `make frameworks` installs, for tests that make models with them."""

from __future__ import annotations

import importlib
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
