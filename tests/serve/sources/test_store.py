"""Archives come out of S3 and of folders whole, in one version, or with an error that says why not."""

import gc
import os
import socket
import threading
import tracemalloc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_handlers.errors import Kind, MmeError
from serve.sources.s3 import RangedDownload, S3Store
from serve.sources.store import LocalStore, StoredObject, open_store, validate_name

pytestmark = pytest.mark.usefixtures("no_leaks")

DATA = os.urandom(1_000_003)


@pytest.fixture(autouse=True)
def _hurried(monkeypatch):
    """Tries follow each other at once."""
    monkeypatch.setattr("serve.sources.s3._FIRST_SECONDS", 0.0)


def kind_of(call, *arguments):
    """The kind and the sentence of the error that a call raises."""
    with pytest.raises(MmeError) as caught:
        call(*arguments)
    return caught.value.kind, caught.value.message


@pytest.fixture
def s3(s3_bucket, s3_client):
    """Put an object under the prefix `p`, and give the store of that prefix."""

    def put(name="a.tar.gz", data=DATA, **options):
        s3_client.put_object(Bucket=s3_bucket, Key=f"p/{name}", Body=data)
        return S3Store(s3_bucket, "p", **options)

    return put


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "a//b",
        "a/",
        "../a",
        "a/../b",
        "a/..",
        ".",
        "./a",
        "a\\b",
        "a\nb",
        "a\0",
        "\x7f",
        "a" * 1025,
        "é" * 513,
        "\ud800",
    ],
)
def test_names_that_are_refused(name):
    """A name that could mean a place outside of the store, or nothing, is refused and shown on one line."""
    kind, message = kind_of(validate_name, name)

    assert kind is Kind.INVALID_ARGUMENT
    assert message.isascii()
    assert len(message) < 600


@pytest.mark.parametrize("name", ["a", "a.tar.gz", "tenant/a.tar.gz", "a b/ü.tar.gz", "..a/b..", "a" * 1024])
def test_names_that_are_taken(name):
    """Relative names are taken as they are, long and foreign ones too."""
    assert validate_name(name) == name


@given(st.text(alphabet="./a\\\n", max_size=8))
def test_names_stay_inside(name):
    """Whatever a name is made of, it is refused or stays below its store."""
    try:
        validate_name(name)
    except MmeError:
        return
    assert os.path.normpath(f"/store/{name}") == f"/store/{name}"


def test_open_store(tmp_path, s3_environment):
    """A URI of S3 and a path each open their store, and the store says where it is."""
    assert repr(open_store("s3://my-bucket/some/prefix/")) == "<S3Store s3://my-bucket/some/prefix/>"
    assert repr(open_store("s3://my-bucket")) == "<S3Store s3://my-bucket/>"
    assert repr(open_store(str(tmp_path))) == f"<LocalStore {tmp_path}>"
    assert open_store(f"file://{tmp_path}").uri == str(tmp_path)
    assert open_store("file:///").uri == open_store("file://").uri == "/"


@pytest.mark.parametrize(
    "uri", ["http://bucket/x", "s3://", "s3://B_d/x", "s3://bucket/a/../b", "s3://bucket/a//b", "/no/such/folder"]
)
def test_open_store_refuses(uri, s3_environment):
    """What is neither a bucket nor a folder is refused, by its name."""
    assert kind_of(open_store, uri)[0] is Kind.INVALID_ARGUMENT


def test_a_file_is_no_store(tmp_path):
    """Whoever names a model is told where it belongs: made anew, the folder would be in its way."""
    (tmp_path / "iris.onnx").touch()
    with pytest.raises(MmeError, match=r"iris.onnx' is a file: name the folder that holds the archives") as refused:
        open_store(str(tmp_path / "iris.onnx"))

    assert refused.value.kind is Kind.INVALID_ARGUMENT


