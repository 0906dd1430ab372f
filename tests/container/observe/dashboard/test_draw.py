"""Shapes and words of the page, as static/draw.js makes them in a browser: numbers in, text out."""

from pathlib import Path

import pytest

from container.observe import dashboard
from container.observe.dashboard import COLUMNS
from tests.http_server import Handler, answering

STATIC = Path(dashboard.__file__).parent / "static"
DASH = "\N{EN DASH}"
REQUESTS = {"key": "requests", "series": [["succeeded", "answered"], ["failed", "failed"]]}
LATENCY = {"key": "latency", "series": [["compute_ms", "executing"], ["queue_ms", "in the queue"]]}
CACHE = {"key": "cache", "series": [["hits", "hits"], ["misses", "misses"]]}
WAITING = {"key": "waiting", "series": [["queued", "in a queue"], ["cold", "for their model"]]}

pytestmark = pytest.mark.slow


class Script(Handler):
    """Gives the script, as the page's server does."""

    def do_GET(self):
        """The script, whatever is asked."""
        self.answer(200, (STATIC / "draw.js").read_bytes(), Content_Type="text/javascript")


@pytest.fixture(scope="module")
def draw(driver):
    """A function that calls one of the script's with each of several lists of arguments; spaces are plain ones."""
    with answering(Script) as server:
        driver.get(server.url)

        def call(name, *calls):
            script = """const [name, calls, done] = arguments;
                import("/draw.js").then((draw) => done(calls.map((call) => draw[name](...call))), (error) => done(`${error}`));"""
            made = driver.execute_async_script(script, name, list(calls))
            return [each.replace("\N{NO-BREAK SPACE}", " ") if isinstance(each, str) else each for each in made]

        yield call
        driver.get("about:blank")


def history(**columns):
    """The columns of a history; those that are not named are zeros."""
    (length,) = {len(values) for values in columns.values()}
    return {name: columns.get(name, [0] * length) for name in COLUMNS}


def memory(*sizes, budget=1000, rest=(0, 0), reserved=0, grown=0, uncharged=0, in_flight=0):
    """A budget with models of those sizes."""
    bars = [
        {"name": f"m{number}.tar.gz", "state": "READY", "idle": 0.0, "bytes": size} for number, size in enumerate(sizes)
    ]
    return {"kind": "host", "budget": budget, "held": sum(sizes) + rest[1], "reserved": reserved, "bars": bars,
            "rest": {"models": rest[0], "bytes": rest[1]}, "grown": grown + uncharged, "uncharged": uncharged,
            "in_flight": in_flight}  # fmt: skip


