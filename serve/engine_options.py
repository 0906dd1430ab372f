"""How an engine is to behave."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serve.cache.eviction import DEFAULT_RULES, Rules
from serve.control import DEFAULT_LATENCIES, BatchGuess, Control, Latencies, Weights
from serve.sources.scripts import DEFAULT_SCRIPTS, Scripts
from serve.threads import UnderWay

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from model_handlers.base import Footprint
    from serve.sources.store import Credentials


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