@pytest.mark.parametrize("part_size", [1_000_002, 1_000_003, 1_000_004, 100_000, 333_335, 65_536])
def test_download_across_parts(part_size, s3):
    """The bytes arrive in order, however the parts fall."""
    store = s3(part_size=part_size, parts_ahead=3)
    obj = store.stat("a.tar.gz")
    with store.open(obj) as stream:
        data = b"".join(iter(lambda: stream.read(77_777), b""))

    assert obj == StoredObject("a.tar.gz", len(DATA), obj.etag)
    assert data == DATA


def test_small_reads_and_empty_object(s3):
    """Reads of any size work, and an empty object is empty."""
    store = s3(data=b"abcdefghij", part_size=3)
    with store.open(store.stat("a.tar.gz")) as stream:
        assert [stream.read(1), stream.read(1), *iter(lambda: stream.read(5), b"")] == [
            b"a",
            b"b",
            b"c",
            b"def",
            b"ghi",
            b"j",
        ]
    store = s3(data=b"")
    with store.open(store.stat("a.tar.gz")) as stream:
        assert stream.read(10) == b""


@pytest.mark.parametrize(("part_size", "ranges"), [(100, []), (60, [b"bytes=0-59", b"bytes=60-99"])])
def test_how_objects_are_asked_for(part_size, ranges, wire, s3_environment):
    """An object that is not larger than a part is one plain GET, a larger one ranges; each names the etag."""

    def answer(request):
        size = {b"0-59": 60, b"60-9": 40}.get(request.partition(b"bytes=")[2][:4], 100)
        return b"HTTP/1.1 200 X\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)

    wire.answers(answer)
    with S3Store("bucket", attempts=1, part_size=part_size).open(StoredObject("a", 100, "e-1")) as stream:
        assert len(b"".join(iter(lambda: stream.read(100), b""))) == 100

    assert sorted(wire.field(b"Range")) == ranges
    assert set(wire.field(b"If-Match")) == {b'"e-1"'}
    assert len(wire.requests) == max(1, len(ranges))


def test_replaced_during_download(s3, s3_bucket, s3_client):
    """An object that is replaced between two parts is an error and never a mix of two versions."""
    store = s3(part_size=100_000, parts_ahead=2)
    obj = store.stat("a.tar.gz")
    with store.open(obj) as stream:
        first = stream.read(50_000)
        s3_client.put_object(Bucket=s3_bucket, Key="p/a.tar.gz", Body=os.urandom(len(DATA)))
        kind, message = kind_of(lambda: b"".join(iter(lambda: stream.read(50_000), b"")))

    assert DATA.startswith(first)
    assert kind is Kind.UNAVAILABLE
    assert "replaced" in message
    assert "try again" in message


def test_replaced_before_download(s3, s3_client, s3_bucket):
    """The version that `stat` saw is the one that is read, or none; a deleted one is unknown."""
    store = s3()
    obj = store.stat("a.tar.gz")
    s3(data=b"other")
    with store.open(obj) as stream:
        assert kind_of(stream.read, 10)[0] is Kind.UNAVAILABLE
    s3_client.delete_object(Bucket=s3_bucket, Key="p/a.tar.gz")
    with store.open(obj) as stream:
        assert kind_of(stream.read, 10)[0] is Kind.UNKNOWN_MODEL


def test_closed_early(s3):
    """Closing in the middle stops and joins what is on the way; a thread that waits in a read is let go."""
    store = s3(part_size=50_000, parts_ahead=3)
    stream = store.open(store.stat("a.tar.gz"))
    stream.read(60_000)
    stream.close()
    stream.close()

    assert [thread for thread in threading.enumerate() if thread.name.startswith("download")] == []
    with pytest.raises(ValueError, match="closed"):
        stream.read(1)


def test_missing_object(s3):
    """A name that the store does not have is an unknown model; the sentence names it, the store, and what to do."""
    store = s3()
    kind, message = kind_of(store.stat, "b.tar.gz")

    assert kind is Kind.UNKNOWN_MODEL
    assert "'b.tar.gz'" in message
    assert store.uri in message
    assert "put the archive there" in message


