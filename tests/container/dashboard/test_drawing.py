"""Shapes and words of the page as the server writes it: numbers in, text out."""

import pytest

from container.dashboard import drawing
from container.dashboard.history import Sample

SPACE = "\N{NO-BREAK SPACE}"
REQUESTS, LATENCY, CACHE, WAITING = drawing.CHARTS


def history(**columns):
    """The columns of a history; those that are not named are zeros."""
    (length,) = {len(values) for values in columns.values()}
    return {name: columns.get(name, [0] * length) for name in Sample.__annotations__}


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_994, "9.99 kB"), (9_996, "10.0 kB"), (99_960, "100 kB"),
     (999_499, "999 kB"), (999_500, "1.00 MB"), (45_120_000, "45.1 MB"), (3_210_000_000, "3.21 GB"), (7 * 10**16, "70000 TB")],
)  # fmt: skip
def test_bytes_have_three_digits_that_matter(number, text):
    """In powers of 1000, as the settings take them."""
    assert drawing.size(number) == text.replace(" ", SPACE)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0004, "0 ms"), (0.82, "820 ms"), (0.9996, "1.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (119.4, "119 s"),
     (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (200_000, "2 d")],
)  # fmt: skip
def test_a_time_has_the_unit_a_person_would_choose(seconds, text):
    """Milliseconds below a second, then less and less exactly."""
    assert drawing.span(seconds) == text.replace(" ", SPACE)


@pytest.mark.parametrize(
    ("seconds", "text", "heat"),
    [(None, "never", 4), (0.9, "now", 0), (5, "5 s ago", 0), (5.1, "5 s ago", 1), (31, "31 s ago", 2),
     (121, "2 min ago", 3), (601, "10 min ago", 4)],
)  # fmt: skip
def test_a_last_use_is_told_and_coloured(seconds, text, heat):
    """The longer ago, the colder; a model that was never used is as cold as can be."""
    assert drawing.ago(seconds) == text.replace(" ", SPACE, 1).replace(f"{SPACE}ago", " ago")
    assert drawing.heat(seconds) == heat


def memory(*sizes, budget=1000, rest=(0, 0), reserved=0, grown=0, uncharged=0, in_flight=0):
    """A budget with models of those sizes."""
    bars = [
        {"name": f"m{number}.tar.gz", "state": "READY", "idle": 0.0, "bytes": size} for number, size in enumerate(sizes)
    ]
    return {"kind": "host", "budget": budget, "held": sum(sizes) + rest[1], "reserved": reserved, "bars": bars,
            "rest": {"models": rest[0], "bytes": rest[1]}, "grown": grown + uncharged, "uncharged": uncharged,
            "in_flight": in_flight}  # fmt: skip


def test_executions_have_a_piece_where_no_model_is_charged_for_them():
    """Between the models and what loads were promised."""
    pieces = drawing.segments(memory(300, uncharged=100, reserved=50))
    assert [(piece["name"], piece["x"], piece["width"]) for piece in pieces] == [
        ("m0.tar.gz", "0", "30"),
        ("executions", "30", "10"),
        ("loading", "40", "5"),
    ]


def test_a_budget_in_words_tells_apart_what_was_loaded_has_grown_and_is_on_the_way():
    """Nothing is said of what there is none of."""
    words = drawing.held(memory(300, grown=20, uncharged=100, reserved=50, in_flight=7)).replace(SPACE, " ")
    assert words == (
        "400 B of 1.00 kB held by models, 120 B of it taken by executions, 50 B promised to loads, "
        "7 B of requests and responses on the way"
    )
    assert drawing.held(memory(300)).replace(SPACE, " ") == "300 B of 1.00 kB held by models"


def test_pieces_of_a_bar_are_as_wide_as_their_bytes():
    """From left to right without gaps: models, the rest of them, what loads were promised; the free part is left over."""
    pieces = drawing.segments(memory(300, 200, rest=(7, 100), reserved=50))

    assert [(piece["kind"], piece["name"], piece["x"], piece["width"]) for piece in pieces] == [
        ("model", "m0.tar.gz", "0", "30"),
        ("model", "m1.tar.gz", "30", "20"),
        ("rest", "7 more", "50", "10"),
        ("reserved", "loading", "60", "5"),
    ]


def test_more_than_the_budget_still_fits_into_the_bar():
    """A model that turned out larger than its estimate takes what it takes; nothing is drawn outside."""
    pieces = drawing.segments(memory(900, 350))
    assert float(pieces[-1]["x"]) + float(pieces[-1]["width"]) == pytest.approx(100)


@pytest.mark.parametrize(
    ("share", "text"),
    [(100, "tenant-a/model"), (12, "tenant-a/model"), (8, "tenant-a…"), (4.2, "ten…"), (4.0, ""), (0, "")],
)
def test_a_label_is_as_long_as_its_piece(share, text):
    """The ending that all archives have is left away, then letters, and one or two say nothing."""
    assert drawing.label("tenant-a/model.tar.gz", share) == text