NO_EVENT = {"why": "", "host": 0, "device": 0, "seconds": 0, "download_seconds": 0, "times": 1}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("size", {0: "0 B", 999: "999 B", 1000: "1.00 kB", 9_994: "9.99 kB", 9_996: "10.0 kB", 99_960: "100 kB",
                  999_499: "999 kB", 999_500: "1.00 MB", 45_120_000: "45.1 MB", 3_210_000_000: "3.21 GB",
                  7 * 10**15: "7000 TB"}),
        ("span", {0.0004: "0 ms", 0.82: "820 ms", 0.9996: "1.0 s", 9.94: "9.9 s", 9.96: "10 s", 119.4: "119 s",
                  120: "2 min", 7199: "120 min", 7200: "2 h", 200_000: "2 d"}),
        ("ago", {None: "never", 0.9: "now", 5: "5 s ago", 31: "31 s ago", 121: "2 min ago", 601: "10 min ago"}),
        ("heat", {None: 4, 0.9: 0, 5: 0, 5.1: 1, 31: 2, 121: 3, 601: 4}),
        ("place", {"host": "the host", "gpu1": "GPU 1"}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_numbers_for_people(draw, name, expected):
    """Bytes in three digits that matter; times in the unit that a person would choose; the longer ago, the colder."""
    assert draw(name, *[[given] for given in expected]) == list(expected.values())


def test_pieces_of_a_bar_are_as_wide_as_their_bytes(draw):
    """From left to right without gaps: models, the rest of them, executions, what loads were promised; the rest is free."""
    small, large = draw("segments", [memory(300, 200, rest=(7, 100), uncharged=100, reserved=50)], [memory(900, 350)])

    assert [(piece["kind"], piece["name"], piece["x"], piece["width"]) for piece in small] == [
        ("model", "m0.tar.gz", 0, 30),
        ("model", "m1.tar.gz", 30, 20),
        ("rest", "7 more", 50, 10),
        ("rest", "executions", 60, 10),
        ("reserved", "loading", 70, 5),
    ]
    assert large[-1]["x"] + large[-1]["width"] == pytest.approx(100), "more than the budget still fits into the bar"


def test_budgets_in_words(draw):
    """What was loaded, has grown and is on the way; nothing is said of what there is none of."""
    full, plain = draw("held", [memory(300, grown=20, uncharged=100, reserved=50, in_flight=7)], [memory(300)])
    parts = ["120 B of it taken by executions", "50 B promised to loads", "7 B of requests and responses on the way"]
    assert full == ", ".join(["400 B of 1.00 kB held by models", *parts])
    assert plain == "300 B of 1.00 kB held by models"
    disks = [{"budget": 10**7, "used": 1_500_000, "archives": 10**6, "evictions": count} for count in (0, 1, 1200)]
    taken = "1.50 MB of 10.0 MB, 1.00 MB of it by unpacked archives; "
    left = ("0 archives", "1 archive", "1,200 archives")
    assert draw("onDisk", *[[disk] for disk in disks]) == [f"{taken}{count} left for others" for count in left]
    assert draw("rest", [{"models": 0}], [{"models": 2, "host": 3, "device": 4}]) == [
        "",
        "and 2 models more, 7 B in all",
    ]


def test_a_label_is_as_long_as_its_piece(draw):
    """The ending that all archives have is left away, then letters, and one or two say nothing."""
    pixels = {1000: "tenant-a/model", 120: "tenant-a/model", 80: "tenant-a…", 42: "ten…", 40: "", 0: ""}
    assert draw("label", *[["tenant-a/model.tar.gz", width] for width in pixels]) == list(pixels.values())


def test_the_top_of_a_chart_is_a_round_number_over_everything(draw):
    """Over the sum of both, since they are stacked; latencies may be far below a millisecond."""
    cases = [(REQUESTS, [0], [0], 1), (REQUESTS, [7, 1], [2, 0], 10), (REQUESTS, [100], [1], 200),
             (REQUESTS, [601], [0], 800), (LATENCY, [0.11, None], [0.02, None], 0.2), (LATENCY, [None], [None], 0.01),
             (REQUESTS, [], [], 1)]  # fmt: skip
    calls = [
        [history(**dict(zip([column for column, _ in chart["series"]], values, strict=True))), chart]
        for chart, *values, _ in cases
    ]
    assert draw("ceiling", *calls) == pytest.approx([top for *_, top in cases])


def test_an_area_is_a_step_a_second_up_to_now(draw):
    """The newest second ends at the right edge; a second without a value lies on the ground."""
    columns = history(hits=[5, None, 10], misses=[0, None, 5])
    assert draw("area", [columns, ["hits"], 20], [columns, ["hits", "misses"], 20], [history(hits=[0, 0]), ["hits"], 20]) == [
        "M297 100V75h1V100h1V50h1V100z",
        "M297 100V75h1V100h1V25h1V100z",
        "",
    ]  # fmt: skip
    assert draw("marks", [[0, 3, 0]]) == ["M298.5 0v7"]


def test_a_chart_is_told_in_words(draw):
    """How things are in the last second, or were in one that is pointed at; of the cache, what it did in all of them."""
    cases = [
        (REQUESTS, {"succeeded": [1, 1200], "failed": [0, 3]}, "1,200 answered, 3 failed"),
        (LATENCY, {"queue_ms": [0.5], "compute_ms": [1.25]}, "1.75 ms, 0.50 ms of it in the queue"),
        (LATENCY, {"queue_ms": [None], "compute_ms": [None]}, "no requests"),
        (CACHE, {"hits": [900, 99], "misses": [0, 1]}, "99.9 % hits: 999 hits, 1 missed"),
        (CACHE, {"hits": [0], "misses": [0]}, "no requests"),
        (WAITING, {"queued": [3], "cold": [2]}, "3 in a queue, 2 for their model"),
        (WAITING, {"queued": [], "cold": []}, "nothing yet"),
    ]
    assert draw("reading", *[[history(**columns), chart] for chart, columns, _ in cases]) == [
        text for *_, text in cases
    ]
    assert draw("reading", [history(hits=[3, 5], misses=[1, 0]), CACHE, 0]) == ["75.0 % hits: 3 hits, 1 missed"]


def test_an_event_is_told_in_words(draw):
    """What happened, why, and the bytes."""
    cases = [
        ({"deed": "loaded", "seconds": 0.5, "host": 2_000_000}, "loaded in 500 ms: 2.00 MB"),
        ({"deed": "loaded", "seconds": 2, "download_seconds": 30, "host": 1, "device": 5},
         "loaded in 2.0 s, after 30 s of download: 1 B and 5 B of device memory"),
        ({"deed": "evicted", "why": "b.tar.gz", "device": 5}, "evicted for b: 5 B of device memory"),
        ({"deed": "unloaded", "why": "loaded anew", "host": 5}, "loaded anew: 5 B"),
        ({"deed": "failed", "why": "no model"}, "failed to load: no model"),
        ({"deed": "failed", "why": "no model", "times": 1200}, "failed to load (1,200 times): no model"),
    ]  # fmt: skip
    assert draw("happened", *[[{**NO_EVENT, **event}] for event, _ in cases]) == [text for _, text in cases]


def test_rows_have_bars_of_the_memory_that_is_scarcer(draw):
    """The largest share of either budget is the longest bar; versions are named unless it is just the first."""
    budgets = [{"kind": "host", "budget": 1000}, {"kind": "gpu1", "budget": 100}]
    blank = {"held": {}, "versions": [1], "reason": "", "pinned": False}
    models = [
        {**blank, "held": {"host": 100, "gpu1": 40}, "versions": [1, 3]},
        {**blank, "held": {"host": 100}},
        {**blank, "versions": [], "reason": "evicted for 'x'"},
        {**blank, "versions": [2], "pinned": True},
    ]
    rows, none = draw("rows", [models, budgets], [[], budgets])
    assert [row["share"] for row in rows] == [100, 25, 0, 0]
    assert [row["note"] for row in rows] == ["versions 1, 3", "", "evicted for 'x'", "pinned, version 2"]
    shown = [row["memory"].replace("\N{NO-BREAK SPACE}", " ") for row in rows]
    assert set(shown[0].split(" + ")) == {"100 B", "40 B on GPU 1"}, "the browser's driver sorts the keys of arguments"
    assert shown[1:] == ["100 B", DASH, DASH]
    assert none == []


def test_the_table_sums_what_the_seconds_say(draw):
    """Newest first, counts add up over all of them, latency is the mean over requests and not over seconds."""
    busy = [1] * 39 + [9]  # the last second has nine requests of 10 ms, the others one of 1 ms
    columns = history(
        hits=busy, succeeded=busy, failed=[1] * 40, queue_ms=[0.5] * 39 + [4], compute_ms=[0.5] * 39 + [6],
        queued=list(range(40)), cold=[1] * 40, evictions=[1] + [0] * 39,
    )  # fmt: skip
    newest, oldest = draw("windows", [columns])[0]
    assert newest == [f"30{DASH}0", "68", "30", "3.13", "38", "0", "40", "0"]
    assert oldest == [f"40{DASH}30", "20", "10", "1.00", "10", "0", "10", "1"]
    assert draw("windows", [history(hits=[])]) == [[]]
