"""Log lines, and gunicorn's configuration as gunicorn itself reads it."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
import warnings
from pathlib import Path

import pytest

from container.observe.logs import LogControl, configure
from container.process.master import Server
from container.settings import LogFormat, read_settings
from model_handlers.errors import MmeError

ROOT = Path(__file__).parents[3]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        """Say yes."""
        return True


@pytest.fixture(autouse=True)
def _restore_logging():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream):
    """The JSON objects that were logged."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_extra_facts_are_fields_of_the_json_line():
    """What is passed as extra= stands beside the message, under its own name."""
    stream = io.StringIO()
    configure("info", LogFormat.JSON, stream)

    logging.getLogger("mme.engine").info(
        "loaded %s", "bert", extra={"target_model": "bert-0.tar.gz", "inference_id": "42"}
    )

    (line,) = lines(stream)
    assert line.pop("timestamp")
    assert line == {
        "level": "info",
        "logger": "mme.engine",
        "message": "loaded bert",
        "target_model": "bert-0.tar.gz",
        "inference_id": "42",
    }


def test_timestamp_is_when_the_line_was_written_in_utc_milliseconds():
    """The time is the record's own, ISO 8601 with milliseconds and Z."""
    stream = io.StringIO()
    configure("info", LogFormat.JSON, stream)
    record = logging.makeLogRecord({"name": "mme", "levelno": logging.INFO, "levelname": "INFO", "msg": "x"})
    record.created = 1_700_000_000.25

    logging.getLogger("mme").handle(record)

    assert lines(stream)[0]["timestamp"] == "2023-11-14T22:13:20.250Z"


def test_traceback_is_one_field_of_one_line():
    """An exception makes one line, with the whole traceback in it."""
    stream = io.StringIO()
    configure("info", LogFormat.JSON, stream)

    try:
        {}["gone"]
    except KeyError:
        logging.getLogger("mme").exception("lost it", extra={"target_model": "a"})

    (line,) = lines(stream)
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert line["exception"].endswith("KeyError: 'gone'")
    assert (line["level"], line["target_model"]) == ("error", "a")


def test_auto_is_text_on_a_terminal_and_json_elsewhere():
    """A person sees coloured text, a log collector JSON, from the same setting."""
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        configure("info", LogFormat.AUTO, stream)
        logging.getLogger("mme").info("hello", extra={"target_model": "a"})

    assert "\x1b[" in terminal.getvalue()
    assert "hello" in terminal.getvalue()
    assert lines(pipe)[0]["message"] == "hello"


def test_text_without_a_terminal_has_no_colours():
    """Text that goes into a file carries no escape sequences."""
    stream = io.StringIO()
    configure("info", LogFormat.TEXT, stream)

    logging.getLogger("mme").warning("hello", extra={"target_model": "a.tar.gz"})

    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z \[warning *\] hello", stream.getvalue())
    assert "target_model=a.tar.gz" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_text_shows_facts_and_a_traceback():
    """Facts by name, quoted where their end would not be seen; the traceback on lines of its own."""
    stream = io.StringIO()
    configure("info", LogFormat.TEXT, stream)
    record = a_line()
    record.evicted, record.sentence = ["a"], "two words"

    logging.getLogger("mme").handle(record)

    first, *traceback = stream.getvalue().splitlines()
    assert first.endswith("""[mme] evicted=['a'] sentence='two words' target_model=ä""")
    assert traceback[0].startswith("Traceback")
    assert traceback[-1] == "KeyError: 'gone'"


def test_text_in_a_file_has_a_line_for_each_sentence():
    """Of a model's error too, whose lines a person at a terminal sees as they are."""
    sentence = "load failed: no file\n\nAt:\n  model.py(7)\n"
    for stream, expected in ((io.StringIO(), 1), (Terminal(), 5)):
        configure("info", LogFormat.TEXT, stream)
        logging.getLogger("mme.cache").warning(sentence, extra={"target_model": "m"})
        assert len(stream.getvalue().rstrip().splitlines()) == expected
        assert ("load failed: no file | At: | model.py(7)" in stream.getvalue()) == (expected == 1)


@pytest.mark.parametrize("library", ["botocore.auth", "hpack.hpack", "urllib3", "tomorrows.client"])
def test_below_info_only_our_own_loggers_are_heard(library):
    """At debug level our own lines come out, those of libraries (with credentials in them) do not."""
    stream = io.StringIO()
    configure("debug", LogFormat.JSON, stream)
    logging.getLogger("mme").debug("ours")
    logging.getLogger(library).debug("secret")
    logging.getLogger(library).info("said")
    configure("warning", LogFormat.JSON, stream)
    logging.getLogger("mme").info("quiet")
    logging.getLogger(library).info("quiet")

    assert [line["message"] for line in lines(stream)] == ["ours", "said"]


def a_line():
    """A record of an error with facts and a traceback, from a known place and time."""
    try:
        {}["gone"]
    except KeyError:
        facts = {"name": "mme", "levelno": logging.ERROR, "levelname": "ERROR", "exc_info": sys.exc_info()}
    record = logging.makeLogRecord(facts | {"msg": 'lost "%s"\nand found', "args": ("it",), "target_model": "ä"})
    record.created, record.process, record.filename, record.lineno = 1_700_000_000.25, 17, "engine.py", 33
    return record


