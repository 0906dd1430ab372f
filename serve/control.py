"""The operator's choices: which models are served, what is guessed and measured of them, how weights are held. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError, invalid_model

if TYPE_CHECKING:
    from model_handlers.config.model_config import ModelConfig


class BatchGuess(Enum):
    """What is done about models whose configuration does not say whether they batch."""

    PROVE = "prove"  # batched by the names of their dimensions, or once their requests have proven it
    OFF = "off"  # executed one request at a time


class Control(Enum):
    """Which models of a repository are served, by Triton's names of modes, but for the first, which Triton has not."""

    DEMAND = "demand"  # all at start, or those that are named; any other with its first request or by a load
    NONE = "none"  # all at start, and nothing ever changes
    EXPLICIT = "explicit"  # those that are named at start, and those that a client loads
    POLL = "poll"  # all, as the folder has them

    @property
    def loads_all(self) -> bool:
        """Whether every model of the repository is to be loaded at start, whatever is named."""
        return self in {Control.NONE, Control.POLL}

    @property
    def limits(self) -> bool:
        """Whether only those models answer that were loaded by name, and no other that happens to be there."""
        return self is not Control.DEMAND

    def check(self) -> None:
        """Refuse a client's load or unload where clients have no say: UNAVAILABLE, in Triton's words."""
        if self.loads_all:
            raise MmeError(Kind.UNAVAILABLE, "explicit model load / unload is not allowed if polling is enabled")


DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class Latencies:
    """What of latencies is kept and shown.

    Attributes:
        counters: whether their sums are among the metrics.
        summaries: whether quantiles are kept.
        histograms: whether the time to a first response is kept of models whose configuration does not ask for it.
        quantiles: which.
    """

    counters: bool = True
    summaries: bool = False
    histograms: bool = False
    quantiles: tuple[float, ...] = DEFAULT_QUANTILES

    def __str__(self) -> str:
        switches = {"counter": self.counters, "summary": self.summaries, "histogram": self.histograms}
        said = [f"{name}_latencies={str(on).lower()}" for name, on in switches.items()]
        return ",".join((*said, "summary_quantiles=" + ",".join(f"{quantile}:0" for quantile in self.quantiles)))


DEFAULT_LATENCIES = Latencies()


WEIGHTS = "MME_WEIGHTS"


class Weights(Enum):
    """How weights are to be held."""

    AUTO = "auto"  # mapped, and packed while it is hot
    MAPPED = "mapped"  # always mapped: as little memory as can be
    PACKED = "packed"  # packed from the start: as quick as can be
    PLAIN = "plain"  # read from the model's own file; nothing is kept on disk beside it


class Tier(Enum):
    """How a loaded model holds its weights."""

    PLAIN = "plain"
    MAPPED = "mapped"
    PACKED = "packed"


# Bytes of weights that are worth a form. Smaller models may be so quick that they execute on the event loop, which must
# not wait for a disk, and mapped pages may have to come from there.
LEAST_SHARED_WEIGHTS = 4 << 20


def weights_of(config: ModelConfig, default: Weights) -> Weights:
    """What a model's configuration asks for, else what the operator does; INVALID_MODEL for what does not exist."""
    text = config.parameters.get(WEIGHTS)
    if text is None:
        return default
    try:
        return Weights(text.strip().lower())
    except ValueError:
        choices = ", ".join(f"'{weights.value}'" for weights in Weights)
        raise invalid_model(
            f"model '{config.name}': parameter '{WEIGHTS}' must be one of {choices}, got '{text}'"
        ) from None
