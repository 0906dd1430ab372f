"""The page in a real browser, at a real server that loads, evicts and answers meanwhile."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from container.steps.access import digest_of

EVIL = "<img src=x onerror=\"document.title='owned'\">"

pytestmark = pytest.mark.slow

ASKED = """return performance.getEntriesByType("resource").filter((each) => each.initiatorType === "fetch").length"""

# Everything in the page but what depends on its width: tags, attributes that say something, and own text.
DRAWN = """
return [...document.querySelectorAll("main *")].filter((each) => each.tagName !== "text").map((each) => [
  each.tagName.toLowerCase(),
  [...each.attributes].filter(({name}) => name !== "data-fresh").map(({name, value}) => [name, value.replace(/\\s+/g, " ").trim()]).sort(),
  [...each.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data.trim()).filter(Boolean),
]);
"""


def test_bars_are_as_wide_as_their_bytes(served, page):
    """Each model's piece of the budget has its share of the bar, and the rest of the bar is free."""
    running = served({"big": 100, "middle": 50, "small": 25}, "big", "middle", "small", device_budget=10**9)
    page.open(running)

    widths = page.widths('[data-kind="host"] .segment')
    whole = page.run("return document.querySelector('[data-kind=host] .bar').getBoundingClientRect().width")
    for name, megabytes in (("big", 100), ("middle", 50), ("small", 25)):
        assert widths[name] / whole == pytest.approx(megabytes / 200, abs=0.002)
    assert page.text('[data-kind="host"] figcaption') == "On the host 175 MB of 200 MB held by models"
    assert page.widths('[data-kind="gpu0"] .segment') == {}
    shares = page.run(
        "return [...document.querySelectorAll('#rows .held')].map((each) => each.getBoundingClientRect().width)"
    )
    assert [share / shares[0] for share in shares] == pytest.approx([1, 0.5, 0.25], abs=0.02)


def test_a_load_and_an_eviction_appear_while_the_page_is_open(served, page, ask, until):
    """The load with its time while it lasts; then the new bar, who went for it, and how much that freed."""
    running = served({"old": 120, "kept": 30, "new": 90}, "old", "kept")
    ask(running, "kept")
    page.open(running)
    assert set(page.widths(".segment")) == {"old", "kept"}

    with ThreadPoolExecutor(1) as pool, running.loads_held_up():
        pool.submit(ask, running, "new")
        until(lambda: page.text("#loading li").startswith("new for "), "the load")
        assert "1 request waiting" in page.text("#loading li")
        assert page.rows()["new"]["state"] == "loading"
        before = page.text("#loading li")
        until(lambda: page.text("#loading li") != before, "its time to go on")

    until(lambda: set(page.widths(".segment")) == {"new", "kept"}, "the new bar")
    until(lambda: page.texts("#loading li") == [], "the end of the load")
    happened = page.texts("#events li > span + span")
    assert happened[1] == "old evicted for new: 120 MB"
    assert happened[0].startswith("new loaded in ")
    assert happened[0].endswith(": 90.0 MB")
    assert (page.rows()["old"]["state"], page.rows()["old"]["note"]) == ("unavailable", "evicted for 'new'")
    assert page.count("#events [data-fresh]") == 2
    until(
        lambda: page.run("return document.querySelector('[data-field=evictions]').getAttribute('d')"),
        "the mark of the eviction",
    )


def test_hits_and_misses_move(served, page, ask, until):
    """In the model's row, in the chart's words and in its shape."""
    running = served({"a": 10, "b": 10}, "a")
    watcher = running.service.watcher
    running.on_loop.call(watcher.close)  # a second is over when we say so
    running.on_loop.run(watcher.sample())
    page.open(running)
    assert page.text('[data-chart="cache"] output') == "no requests"
    assert page.rows()["a"]["hits"] == "0"

    for _ in range(3):
        ask(running, "a")
    ask(running, "b")
    running.on_loop.run(watcher.sample())

    until(lambda: page.text('[data-chart="cache"] output') == "75.0 % hits: 3 hits, 1 missed", "the counts")
    rows = page.rows()
    assert [(rows[name]["hits"], rows[name]["misses"]) for name in "ab"] == [("3", "0"), ("0", "1")]
    assert page.run("return document.querySelector('[data-chart=cache] .first').getBBox().height") > 0
    assert page.run("return document.querySelector('[data-chart=requests] .first').getBBox().height") > 0


