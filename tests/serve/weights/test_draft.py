"""Forms being written: blobs that are there once, whoever writes them, and what they are called."""

import os
import time

import pytest

from model_handlers.errors import Kind, MmeError
from model_handlers.mapped import PIECE, Span
from serve.weights.store import Draft

BIG = os.urandom(2 * PIECE + 12_345)


@pytest.fixture
def files(tmp_path):
    """The directory where all blobs lie."""
    path = tmp_path / "files"
    path.mkdir()
    return path


def names(directory):
    """What lies in it."""
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def draft(tmp_path, files):
    """Makes a draft of that name; its sources are closed afterwards."""
    made = []

    def draft(name="draft"):
        (tmp_path / name).mkdir()
        made.append(Draft(tmp_path / name, files))
        return made[-1]

    yield draft
    for one in made:
        one.close()


@pytest.fixture
def span(tmp_path):
    """Makes a file and tells the span of a draft that leaves out what is put around it."""

    def span(draft, content, before=b"head", after=b"tail"):
        path = tmp_path / f"source {len(list(tmp_path.iterdir()))}"
        path.write_bytes(before + content + after)
        return Span(draft.source(path), len(before), len(content))

    return span


def test_a_blob_holds_just_the_bytes(draft, span, files):
    """It is one file, of one link, that nobody may write to; nothing else is left."""
    one = draft()
    name = one.put(span(one, BIG))

    assert (files / name).read_bytes() == BIG
    assert (files / name).stat().st_mode & 0o777 == 0o400
    assert (files / name).stat().st_nlink == 1
    assert one.blobs == {name: len(BIG)}
    assert names(one.folder) == []


def test_the_same_bytes_are_there_once(draft, span, files):
    """Twice in one model or in two, from other places in other files: one file on disk."""
    one, other = draft("one"), draft("other")
    taken = {one.put(span(one, BIG)), one.put(span(one, BIG, b"")), other.put(span(other, BIG, b"other"))}

    assert names(files) == list(taken)
    assert one.blobs == other.blobs
    assert repr(one) == "<Draft of 1 blobs, 1.1 MB>"


def test_other_bytes_of_the_same_checksum_and_length_are_another_blob(draft, span, files, monkeypatch):
    """Every byte is compared: where checksum and length agree and the bytes do not, the next number is taken."""
    monkeypatch.setattr("serve.weights.store._checksum", lambda _span: 7)
    contents = [BIG, BIG[:-1] + bytes([BIG[-1] ^ 1]), bytes([BIG[0] ^ 1]) + BIG[1:]]
    one, other = draft("one"), draft("other")
    taken = [one.put(span(one, content)) for content in contents]

    assert taken == [f"00000007-{len(BIG):x}-{number}" for number in range(3)]
    assert [other.put(span(other, content)) for content in reversed(contents)] == taken[::-1]
    assert [(files / name).read_bytes() for name in taken] == contents
    assert names(files) == taken


@pytest.mark.parametrize("length", [100, PIECE])
def test_a_blob_that_a_crash_cut_is_not_taken(draft, span, files, length):
    """A file of the right name without the right bytes is left alone, and another is made."""
    one, other = draft("one"), draft("other")
    name = one.put(span(one, BIG))
    (files / name).unlink()
    (files / name).write_bytes(BIG[:length])

    taken = other.put(span(other, BIG))

    assert taken != name
    assert (files / taken).read_bytes() == BIG


def test_a_blob_that_is_taken_again_is_as_good_as_new(draft, span, files):
    """Whoever takes an old blob has as much time to keep it as if it had made it."""
    one, other = draft("one"), draft("other")
    name = one.put(span(one, BIG))
    os.utime(files / name, (1, 1))

    other.put(span(other, BIG))

    assert time.time() - (files / name).stat().st_mtime < 300


def test_somebody_quicker_is_believed(draft, span, files, monkeypatch):
    """When the same blob appears while ours is written, theirs is taken."""
    one, other = draft("one"), draft("other")
    ours = span(one, BIG)
    theirs = other.put(span(other, BIG))
    inode = (files / theirs).stat().st_ino
    (files / theirs).rename(one.folder / "hidden")
    link = os.link

    def appear(source, target):
        (one.folder / "hidden").rename(files / theirs)
        link(source, target)

    monkeypatch.setattr(os, "link", appear)

    assert one.put(ours) == theirs
    assert (files / theirs).stat().st_ino == inode
    assert names(one.folder) == []


def test_a_source_that_is_written_to_is_noticed(draft, span):
    """A draft knows whether its sources are still what it read."""
    one = draft()
    source = span(one, BIG).file
    assert one.is_true()

    with source.path.open("ab") as file:
        file.write(b"more")

    assert not one.is_true()


def test_a_source_that_ends_too_soon_is_an_error(draft, span):
    """A file that is cut while it is read is INVALID_MODEL, and no signal ends the process."""
    one = draft()
    cut = span(one, BIG)
    os.truncate(cut.file.path, 100)

    with pytest.raises(MmeError, match="ends at byte 100") as caught:
        one.put(cut)

    assert caught.value.kind is Kind.INVALID_MODEL
