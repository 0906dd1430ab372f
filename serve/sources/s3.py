"""The archives under a prefix of a bucket in S3, or what else lies there.

boto3 finds credentials, region and endpoint by its own rules. What botocore raises becomes an error of ours at one
border, by the table in `s3_rules`. Importing this takes a tenth of a second. Thread-safe; runs on load threads.
"""

from __future__ import annotations

import io
import os
import random
import re
import threading
import time
from contextlib import closing, contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, cast

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
    HTTPClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    ProxyConnectionError,
    SSLError,
)
from botocore.exceptions import ConnectionError as NoConnectionError

from model_handlers.errors import DamagedError, Kind, MmeError, invalid_argument
from model_handlers.system.threads import NEVER, CancelToken, start_thread
from serve.sources.s3_rules import S3, by_another, message, sentence, service_of, told
from serve.sources.store import (
    ARCHIVE_SUFFIX,
    NO_CREDENTIALS,
    ReplacedError,
    StoredObject,
    UnreachableError,
    UntoldError,
    unknown_model,
    validate_name,
    wrong_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import BinaryIO

    _Response = tuple[Any, Mapping[str, Any]]  # as it came, and as it was read

    from _typeshed import WriteableBuffer


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
BUSY = (429, *range(500, 600))  # statuses that say nothing about what was asked for
_FIRST_SECONDS = 0.4
_MOST_SECONDS = 30.0  # that a service may ask for
_HURRIED_ATTEMPTS = 2
_PASSING = ("RequestTimeout", "RequestTimeoutException")  # codes of a 400 that may come right
_CHUNK_SIZE = 256 << 10
_ATTEMPTS = 4  # openings of one part, of `attempts` requests each, before its error is the download's
_CLOSE_SECONDS = 0.5  # that the threads of a download that is closed are waited for
_PATIENCE_SECONDS = 20.0  # without a byte of a part, over several openings, each of which waits for some seconds


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

        `endpoint` is the URL of an S3 that is not AWS's. Objects of more than `part_size` bytes are fetched in parts,
        of which `parts_ahead` are in memory; `attempts` of each request are made before its error counts.
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
        validate_name(name)
        with self._s3(name), self._retries.for_load(token, hurried=hurried):
            head = self._head(self._prefix + name)
        return StoredObject(name, head["ContentLength"], head["ETag"].strip('"'))

    def open(self, obj: StoredObject) -> BinaryIO:
        """See `Store.open`. Closing it early stops the parts that are on the way."""

        def open_range(start: int, stop: int, token: CancelToken) -> _Body:
            with self._retries.for_load(token):
                return self._get(obj, start, stop)

        ahead, part_size = self._parts_ahead, self._part_size
        download = RangedDownload(open_range, obj.size, part_size=part_size, ahead=ahead, name=obj.name)
        # not in a BufferedReader: its lock would let no other thread close it while a read waits
        return cast("BinaryIO", download)

    def list(self) -> Iterator[StoredObject]:
        return (obj for obj in self.objects() if obj.name.endswith(ARCHIVE_SUFFIX) and not wrong_name(obj.name))

    def objects(
        self, beginning: str = "", token: CancelToken = NEVER, *, hurried: bool = False
    ) -> Iterator[StoredObject]:
        """Everything under the prefix whose name begins so, looked at page by page as it is asked for."""
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
        except OSError as error:  # a file that boto3 was told to read, as a token; behind botocore's, of which some are
            reason = f"the AWS credentials for {self.uri} cannot be had: {error.strerror or error}: {error.filename}"
            raise UnreachableError(reason) from error

    def _refused(self, error: ClientError, name: str) -> MmeError:
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
        """False only when S3 says so: HEAD of an object answers 404 for a missing bucket, too."""
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
        """Fill the start of `buffer`; 0 at the end. An MmeError says that the connection broke, unless Damaged."""
        with self._store._s3(self._name):  # noqa: SLF001 - the same module's border
            received: int = self._body.readinto(buffer)
        return received

    def interrupt(self) -> None:
        """Wake the thread that reads."""
        with suppress(AttributeError, OSError, RuntimeError, ValueError):  # it is at its end, or none of urllib3's
            self._body._raw_stream.shutdown()  # noqa: SLF001 - botocore hands nothing out that wakes a reader

    def close(self) -> None:
        self._body.close()


def pause(attempt: int) -> float:
    """Seconds to wait behind a try, counted from 1. Half is chance: servers do not all come back at once."""
    return _FIRST_SECONDS * 2.0 ** (attempt - 1) * random.uniform(0.5, 1.0)  # noqa: S311 - nothing is kept secret


def asked_pause(headers: Mapping[str, str]) -> float:
    """The seconds that an answer asks to be left alone for, by its headers in lower case; 0 for none."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0) if text else 0.0
    except (ValueError, OverflowError):
        return 0.0


class Retries:
    """When a request is sent again: asked by a client of botocore after each try, on the thread that asks S3.

    botocore's own rules know no `Retry-After` and no end of a load. A pause is as long as the service asks for; one
    that asks for more than half a minute is left alone. `attempts` of each request are made before its error counts.
    """

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._here = threading.local()

    def __repr__(self) -> str:
        return f"<Retries, {self._attempts} attempts>"

    @contextmanager
    def for_load(self, token: CancelToken, *, hurried: bool = False) -> Iterator[None]:
        """Requests of this thread in there are retried until the token is cancelled; in a hurry, once."""
        self._here.token, self._here.hurried = token, hurried
        try:
            yield
        finally:
            del self._here.token, self._here.hurried

    def __call__(
        self, response: _Response | None, caught_exception: Exception | None, attempts: int, **_: object
    ) -> int | None:
        """Wait, and have the request sent again by 0; None where its answer, or its error, is what there is."""
        most = _HURRIED_ATTEMPTS if getattr(self._here, "hurried", False) else self._attempts
        if attempts >= min(most, self._attempts) or not _may_come_right(response, caught_exception):
            return None
        asked = asked_pause(_headers(response))
        if asked > _MOST_SECONDS:
            return None
        return 0 if self._waited(max(pause(attempts), asked)) else None

    def _waited(self, seconds: float) -> bool:
        token: CancelToken = getattr(self._here, "token", NEVER)
        return token.sleep(seconds)


def _may_come_right(response: _Response | None, error: Exception | None) -> bool:
    if response is None:
        return isinstance(error, (NoConnectionError, HTTPClientError)) and not isinstance(error, SSLError)
    answer, parsed = response
    return answer.status_code in BUSY or parsed.get("Error", {}).get("Code") in _PASSING


def _headers(response: _Response | None) -> dict[str, str]:
    return {} if response is None else {str(name).lower(): str(text) for name, text in response[0].headers.items()}


class _Part:
    """The first `filled` bytes of `data` have arrived and never change again."""

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.data = memoryview(bytearray(size))
        self.filled = 0


class RangedDownload(io.RawIOBase):
    """A large object's bytes in order, fetched in parts by a few threads at once.

    One connection to an object store is slower than the network; several fill it. Bytes of a part are delivered while
    the rest of it is coming, a part whose connection breaks goes on where it broke, and at most `ahead` parts are in
    memory. The condition guards what threads share; `_offset` is the reader's. Read by one thread; closed by any.
    """

    def __init__(
        self,
        open_range: Callable[[int, int, CancelToken], _Body],
        size: int,
        *,
        part_size: int,
        ahead: int,
        name: str,
        patience: float = _PATIENCE_SECONDS,
    ) -> None:
        """Start threads, at most one for each of the `ahead` parts that may be in memory.

        `open_range` opens the bytes from its first argument up to, not including, its second, and stops to try when the
        token is cancelled; what it raises ends the download. A part without a byte for `patience` seconds is given up.
        """
        super().__init__()
        self._open_range = open_range
        self._size = size
        self._part_size = part_size
        self._ahead = ahead
        self._count = -(-size // part_size)
        self._name = name
        self._stop = threading.Event()
        self._token = CancelToken(name, self._stop.is_set)  # which does not know the download: no cycle keeps it
        self._patience = patience
        self._changed = threading.Condition()
        self._parts: dict[int, _Part] = {}
        self._claimed = 0  # parts that a thread has taken on
        self._reading = 0  # the part that the reader is in
        self._offset = 0  # of the reader in that part
        self._error: BaseException | None = None
        self._bodies: set[_Body] = set()  # being read
        self._threads: list[threading.Thread] = []
        for lane in range(min(ahead, self._count)):
            thread = threading.Thread(target=self._work, name=f"download {name} {lane}", daemon=True)
            try:
                start_thread(thread)
            except MmeError:
                if not self._threads:
                    raise
                break  # those that run do it alone
            self._threads.append(thread)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Bytes that have arrived, at least one; 0 at the end. Raises ValueError when closed while it waits."""
        target = memoryview(buffer).cast("B")
        if self._reading == self._count:
            return 0
        part = self._arrived()
        size = min(len(target), part.filled - self._offset)
        target[:size] = part.data[self._offset : self._offset + size]
        self._advance(part, size)
        return size

    def close(self) -> None:
        """Stop the threads. One that waits for the head of an answer is left behind until that comes, or times out."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()
            for body in self._bodies:
                body.interrupt()
        ends = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():  # a stream that was dropped unclosed may end in one of them
                thread.join(max(ends - time.monotonic(), 0.0))
        self._parts.clear()
        super().close()

    def _arrived(self) -> _Part:
        with self._changed:
            self._changed.wait_for(lambda: self._token.cancelled or self._error or self._has_bytes())
            if self._token.cancelled:
                raise ValueError(f"the download of {self._name} is closed")
            if self._error:
                raise self._error
            return self._parts[self._reading]

    def _has_bytes(self) -> bool:
        part = self._parts.get(self._reading)
        return part is not None and part.filled > self._offset

    def _advance(self, part: _Part, size: int) -> None:
        self._offset += size
        if self._offset == len(part.data):
            with self._changed:
                self._parts.pop(self._reading, None)
                self._reading += 1
                self._offset = 0
                self._changed.notify_all()

    def _work(self) -> None:
        try:
            while self._download_next():
                pass
        except BaseException as error:  # noqa: BLE001 - it is raised again, where the stream is read
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _download_next(self) -> bool:
        """Download a part; keep no hold of it, so that it is freed as soon as it was read."""
        part = self._claim()
        if part is not None:
            self._download(part)
        return part is not None

    def _claim(self) -> _Part | None:
        with self._changed:
            self._changed.wait_for(lambda: self._idle() or self._claimed < self._reading + self._ahead)
            if self._idle():
                return None
            start = self._claimed * self._part_size
            part = self._parts[self._claimed] = _Part(start, min(self._part_size, self._size - start))
            self._claimed += 1
            return part

    def _idle(self) -> bool:
        return self._token.cancelled or self._error is not None or self._claimed == self._count

    def _download(self, part: _Part) -> None:
        """Fill the part, opening what is missing of it again when the connection breaks."""
        since = time.monotonic()
        for attempt in range(1, _ATTEMPTS + 1):
            before = part.filled
            with self._opened(part.start + before, part.start + len(part.data)) as body:
                try:
                    self._receive(part, body)
                except DamagedError:  # and the bytes before were handed on
                    raise
                except MmeError as error:
                    if self._token.cancelled:
                        return
                    if part.filled > before:
                        since = time.monotonic()
                    elif attempt == _ATTEMPTS or time.monotonic() - since > self._patience:
                        raise self._ended_early(part) from error
                    if attempt == _ATTEMPTS:
                        raise
                else:
                    return
            self._token.sleep(pause(attempt))

    @contextmanager
    def _opened(self, start: int, stop: int) -> Iterator[_Body]:
        with closing(self._open_range(start, stop, self._token)) as body:
            with self._changed:
                self._bodies.add(body)
            try:
                yield body
            finally:
                with self._changed:
                    self._bodies.discard(body)

    def _ended_early(self, part: _Part) -> MmeError:
        return MmeError(
            Kind.UNAVAILABLE,
            f"the store announced {self._size} bytes of '{self._name}' and sent none behind byte "
            f"{part.start + part.filled}: the download ended early, try again",
        )

    def _receive(self, part: _Part, body: _Body) -> None:
        while part.filled < len(part.data) and not self._token.cancelled:
            received = body.readinto(part.data[part.filled : part.filled + _CHUNK_SIZE])
            if not received:
                raise self._ended_early(part)
            if part.filled + received == len(part.data):
                body.readinto(memoryview(bytearray(1)))  # the end, where the store's checksum is compared
            with self._changed:
                part.filled += received
                self._changed.notify_all()
