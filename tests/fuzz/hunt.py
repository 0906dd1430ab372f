"""Fuzzing of one target: inputs are made and tried, those with a new outcome are kept, findings made small.

A target is a function of bytes that raises on a finding; what it returns is the outcome, by which inputs are told
apart. What takes seconds of the processor, or memory out of proportion to the input, is a finding too. The input at
hand lies in a file, where it is found if the process dies of it.
"""

from __future__ import annotations

import hashlib
import mmap
import signal
import time
import traceback
import tracemalloc
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.mutate import Mutator

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence
    from pathlib import Path

    from hypothesis.strategies import SearchStrategy

LONGEST = 4096  # bytes of an input
_MEASURED = 101  # inputs, of which the memory of one is measured
_MOST_KEPT = 2000
_MOST_TRIES = 3000  # to make a finding smaller
_EXAMPLES = 20  # of hypothesis, in one slice of four: they take long to make
_EXAMPLES_EACH = 4
_BATCH = 32  # inputs between two looks at the clock


@dataclass(frozen=True)
class Target:
    """What is fuzzed.

    Attributes:
        name: of the target, and of its folder in the corpus.
        check: tries an input and returns its outcome; raises on a finding.
        strategy: inputs in the form that is expected.
        words: that mean something there.
        memory: bytes that an input may take, and bytes for each of its own.
        longest: bytes of an input.
        needs: a package without which the target is left out.
    """

    name: str
    check: Callable[[bytes], Hashable]
    strategy: SearchStrategy[bytes]
    words: tuple[bytes, ...] = ()
    memory: tuple[int, int] = (4 << 20, 128)
    longest: int = LONGEST
    needs: str = ""


class FindingError(AssertionError):
    """What a target found out itself."""


@dataclass
class Finding:
    """An input, and what it does.

    Attributes:
        place: kind of error and line of code, by which findings are told apart.
    """

    target: str
    data: bytes
    place: str
    text: str

    @property
    def file(self) -> str:
        """Its name in the corpus."""
        return f"{hashlib.sha256(self.data).hexdigest()[:12]}.bin"


def tried(target: Target, data: bytes) -> Hashable:
    """The outcome of an input; the second time its memory is measured, when what is imported by need is there."""
    target.check(data)
    tracemalloc.start()
    try:
        outcome = target.check(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    base, each = target.memory
    if peak > base + each * len(data):
        raise FindingError(f"{len(data)} bytes took {peak} bytes of memory")
    return outcome


@dataclass
class Hunt:
    """The fuzzing of one target.

    Attributes:
        current: where the input at hand is written, if anywhere: its length in four bytes, then itself.
        patience: seconds of the processor's time for one input.
        count, seconds: inputs that were tried, and the time of the processor that it took.
        pool: inputs from which others are made.
        findings: one for each place.
    """

    target: Target
    seeds: Sequence[bytes]
    seed: int
    current: Path | None = None
    patience: float = 20.0  # importing a library counts as well
    count: int = 0
    seconds: float = 0.0
    pool: list[bytes] = field(default_factory=list)
    findings: dict[str, Finding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = Random(f"{self.seed} {self.target.name}")
        self._mutator = Mutator(self._random, self.target.words, self.target.longest)
        self._slices = self._tries = 0
        self._seen: set[Hashable] = set()
        self._check: Callable[[bytes], Hashable] = self.target.check

    def run(self, seconds: float, count: int) -> None:
        """Try inputs for so long, or so many."""
        began, ends, last = time.process_time(), time.monotonic() + seconds, self.count + count
        with self._watched():
            if not self.count:
                for data in (b"", *self.seeds):
                    self.take(data)
                self.pool += [data for data in self.seeds if data not in self.pool]
                self.pool = self.pool or [b""]
            if self._slices % _EXAMPLES_EACH == 1:
                self._try_examples(min(_EXAMPLES, max(last - self.count, 1)))
            self._slices += 1
            while self.count < last and time.monotonic() < ends:
                for _ in range(min(_BATCH, last - self.count)):
                    self.take(self._mutator.mutated(self.pool))
        self.seconds += time.process_time() - began

    def take(self, data: bytes) -> None:
        """Try an input."""
        self.count += 1
        self._tries += 1
        if self.current is not None:
            size = len(data)
            self._memory[: size + 4] = size.to_bytes(4, "big") + data
        try:
            outcome = self._check(data) if self.count % _MEASURED else tried(self.target, data)
        except Exception as error:  # noqa: BLE001 - which is what is looked for
            self._found(data, error)
            return
        if outcome not in self._seen and len(self._seen) < _MOST_KEPT:
            self._seen.add(outcome)
            self.pool.append(data)

    def _try_examples(self, most: int) -> None:
        """Try inputs of the form that is expected."""

        @seed(self._random.getrandbits(64))
        @settings(
            max_examples=most,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(self.target.strategy)
        def run(data: bytes) -> None:
            self.take(data[: self.target.longest])

        run()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Interrupt an input that takes too long, and have the one at hand where it outlasts the process."""
        before = -1

        def look(*_: object) -> None:
            nonlocal before
            if before == self._tries:
                raise FindingError(f"it takes more than {self.patience} seconds")
            before = self._tries

        if self.current is not None:
            size = self.target.longest * 2 + 4
            self.current.write_bytes(bytes(size))  # not sparse: a page without a place on the disk ends the process
            with self.current.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), size)
        handler = signal.signal(signal.SIGVTALRM, look)
        signal.setitimer(signal.ITIMER_VIRTUAL, self.patience, self.patience)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, handler)
            if self.current is not None:
                self._memory.close()
                self.current.unlink()

    def _found(self, data: bytes, error: Exception) -> None:
        place = place_of(error)
        if place in self.findings:
            return
        small = minimised(data, lambda candidate: self._place(candidate) == place)
        text = "".join(traceback.format_exception(error))
        self.findings[place] = Finding(self.target.name, small, place, text)

    def _place(self, data: bytes) -> str:
        self._tries += 1
        try:
            tried(self.target, data)
        except Exception as error:  # noqa: BLE001 - see `take`
            return place_of(error)
        return ""


def place_of(error: Exception) -> str:
    """Kind of error and line of code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    what = str(error)[:40] if isinstance(error, FindingError) and "bytes" not in str(error) else ""
    return f"{type(error).__name__} {frame.filename}:{frame.lineno} {what}".rstrip()


def minimised(data: bytes, same: Callable[[bytes], bool]) -> bytes:
    """The shortest input found that is still the same finding: parts are left out, the large ones first."""
    tries, size = 0, max(len(data) // 2, 1)
    while size and tries < _MOST_TRIES:
        at, shorter = 0, False
        while at < len(data) and tries < _MOST_TRIES:
            candidate = data[:at] + data[at + size :]
            tries += 1
            if same(candidate):
                data, shorter = candidate, True
            else:
                at += size
        if not (shorter and size == 1):
            size //= 2
    return data
