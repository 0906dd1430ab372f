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
    """How an engine is to behave.

    Attributes:
        cache_directory: where unpacked archives live, environments that models bring, and what outlives a worker.
        life: of the process that starts workers, whose next one is to know what is registered; "" for no such thing.
        left_out: models that are not brought back, nor loaded at the start, though the worker before had them.
        disk_budget: bytes for all archives, and for all files of overrides; None for a share of what is free.
        max_archive_files: files and directories that one archive may hold.
        evicts: whether we make room ourselves; False where a platform manages the models.
        store: URI of the archives that requests may name, or "".
        buckets: URLs of repositories in S3 whose models requests may name.
        credentials: prefix of such URLs → those that it is asked with.
        repository, more_repositories: folders of models that requests may name; None for no such thing.
        namespaces: whether two of them may have models of one name.
        folders: models that requests may name, by their own folders.
        load_threads: environments made at a time, loads at a time.
        framework_threads: threads that models' frameworks may have in this process; 0 for any number.
        load_patience, unload_patience: seconds that a load, or the wait for an unload, may take.
        drain_patience: seconds that an unload waits for requests under way.
        inline_ns: executions expected to take at most this long run on the event loop.
        require_gpu: whether KIND_GPU without a GPU is an error.
        resources: (name in lower case, device) → what there is of it, see `RateLimiter`; None for no rate limiting.
        response_cache_bytes: what the responses kept for models that ask for it may take together; 0 keeps none.
    """

    budget: Footprint
    cache_directory: Path
    life: str = ""
    under_way: UnderWay = field(default_factory=UnderWay)
    left_out: frozenset[str] = frozenset()
    disk_budget: int | None = None
    max_archive_files: int = 20_000
    evicts: bool = True
    eviction: Rules = DEFAULT_RULES
    store: str = ""
    buckets: tuple[str, ...] = ()
    credentials: Mapping[str, Credentials] = field(default_factory=dict)
    repository: Path | None = None
    more_repositories: tuple[Path, ...] = ()
    namespaces: bool = False
    control: Control = Control.DEMAND
    folders: Mapping[str, Path] = field(default_factory=dict)
    scripts: Scripts = DEFAULT_SCRIPTS
    load_threads: int = 2
    framework_threads: int = 0
    load_patience: float = 350.0
    unload_patience: float = 350.0
    drain_patience: float = 25.0
    inline_ns: int = 200_000
    require_gpu: bool = False
    batch_guess: BatchGuess = BatchGuess.PROVE
    weights: Weights = Weights.AUTO
    resources: Mapping[tuple[str, str], int] | None = None
    latencies: Latencies = DEFAULT_LATENCIES
    response_cache_bytes: int = 64 << 20