def test_missing_bucket(s3_environment):
    """A bucket that is not there makes the store unavailable, and no model unknown."""
    store = S3Store("no-such-bucket-here")
    for call, *arguments in ((store.stat, "a.tar.gz"), (list, store.list())):
        kind, message = kind_of(call, *arguments)
        assert kind is Kind.UNAVAILABLE
        assert "bucket of s3://no-such-bucket-here/ does not exist" in message


def test_invalid_names_never_reach_s3(s3):
    """A bad name is refused before anything is asked."""
    assert kind_of(s3().stat, "../secret")[0] is Kind.INVALID_ARGUMENT


def test_network_down(s3_environment, monkeypatch):
    """Nobody behind the endpoint is an unavailable store, after the retries."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{closed.getsockname()[1]}")
        store = S3Store("bucket", attempts=1)
        kind, message = kind_of(store.stat, "a.tar.gz")

    assert kind is Kind.UNAVAILABLE
    assert "cannot be reached" in message


def test_no_credentials(s3_environment, monkeypatch):
    """A process without credentials is told so."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    kind, message = kind_of(S3Store("bucket").stat, "a.tar.gz")

    assert kind is Kind.UNAVAILABLE
    assert "no AWS credentials" in message


def test_profile_that_does_not_exist(s3_environment, monkeypatch):
    """What is wrong with the settings of boto3 is one of our errors too."""
    monkeypatch.setenv("AWS_PROFILE", "nobody")

    assert kind_of(S3Store, "bucket")[0] is Kind.UNAVAILABLE


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (403, "AccessDenied", Kind.UNAVAILABLE, "allow s3:GetObject"),
        (403, "InvalidAccessKeyId", Kind.UNAVAILABLE, "does not accept the AWS credentials"),
        (403, "InvalidObjectState", Kind.UNAVAILABLE, "restore it"),
        (503, "SlowDown", Kind.UNAVAILABLE, "SlowDown"),
        (412, "PreconditionFailed", Kind.UNAVAILABLE, "replaced"),
        (404, "NoSuchKey", Kind.UNKNOWN_MODEL, "'a.tar.gz'"),
        (404, "NoSuchBucket", Kind.UNAVAILABLE, "does not exist"),
    ],
)
def test_what_s3_answers(status, code, kind, words, wire, s3_environment):
    """Every answer of S3 is one of our errors, chosen by its code; of a message only what AccessDenied speaks of counts."""
    body = f"<Error><Code>{code}</Code><Message>access denied no such key</Message></Error>".encode()
    head = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
    wire.answers(lambda request: head + (b"" if request.startswith(b"HEAD") else body))
    store = S3Store("bucket", attempts=1)
    with store.open(StoredObject("a.tar.gz", 10, "e")) as stream:
        found, message = kind_of(stream.read, 1)

    assert found is kind
    assert words in message


def test_connection_that_breaks(wire, s3_environment):
    """A part whose connection breaks goes on where it broke, and the bytes are whole."""
    data = bytes(range(250))

    def some(request):
        fields = dict(line.split(b": ", 1) for line in request.split(b"\r\n")[1:] if b": " in line)
        start, stop = (int(x) for x in fields.get(b"Range", b"bytes=0-249").removeprefix(b"bytes=").split(b"-"))
        part = data[start : stop + 1]
        return b"HTTP/1.1 206 X\r\nContent-Length: %d\r\n\r\n" % len(part) + part[:70]

    wire.answers(some)
    store = S3Store("bucket", attempts=1, part_size=200)
    with store.open(StoredObject("a.tar.gz", 250, "e")) as stream:
        received = b"".join(iter(lambda: stream.read(100), b""))

    assert received == data
    assert sorted(wire.field(b"Range")) == [b"bytes=0-199", b"bytes=140-199", b"bytes=200-249", b"bytes=70-199"]


