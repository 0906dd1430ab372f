"""What mme does on a GPU, part by part: JSON and Markdown, whatever fails.

    python -m benchmarks.gpu_report --out DIR [--part N ...] [--minutes 9] [--again] [--rehearse]

Each part of `benchmarks.gpu_parts` runs in a process of its own, for as long as it may take, and leaves
DIR/part-N.json; figures that it had before it failed, hung or was killed are in there. DIR/report.md and
DIR/report.json are made of those that are there, after each part. Called again, it goes on: parts that never ran come
first, then those that failed; one that the limit of the whole call (`--minutes`) cut off runs again. `--part` runs
those parts, done or not; `--again` all.

`--rehearse` runs the same on a machine without a GPU: the host's memory stands for the device's, the CPU for its
processors, and a made-up NVML for the driver. What was rehearsed says so, and counts for nothing on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
_DONE = {"done", "missing"}  # what needs no second try
_LEAST = 20  # seconds, with less of which no part is begun
_TAIL = 4000  # characters of a part's output that are kept
_WORDS = {
    "done": "done",
    "missing": "could not run here: see what is missing",
    "failed": "failed in part, or as a whole",
    "timed out": "took longer than it may",
    "cut off": "was cut off by the limit of the whole call; it runs again next time",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        name: of the function in `module`.
        title: what it answers.
        seconds: how long it may take.
    """

    name: str
    title: str
    seconds: float = 120
    module: str = "benchmarks.gpu_parts"


PARTS = (
    Part("versions", "Versions, driver, NVML, and whether ONNX Runtime's CUDA provider and PyTorch start"),
    Part("device_tests", "The tests that need a GPU (tests/gpu)", 420),
    Part("pytorch", "PyTorch: TorchScript and .pt2, in the serving process and in workers", 180),
    Part("python_models", "Python models on the device: KIND_GPU, DLPack without a copy"),
    Part("footprints", "What models are charged for, against NVML and the allocator", 240),
    Part("evictions", "A budget that holds four of six models: evictions, what unloads give back, loads at once", 300),
    Part("refusals", "507, exactly when it must be", 180),
    Part("out_of_memory", "Out of memory: while loading, while inferring, by a neighbour", 180),
    Part("lost_device", "A CUDA error that stays, and recovery", 180),
    Part("buffers", "Bound and pinned buffers, on and off"),
    Part("latency", "MiniLM and a ResNet-like model against the bare library, in turns", 240),
    Part("hot_beside_loads", "A hot model's p99 while others load and leave", 120),
    Part("contexts", "What a process and its CUDA context take, and which processes models share"),
    Part("gauges", "Gauges against nvidia-smi"),
    Part("mig", "MIG as it is set"),
)


def main(words: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run what is asked for and has not run; 1 where a part failed."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", type=int, nargs="*", choices=range(1, len(parts) + 1), default=[], metavar="N")
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole call")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * arguments.minutes
    results = _results(arguments.out, parts)
    wanted = arguments.part or _in_turn(results, len(parts), again=arguments.again, rehearse=arguments.rehearse)
    _write(arguments.out, parts)
    for number in wanted:
        left = deadline - time.monotonic()
        if left < _LEAST:
            print(f"the time of this call is over before part {number}: call again", flush=True)
            break
        result = _run(number, parts[number - 1], arguments.out, left, rehearse=arguments.rehearse)
        print(f"part {number}, {result['name']}: {result['state']}, {result['seconds']} s", flush=True)
        _write(arguments.out, parts)
    states = {number: result["state"] for number, result in _results(arguments.out, parts).items()}
    return int(any(states.get(number) not in _DONE for number in wanted))


def _in_turn(results: dict[int, dict[str, Any]], count: int, *, again: bool, rehearse: bool) -> list[int]:
    """The parts to run: those without a result of this kind first, those that did not end well after them."""
    if again:
        return list(range(1, count + 1))
    ours = {number: result for number, result in results.items() if result["rehearsed"] == rehearse}
    fresh = [number for number in range(1, count + 1) if number not in ours]
    return fresh + [number for number, result in ours.items() if result["state"] not in _DONE]


