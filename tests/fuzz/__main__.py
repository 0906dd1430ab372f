"""`make fuzz`: try inputs that were never seen, from the kept ones on; findings are written to the corpus."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fuzz.corpus import add, kept
from tests.fuzz.hunt import Hunt, tried
from tests.fuzz.targets import TARGETS, available

if TYPE_CHECKING:
    from collections.abc import Sequence

_SLICE = 0.5  # seconds of one target, then the next one's
_LINE = "{:10} {:>12} {:>10} {:>8} {:>9}"


def main(arguments: Sequence[str]) -> int:
    """Return 1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default: %(default)s)")
    parser.add_argument("--count", type=int, default=1 << 62, help="inputs of each target at most")
    parser.add_argument("--only", nargs="+", choices=TARGETS, metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--seed", type=int, default=int(time.time()) // 86400, help="default: the number of the day")
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="try the input in this file of the corpus, and no other"
    )
    given = parser.parse_args(arguments)
    if given.replay:
        _say(repr(tried(TARGETS[given.replay.absolute().parent.name], given.replay.read_bytes())))
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of XGBoost, whose threads else wait for one another
    warnings.simplefilter("ignore")  # of what libraries think of inputs
    logging.disable()
    _say(f"seed {given.seed}")
    current = Path(tempfile.gettempdir()) / f"fuzz-{os.getpid()}.input"
    names = [name for name in given.only or TARGETS if available(TARGETS[name])]
    hunts = [Hunt(TARGETS[name], kept(name), given.seed, current) for name in names]
    _hunt(hunts, time.monotonic() + 60 * given.minutes, given.count)
    _report(hunts)
    return any(hunt.findings for hunt in hunts)


def _hunt(hunts: Sequence[Hunt], ends: float, count: int) -> None:
    """Give each target its slice, again and again, and tell what is found at once."""
    left = list(hunts)
    while left and time.monotonic() < ends:
        for hunt in list(left):
            told = len(hunt.findings)
            hunt.run(min(_SLICE, max(ends - time.monotonic(), 0.0)), count - hunt.count)
            for finding in list(hunt.findings.values())[told:]:
                file = os.path.relpath(add(finding))
                _say(
                    f"{finding.text}\n{finding.place}\ninput: {finding.data!r}\nreplay: python -m tests.fuzz --replay {file}\n"
                )
            if hunt.count >= count:
                left.remove(hunt)


def _report(hunts: Sequence[Hunt]) -> None:
    _say(_LINE.format("target", "inputs", "a second", "kept", "findings"))
    for hunt in hunts:
        rate = hunt.count / max(hunt.seconds, 1e-9)
        _say(_LINE.format(hunt.target.name, f"{hunt.count:,}", f"{rate:,.0f}", len(hunt.pool), len(hunt.findings)))
    total, seconds = sum(hunt.count for hunt in hunts), sum(hunt.seconds for hunt in hunts)
    found = sum(len(hunt.findings) for hunt in hunts)
    _say(_LINE.format("all", f"{total:,}", f"{total / max(seconds, 1e-9):,.0f}", "", found))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