def test_connection_that_always_breaks(wire, s3_environment):
    """A part that never gets on is given up, with an error and without a thread."""
    wire.answers(lambda _: b"HTTP/1.1 200 X\r\nContent-Length: 100\r\n\r\n")
    store = S3Store("bucket", attempts=1)
    with store.open(StoredObject("a.tar.gz", 100, "e")) as stream:
        kind, message = kind_of(stream.read, 1)

    assert kind is Kind.UNAVAILABLE
    assert message == (
        "the store announced 100 bytes of 'a.tar.gz' and sent none behind byte 0: the download ended early, try again"
    )
    assert len(wire.requests) == 4


@pytest.mark.parametrize("status", [b"301 Moved Permanently", b"307 Temporary Redirect"])
def test_a_redirect_to_another_region_is_followed(wire, s3_environment, status):
    """Where S3 tells the bucket's region, it is asked there, and from then on."""

    def answer(request):
        if b"/us-east-1/s3/" in request:
            return b"HTTP/1.1 " + status + b"\r\nx-amz-bucket-region: eu-west-1\r\nContent-Length: 0\r\n\r\n"
        return b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 5\r\n\r\n'

    wire.answers(answer)
    store = S3Store("bucket", attempts=1)

    assert store.stat("a.tar.gz") == StoredObject("a.tar.gz", 5, "e")
    asked = len(wire.requests)
    assert store.stat("b.tar.gz").size == 5
    assert len(wire.requests) == asked + 1


def test_an_object_that_is_shorter_than_announced_is_told_by_its_first_part(wire, s3_environment):
    """Not by the last one, when all others have come."""
    head = b"HTTP/1.1 206 X\r\nContent-Length: 50\r\nContent-Range: bytes 0-49/60\r\n\r\n"
    wire.answers(lambda _: head + bytes(50))
    store = S3Store("bucket", attempts=1, part_size=50, parts_ahead=1)
    with store.open(StoredObject("a.tar.gz", 1000, "e")) as stream:
        kind, message = kind_of(stream.read, 1)

    assert kind is Kind.UNAVAILABLE
    assert "replaced" in message
    assert wire.field(b"Range") == [b"bytes=0-49"]


def test_server_that_ignores_ranges(wire, s3_environment):
    """An answer of another length than was asked for is never taken for the part."""
    wire.answers(lambda _: b"HTTP/1.1 200 X\r\nContent-Length: 100\r\n\r\n" + bytes(100))
    store = S3Store("bucket", attempts=1, part_size=50)
    with store.open(StoredObject("a.tar.gz", 100, "e")) as stream:
        assert kind_of(stream.read, 1)[0] is Kind.UNAVAILABLE


def test_list_s3(s3, s3_client, s3_bucket):
    """The list holds the archives below the prefix, in order, page after page, with what `stat` says."""
    store = s3("b/c.tar.gz", b"22")
    for name in ("a.tar.gz", "readme.txt", "d.tar.gz", "x//y.tar.gz"):
        s3(name, b"1")
    s3_client.put_object(Bucket=s3_bucket, Key="other.tar.gz", Body=b"")
    s3_client.put_object(Bucket=s3_bucket, Key="pq/other.tar.gz", Body=b"")

    assert [obj.name for obj in store.list()] == ["a.tar.gz", "b/c.tar.gz", "d.tar.gz"]
    assert list(store.list())[:2] == [store.stat("a.tar.gz"), store.stat("b/c.tar.gz")]


def test_local_store(tmp_path):
    """A folder lists, describes and opens its archives by relative names."""
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "b.tar.gz").write_bytes(b"bb")
    (tmp_path / "a.tar.gz").write_bytes(b"a")
    (tmp_path / "readme").touch()
    (tmp_path / "d.tar.gz").mkdir()
    (tmp_path / "gone.tar.gz").symlink_to(tmp_path / "nowhere")
    store = LocalStore(tmp_path)

    assert [obj.name for obj in store.list()] == ["a.tar.gz", "t/b.tar.gz"]
    assert next(store.list()).name == "a.tar.gz"
    with store.open(store.stat("t/b.tar.gz")) as stream:
        assert stream.read() == b"bb"


