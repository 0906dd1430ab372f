"""A server whose models have exact sizes, and a real browser that looks at it."""

from __future__ import annotations

import os
import shutil
import tempfile
from urllib.parse import quote

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from container.settings import Mode
from model_handlers.base import Footprint
from serve.sources.archive import pack
from tests.waiting import eventually

MB = 1_000_000
_SWITCHES = (
    "--headless",
    "--no-sandbox",  # Chromium's needs rights that a container does not have
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(name="until", scope="session")
def _until():
    return eventually


@pytest.fixture
def lay(tmp_path, put):
    """A function that writes a model of a repository which takes exactly so many megabytes.

    Nearly all of it is a hole in a file beside the model: no model takes less than its files.
    """

    def write(name, megabytes):
        folder = put["multiple"](tmp_path / "repository", name, 2.0)
        size = (folder / "1" / "model.onnx").stat().st_size
        with (folder / "1" / "hole").open("wb") as file:
            file.truncate(megabytes * MB - size)

    return write


@pytest.fixture
def served(start, tmp_path, lay):
    """A function that starts a server of models of so many megabytes each, and loads some, one after the other."""

    def run(sizes, *loaded, budget=200 * MB, device_budget=0, **settings):
        for name, megabytes in sizes.items():
            lay(name, megabytes)
        running = start(
            mode=Mode.REPOSITORY,
            model_repository=tmp_path / "repository",
            memory_budget=budget,
            load_models=loaded[:1],
            **settings,
        )
        running.engine.cache.room.budget = Footprint(budget, (device_budget,))  # as if there were GPUs
        for name in loaded[1:]:
            assert running.http("POST", f"/v2/repository/models/{quote(name, safe='')}/load").status == 200
        assert [name for name, _ in running.on_loop.call(running.engine.index.registered)] == sorted(loaded)
        return running

    return run


@pytest.fixture
def served_from_store(start, tmp_path, put):
    """A function that starts a server of a folder of archives, each with a small model."""

    def run(*names, **settings):
        folder = tmp_path / "store"
        folder.mkdir()
        for name in names:
            pack(put["multiple"](tmp_path / "packed", name, 2.0), folder / f"{name}.tar.gz")
        return start(mode=Mode.STORE, model_store=str(folder), **settings)

    return run


@pytest.fixture
def ask(json_inputs):
    """A function that sends one request to a model; returns the answer."""
    return lambda running, name: running.infer(name, {"inputs": json_inputs(X=[1, 2, 3, 4])})


# -- the browser -----------------------------------------------------------------------------------------------------


def _missing():
    """Why there is no browser to test with, "" if there is one."""
    programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(programs)} here; Debian's chromium and chromium-driver have them" if programs else ""


class Page:
    """One browser window on a server's page."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, running, path="/dashboard", *, scheme="light", width=1280):
        """Load the page, and wait for its first data."""
        do = self.driver.execute_cdp_cmd
        do("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        do("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(f"http://127.0.0.1:{running.port}{path}")
        eventually(lambda: self.text("#live") == "live", "the first data")

    def run(self, script, *arguments):
        """The value of a script of the test's."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector):
        """What an element says, with plain spaces; "" if there is none."""
        found = self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return " ".join(found.split())

    def texts(self, selector):
        """What each such element says."""
        script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
        return [" ".join(text.split()) for text in self.run(script, selector)]

    def count(self, selector):
        """How many such elements there are."""
        return self.run("return document.querySelectorAll(arguments[0]).length", selector)

    def widths(self, selector):
        """The width in pixels of each such element, by the text of its title."""
        script = """return [...document.querySelectorAll(arguments[0])].map((each) =>
            [each.querySelector("title").textContent, each.getBoundingClientRect().width])"""
        return {title.partition(":")[0]: width for title, width in self.run(script, selector)}

    def rows(self):
        """The table of models: the cells' texts by the model's name."""
        script = """return [...document.querySelectorAll("#rows tr")].map((row) =>
            [...row.querySelectorAll("[data-field]")].map((each) => [each.dataset.field, each.textContent]))"""
        rows = [{name: " ".join(text.split()) for name, text in cells} for cells in self.run(script)]
        return {row["name"]: row for row in rows}

    def complaints(self):
        """What the browser has logged: errors of scripts, breaches of the page's policy, failed requests."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """Chromium, for all tests of this process."""
    if missing := _missing():
        if os.environ.get("REQUIRE_BROWSER") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    home = tmp_path_factory.mktemp("browser")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for switch in (*_SWITCHES, f"--user-data-dir={home / 'profile'}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # what it leaves in the temporary folder while it runs is not the tests'
    environment = {**os.environ, "TMPDIR": tempfile.mkdtemp(dir=home), "HOME": str(home)}
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver"), env=environment))
    yield driver
    driver.quit()


@pytest.fixture
def page(driver):
    """A window; whatever a test does with it, the browser finds nothing to complain about."""
    driver.get_log("browser")
    yield (page := Page(driver))
    assert page.complaints() == []
    driver.get("about:blank")
