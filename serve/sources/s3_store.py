"""The archives under a prefix of a bucket in S3, or what else lies there.

It never reads the environment: boto3 finds credentials, region and endpoint by its own rules. What botocore raises
becomes one of our errors at one border; `refusals` has what services refuse. Importing this costs a tenth of a second
and is left to who opens such a store. Synchronous and thread-safe; runs on load threads.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    ProxyConnectionError,
)
from botocore.exceptions import ConnectionError as NoConnectionError

from model_handlers.cancel_token import NEVER, CancelToken
from model_handlers.errors import DamagedError, Kind, MmeError, invalid_argument
from serve.sources.credentials import NO_CREDENTIALS
from serve.sources.ranged_download import RangedDownload
from serve.sources.refusals import S3, by_another, message, sentence, service_of, told
from serve.sources.retries import BUSY, Retries, asked_pause
from serve.sources.store import (
    ARCHIVE_SUFFIX,
    ReplacedError,
    StoredObject,
    UnreachableError,
    UntoldError,
    unknown_model,
    validate_name,
    wrong_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import BinaryIO

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")
_PART_SIZE = 12 << 20
_PARTS_AHEAD = 4
_CONNECTIONS = 64  # kept open: eight loads at a time, each with four parts, and a few files beside those
_CONNECT_SECONDS = 5
_READ_SECONDS = 15

# What S3 answers, by its code; HEAD has no body and gives the status as the code.
_NO_KEY = ("NoSuchKey",)
_NO_BUCKET = ("NoSuchBucket",)
_ABSENT = ("NotFound", "404")  # the object, or its bucket
_REPLACED = ("PreconditionFailed", "412", "InvalidRange", "416")
_BODILESS = ("301", "307", "400", "403")  # HEAD's, of which a GET tells more


class S3Store:
    """The archives under a prefix of a bucket.

    Large ones are downloaded in parts in parallel, each on the condition that the etag is still the one of `stat`.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str = "",
        credentials: Mapping[str, str] = NO_CREDENTIALS,
        part_size: int = _PART_SIZE,
        parts_ahead: int = _PARTS_AHEAD,
        attempts: int = 4,
    ) -> None:
        """Make the client; nothing is asked of S3 yet.

        Args:
            bucket: its name.
            prefix: what stands before every name, without slashes around it.
            endpoint: the URL of an S3 that is not AWS's; "" for the one that boto3 finds.
            credentials: what a session of boto3 is made with.
            part_size: bytes of a ranged GET; an object that is not larger is fetched by one plain GET.
            parts_ahead: parts of one object in memory and on the way.
            attempts: of each request, before its error counts.
        """
        if not _BUCKET.fullmatch(bucket):
            raise invalid_argument(f"'{bucket}' is not the name of a bucket: write s3://bucket/prefix")
        prefix = prefix.strip("/")
        self._bucket = bucket
        self._endpoint = endpoint
        self._prefix = f"{validate_name(prefix)}/" if prefix else ""
        self._part_size = part_size
        self._parts_ahead = parts_ahead
        self._retries = Retries(attempts)
        with self._s3():
            core = botocore.session.get_session()
            session = boto3.session.Session(botocore_session=core, **credentials)
            _check_bundle(core.get_config_variable("ca_bundle"))
            self._client: Any = session.client(
                "s3",
                endpoint_url=endpoint or None,
                config=Config(
                    retries={"mode": "standard", "total_max_attempts": 1},  # ours take their place
                    max_pool_connections=_CONNECTIONS,
                    connect_timeout=_CONNECT_SECONDS,
                    read_timeout=_READ_SECONDS,
                ),
            )
        self._client.meta.events.register("needs-retry.s3", self._retries)

    @property
    def uri(self) -> str:
        """The prefix as an s3:// URI."""
        return f"s3://{self._endpoint and f'{self._endpoint}/'}{self._bucket}/{self._prefix}"

    def __repr__(self) -> str:
        return f"<S3Store {self.uri}>"

    def stat(self, name: str, token: CancelToken = NEVER, *, hurried: bool = False) -> StoredObject:
        """See `Store.stat`."""
        validate_name(name)
        with self._s3(name), self._retries.for_load(token, hurried=hurried):
            head = self._head(self._prefix + name)
        return StoredObject(name, head["ContentLength"], head["ETag"].strip('"'))

    def open(self, obj: StoredObject) -> BinaryIO:
        """See `Store.open`. Closing it early stops the parts that are on the way."""
        closed = threading.Event()

        def open_range(start: int, stop: int) -> _Body:
            with self._retries.for_load(CancelToken(obj.name, closed.is_set)):
                return self._get(obj, start, stop)

        download = RangedDownload(
            open_range, obj.size, part_size=self._part_size, ahead=self._parts_ahead, name=obj.name, closed=closed
        )
        # not in a BufferedReader: its lock would let no other thread close it while a read waits
        return cast("BinaryIO", download)

    def list(self) -> Iterator[StoredObject]:
        """See `Store.list`."""
        return (obj for obj in self.objects() if obj.name.endswith(ARCHIVE_SUFFIX) and not wrong_name(obj.name))

    def objects(
        self, beginning: str = "", token: CancelToken = NEVER, *, hurried: bool = False
    ) -> Iterator[StoredObject]:
        """Everything whose name begins like that, whatever it is and however it is called; `open` takes it.

        The other arguments are those of `Store.stat`.
        """
        prefix = self._prefix + beginning
        with self._s3(beginning):
            pages = iter(self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix))
        while True:
            with self._s3(beginning), self._retries.for_load(token, hurried=hurried):
                page = next(pages, None)
            if page is None:
                return
            for entry in page.get("Contents", ()):
                name = entry["Key"].removeprefix(self._prefix)
                yield StoredObject(name, entry["Size"], entry["ETag"].strip('"'))

    def _get(self, obj: StoredObject, start: int, stop: int) -> _Body:
        condition = {"IfMatch": f'"{obj.etag}"'}
        if (start, stop) != (0, obj.size):
            condition["Range"] = f"bytes={start}-{stop - 1}"
        with self._s3(obj.name):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + obj.name, **condition)
        body = _Body(self, obj.name, answer["Body"])
        # Each part tells the size of the whole: the first one tells that it is not what HEAD said.
        whole = answer.get("ContentRange", "").rpartition("/")[2]
        other = whole.isdecimal() and int(whole) != obj.size
        if other or answer["ContentLength"] != stop - start:  # it ignores ranges, or the object is another one
            body.close()
            raise ReplacedError(obj.name, self.uri)
        return body

    @contextmanager
    def _s3(self, name: str = "") -> Iterator[None]:
        """The border: what botocore raises leaves as one of our errors."""
        try:
            yield
        except ClientError as error:
            raise self._refused(error, name) from error
        except ProfileNotFound as error:
            reason = f"the AWS profile for {self.uri} is in no configuration file: {error}; add or unset it"
            raise UntoldError(reason) from error
        except PartialCredentialsError as error:
            reason = f"half a key for {self.uri}: {error}; set both, or neither"
            raise UntoldError(reason) from error
        except NoCredentialsError as error:
            reason = f"no AWS credentials for {self.uri}: give the process a role or a profile"
            raise UntoldError(reason) from error
        except FlexibleChecksumError as error:
            reason = f"what arrives of {self.uri}{name} is not what S3 sent, look at what lies between: {error}"
            raise DamagedError(Kind.UNAVAILABLE, reason) from error
        except RecursionError as error:  # botocore follows redirects of what is to tell it where to
            raise UntoldError(sentence(S3, {"Code": "TemporaryRedirect"}, self.uri, name)) from error
        except (ValueError, ParamValidationError) as error:
            reason = f"what boto3 is told of {self.uri} is not understood, check endpoint and credentials: {error}"
            raise UntoldError(reason) from error
        except ProxyConnectionError as error:
            reason = f"the proxy for {self.uri} does not let it be reached, check HTTPS_PROXY and NO_PROXY: {error}"
            raise UnreachableError(f"{reason}: {_root_of(error.kwargs.get('error'))}") from error
        except BotoCoreError as error:
            reason = f"the store {self.uri} cannot be reached, check network, endpoint and region: {error}"
            raise UnreachableError(reason, whole=isinstance(error, NoConnectionError)) from error
        except (
            OSError
        ) as error:  # a file that boto3 was told to read, as a token; botocore's timeouts are OSErrors, too
            reason = f"the AWS credentials for {self.uri} cannot be had: {error.strerror or error}: {error.filename}"
            raise UnreachableError(reason) from error

    def _refused(self, error: ClientError, name: str) -> MmeError:
        """What an error that S3 answered means, or the service that credentials are of."""
        answer = error.response.get("Error", {})
        code, service = str(answer.get("Code", "")), service_of(error.operation_name)
        if service == S3 and code == "InvalidObjectState":
            return MmeError(Kind.UNAVAILABLE, sentence(service, answer, self.uri, name))
        if code in _REPLACED:
            return ReplacedError(name, self.uri)
        if code in _NO_KEY or (code in _ABSENT and name and self._has_bucket()):
            return unknown_model(name, self.uri)
        if code in _NO_BUCKET or code in _ABSENT:
            reason = f"the bucket of {self.uri} does not exist: create it, or name another"
        else:
            if reason := sentence(service, answer, self.uri, name):
                return UntoldError(reason + by_another(error.response))
            reason = f"{service} answered {code or 'an error'} for {self.uri}{name}: try again"
            reason += told(service, message(answer))
            metadata = error.response.get("ResponseMetadata", {})
            if metadata.get("HTTPStatusCode", 0) in BUSY:
                asked = asked_pause(metadata.get("HTTPHeaders", {}))
                return UnreachableError(reason, whole=service != S3, asked_pause=asked)
        return UntoldError(reason)

    def _head(self, key: str) -> Any:
        """HEAD of an object. Where its refusal has no body, that of a GET is raised, which says why."""
        try:
            return self._client.head_object(Bucket=self._bucket, Key=key)
        except ClientError as error:
            if str(error.response.get("Error", {}).get("Code", "")) not in _BODILESS:
                raise
            bare = error
        try:
            self._client.get_object(Bucket=self._bucket, Key=key, Range="bytes=0-0")["Body"].close()
        except ClientError as error:
            if "Message" in error.response.get("Error", {}):
                raise
        except BotoCoreError:
            pass  # the first answer has to do
        raise bare

    def _has_bucket(self) -> bool:
        """False only when S3 says so: HEAD of an object answers 404 alike for the object and for the bucket."""
        try:
            self._client.head_bucket(Bucket=self._bucket)
        except ClientError as error:
            return str(error.response.get("Error", {}).get("Code", "")) not in (*_ABSENT, *_NO_BUCKET)
        except BotoCoreError:
            return True
        return True


def _check_bundle(path: str | None) -> None:
    """Refuse one that is not there, of which requests would say nothing but that S3 can't be reached."""
    if path and not os.path.exists(path):  # noqa: PTH110 - a text of boto3's
        raise invalid_argument(f"the CA bundle '{path}' is not there: mount it, or unset AWS_CA_BUNDLE (ca_bundle)")


def _root_of(error: Any) -> str:
    """What urllib3 says of a proxy, without what it says about that."""
    while getattr(error, "original_error", None) is not None:
        error = error.original_error
    return str(error)


class _Body:
    """A GET's body, whose errors are ours."""

    def __init__(self, store: S3Store, name: str, body: Any) -> None:
        self._store = store
        self._name = name
        self._body = body

    def readinto(self, buffer: memoryview) -> int:
        with self._store._s3(self._name):  # noqa: SLF001 - the same module's border
            received: int = self._body.readinto(buffer)
        return received

    def interrupt(self) -> None:
        with suppress(AttributeError, OSError, RuntimeError, ValueError):  # it is at its end, or none of urllib3's
            self._body._raw_stream.shutdown()  # noqa: SLF001 - botocore hands nothing out that wakes a reader

    def close(self) -> None:
        self._body.close()
