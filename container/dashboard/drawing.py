"""Shapes and words of the page. PURE: numbers in, text out.

Charts are 300 wide, a unit a second, and 100 high; bars are percentages of their budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from container.dashboard.history import SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    History = Mapping[str, Sequence[Any]]

HEIGHT = 100
_HEAT_SECONDS = (5.0, 30.0, 120.0, 600.0)  # since the last use; after the last of them a model is cold
_NOTHING = "\N{EN DASH}"
_SPACE = "\N{NO-BREAK SPACE}"  # between a number and its unit
_STEPS = (1, 2, 3, 4, 5, 6, 8)  # of a chart's top, times a power of ten
_BAR_PIXELS = 1000  # how wide a bar is taken to be before a browser says
_LETTER_PIXELS = 7.4
_UNITS = ("B", "kB", "MB", "GB", "TB")


class Chart(NamedTuple):
    """One chart: what it is called, and the columns that are stacked in it, each with its name."""

    key: str
    title: str
    unit: str
    series: tuple[tuple[str, str], tuple[str, str]]


CHARTS = (
    Chart("requests", "Requests", "a second", (("succeeded", "answered"), ("failed", "failed"))),
    Chart("latency", "Latency", "ms, mean", (("compute_ms", "executing"), ("queue_ms", "in the queue"))),
    Chart("cache", "Model cache", "requests a second", (("hits", "hits"), ("misses", "misses"))),
    Chart("waiting", "Waiting requests", "", (("queued", "in a queue"), ("cold", "for their model"))),
)


def size(number: int) -> str:
    """Bytes for people: three digits that matter, powers of 1000."""
    value, unit = float(number), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}{_SPACE}{_UNITS[unit]}"


def span(seconds: float) -> str:
    """How long something takes."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}{_SPACE}ms"
    return f"{seconds:.1f}{_SPACE}s" if seconds < 9.95 else whole(seconds)


def ago(seconds: float | None) -> str:
    """How long ago something was; what is older is told less exactly."""
    if seconds is None:
        return "never"
    return "now" if seconds < 1 else f"{whole(int(seconds))} ago"


def whole(seconds: float) -> str:
    """How long something is, in the unit that a person would choose."""
    for unit, length, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < length * most:
            return f"{seconds / length:.0f}{_SPACE}{unit}"
    return f"{seconds / 86400:.0f}{_SPACE}d"


def heat(idle: float | None) -> int:
    """How recently a model was used: 0 is hot, 4 is cold, and goes first."""
    if idle is None:
        return len(_HEAT_SECONDS)
    return sum(idle > limit for limit in _HEAT_SECONDS)


def short(name: str) -> str:
    """A name as far as it tells models from each other."""
    return name.removesuffix(".tar.gz")


def label(name: str, share: float) -> str:
    """As much of a name as goes into a share (percent) of a bar."""
    letters = int((share / 100 * _BAR_PIXELS - 12) / _LETTER_PIXELS)
    text = short(name)
    if len(text) > letters:
        text = f"{text[: letters - 1]}\N{HORIZONTAL ELLIPSIS}" if letters > 3 else ""
    return text