def test_a_name_full_of_markup_is_a_name(served, page):
    """It is shown letter by letter, in the bar, the table and the events, and does nothing."""
    running = served({EVIL: 10, "<script>alert(1)</script>".replace("/", "\\"): 20}, EVIL)
    page.open(running, "/dashboard?filter=%22%3E%3Cimg%20src=x%20onerror=alert(1)%3E")
    assert page.driver.find_element("id", "filter").get_attribute("value") == '"><img src=x onerror=alert(1)>'
    page.open(running)

    assert EVIL in page.rows()
    assert page.widths(".segment").keys() == {EVIL}
    assert any(text.startswith(EVIL) for text in page.texts("#events li b"))
    assert page.driver.title == "mme"
    assert page.count("img") == 0
    assert page.count("script") == 1


def test_an_open_page_becomes_what_a_new_one_is(served, page, ask, until, tmp_path):
    """Whatever came, left, changed or moved meanwhile: it ends as the page that is opened only then."""
    running = served({"big": 100, "small": 30, "next": 90}, "big", "small", device_budget=10**9, pins=("small",))
    page.open(running)
    assert set(page.widths(".segment")) == {"big", "small"}
    (tmp_path / "repository" / "bad" / "1").mkdir(parents=True)
    (tmp_path / "repository" / "bad" / "1" / "model.onnx").write_bytes(b"no model")
    watcher = running.service.watcher
    for name in ("small", "next", "next", "bad", "bad"):
        ask(running, name)
        running.on_loop.run(watcher.sample())
    running.on_loop.call(watcher.close)  # from now on the data stay as they are
    asked = page.run(ASKED)
    until(lambda: page.run(ASKED) >= asked + 2, "a page that was asked for after that")
    became = page.run(DRAWN)

    page.open(running)
    written = page.run(DRAWN)

    assert became == written
    assert page.rows()["small"]["note"] == "pinned"
    assert len(written) > 150


def test_the_filter_finds_models_while_one_types(served, page, until):
    """Letter case does not count, and what is not found is counted."""
    running = served(
        {f"tenant-{number}": 10 for number in range(6)} | {"iris": 5}, *(f"tenant-{n}" for n in range(6)), "iris"
    )
    page.open(running)
    field = page.driver.find_element("id", "filter")

    field.send_keys("IRI")
    until(lambda: set(page.rows()) == {"iris"}, "the filter to apply")
    assert page.text("#matching") == "1 of 7"
    assert len(page.widths(".segment")) == 7
    field.clear()
    field.send_keys("tenant-4")
    until(lambda: set(page.rows()) == {"tenant-4"}, "the filter to change")


def test_a_server_that_does_not_answer_is_said_and_waited_for(served, page, ask, until):
    """What was there stays to be seen; once it answers again, the page goes on."""
    running = served({"a": 10}, "a")
    page.open(running)
    conditions = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {"offline": True, **conditions})
    until(lambda: page.text("#live") == "the server does not answer; trying again", "the page to notice")
    assert set(page.widths(".segment")) == {"a"}
    ask(running, "a")

    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {"offline": False, **conditions})
    until(lambda: page.text("#live") == "live", "the page to go on")
    until(lambda: page.rows()["a"]["hits"] == "1", "what happened meanwhile")
    assert all("ERR_INTERNET_DISCONNECTED" in complaint for complaint in page.complaints())


def test_the_pointer_reads_one_second_of_every_chart(served, page, ask, until):
    """Where it points, all charts tell of that second; when it leaves, of now."""
    running = served({"a": 10}, "a")
    watcher = running.service.watcher
    running.on_loop.call(watcher.close)
    for times in (0, 2, 0, 0):
        for _ in range(times):
            ask(running, "a")
        running.on_loop.run(watcher.sample())
    page.open(running)

    plot = page.driver.find_element("css selector", '[data-chart="requests"] .plot svg')
    box = plot.rect
    event = """arguments[0].dispatchEvent(new PointerEvent(arguments[1], {bubbles: true, clientX: arguments[2]}))"""
    page.run(event, plot, "pointermove", box["x"] + box["width"] * (1 - 2.5 / 300))
    told = "3 s ago: 2 answered, 0 failed"
    until(lambda: page.text('[data-chart="requests"] output') == told, "the numbers of that second")
    assert page.text('[data-chart="cache"] output') == "3 s ago: 100.0 % hits: 2 hits, 0 missed"
    page.run(event, plot, "pointerleave", 0)
    assert page.text('[data-chart="requests"] output') == "0 answered, 0 failed"


