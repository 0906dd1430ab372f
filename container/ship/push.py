"""`mme push`: archives to S3, in parallel parts, and never over another archive of the same name.

SageMaker caches archives by their names, so that one which is overwritten may go on serving as it was: that is refused
unless it is forced. S3 itself decides it (If-None-Match) and checks each part by its SHA-256. What is there with the
same content is skipped: the object's SHA-256 says so. Nothing is uploaded before all of them have been looked at.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from container.cli import ARCHIVE_SUFFIX, Command, add_region, progress
from container.ship.aws import Aws, aws_errors, code_of, split_uri
from model_handlers.errors import MmeError, invalid_argument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

_EXAMPLES = """\
examples:
  mme push bert-0.tar.gz bert-1.tar.gz s3://my-bucket/models
      what is there with the same content is skipped; another archive under the same name is not overwritten
  mme push archives/*.tar.gz s3://my-bucket/models --dry-run
"""
_GZIP = b"\x1f\x8b"
_PART = 16 << 20
_PARTS_AT_ONCE = 8
_DIGEST = "mme-sha256"  # of the whole archive: S3's own checksum of one in parts is made of those of the parts
_ABSENT = frozenset({"404", "NoSuchKey", "NotFound", "NoSuchBucket"})
_TAKEN = frozenset({"PreconditionFailed", "ConditionalRequestConflict"})


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("archives", type=Path, nargs="+", metavar="ARCHIVE", help="made by `mme pack`")
    parser.add_argument(
        "destination", metavar="s3://BUCKET/PREFIX", help="where they go; a key where it ends in .tar.gz"
    )
    parser.add_argument("--force", action="store_true", help="overwrite other archives of the same names")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    add_region(parser)


@dataclass(frozen=True, slots=True)
class Upload:
    """An archive, its place, its SHA-256, and what is at that place now: nothing (None), the same (True) or another."""

    file: Path
    bucket: str
    key: str
    digest: bytes
    same: bool | None

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


def run(arguments: argparse.Namespace) -> int:
    bucket, prefix = split_uri(arguments.destination)
    for file in arguments.archives:
        _check(file)
    aws = Aws(arguments.region or "")
    uploads = [_planned(aws, file, bucket, _key(prefix, file)) for file in arguments.archives]
    conflicts = [upload.uri for upload in uploads if upload.same is False]
    if conflicts and not arguments.force:
        raise invalid_argument(
            f"{', '.join(conflicts)} holds another archive, which SageMaker may have cached under that name: "
            "push yours under a new name, or over it with --force"
        )
    if not arguments.dry_run:
        _upload(aws.client("s3"), [upload for upload in uploads if not upload.same], replace=arguments.force)
    verb = "would be uploaded" if arguments.dry_run else "uploaded"
    for upload in uploads:
        size = f"{upload.file.stat().st_size / 1e6:.1f} MB"
        print(f"{upload.uri}: {'there already, with the same content' if upload.same else f'{verb}, {size}'}")
    return 0


def _check(file: Path) -> None:
    if not file.is_file():
        raise invalid_argument(f"'{file}' is no file: make an archive with `mme pack` first")
    if not file.name.endswith(ARCHIVE_SUFFIX):
        raise invalid_argument(f"'{file}' does not end in {ARCHIVE_SUFFIX}, and SageMaker takes no other archive")
    with file.open("rb") as content:
        if content.read(2) != _GZIP:
            raise invalid_argument(f"'{file}' is no gzip file, whatever its name says: pack it with `mme pack`")


def _key(prefix: str, file: Path) -> str:
    """The key: the prefix itself where it names an archive."""
    from serve.sources.store import validate_name  # noqa: PLC0415 - heavy

    if prefix.endswith(ARCHIVE_SUFFIX):
        return prefix
    prefix = prefix.strip("/")
    return validate_name(f"{prefix}/{file.name}" if prefix else file.name)


def _planned(aws: Aws, file: Path, bucket: str, key: str) -> Upload:
    """What is at the archive's place now."""
    from model_handlers.system.disk import file_digest  # noqa: PLC0415 - heavy

    digest, doing = file_digest(file), f"s3://{bucket}/{key}"
    wanted = {"Bucket": bucket, "Key": key, "ChecksumMode": "ENABLED"}
    head = aws.find("s3", "head_object", wanted, _ABSENT, doing)
    if head is None and aws.find("s3", "head_bucket", {"Bucket": bucket}, _ABSENT, doing) is None:
        advice = f"make it with `aws s3 mb s3://{bucket}`, or name another"
        raise invalid_argument(f"bucket '{bucket}' does not exist: {advice}")
    return Upload(file, bucket, key, digest, None if head is None else _is_same(file, digest, head))


def _is_same(file: Path, digest: bytes, head: Mapping[str, Any]) -> bool:
    """Whether an object has the file's content: by the SHA-256 that `mme push` keeps beside it, else by S3's own."""
    if head["ContentLength"] != file.stat().st_size:
        return False
    known = head.get("Metadata", {}).get(_DIGEST)
    if known:
        return bool(known == digest.hex())
    return bool(head.get("ChecksumSHA256") == base64.b64encode(digest).decode())


def _upload(s3: Any, uploads: list[Upload], *, replace: bool) -> None:
    """Upload all of them, part by part; when one fails, or is interrupted, the others stop and their parts go."""
    from boto3.s3.transfer import (  # noqa: PLC0415 - heavy
        ProgressCallbackInvoker,
        TransferConfig,
        create_transfer_manager,
    )

    if not replace:
        for operation in ("PutObject", "CompleteMultipartUpload"):  # which the transfer can't be told by an argument
            s3.meta.events.register(f"provide-client-params.s3.{operation}", _only_new)
    total = sum(upload.file.stat().st_size for upload in uploads)
    config = TransferConfig(multipart_threshold=_PART, multipart_chunksize=_PART, max_concurrency=_PARTS_AT_ONCE)
    with progress(total, "push") as advance, create_transfer_manager(s3, config) as manager:
        running = []
        for upload in uploads:
            extra = {"ChecksumAlgorithm": "SHA256", "Metadata": {_DIGEST: upload.digest.hex()}}
            report = [ProgressCallbackInvoker(advance)]
            running.append(manager.upload(str(upload.file), upload.bucket, upload.key, extra, report))
        for upload, transfer in zip(uploads, running, strict=True):
            try:
                with aws_errors(upload.uri):
                    transfer.result()
            except MmeError as error:
                if code_of(error) in _TAKEN:
                    reason = f"{upload.uri} has appeared meanwhile: something else pushes under this name"
                    raise invalid_argument(reason) from error
                raise


def _only_new(params: dict[str, Any], **_: Any) -> None:
    params["IfNoneMatch"] = "*"


COMMAND = Command("push", "upload archives to S3", _EXAMPLES, _add_flags, run)