@pytest.mark.parametrize(
    ("chart", "first", "second", "top"),
    [(REQUESTS, [0], [0], 1), (REQUESTS, [7, 1], [2, 0], 10), (REQUESTS, [100], [1], 200), (REQUESTS, [601], [0], 800),
     (LATENCY, [0.11, None], [0.02, None], 0.2), (LATENCY, [None], [None], 0.01)],
)  # fmt: skip
def test_the_top_of_a_chart_is_a_round_number_over_everything(chart, first, second, top):
    """Over the sum of both, since they are stacked; latencies may be far below a millisecond."""
    columns = dict(zip([column for column, _ in chart.series], (first, second), strict=True))
    assert drawing.ceiling(history(**columns), chart) == pytest.approx(top)


def test_an_area_is_a_step_a_second_up_to_now():
    """The newest second ends at the right edge; a second without a value lies on the ground."""
    columns = history(hits=[5, None, 10], misses=[0, None, 5])
    assert drawing.area(columns, ["hits"], 20) == "M297 100V75h1V100h1V50h1V100z"
    assert drawing.area(columns, ["hits", "misses"], 20) == "M297 100V75h1V100h1V25h1V100z"
    assert drawing.area(history(hits=[0, 0]), ["hits"], 20) == ""
    assert drawing.marks([0, 3, 0]) == "M298.5 0v7"


@pytest.mark.parametrize(
    ("chart", "columns", "text"),
    [
        (REQUESTS, {"succeeded": [1, 1200], "failed": [0, 3]}, "1,200 answered, 3 failed"),
        (LATENCY, {"queue_ms": [0.5], "compute_ms": [1.25]}, "1.75 ms, 0.50 ms of it in the queue"),
        (LATENCY, {"queue_ms": [None], "compute_ms": [None]}, "no requests"),
        (CACHE, {"hits": [900, 99], "misses": [0, 1]}, "99.9 % hits: 999 hits, 1 missed"),
        (CACHE, {"hits": [0], "misses": [0]}, "no requests"),
        (WAITING, {"queued": [3], "cold": [2]}, "3 in a queue, 2 for their model"),
        (WAITING, {"queued": [], "cold": []}, "nothing yet"),
    ],
)
def test_a_chart_is_told_in_words(chart, columns, text):
    """How things are in the last second; of the cache, what it did in all of them."""
    assert drawing.reading(history(**columns), chart) == text


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"deed": "loaded", "seconds": 0.5, "host": 2_000_000}, "loaded in 500 ms: 2.00 MB"),
        ({"deed": "loaded", "seconds": 2, "download_seconds": 30, "host": 1, "device": 5},
         "loaded in 2.0 s, after 30 s of download: 1 B and 5 B of device memory"),
        ({"deed": "evicted", "why": "b.tar.gz", "device": 5}, "evicted for b: 5 B of device memory"),
        ({"deed": "unloaded", "why": "loaded anew", "host": 5}, "loaded anew: 5 B"),
        ({"deed": "failed", "why": "no model"}, "failed to load: no model"),
        ({"deed": "failed", "why": "no model", "times": 1200}, "failed to load (1,200 times): no model"),
    ],
)  # fmt: skip
def test_an_event_is_told_in_words(event, text):
    """What happened, why, and the bytes."""
    blank = {"why": "", "host": 0, "device": 0, "seconds": 0, "download_seconds": 0, "times": 1}
    assert drawing.told({**blank, **event}).replace(SPACE, " ") == text


def test_rows_have_bars_of_the_memory_that_is_scarcer():
    """The largest share of either budget is the longest bar; versions are named unless it is just the first."""
    budgets = [{"kind": "host", "budget": 1000}, {"kind": "gpu1", "budget": 100}]
    blank = {"held": {}, "versions": [1], "reason": "", "pinned": False}
    rows = drawing.rows(
        [
            {**blank, "held": {"host": 100, "gpu1": 40}, "versions": [1, 3]},
            {**blank, "held": {"host": 100}},
            {**blank, "versions": [], "reason": "evicted for 'x'"},
            {**blank, "versions": [2], "pinned": True},
        ],
        budgets,
    )
    assert [row["share"] for row in rows] == ["100", "25", "0", "0"]
    assert [row["note"] for row in rows] == ["versions 1, 3", "", "evicted for 'x'", "pinned, version 2"]
    assert [row["memory"].replace(SPACE, " ") for row in rows] == [
        "100 B + 40 B on GPU 1",
        "100 B",
        *["\N{EN DASH}"] * 2,
    ]
    assert drawing.rows([], budgets) == []


@pytest.mark.parametrize(
    ("evictions", "left"),
    [(0, "0 archives left for others"), (1, "1 archive left for others"), (1200, "1,200 archives")],
)
def test_the_disk_in_words(evictions, left):
    """What is taken, by what, and who left."""
    words = drawing.on_disk({"budget": 10_000_000, "used": 1_500_000, "archives": 1_000_000, "evictions": evictions})
    assert words.replace(SPACE, " ").startswith("1.50 MB of 10.0 MB, 1.00 MB of it by unpacked archives; " + left)
