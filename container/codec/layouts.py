"""Layouts of requests, interned: those that look alike share one object, so that a model checks it once. PURE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serve.request import Bounded, Layout

if TYPE_CHECKING:
    from model_handlers.tensor import DataType

_MAX_LAYOUTS = 4096  # remembered; then all are forgotten, which costs each model one check
_MAX_BYTES = 16 << 20  # that they may take


class Layouts:
    """The layouts that have been seen, whatever the form of their requests."""

    def __init__(self) -> None:
        self._known = Bounded(_MAX_LAYOUTS, _MAX_BYTES)

    def __len__(self) -> int:
        return len(self._known)

    def intern(self, inputs: tuple[tuple[str, DataType, tuple[int, ...]], ...], outputs: tuple[str, ...]) -> Layout:
        """The one layout of these inputs (name, data type, full shape) and requested outputs (() for all of them)."""
        key = (inputs, outputs)
        layout: Layout | None = self._known.get(key)
        if layout is None:
            layout = Layout(inputs, outputs)
            self._known.keep(key, layout, layout.weight())
        return layout