@pytest.mark.parametrize("width", [340, 700, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_width_and_both_schemes(served, page, ask, width, scheme):
    """Nothing sticks out at the side, text stands off from what is behind it, pictures and fields have names."""
    long = "tenant-with-a-very-long-name-that-nobody-could-remember-" + "x" * 60
    running = served({"big": 100, long: 30}, "big", long)
    ask(running, "big")
    page.open(running, scheme=scheme, width=width)

    assert page.run("return document.scrollingElement.scrollWidth") <= width
    colours = page.run("""return ["color", "backgroundColor"].map((name) =>
        getComputedStyle(document.body)[name].match(/[0-9.]+/g).slice(0, 3).map(Number))""")
    text, behind = map(_luminance, colours)
    assert (behind > 0.5) == (scheme == "light")
    assert (max(text, behind) + 0.05) / (min(text, behind) + 0.05) > 7
    assert page.count('svg[role="img"]:not([aria-label])') == 0
    assert page.count("svg:not([role=img]):not([aria-hidden]):not(.segment)") == 0
    assert page.run("return document.getElementById('filter').labels.length") == 1
    assert page.run("return getComputedStyle(document.querySelector('#rows th')).overflowWrap") == "anywhere"


def _luminance(rgb):
    """Of a colour, as the Web Content Accessibility Guidelines count it."""
    channels = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), channels, strict=True))


def test_the_disk_is_told_of_where_archives_are_unpacked(served_from_store, page, ask, until):
    """In an open page too; elsewhere there is no word of it."""
    running = served_from_store("a", "b")
    page.open(running)
    empty = page.text("#disk")
    assert empty.endswith("0 archives left for others")
    assert ask(running, "a").status == 200
    told = until(lambda: (words := page.text("#disk")) != empty and words, "the archive on disk")
    page.open(running)
    assert page.text("#disk") == told


def test_lists_without_anything_in_them_say_so(served_from_store, page, ask, until):
    """As long as there is nothing to list."""
    running = served_from_store("a")
    page.open(running)
    empty = """return ["#rows", "#events ol"].map((each) =>
        getComputedStyle(document.querySelector(each), "::after").content)"""
    assert page.run(empty) == ['"none"', '"nothing yet"']
    assert ask(running, "a").status == 200
    until(lambda: page.run(empty) == ["none", "none"], "the lists")


def test_a_key_opens_the_page(served, page, until, tmp_path):
    """One that the server knows, for as long as it does; a tab that has it asks no more, and another one does."""
    keys = tmp_path / "keys"
    keys.write_text(f"sha256:{digest_of('good')} statistics\nsha256:{digest_of('other')} inference\n")
    running = served({"small": 25}, "small", key_file=keys)
    page.driver.get(f"http://127.0.0.1:{running.port}/dashboard")
    shown = "#key:not([hidden])"
    until(lambda: page.text(shown) == "The server wants a key for statistics. Key Show", "the form")

    def enter(key):
        field = page.driver.find_element("css selector", "#key input")
        field.clear()
        field.send_keys(f"{key}\n")

    enter("bad")
    until(lambda: page.text("#why") == "The server does not know this key.", "what is wrong")
    enter("other")
    until(lambda: page.text("#why") == "This key may not see statistics.", "what is wrong")
    enter("good")
    until(lambda: page.text("#live") == "live", "the first data")
    assert set(page.rows()) == {"small"}
    assert page.run("return document.cookie + location.href") == f"http://127.0.0.1:{running.port}/dashboard"
    page.driver.refresh()
    until(lambda: page.text("#live") == "live", "the data again")

    keys.write_text("")
    assert running.service.keys.look()
    until(lambda: page.count(shown), "the form")
    assert page.run("return sessionStorage.length") == 0
    assert all("the server responded with a status of 40" in message for message in page.complaints())
