"""How an engine is to behave: the operator's choices, and sizes of memory as people write them. PURE."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError, invalid_model
from serve.cache.eviction import DEFAULT_RULES, Rules
from serve.sources.scripts import DEFAULT_SCRIPTS, Scripts
from serve.threads import UnderWay

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from model_handlers.base import Footprint
    from model_handlers.config.model_config import ModelConfig
    from serve.sources.store import Credentials


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


_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)}
_UNITS |= {f"{prefix}i{b}": 1024**power for power, prefix in enumerate("kmgtp", start=1) for b in ("b", "")}
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)", re.ASCII)
_MOST_BYTES = 1 << 50
BYTES_ALLOWED = "a size such as 67108864, 350MB or 2GiB, at most 1PiB"
_SHARE = re.compile(r"(?:([0-9]+(?:\.[0-9]+)?)%|([01]\.[0-9]+))(?:\s*-\s*(.+))?")
_BUDGET_ALLOWED = (
    "a size such as 350MB or 2GiB, at most 1PiB, or a share such as 80% or 0.8, or one less a size such as 95%-2GiB"
)


@dataclass(frozen=True, slots=True)
class Share:
    """A share (0 to 1) of what there is, less so many bytes that are to stay free."""

    of: float
    less: int

    def __str__(self) -> str:
        return f"{Decimal(repr(self.of)):f}-{self.less}"


HOST_SHARE = 0.8  # of the host's memory, when no budget is set: the rest is for us, the page cache and batches
DEVICE_SHARE = 0.9

# An int is a number of bytes, a float a share (0 to 1) of what the host or the device has, None its own measure.
MemoryBudget = int | float | Share | None


def byte_size(text: str) -> int:
    """A number of bytes: `67108864`, `350MB` (powers of 1000), `2GiB` and Kubernetes' `2Gi` (powers of 1024).

    Raises:
        ValueError: with what is allowed, worded to follow "expected".
    """
    match = _SIZE.fullmatch(text.strip().lower())
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None or not 1 <= int(float(match[1]) * unit) <= _MOST_BYTES:
        raise ValueError(BYTES_ALLOWED)
    return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)


def memory_budget(text: str) -> int | float | Share:
    """A number of bytes, or a share of what there is: `80%`, `0.8`; less a reserve if one is named: `95%-2GiB`.

    Returns:
        an int for bytes, a float in (0, 1] for a share, a `Share` for one less a reserve.

    Raises:
        ValueError: as `byte_size`.
    """
    share = _SHARE.fullmatch(text)
    try:
        if share is None:
            return byte_size(text)
        reserve = byte_size(share[3]) if share[3] else 0
    except ValueError:
        raise ValueError(_BUDGET_ALLOWED) from None
    value = float(share[1]) / 100 if share[1] else float(share[2])
    if not 0 < value <= 1:
        raise ValueError(_BUDGET_ALLOWED)
    return Share(value, reserve) if reserve else value


def bytes_of(budget: MemoryBudget, available: int, default_share: float) -> int:
    """Bytes that a budget comes to, of so many that there are. Raises ValueError: a reserve leaves nothing."""
    if isinstance(budget, Share):
        found = int(available * budget.of) - budget.less
    elif isinstance(budget, float) or budget is None:
        found = int(available * (default_share if budget is None else budget))
    else:
        found = budget
    if found <= 0:
        raise ValueError(f"that leaves nothing of {available} bytes")
    return found


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine is to behave."""

    budget: Footprint
    cache_directory: Path  # where unpacked archives live, environments that models bring, and what outlives a worker
    # of the process that starts workers, whose next one is to know what is registered; "" for no such thing
    life: str = ""
    under_way: UnderWay = field(default_factory=UnderWay)
    # models that are not brought back, nor loaded at the start, though the worker before had them
    left_out: frozenset[str] = frozenset()
    # bytes for all archives, and for all files of overrides; None for a share of what is free
    disk_budget: int | None = None
    max_archive_files: int = 20_000  # files and directories that one archive may hold
    evicts: bool = True  # whether we make room ourselves; False where a platform manages the models
    eviction: Rules = DEFAULT_RULES
    store: str = ""  # URI of the archives that requests may name, or ""
    buckets: tuple[str, ...] = ()  # URLs of repositories in S3 whose models requests may name
    # prefix of such URLs → those that it is asked with
    credentials: Mapping[str, Credentials] = field(default_factory=dict)
    # repository, more_repositories: folders of models that requests may name; None for no such thing
    repository: Path | None = None
    more_repositories: tuple[Path, ...] = ()
    namespaces: bool = False  # whether two of them may have models of one name
    control: Control = Control.DEMAND
    folders: Mapping[str, Path] = field(default_factory=dict)  # models that requests may name, by their own folders
    scripts: Scripts = DEFAULT_SCRIPTS
    load_threads: int = 2  # environments made at a time, loads at a time
    framework_threads: int = 0  # threads that models' frameworks may have in this process; 0 for any number
    # load_patience, unload_patience: seconds that a load, or the wait for an unload, may take
    load_patience: float = 350.0
    unload_patience: float = 350.0
    drain_patience: float = 25.0  # seconds that an unload waits for requests under way
    inline_ns: int = 200_000  # executions expected to take at most this long run on the event loop
    require_gpu: bool = False  # whether KIND_GPU without a GPU is an error
    batch_guess: BatchGuess = BatchGuess.PROVE
    weights: Weights = Weights.AUTO
    # (name in lower case, device) → what there is of it, see `RateLimiter`; None for no rate limiting
    resources: Mapping[tuple[str, str], int] | None = None
    latencies: Latencies = DEFAULT_LATENCIES
    # what the responses kept for models that ask for it may take together; 0 keeps none
    response_cache_bytes: int = 64 << 20
