"""Files on trial: whatever happens to the process that loads them is one sentence, and nothing is left of it."""

import pytest
from isolated_models import Tried

from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.worker import process
from model_handlers.worker.fork_client import ForkClient
from model_handlers.worker.start import verify_file


@pytest.fixture
def attempt(tmp_path, nothing_held):
    """Tries a file of that text; returns the error, or None."""

    def attempt(text, **parameters):
        (tmp_path / "model.txt").write_text(text)
        try:
            verify_file(Tried, ModelConfig("m", parameters=parameters), tmp_path / "model.txt")
        except MmeError as error:
            return error
        return None

    return attempt


def test_a_file_that_loads_is_loaded_elsewhere(attempt, tmp_path):
    """By a process that is not this one, at a low priority, which the system ends first where memory is short."""
    assert attempt("tell") is None

    pid, priority, oom = (tmp_path / "told").read_text().split()
    assert (int(priority), int(oom)) == (10, 1000)
    assert not (tmp_path / "proc" / pid).exists()


@pytest.mark.parametrize(
    ("deed", "sentence"),
    [
        ("segfault", "model 'm': the process of 'm on trial' was killed by SIGSEGV while it read 'model.txt', which"),
        (
            "abort",
            "was killed by SIGABRT while it read 'model.txt', which was never loaded before: the file is damaged",
        ),
        ("exit", "ended with exit code 3 while it read 'model.txt'"),
        ("refuse", "no such model"),
        ("raise", "model 'm' failed while it was loaded: ValueError: a bad number"),
        ("devour", "model 'm' ran out of memory while it was loaded"),
    ],
)
def test_whatever_becomes_of_the_process_is_told(attempt, deed, sentence):
    """In one line without a stack; a file that wants more memory than one of its size can is no want of memory."""
    error = attempt(deed)

    assert sentence in error.message
    assert "\n" not in error.message
    assert "Fatal Python error" not in error.message
    assert error.kind is Kind.INVALID_MODEL


def test_a_process_that_hangs_is_ended(attempt):
    """After as long as a load of the model may take."""
    error = attempt("hang", MME_LOAD_TIMEOUT="0.5")

    assert error.kind is Kind.INVALID_MODEL
    assert "was ended, since it gave no answer within 0.5 s, while it read 'model.txt'" in error.message


def test_who_is_killed_by_somebody_has_no_damaged_file(attempt):
    """What it would have died of, or not, the next trial tells."""
    error = attempt("killed")

    assert error.kind is Kind.UNAVAILABLE
    assert "its file could not be tried; load it again" in error.message


def test_the_end_of_the_fork_server_is_not_the_files_fault(attempt, monkeypatch):
    """Nothing is known of the file then, which is tried by the next fork server."""
    forks = ForkClient()
    monkeypatch.setattr(process, "FORKS", forks)
    try:
        error = attempt("end all")

        assert error.kind is Kind.UNAVAILABLE
        assert "its file could not be tried; load it again" in error.message
        assert attempt("tell") is None
    finally:
        forks.stop()
