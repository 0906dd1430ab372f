"""`mme push`: archives to S3, in parallel parts, and never over another archive of the same name.

SageMaker caches archives by their names, so that one which is overwritten may go on serving as it was: that is refused
unless it is forced. What is there with the same content is skipped: its SHA-256 is kept beside each object, and for
those of other tools the ETag tells. Nothing is uploaded before all of them have been looked at.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from boto3.s3.transfer import ProgressCallbackInvoker, TransferConfig, create_transfer_manager
from botocore.exceptions import ClientError

from container.ship.aws import Aws, aws_errors, split_uri
from container.ship.progress import progress
from model_handlers.errors import invalid_argument
from model_handlers.system.disk import file_digest
from serve.sources.store import ARCHIVE_SUFFIX, validate_name

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping
    from pathlib import Path

_GZIP = b"\x1f\x8b"
_PART = 16 << 20
_PARTS_AT_ONCE = 8
_PART_SIZES = (_PART, 8 << 20)  # ours, and that of AWS's own tools
_DIGEST = "mme-sha256"
_ABSENT = ("404", "NoSuchKey", "NotFound")


@dataclass(frozen=True, slots=True)
class Upload:
    """An archive and where it goes.

    Attributes:
        file: the archive.
        bucket, key: its place.
        digest: SHA-256 of its content, in hex.
        there: whether the same content is there.
        conflict: whether another content is.
    """

    file: Path
    bucket: str
    key: str
    digest: str
    there: bool = False
    conflict: bool = False

    @property
    def uri(self) -> str:
        """Its place as an s3:// URI."""
        return f"s3://{self.bucket}/{self.key}"


def run(arguments: argparse.Namespace) -> int:
    """Look, upload, and tell what was done.

    Raises:
        MmeError: an argument is wrong, S3 refuses, or something else is there.
    """
    bucket, prefix = split_uri(arguments.destination)
    for file in arguments.archives:
        _check(file)
    s3 = Aws(arguments.region or "").client("s3")
    uploads = [_planned(s3, file, bucket, _key(prefix, file)) for file in arguments.archives]
    conflicts = [upload.uri for upload in uploads if upload.conflict]
    if conflicts and not arguments.force:
        raise invalid_argument(
            f"{', '.join(conflicts)} holds another archive, which SageMaker may have cached under that name: "
            "push yours under a new name, or over it with --force"
        )
    todo = [upload for upload in uploads if not upload.there]
    if not arguments.dry_run:
        _upload(s3, todo, replace=arguments.force)
    for upload in uploads:
        done = "there already, with the same content" if upload.there else _done(arguments.dry_run, upload)
        print(f"{upload.uri}: {done}")
    return 0


def _done(dry_run: bool, upload: Upload) -> str:  # noqa: FBT001 - private, one word
    size = f"{upload.file.stat().st_size / 1e6:.1f} MB"
    return f"would be uploaded, {size}" if dry_run else f"uploaded, {size}"


def _check(file: Path) -> None:
    """Refuse what no endpoint could load."""
    if not file.is_file():
        raise invalid_argument(f"'{file}' is no file: make an archive with `mme pack` first")
    if not file.name.endswith(ARCHIVE_SUFFIX):
        raise invalid_argument(f"'{file}' does not end in {ARCHIVE_SUFFIX}, and SageMaker takes no other archive")
    with file.open("rb") as content:
        if content.read(2) != _GZIP:
            raise invalid_argument(f"'{file}' is no gzip file, whatever its name says: pack it with `mme pack`")


def _key(prefix: str, file: Path) -> str:
    """The key: the prefix itself where it names an archive."""
    if prefix.endswith(ARCHIVE_SUFFIX):
        return prefix
    prefix = prefix.strip("/")
    return validate_name(f"{prefix}/{file.name}" if prefix else file.name)


def _planned(s3: Any, file: Path, bucket: str, key: str) -> Upload:
    """What is at the archive's place now."""
    digest = file_digest(file).hex()
    head = _head(s3, bucket, key)
    if head is None:
        return Upload(file, bucket, key, digest)
    same = _is_same(file, digest, head)
    return Upload(file, bucket, key, digest, there=same, conflict=not same)


def _head(s3: Any, bucket: str, key: str) -> Mapping[str, Any] | None:
    """What S3 says of an object, None where there is none."""
    with aws_errors(f"s3://{bucket}/{key}"):
        try:
            head: Mapping[str, Any] = s3.head_object(Bucket=bucket, Key=key)
        except ClientError as error:
            if error.response["Error"]["Code"] not in _ABSENT:
                raise
            if _has_bucket(s3, bucket):
                return None
        else:
            return head
    raise invalid_argument(f"bucket '{bucket}' does not exist: make it with `aws s3 mb s3://{bucket}`, or name another")


def _has_bucket(s3: Any, bucket: str) -> bool:
    try:
        s3.head_bucket(Bucket=bucket)
    except ClientError as error:
        if error.response["Error"]["Code"] in {*_ABSENT, "NoSuchBucket"}:
            return False
        raise
    return True


def _is_same(file: Path, digest: str, head: Mapping[str, Any]) -> bool:
    if head["ContentLength"] != file.stat().st_size:
        return False
    known = head.get("Metadata", {}).get(_DIGEST)
    if known:
        return bool(known == digest)
    etag = head["ETag"].strip('"')
    if "-" not in etag:
        return bool(etag == etag_of(file, 0))
    return any(etag == etag_of(file, size) for size in _PART_SIZES)


def etag_of(file: Path, part: int) -> str:
    """The ETag that S3 gives a file which is uploaded in parts of `part` bytes; 0 means as a whole."""
    with file.open("rb") as content:
        if not part:
            return hashlib.file_digest(content, _md5).hexdigest()
        digests = [_md5(piece).digest() for piece in iter(lambda: content.read(part), b"")]
    return f"{_md5(b''.join(digests)).hexdigest()}-{len(digests)}"


def _md5(data: bytes = b"") -> Any:
    return hashlib.md5(data, usedforsecurity=False)


def _upload(s3: Any, uploads: list[Upload], *, replace: bool) -> None:
    """All of them, part by part; when one fails, or somebody interrupts, the others stop and their parts go."""
    total = sum(upload.file.stat().st_size for upload in uploads)
    config = TransferConfig(multipart_threshold=_PART, multipart_chunksize=_PART, max_concurrency=_PARTS_AT_ONCE)
    with progress(total, "push") as advance, create_transfer_manager(s3, config) as manager:
        running = []
        for upload in uploads:
            if not replace and _head(s3, upload.bucket, upload.key) is not None:
                raise invalid_argument(f"{upload.uri} has appeared meanwhile: somebody else pushes under this name")
            extra = {"Metadata": {_DIGEST: upload.digest}}
            told = [ProgressCallbackInvoker(advance)]
            running.append(manager.upload(str(upload.file), upload.bucket, upload.key, extra, told))
        for upload, transfer in zip(uploads, running, strict=True):
            with aws_errors(upload.uri):
                transfer.result()