def segments(memory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The pieces of a budget's bar, from left to right: models, the rest, executions, and what loads were promised."""
    whole = max(memory["budget"], memory["held"] + memory["uncharged"] + memory["reserved"])
    pieces = [{**bar, "kind": "model", "heat": heat(bar["idle"])} for bar in memory["bars"]]
    rest = memory["rest"]
    if rest["models"]:
        pieces.append({"kind": "rest", "name": f"{rest['models']} more", "bytes": rest["bytes"]})
    if memory["uncharged"]:
        pieces.append({"kind": "rest", "name": "executions", "bytes": memory["uncharged"]})
    if memory["reserved"]:
        pieces.append({"kind": "reserved", "name": "loading", "bytes": memory["reserved"]})
    at = 0
    for piece in pieces:
        piece |= {"x": _percent(at, whole), "width": _percent(piece["bytes"], whole)}
        at += piece["bytes"]
    return pieces


def ceiling(history: History, chart: Chart) -> float:
    """The top of a chart: a round number over its highest second."""
    first, second = (history[column] for column, _ in chart.series)
    highest = max(((a or 0) + (b or 0) for a, b in zip(first, second, strict=True)), default=0)
    powers = range(-2 if chart.key == "latency" else 0, 15)
    return next(top for power in powers for step in _STEPS if (top := float(f"{step}e{power}")) >= highest)


def area(history: History, columns: Sequence[str], top: float) -> str:
    """The outline of the sum of columns, a step a second, the last one at the right edge."""
    values = [sum(second or 0 for second in each) for each in zip(*(history[name] for name in columns), strict=True)]
    if not any(values):
        return ""
    start = SECONDS - len(values)
    steps = "".join(f"V{round(HEIGHT - HEIGHT * value / top, 1):g}h1" for value in values)
    return f"M{start} {HEIGHT}{steps}V{HEIGHT}z"


def marks(values: Sequence[int]) -> str:
    """A stroke at the upper edge for every second in which something happened."""
    start = SECONDS - len(values)
    return "".join(f"M{start + index}.5 0v7" for index, value in enumerate(values) if value)


def reading(history: History, chart: Chart) -> str:
    """A chart in words: how things are, or were in all where a single second says little."""
    if chart.key == "cache":
        hits, misses = sum(history["hits"]), sum(history["misses"])
        if not hits + misses:
            return "no requests"
        return f"{100 * hits / (hits + misses):.1f} % hits: {hits:,} hits, {misses:,} missed"
    if not history["queued"]:
        return "nothing yet"
    if chart.key == "latency":
        queue, compute = history["queue_ms"][-1], history["compute_ms"][-1]
        return "no requests" if compute is None else f"{queue + compute:.2f} ms, {queue:.2f} ms of it in the queue"
    (first, first_name), (second, second_name) = chart.series
    return f"{history[first][-1]:,} {first_name}, {history[second][-1]:,} {second_name}"


def told(event: Mapping[str, Any]) -> str:
    """What happened to a model, behind its name."""
    taken = " and ".join(
        f"{size(event[kind])}{where}" for kind, where in (("host", ""), ("device", " of device memory")) if event[kind]
    )
    if event["deed"] == "loaded":
        download = f", after {span(event['download_seconds'])} of download" if event["download_seconds"] else ""
        return f"loaded in {span(event['seconds'])}{download}: {taken}"
    if event["deed"] == "evicted":
        return f"evicted for {short(event['why'])}: {taken}"
    if event["deed"] == "unloaded":
        return f"{event['why']}: {taken}"
    again = f" ({event['times']:,} times)" if event["times"] > 1 else ""
    return f"failed to load{again}: {event['why']}"


def happening(event: Mapping[str, Any], now: float) -> dict[str, str]:
    """One line of what happened."""
    key = f"{event['since']} {event['deed']} {event['name']}"
    when = ago(max(now - event["at"], 0.0))
    return {"key": key, "deed": event["deed"], "name": event["name"], "when": when, "told": told(event)}


def under_way(load: Mapping[str, Any]) -> str:
    """How far a load is, behind its model's name."""
    waiting = f", {_counted(load['waiting'], 'request')} waiting" if load["waiting"] else ""
    return f"for {span(load['seconds'])}{waiting}"


def place(kind: str) -> str:
    """Where a kind of memory is: `host` is the host, `gpu1` is GPU 1."""
    return "the host" if kind == "host" else f"GPU {kind.removeprefix('gpu')}"


def held(memory: Mapping[str, Any]) -> str:
    """A budget in words."""
    parts = {
        "grown": "of it taken by executions",
        "reserved": "promised to loads",
        "in_flight": "of requests and responses on the way",
    }
    more = "".join(f", {size(memory[key])} {words}" for key, words in parts.items() if memory[key])
    return f"{size(memory['held'] + memory['uncharged'])} of {size(memory['budget'])} held by models{more}"


def on_disk(disk: Mapping[str, int]) -> str:
    """The budget of unpacked archives in words."""
    taken = f"{size(disk['used'])} of {size(disk['budget'])}, {size(disk['archives'])} of it by unpacked archives"
    return f"{taken}; {_counted(disk['evictions'], 'archive')} left for others"


def resident(counts: Mapping[str, int]) -> str:
    """How many models are in memory."""
    return f"{counts['resident']:,} of {_counted(counts['known'], 'model')}"


def failed(counts: Mapping[str, int]) -> str:
    """How many models can't serve."""
    return f"{counts['failed']:,} failed" if counts["failed"] else ""


def matching(counts: Mapping[str, int], wanted: str) -> str:
    """How many models there are, or how many of them the filter lets through."""
    return f"{counts['matching']:,} of {counts['known']:,}" if wanted else f"{counts['known']:,}"


def rest(others: Mapping[str, int]) -> str:
    """The models without a row."""
    if not others["models"]:
        return ""
    taken = others["host"] + others["device"]
    return f"and {_counted(others['models'], 'model')} more{f', {size(taken)} in all' if taken else ''}"


def rows(models: Sequence[Mapping[str, Any]], memory: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Models with what their rows say; the largest has the longest bar, of the kind of memory that it takes more of."""
    budgets = {each["kind"]: each["budget"] for each in memory}
    shares = [
        max((model["held"].get(kind, 0) / budget for kind, budget in budgets.items()), default=0) for model in models
    ]
    largest = max(shares, default=0) or 1
    return [_row(model, _percent(share, largest)) for model, share in zip(models, shares, strict=True)]


def _row(model: Mapping[str, Any], share: str) -> dict[str, Any]:
    parts = [size(taken) + ("" if kind == "host" else f" on {place(kind)}") for kind, taken in model["held"].items()]
    return {**model, "share": share, "memory": " + ".join(parts) or _NOTHING, "note": _note(model)}


def _note(model: Mapping[str, Any]) -> str:
    """Below the name: why a model is not in memory, or what is not usual about one that is."""
    versions = model["versions"]
    if not versions:
        return str(model["reason"])
    unusual = ["pinned"] if model["pinned"] else []
    if versions != [1]:
        unusual.append(f"version{'' if len(versions) == 1 else 's'} {', '.join(map(str, versions))}")
    if model["reason"]:
        unusual.append(str(model["reason"]))
    return ", ".join(unusual)


def cells(window: Mapping[str, Any]) -> list[str]:
    """A line of the table of the last minutes."""
    latency = _NOTHING if window["latency_ms"] is None else f"{window['latency_ms']:.2f}"
    counts = [f"{window[key]:,}" for key in ("hits", "misses", "waiting", "evictions")]
    return [
        f"{window['from']}\N{EN DASH}{window['to']}",
        f"{window['requests']:,}",
        f"{window['failed']:,}",
        latency,
        *counts,
    ]


def _percent(part: float, whole: float) -> str:
    return f"{round(100 * part / whole, 3):g}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