def _run(number: int, part: Part, out: Path, left: float, *, rehearse: bool) -> dict[str, Any]:
    """Have it run in a session of its own, which is ended as a whole; what it left is its result."""
    limit = min(part.seconds, left - 5)
    began, clock = time.strftime("%Y-%m-%d %H:%M:%S %Z"), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as scratch:
        notes, log = Path(scratch, "notes.json"), Path(scratch, "log")
        command = [sys.executable, "-m", part.module, part.name, str(notes), *(["--rehearse"] if rehearse else [])]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TMPDIR": scratch}
        with log.open("wb") as output:  # not in the checkout: servers are to import what is installed
            process = subprocess.Popen(
                command, cwd=scratch, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        _end(process, scratch)
        found = json.loads(notes.read_text()) if notes.exists() else {"figures": {}, "missing": [], "failures": {}}
        tail = log.read_text(errors="replace")[-_TAIL:]
    if code is None:
        state = "timed out" if limit == part.seconds else "cut off"
    elif code or found["failures"]:
        state = "failed"
    else:
        state = "missing" if found["missing"] and not found["figures"] else "done"
    result = {
        "part": number,
        "name": part.name,
        "title": part.title,
        "state": state,
        "rehearsed": rehearse,
        "began": began,
        "seconds": round(time.monotonic() - clock, 1),
        "exit_code": code,
        **found,
        "log": "" if state in _DONE else tail,
    }
    _replace(out / f"part-{number}.json", json.dumps(result, indent=1))
    return result


def _end(process: subprocess.Popen[bytes], scratch: str) -> None:
    """Kill what is left of the part: its session, and processes in sessions of their own whose TMPDIR is its."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    mark = f"TMPDIR={scratch}\0".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark in (entry / "environ").read_bytes() + b"\0":
                os.kill(int(entry.name), signal.SIGKILL)


def _results(out: Path, parts: Sequence[Part]) -> dict[int, dict[str, Any]]:
    found = {}
    for number in range(1, len(parts) + 1):
        with contextlib.suppress(OSError, ValueError):  # not there, or cut short with the machine
            found[number] = json.loads((out / f"part-{number}.json").read_text())
    return found


def _write(out: Path, parts: Sequence[Part]) -> None:
    results = _results(out, parts)
    _replace(out / "report.json", json.dumps(list(results.values()), indent=1))
    _replace(out / "report.md", markdown(results, parts))


def _replace(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.replace(path)


def markdown(results: dict[int, dict[str, Any]], parts: Sequence[Part] = PARTS) -> str:
    """The report of the parts that have a result, by their numbers; of others it says that they never ran."""
    rows = ["# mme on a GPU", "", "| part | | state | seconds |", "|---|---|---|---|"]
    texts = []
    for number, part in enumerate(parts, 1):
        result = results.get(number)
        state = "has not run" if result is None else _state(result)
        rows.append(f"| {number} | {part.title} | {state} | {'' if result is None else result['seconds']} |")
        texts += ["", f"## {number}. {part.title}", "", *_section(result)]
    return "\n".join([*rows, *texts, ""])


def _state(result: dict[str, Any]) -> str:
    return f"{result['state']}{', rehearsed without a GPU' if result['rehearsed'] else ''}"


def _section(result: dict[str, Any] | None) -> list[str]:
    if result is None:
        return ["This part has not run."]
    lines = [f"{_WORDS[result['state']]}; {result['began']}, {result['seconds']} s"]
    if result["rehearsed"]:
        lines += ["", "**Rehearsed without a GPU: these figures are of stand-ins.**"]
    if result["missing"]:
        lines += ["", *[f"- missing: {each}" for each in result["missing"]]]
    if result["failures"]:
        lines += ["", *[f"- {name} failed: {_cell(said)}" for name, said in result["failures"].items()]]
    if result["figures"]:
        lines += ["", "| | |", "|---|---|", *[f"| {n} | {_cell(v)} |" for n, v in _flat("", result["figures"])]]
    if result["log"]:
        lines += ["", "```", result["log"].replace("```", "'''").rstrip(), "```"]
    return lines


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(name, value)]
    return [pair for key, each in value.items() for pair in _flat(f"{name}, {key}" if name else str(key), each)]


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
