"""`mme models`: the table, JSON and watching, of a server of ours and of one that tells less."""

import contextlib
import functools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from container.cli import main
from container.cli.models import span_text
from container.settings import Mode
from model_handlers.base import Footprint
from tests.http_server import Handler, answering

# What Triton answers: no fields of ours, no Date.
INDEX = [
    {"name": "plus", "version": "1", "state": "READY", "reason": ""},
    {"name": "plus", "version": "3", "state": "READY", "reason": ""},
    {"name": "growing", "version": "1", "state": "READY", "reason": ""},
    {"name": "growing", "version": "2", "state": "UNAVAILABLE", "reason": "no weights"},
    {"name": "a broken one", "version": "", "state": "UNAVAILABLE", "reason": "no config.pbtxt\nat all"},
    {"name": "evil\x1b[2J", "reason": ""},
]
STATS = {
    "model_stats": [
        {
            "name": "plus",
            "version": version,
            "inference_count": 15,
            "execution_count": 6,
            "inference_stats": {
                "success": {"count": 5, "ns": 5},
                "fail": {"count": 1, "ns": 5},
                "queue": {"count": 5, "ns": 2_500_000},
                "compute_infer": {"count": 5, "ns": 6_150_000},
            },
        }
        for version in ("1", "3")
    ]
}


class Triton(Handler):
    """The index and the statistics; `down` of the server makes it refuse."""

    def do_GET(self):
        """Statistics."""
        self._answer(STATS)

    def do_POST(self):
        """The index."""
        self.body()
        self.server.asked.release()
        self._answer(INDEX)

    def _answer(self, content):
        self.answer(*((503, {"error": "busy"}) if self.server.down else (200, content)))


@pytest.fixture
def triton():
    """A listening server; `url` is its address, `asked` is released with every request for the index."""
    with answering(Triton, down=False, asked=threading.Semaphore(0)) as server:
        yield server


@pytest.fixture
def own(start, tmp_path, put):
    """A server of ours: `twice` in memory, `thrice` on disk, `bad` broken."""
    put["multiple"](tmp_path, "twice", 2.0)
    put["multiple"](tmp_path, "thrice", 3.0)
    (tmp_path / "bad" / "1").mkdir(parents=True)
    (tmp_path / "bad" / "1" / "model.onnx").write_bytes(b"no model")
    return start(mode=Mode.REPOSITORY, model_repository=tmp_path, load_models=("twice",))


def models(capsys, url, *flags):
    """The output of one run as a table: cells by two spaces or more."""
    assert main.main(["models", "--url", url, *flags]) == 0
    return [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines()]


def test_a_table_of_what_the_cache_knows(own, capsys, json_inputs):
    """One line a model, those in memory first: bytes, last use, hits, misses, and the reason of one that failed."""
    for _ in range(3):
        own.infer("twice", {"inputs": json_inputs(X=[1, 2, 3, 4])})
    own.infer("bad", {"inputs": []})

    titles, twice, bad, thrice = models(capsys, f"http://127.0.0.1:{own.port}")

    assert titles == ["MODEL", "VERSION", "STATE", "MEMORY", "LAST USE", "HITS", "MISSES", "WAITING", "REASON"]
    assert twice[:3] == ["twice", "1", "READY"]
    footprint = own.engine.cache.entries["twice"].footprint
    assert twice[3] == f"{footprint.host / 1e6:.1f} MB"
    assert re.fullmatch(r"\d+ s ago", twice[4])
    assert twice[5:] == ["3", "0", "0"]
    assert bad[:3] == ["bad", "1", "UNAVAILABLE"]
    assert "can't load model 'bad'" in bad[-1]
    assert thrice == ["thrice", "not loaded"]
    with_stats = models(capsys, f"http://127.0.0.1:{own.port}", "--stats")
    refused = with_stats[0].index("FAILED") - 4  # no memory, last use, waiting or requests
    assert with_stats[2][:2] == bad[:2]
    assert with_stats[2][refused] == "1"


def test_what_executions_took_is_shown_apart(own, capsys, json_inputs):
    """A column that is there only while a model has grown."""
    own.infer("twice", {"inputs": json_inputs(X=[1, 2, 3, 4])})
    own.engine.cache.entries["twice"].resident.grown = Footprint(12_300_000)

    titles, twice, *_ = models(capsys, f"http://127.0.0.1:{own.port}")

    assert twice[titles.index("GROWN")] == "12.3 MB"


def test_a_server_without_models_says_so(start, tmp_path, capsys):
    """In a sentence, where a table would be a line of titles."""
    url = f"http://127.0.0.1:{start(mode=Mode.REPOSITORY, model_repository=tmp_path).port}"

    assert main.main(["models", "--url", url]) == 0
    assert capsys.readouterr().out.startswith(f"no models at {url}: it has loaded none")


