"""Files are tried once for their content, and again for whatever would be read otherwise."""

from __future__ import annotations

import os
import shutil

import pytest

from model_handlers import base
from model_handlers.base import Handler, Runtime, Traits
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from serve.loading import verify
from serve.loading.verify import Proofs
from serve.state_file import StateFile


class Reader(Handler):
    """Reads files, in a version."""

    version = 1

    @classmethod
    def traits(cls, config, model_file):  # noqa: ARG003 - of any file
        """By a runtime of its version."""
        return Traits(runtime=Runtime(packages=(f"reader {cls.version}",)))


@pytest.fixture
def tried(monkeypatch):
    """The contents of the files that were tried, in place of a trial."""
    contents = []
    monkeypatch.setattr(verify, "verify_file", lambda _handler, _config, file: contents.append(file.read_text()))
    monkeypatch.setattr(Reader, "version", 1)
    monkeypatch.setattr(base, "version_of", lambda package: package)
    return contents


@pytest.fixture
def state(tmp_path):
    """A file for proofs."""
    return StateFile(tmp_path / "cache" / "proofs.json", verify.PROOFS_FORM)


@pytest.fixture
def file(tmp_path):
    """A model file."""
    path = tmp_path / "model.txt"
    path.write_text("one")
    return path


CONFIG = ModelConfig("m")


def test_content_is_tried_once(tried, state, file, tmp_path):
    """Not again for the same file, a copy of it, or in the next life of the server."""
    known = Proofs(state)
    copy = tmp_path / "copy" / "model.txt"
    copy.parent.mkdir()
    for _ in range(2):
        known.provide(Reader, CONFIG, file)
        known.check(Reader, CONFIG, file)
    shutil.copy2(file, copy)
    known.provide(Reader, CONFIG, copy)
    Proofs(state).provide(Reader, CONFIG, copy)

    assert tried == ["one"]
    assert repr(Proofs(state)) == "<Proofs of 1 files>"


def test_other_content_under_the_same_name_and_time_is_tried(tried, file):
    """As a damaged copy has it, which `cp -p` gives the time of what it is a copy of."""
    known = Proofs()
    known.provide(Reader, CONFIG, file)
    times = file.stat()
    file.write_text("two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    known.provide(Reader, CONFIG, file)

    assert tried == ["one", "two"]


@pytest.mark.parametrize(
    "change",
    [
        lambda monkeypatch, config, file: (monkeypatch.setattr(Reader, "version", 2), config, file)[1:],
        lambda _, config, file: (ModelConfig("m", parameters={"kind": "b"}), file, config)[:2],
        lambda _, config, file: (config, file.rename(file.with_name("model.bin"))),
    ],
    ids=["another version", "another parameter", "another name"],
)
def test_what_would_be_read_otherwise_is_tried(tried, file, monkeypatch, change):
    """By a library of another version, or as a file of another kind."""
    known = Proofs()
    known.provide(Reader, CONFIG, file)
    config, file = change(monkeypatch, CONFIG, file)
    known.provide(Reader, config, file)

    assert tried == ["one", "one"]


def test_a_file_that_fails_is_tried_again(monkeypatch, tried, file, state):
    """There is no proof of it."""
    known = Proofs(state)
    with monkeypatch.context() as failing:
        failing.setattr(verify, "verify_file", lambda *_: (_ for _ in ()).throw(MmeError(Kind.INVALID_MODEL, "died")))
        for _ in range(2):
            with pytest.raises(MmeError, match="died"):
                known.provide(Reader, CONFIG, file)
    with pytest.raises(MmeError):
        known.check(Reader, CONFIG, file)
    known.provide(Reader, CONFIG, file)

    assert tried == ["one"]
    known.check(Reader, CONFIG, file)


def test_a_file_that_is_written_meanwhile_is_refused(monkeypatch, tried, file):
    """While it is tried, and between its trial and its load."""
    known = Proofs()
    with monkeypatch.context() as writing:
        writing.setattr(verify, "verify_file", lambda *_: file.write_text("two, which is longer"))
        with pytest.raises(MmeError, match="was written while it was loaded; load it again once it is whole"):
            known.provide(Reader, CONFIG, file)
    known.provide(Reader, CONFIG, file)
    file.write_text("three, which is longer still")
    with pytest.raises(MmeError) as caught:
        known.check(Reader, CONFIG, file)

    assert caught.value.kind is Kind.INVALID_MODEL
    assert tried == ["two, which is longer"]


@pytest.mark.parametrize(("proven", "count"), [('[1, "a", null]', 1), ("5", 0), ('{"a": true}', 1), ('"ab"', 0)])
def test_a_file_of_nonsense_is_ignored(tmp_path, proven, count):
    """Whoever wrote it."""
    path = tmp_path / "cache" / "proofs.json"
    path.parent.mkdir()
    path.write_text(f'{{"form": "mme proofs 1", "proven": {proven}}}')

    assert repr(Proofs(StateFile(path, verify.PROOFS_FORM))) == f"<Proofs of {count} files>"
