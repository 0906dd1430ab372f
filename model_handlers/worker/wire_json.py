"""JSON as messages carry it: by orjson, or by the standard library where a model's own environment has no orjson.

PURE. Both write what both read: the standard library is held to what JSON has a form for.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def plain_dumps(value: Any) -> bytes:
    """A value as bytes.

    Raises:
        TypeError, ValueError: JSON has no form for it.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def plain_loads(data: memoryview) -> Any:
    """The value of these bytes.

    Raises:
        ValueError: they are not JSON.
    """
    return json.loads(bytes(data))


dumps: Callable[[Any], bytes] = plain_dumps
loads: Callable[[memoryview], Any] = plain_loads
try:
    import orjson
except ImportError:
    pass
else:
    dumps, loads = orjson.dumps, orjson.loads