def test_a_load_under_way_is_shown_with_its_time(own, capsys, json_inputs):
    """LOADING, and for how long."""
    with ThreadPoolExecutor(1) as pool, own.loads_held_up():
        pool.submit(own.infer, "thrice", {"inputs": json_inputs(X=[1, 2, 3, 4])})
        while "thrice" not in own.engine.cache.entries or own.engine.cache.entries["thrice"].state.shown != "LOADING":
            pass
        rows = {row[0]: row for row in models(capsys, f"http://127.0.0.1:{own.port}")}

    assert re.fullmatch(r"LOADING \d+ s", rows["thrice"][1])


def test_a_model_that_is_in_use_was_used_now(own, capsys):
    """A request that has been executing for an hour is no use of an hour ago."""
    lease = own.on_loop.call(own.engine.cache.ready.lease, "twice")
    lease.entry.last_used -= 3600
    try:
        cells = [row[4] for row in models(capsys, f"http://127.0.0.1:{own.port}") if row[0] == "twice"]
    finally:
        own.on_loop.call(lease.release)

    assert cells == ["now"]


def test_another_server_of_models_has_fewer_columns(triton, capsys):
    """Versions of a model share a line; what a server does not tell is no column; nothing drives the terminal."""
    titles, growing, plus, broken, evil = models(capsys, triton.url)

    assert titles == ["MODEL", "VERSION", "STATE", "REASON"]
    assert plus == ["plus", "1,3", "READY"]
    assert growing == ["growing", "1", "READY", "no weights"], "why the newer version is not served"
    assert broken == ["a broken one", "UNAVAILABLE", "no config.pbtxt at all"]
    assert evil == ["evil\N{REPLACEMENT CHARACTER}[2J", "not loaded"]


def test_statistics_are_columns_on_request(triton, capsys):
    """Requests, failures, mean batch size and mean times, of all versions together."""
    titles, _, plus, *_ = models(capsys, triton.url, "--stats")

    assert titles == ["MODEL", "VERSION", "STATE", "REQUESTS", "FAILED", "BATCH", "QUEUE", "COMPUTE", "REASON"]
    assert plus == ["plus", "1,3", "READY", "10", "2", "2.5", "0.50 ms", "1.23 ms"]


def test_json_is_the_index_as_it_came(triton, capsys):
    """For programs: nothing left out, nothing added."""
    assert main.main(["models", "--url", triton.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == INDEX


@pytest.mark.parametrize("arguments", [("--json", "--stats"), ("--watch", "0"), ("--watch", "soon")])
def test_arguments_that_make_no_sense_are_refused(arguments, capsys):
    """With the usage, exit code 2."""
    with pytest.raises(SystemExit) as raised:
        main.main(["models", *arguments])
    assert raised.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@contextlib.contextmanager
def watching(url, *flags, stdout):
    """The command as a process, interrupted at the end as a person does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "container.cli.main", "models", "--url", url, "--watch", "0.1", *flags],
        stdout=stdout,
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - tests may run in the background, where it is ignored
    )
    try:
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()


def test_watching_goes_on_though_the_server_does_not_answer_for_a_while(triton):
    """One line of JSON after the other; the server's error is one of them, and the index comes again after it."""
    with watching(triton.url, "--json", stdout=subprocess.PIPE) as process, process.stdout as out:
        assert json.loads(out.readline()) == INDEX
        triton.down = True
        while (line := json.loads(out.readline())) == INDEX:
            pass
        assert line == {"error": "503 Service Unavailable: busy"}
        triton.down = False
        while json.loads(out.readline()) != INDEX:
            pass


def test_watching_on_a_terminal_draws_over_what_was_there(triton):
    """Each time from the upper left corner, every line to its end, what was below is cleared."""
    master, terminal = pty.openpty()
    seen = b""
    try:
        with watching(triton.url, stdout=terminal):
            for _ in range(3):
                assert triton.asked.acquire(timeout=60)
            while seen.count(b"\x1b[H") < 3:
                seen += os.read(master, 65536)
    finally:
        os.close(terminal)
        os.close(master)

    frames = seen.split(b"\x1b[H")
    assert frames[1].count(b"\x1b[K") == 5
    assert b"plus" in frames[1]
    assert frames[1].rstrip().endswith(b"\x1b[J\x1b[?25h")


def test_a_server_that_never_answered_ends_the_watch(capsys):
    """A mistyped address is said at once."""
    assert main.main(["models", "--url", "http://127.0.0.1:9", "--watch"]) == 1
    assert "is the server up?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("since", "shown"),
    [
        ("2026-11-20T12:00:00.900Z", "0 s"),
        ("2026-11-20T11:58:01.000Z", "119 s"),
        ("2026-11-20T11:58:00.000Z", "2 min"),
        ("2026-11-20T10:00:01.000Z", "120 min"),
        ("2026-11-20T10:00:00.000Z", "2 h"),
        ("2026-11-18T12:00:00.000Z", "2 d"),
    ],
)
def test_times_are_told_in_the_unit_a_person_would_choose(since, shown):
    """A use that is later than the server's Date, which has whole seconds, was just now."""
    assert span_text(since, datetime(2026, 11, 20, 12, tzinfo=UTC)) == shown