@pytest.mark.parametrize("name", ["b.tar.gz", "folder", "a.tar.gz/b"])
def test_local_missing(name, tmp_path):
    """What is not a file of the folder is an unknown model."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.tar.gz").touch()
    kind, message = kind_of(LocalStore(tmp_path).stat, name)

    assert kind is Kind.UNKNOWN_MODEL
    assert str(tmp_path) in message


def test_local_outside(tmp_path):
    """No name leads out of the folder."""
    assert kind_of(LocalStore(tmp_path).stat, "../a.tar.gz")[0] is Kind.INVALID_ARGUMENT


def test_local_replaced(tmp_path):
    """A file that changed since `stat` is an error; one that is replaced while it is open is read as it was."""
    path = tmp_path / "a.tar.gz"
    path.write_bytes(b"old")
    store = LocalStore(tmp_path)
    obj = store.stat("a.tar.gz")
    with store.open(obj) as stream:
        (tmp_path / "new").write_bytes(b"new")
        (tmp_path / "new").replace(path)
        assert stream.read() == b"old"
    kind, message = kind_of(store.open, obj)

    assert kind is Kind.UNAVAILABLE
    assert "try again" in message
    assert store.stat("a.tar.gz").etag != obj.etag


class MemoryRange:
    """A range of bytes in memory, whose `gate` says how much may go out."""

    def __init__(self, data, gate):
        self.data, self.gate, self.closed = data, gate, False

    def readinto(self, buffer):
        """At most 1000 bytes."""
        self.gate.wait()
        size = min(1000, len(buffer), len(self.data))
        buffer[:size], self.data = self.data[:size], self.data[size:]
        return size

    def interrupt(self):
        """Leave it to the gate."""

    def close(self):
        """Note it."""
        self.closed = True


def test_parts_ahead_are_bounded():
    """No more parts are asked for than may be in memory, until the reader has taken one."""
    asked, gate, ahead = [], threading.Event(), threading.Semaphore(0)
    gate.set()

    def open_range(start, stop, _token):
        asked.append(start)
        ahead.release()
        return MemoryRange(DATA[start:stop], gate)

    download = RangedDownload(open_range, 1_000_000, part_size=100_000, ahead=3, name="a")
    for _ in range(3):
        ahead.acquire()
    before = sorted(asked)
    taken = b""
    while len(taken) < 100_000:
        taken += download.read(100_000 - len(taken))
    ahead.acquire()
    after = sorted(asked)
    download.close()

    assert before == [0, 100_000, 200_000]
    assert after == [0, 100_000, 200_000, 300_000]
    assert taken == DATA[:100_000]


class Zeros:
    """A range that takes no memory of its own."""

    def readinto(self, buffer):
        """At most 50,000 bytes, as they are."""
        return min(len(buffer), 50_000)

    def interrupt(self):
        """Nothing waits."""

    def close(self):
        """Nothing is open."""


def test_parts_that_were_read_are_freed():
    """Threads that wait for room keep no hold of what they brought: as many parts as may be ahead, and the one read."""
    with RangedDownload(lambda *_: Zeros(), 60_000_000, part_size=1_000_000, ahead=4, name="a") as download:
        tracemalloc.start()
        try:
            for _ in range(6000):
                download.read(10_000)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most < 5.5e6


def test_a_download_that_was_closed_is_freed_at_once():
    """It knows of nothing that knows it: what it holds waits for no collection."""
    with RangedDownload(lambda *_: Zeros(), 1000, part_size=1000, ahead=1, name="a") as download:
        assert len(download.readall()) == 1000
    kept = weakref.ref(download)
    gc.disable()
    try:
        del download
        assert kept() is None
    finally:
        gc.enable()


def test_reader_let_go_by_close():
    """A thread that waits for bytes that do not come is let go when another one closes the stream."""
    gate, caught = threading.Event(), []
    opened = threading.Event()

    def open_range(start, stop, _token):
        opened.set()
        return MemoryRange(DATA[start:stop], gate)

    download = RangedDownload(open_range, 1000, part_size=1000, ahead=2, name="a")

    def read():
        try:
            download.read(10)
        except ValueError as error:
            caught.append(str(error))
        gate.set()  # only now may the part's own thread go on

    reader = threading.Thread(target=read)
    reader.start()
    opened.wait()
    download.close()
    reader.join()

    assert caught == ["the download of a is closed"]


def test_threads_whose_bytes_do_not_come_are_woken_by_close(monkeypatch, s3_environment):
    """They are gone when it returns, though the store sends nothing more and does not hang up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{listener.getsockname()[1]}")
        stream = S3Store("bucket", attempts=1).open(StoredObject("a", 1 << 20, "e"))
        connection, _ = listener.accept()
        with connection:
            connection.recv(65_536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1048576\r\n\r\n" + bytes(1 << 18))
            assert stream.read(10) == bytes(10)
            stream.close()
            assert [thread.name for thread in threading.enumerate() if thread.name.startswith("download a")] == []


def test_a_store_that_does_not_answer_can_not_be_reached(monkeypatch, s3_environment):
    """A timeout is the network's, and says nothing of credentials."""
    monkeypatch.setattr("serve.sources.s3._READ_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{listener.getsockname()[1]}")
        kind, message = kind_of(S3Store("bucket", attempts=1).stat, "a")

    assert kind is Kind.UNAVAILABLE
    assert message.startswith("the store s3://bucket/ cannot be reached, check network")


def test_ranges_are_closed():
    """Every range that was opened is closed, after success, after an error, and when the stream is closed early."""
    gate, bodies = threading.Event(), []
    gate.set()

    def open_range(start, stop, _token):
        bodies.append(MemoryRange(DATA[start:stop] if start != 4000 else b"", gate))
        return bodies[-1]

    with RangedDownload(open_range, 10_000, part_size=2000, ahead=2, name="a") as download:
        kind, message = kind_of(lambda: b"".join(iter(lambda: download.read(100), b"")))

    assert kind is Kind.UNAVAILABLE
    assert "ended early" in message
    assert all(body.closed for body in bodies)


@pytest.mark.parametrize(("patience", "openings"), [(0.0, 1), (60.0, 4)])
def test_a_store_that_falls_silent_is_not_waited_for_again_and_again(patience, openings):
    """A part without a byte for so long is given up, however many more times it could be opened."""
    opened, gate = [], threading.Event()
    gate.set()

    def open_range(start, stop, _token):
        opened.append(start)
        return MemoryRange(b"", gate)

    with RangedDownload(open_range, 100, part_size=100, ahead=1, name="a", patience=patience) as download:
        kind, message = kind_of(download.read, 1)

    assert kind is Kind.UNAVAILABLE
    assert "the store announced 100 bytes of 'a' and sent none behind byte 0" in message
    assert len(opened) == openings


@pytest.fixture
def wire(monkeypatch, s3_environment):
    """A server on loopback that answers as it is told and then hangs up; S3 for the process."""
    server = Wire()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.port}")
    yield server
    server.close()


class Wire:
    """Reads one request a connection, keeps it, answers, closes."""

    def __init__(self):
        self.requests = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._answer = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def answers(self, answer):
        """Set what makes an answer of a request."""
        self._answer = answer

    def field(self, name):
        """That header of each request."""
        lines = [line for request in self.requests for line in request.split(b"\r\n")]
        return [line.split(b": ")[1] for line in lines if line.startswith(name + b": ")]

    def _serve(self):
        while True:
            connection, _ = self._listener.accept()
            with connection:
                request = b""
                while b"\r\n\r\n" not in request:
                    data = connection.recv(65536)
                    if not data:
                        break
                    request += data
                if request == b"stop\r\n\r\n":
                    return
                if request:
                    self.requests.append(request)
                    # said aloud, or the client takes the dying connection for its next request
                    answer = self._answer(request).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
                    connection.sendall(answer)

    def close(self):
        """Stop the thread."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(b"stop\r\n\r\n")
        self._thread.join()
        self._listener.close()