@pytest.mark.parametrize(
    ("lines", "begin"),
    [(LogFormat.TRITON, "E1114 22:13:20.250000"), (LogFormat.ISO8601, "2023-11-14T22:13:20Z E")],
)
def test_lines_as_triton_writes_them(lines, begin):
    """Severity, time in UTC, process and place, and the sentence in quotes; facts and a traceback behind it."""
    stream = io.StringIO()
    configure("info", lines, stream)

    logging.getLogger("mme").handle(a_line())

    (line,) = stream.getvalue().splitlines()
    said, _, traceback = line.partition(" exception=")
    assert said == f'{begin} 17 engine.py:33] "lost \\"it\\"\\nand found" target_model="ä"'
    assert json.loads(traceback).endswith("KeyError: 'gone'")
    for level, letter in (("debug", ""), ("info", "I"), ("warning", "W"), ("critical", "E")):
        getattr(logging.getLogger("mme"), level)("x")
        assert letter in stream.getvalue().splitlines()[-1][: len(begin)]
    logging.getLogger("mme").info("native", extra={"fact": 1})
    assert stream.getvalue().endswith('] "native" fact=1\n')


def test_what_is_logged_changes_while_it_runs():
    """Each severity by itself, the format and back; what others say of their requests is never among it."""
    stream = io.StringIO()
    configure("info", LogFormat.JSON, stream)
    control = LogControl("info", LogFormat.JSON)

    def logged(**wanted):
        control.change(wanted)
        stream.seek(0)
        stream.truncate()
        for name in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger("mme.x"), name)(name)
            getattr(logging.getLogger("botocore.auth"), name)(f"botocore {name}")
        return stream.getvalue().splitlines()

    def sentences(**wanted):
        return [json.loads(line)["message"] for line in logged(**wanted) if "botocore" not in line]

    assert sentences(log_verbose_level=1, log_warning=False) == ["debug", "info", "error"]
    assert "botocore debug" not in stream.getvalue()
    assert sentences(log_verbose_level=0, log_info=False) == ["error"]
    with pytest.raises(MmeError):
        control.change({"log_error": False, "log_format": "xml"})
    assert sentences() == ["error"]
    assert control.document() == {
        "log_file": "",
        "log_info": False,
        "log_warning": False,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "json",
    }
    shaped = logged(log_format="default")
    assert len(shaped) == 2
    assert re.match(r'E\d{4} .* test_logs\.py:\d+\] "error"$', shaped[0])
    assert sentences(log_format="json", log_info=True, log_error=None) == ["info", "error"]


def test_warnings_come_out_the_same_way():
    """A Python warning goes through the same handler as everything else."""
    stream = io.StringIO()
    configure("info", LogFormat.JSON, stream)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old", UserWarning, stacklevel=1)

    (warning,) = lines(stream)
    assert (warning["logger"], warning["level"]) == ("py.warnings", "warning")


@pytest.mark.parametrize("value", [{1, 2}, b"\xff", float("nan"), "\udcff", 2**70, {(1, 2): object}])
def test_no_value_loses_a_line(value):
    """Whatever is passed as extra=, the line comes out as JSON."""
    stream = io.StringIO()
    configure("info", LogFormat.JSON, stream)

    logging.getLogger("mme").info("still here", extra={"value": value})

    assert lines(stream)[0]["message"] == "still here"


def gunicorn(tmp_path, **environ):
    """Gunicorn with our configuration, its own plain worker, and an application that tells what is never collected."""
    (tmp_path / "plain.py").write_text(
        "import gc, os\n"
        "from container.process.master import Server\n"
        "from container.settings import read_settings\n"
        "class Plain(Server):\n"
        "    def load_config(self):\n"
        "        super().load_config()\n"
        "        self.cfg.set('worker_class', 'sync')\n"
        "    def load(self):\n"
        "        return app\n"
        "def app(environ, start):\n"
        "    start('200 OK', [])\n"
        "    return [b'%d' % (gc.isenabled() and gc.get_freeze_count())]\n"
        "Plain(read_settings(os.environ), ()).run()\n"
    )
    return subprocess.Popen(
        [sys.executable, tmp_path / "plain.py"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MME_HOST": "127.0.0.1", "MME_PORT": "0", **environ},
    )


def test_gunicorn_logs_through_the_same_handler_and_drains_on_sigterm(tmp_path):
    """Every line of gunicorn's master and worker is JSON; what both share is not collected; SIGTERM ends it with 0."""
    process = gunicorn(tmp_path)
    too_long = threading.Timer(60, process.kill)  # a server that logs nothing must fail the test, not hang it
    too_long.start()
    try:
        seen = []
        for text in process.stderr:
            seen.append(json.loads(text))
            if "Booting worker" in seen[-1]["message"]:  # a worker that answers has taken its signals over
                url = next(re.search(r"http://\S+", line["message"]) for line in seen if "Listening" in line["message"])
                with urllib.request.urlopen(url[0], timeout=60) as answer:
                    assert answer.status == 200
                    assert int(answer.read()) > 10_000
                process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        too_long.cancel()
        process.kill()
        process.stderr.close()
        process.wait()

    assert {line["logger"] for line in seen} == {"gunicorn.error"}
    assert any("127.0.0.1" in line["message"] for line in seen)


def test_gunicorn_settings_follow_ours():
    """Address, drain and idle time are those of our settings; one worker, no preload, no access log, no control socket."""
    environ = {"MME_HOST": "::", "MME_PORT": "9000", "MME_IDLE_TIMEOUT": "30", "MME_LOG_LEVEL": "debug"}
    c = Server(read_settings(environ), ()).cfg

    assert (c.bind, c.graceful_timeout, c.keepalive, c.workers) == (["[::]:9000"], 28, 30, 1)
    assert (c.worker_class_str, c.preload_app) == ("container.process.worker.EngineWorker", False)
    assert (c.accesslog, c.control_socket_disable) == (None, True)
    assert c.logconfig_dict["loggers"]["mme"]["level"] == "DEBUG"
