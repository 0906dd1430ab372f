"""How hot models are. PURE.

Heat is the time that a model's executions took, of late: it is halved with every tick. A model that keeps a twentieth
of a core busy is hot, at once if it comes suddenly: by then it has paid a good part of what packing costs.
"""

from __future__ import annotations

HOT_SECONDS = 0.1
_COLD_SECONDS = 0.001


class Heat:
    """The heat of one model.

    Attributes:
        seconds: the heat.
    """

    def __init__(self, busy_seconds: float) -> None:
        """`busy_seconds`: what its executions took until now, ever; they leave it cold."""
        self._busy = busy_seconds
        self.seconds = 0.0

    def __repr__(self) -> str:
        return f"<Heat {self.seconds:.3f} s>"

    def tick(self, busy_seconds: float | None) -> None:
        """Another second went by; its executions took so long until now. None: there were no more."""
        self.seconds /= 2
        if busy_seconds is not None:
            self.seconds += busy_seconds - self._busy
            self._busy = busy_seconds

    @property
    def is_hot(self) -> bool:
        """Whether it is worth memory."""
        return self.seconds >= HOT_SECONDS

    @property
    def is_cold(self) -> bool:
        """Whether it has hardly been used for a while."""
        return self.seconds < _COLD_SECONDS
