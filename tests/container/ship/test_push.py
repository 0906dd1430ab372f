"""`mme push`: what is uploaded, skipped and refused."""

from __future__ import annotations

import gzip
import hashlib

import pytest

from container.ship import push
from tests.container.ship.conftest import refusal


@pytest.fixture
def archive(tmp_path):
    """A small archive."""
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(b"content"))
    return path


def keys(account):
    """What the bucket holds."""
    return [row["Key"] for row in account.client("s3").list_objects_v2(Bucket="models").get("Contents", ())]


def test_archives_are_uploaded_and_then_skipped(account, mme, archive, tmp_path):
    """Once each; the second time nothing is sent."""
    second = tmp_path / "b.tar.gz"
    second.write_bytes(gzip.compress(b"other"))

    said = mme("push", archive, second, "s3://models/bert/")
    assert (said.code, said.err) == (0, "")
    assert said.out.count("uploaded") == 2
    assert keys(account) == ["bert/a.tar.gz", "bert/b.tar.gz"]
    again = mme("push", archive, second, "s3://models/bert")
    assert again.code == 0
    assert again.out.count("there already, with the same content") == 2


def test_another_archive_of_the_name_is_overwritten_only_by_force(account, mme, archive):
    """And where one of several may not go, none goes."""
    mme("push", archive, "s3://models/p")
    archive.write_bytes(gzip.compress(b"changed"))
    new = archive.with_name("new.tar.gz")
    new.write_bytes(gzip.compress(b"new"))

    said = mme("push", new, archive, "s3://models/p")
    assert said.code == 2
    (sentence,) = said.err.splitlines()
    assert "s3://models/p/a.tar.gz holds another archive" in sentence
    assert "--force" in sentence
    assert keys(account) == ["p/a.tar.gz"]
    assert mme("push", new, archive, "s3://models/p", "--force").code == 0
    content = account.client("s3").get_object(Bucket="models", Key="p/a.tar.gz")["Body"].read()
    assert gzip.decompress(content) == b"changed"


def test_a_dry_run_uploads_nothing(account, mme, archive):
    """And says what would be."""
    assert "would be uploaded" in mme("push", archive, "s3://models/p", "--dry-run").out
    assert keys(account) == []


@pytest.mark.parametrize(("algorithm", "code"), [("SHA256", 0), ("CRC32", 2)])
def test_what_another_tool_uploaded_is_known_by_s3s_own_sha256(account, mme, archive, algorithm, code):
    """Without one it may be anything, and is overwritten by force alone."""
    body = archive.read_bytes()
    account.client("s3").put_object(Bucket="models", Key="p/a.tar.gz", Body=body, ChecksumAlgorithm=algorithm)

    said = mme("push", archive, "s3://models/p")
    assert said.code == code
    assert ("there already" in said.out) is (code == 0)
    assert ("--force" in said.err) is (code != 0)


@pytest.mark.parametrize("size", [1 << 10, 6 << 20])
def test_what_appears_meanwhile_is_not_overwritten(account, mme, tmp_path, answered, monkeypatch, size):
    """S3 itself refuses to put an object where one is, in one piece or in parts; with --force it does not."""
    monkeypatch.setattr(push, "_PART", 5 << 20)
    path = tmp_path / "a.tar.gz"
    path.write_bytes(b"\x1f\x8b" + bytes(size))
    account.client("s3").put_object(Bucket="models", Key="p/a.tar.gz", Body=b"theirs")
    answered("s3.HeadObject", refusal("404", 404))

    said = mme("push", path, "s3://models/p")
    assert said.code == 2
    assert "s3://models/p/a.tar.gz has appeared meanwhile" in said.err
    assert account.client("s3").get_object(Bucket="models", Key="p/a.tar.gz")["Body"].read() == b"theirs"
    assert mme("push", path, "s3://models/p", "--force").code == 0


def test_large_archives_go_in_parts(account, mme, tmp_path, monkeypatch):
    """Side by side, and they arrive whole."""
    monkeypatch.setattr(push, "_PART", 5 << 20)
    path = tmp_path / "a.tar.gz"
    path.write_bytes(b"\x1f\x8b" + bytes(11 << 20))

    assert mme("push", path, "s3://models/as/this.tar.gz").code == 0
    head = account.client("s3").head_object(Bucket="models", Key="as/this.tar.gz")
    assert head["ETag"].endswith('-3"')
    assert head["Metadata"] == {"mme-sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert head["ContentLength"] == path.stat().st_size


def test_when_one_upload_fails_the_others_stop(account, mme, tmp_path, answered, monkeypatch):
    """In the middle of their parts, of which nothing is left."""
    monkeypatch.setattr(push, "_PART", 5 << 20)
    small, large = tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"
    small.write_bytes(gzip.compress(b"content"))
    large.write_bytes(b"\x1f\x8b" + bytes(21 << 20))
    answered("s3.PutObject", refusal("AccessDenied", 403))

    said = mme("push", small, large, "s3://models/p")
    assert said.code == 2
    assert "have PutObject allowed" in said.err
    assert account.client("s3").list_multipart_uploads(Bucket="models").get("Uploads", []) == []


@pytest.mark.parametrize(
    ("name", "content", "destination", "sentence"),
    [
        ("none.tar.gz", None, "s3://models/p", "make an archive with `mme pack` first"),
        ("a.zip", b"", "s3://models/p", "takes no other archive"),
        ("a.tar.gz", b"zip", "s3://models/p", "is no gzip file"),
        ("a.tar.gz", b"\x1f\x8b", "models/p", "write s3://bucket/prefix"),
        ("a.tar.gz", b"\x1f\x8b", "s3://nobody-has-this/p", "make it with `aws s3 mb"),
    ],
)
def test_wrong_arguments_are_one_sentence(account, mme, tmp_path, name, content, destination, sentence):
    """With the next step, and exit code 2."""
    if content is not None:
        (tmp_path / name).write_bytes(content)

    said = mme("push", tmp_path / name, destination)
    assert said.code == 2
    (line,) = said.err.splitlines()
    assert sentence in line


def test_a_bucket_that_is_denied(account, mme, archive, answered):
    """Says what to have allowed."""
    answered("s3.HeadObject", refusal("403", 403, "Forbidden"))
    said = mme("push", archive, "s3://models/p")

    assert said.code == 2
    assert "denied: have HeadObject allowed" in said.err
