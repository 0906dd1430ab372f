"""What the disk tier makes of a network and a service that fail in every way they can."""

import os

import pytest

from model_handlers.errors import Kind, MmeError
from model_handlers.system.threads import CancelToken
from serve.sources import s3
from serve.sources.artifacts import Artifacts
from serve.sources.s3 import S3Store
from serve.sources.store import UnreachableError
from tests.serve import faulty_s3
from tests.serve.faulty_s3 import FaultyS3

pytestmark = pytest.mark.usefixtures("no_leaks")

NAME = "t/a.tar.gz"
PARTS = 5


class Setup:
    """An archive in S3 behind the proxy, and a tier on disk.

    Attributes:
        s3: the proxy.
        artifacts: the tier.
        put: replaces the archive, or puts one of another name.
        now: the seconds that the tier's clock shows.
    """

    def __init__(self, s3, bucket, store, directory, put):
        self.s3 = s3
        self.bucket = bucket
        self.now = 1000.0
        self.artifacts = Artifacts(store, directory, clock=lambda: self.now)
        self.put = put

    def fetch(self, name=NAME):
        """The first byte of the model's file, and whether it was downloaded."""
        artifact = self.artifacts.fetch(name)
        artifact.hold.release()
        return (artifact.path / "1" / "model.onnx").read_bytes()[:1], artifact.downloaded

    def with_retries(self):
        """From now on it asks as often as it does where nothing else is said."""
        store = S3Store(self.bucket, "models")
        self.artifacts = Artifacts(store, self.artifacts.directory, clock=lambda: self.now)

    def left(self):
        """What is unpacked only in part."""
        folder = self.artifacts.directory
        return [path.name for path in folder.iterdir() if path.name.startswith(".staging-")]


@pytest.fixture
def setup(s3_url, s3_bucket, s3_client, monkeypatch, tmp_path, targz_bytes):
    """See `Setup`."""

    def put(first, name=NAME, size=500_000):
        data = targz_bytes(("config.pbtxt", b"x"), ("1/model.onnx", first + os.urandom(size)))
        s3_client.put_object(Bucket=s3_bucket, Key=f"models/{name}", Body=data)

    monkeypatch.setattr("serve.sources.s3._FIRST_SECONDS", 0.001)  # where a connection breaks
    put(b"1")
    with FaultyS3(s3_url) as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.url)
        store = S3Store(s3_bucket, "models", part_size=500_000 // PARTS + 1, parts_ahead=3, attempts=1)
        setup = Setup(s3, s3_bucket, store, tmp_path / "disk", put)
        yield setup
        setup.artifacts.room.close()


@pytest.mark.parametrize(
    ("method", "fault", "kind", "words"),
    [
        ("HEAD", faulty_s3.status(403), Kind.UNAVAILABLE, "denies access"),
        ("HEAD", faulty_s3.status(400), Kind.UNAVAILABLE, "does not accept the AWS credentials"),
        ("HEAD", faulty_s3.status(404), Kind.UNKNOWN_MODEL, "is not in the store"),
        ("HEAD", faulty_s3.status(500), Kind.UNAVAILABLE, "500"),
        ("HEAD", faulty_s3.hung_up, Kind.UNAVAILABLE, "cannot be reached"),
        ("HEAD", faulty_s3.silent, Kind.UNAVAILABLE, "cannot be reached"),
        ("GET", faulty_s3.status(403, "AccessDenied"), Kind.UNAVAILABLE, "denies access"),
        ("GET", faulty_s3.status(400, "ExpiredToken"), Kind.UNAVAILABLE, "have expired or are wrong"),
        ("GET", faulty_s3.status(400, "IllegalLocationConstraintException"), Kind.UNAVAILABLE, "in another region"),
        ("GET", faulty_s3.status(404, "NoSuchKey"), Kind.UNKNOWN_MODEL, "is not in the store"),
        ("GET", faulty_s3.status(500, "InternalError"), Kind.UNAVAILABLE, "InternalError"),
        ("GET", faulty_s3.status(503, "SlowDown"), Kind.UNAVAILABLE, "SlowDown"),
        ("GET", faulty_s3.reset_after(0), Kind.UNAVAILABLE, None),
        ("GET", faulty_s3.claiming(1), Kind.UNAVAILABLE, "replaced while it was downloaded"),
        ("GET", faulty_s3.claiming(-1), Kind.UNAVAILABLE, "replaced while it was downloaded"),
        ("GET", faulty_s3.garbled, Kind.INVALID_MODEL, NAME),
    ],
)
def test_a_fault_is_one_error_and_leaves_nothing(setup, method, fault, kind, words):
    """Whatever goes wrong between HEAD and the last byte: one error of the right kind, no half archive, no thread.

    When the fault is over and the archive is another one, it is downloaded and whole.
    """
    setup.s3.faults[method] = fault
    with pytest.raises(MmeError, match=words) as caught:
        setup.fetch()
    assert caught.value.kind is kind
    assert setup.left() == []
    setup.s3.faults.clear()
    setup.put(b"2")

    assert setup.fetch() == (b"2", True)


def test_a_body_that_ends_before_its_length_is_the_stores_fault(setup):
    """It is asked for again, told as one that may come right, and never taken for a damaged archive."""
    setup.s3.faults["GET"] = faulty_s3.cut_after(0)
    with pytest.raises(MmeError, match=r"announced \d+ bytes of .* the download ended early, try again") as caught:
        setup.fetch()
    assert caught.value.kind is Kind.UNAVAILABLE
    assert setup.left() == []
    setup.s3.faults.clear()
    assert setup.fetch() == (b"1", True)


def test_an_announced_length_is_not_believed(setup):
    """An object that is said to be longer or shorter than it is never becomes an archive with bytes that are not its."""
    for difference in (-1000, 1000):
        setup.s3.faults["HEAD"] = faulty_s3.claiming(difference)
        with pytest.raises(MmeError):
            setup.fetch()
        assert setup.left() == []
    setup.s3.faults.clear()
    setup.put(b"2")
    assert setup.fetch() == (b"2", True)


def test_connections_that_break_and_crawl_only_cost_time(setup):
    """Parts whose connection is reset in the middle go on where it broke; slow ones are waited for."""
    resets = iter(range(PARTS))

    def flaky(client, answer):
        if next(resets, None) is None:
            return faulty_s3.slowly(5)(client, answer)
        return faulty_s3.reset_after(40_000)(client, answer)

    setup.s3.faults["GET"] = flaky

    assert setup.fetch() == (b"1", True)
    assert setup.s3.count("GET") > PARTS


def test_an_archive_replaced_in_the_middle_is_never_mixed(setup):
    """After a new etag between two parts the fetch begins anew, and has the new archive, whole."""
    gets = []

    def replace(method):
        if method == "GET":
            gets.append(method)
            if len(gets) == 3:
                setup.put(b"2")

    setup.s3.before = replace
    assert setup.fetch() == (b"2", True)
    assert setup.left() == []


def of_ours(caplog):
    """What the tier has logged."""
    return [record for record in caplog.records if record.name.startswith("mme.")]


@pytest.mark.parametrize("fault", [faulty_s3.garbled, faulty_s3.with_checksum(faulty_s3.garbled)], ids=["gzip", "s3"])
def test_what_arrives_damaged_is_downloaded_once_more(setup, fault, caplog):
    """Its own checksum, or S3's, tells: one warning, and the archive is not to blame."""
    setup.s3.faults["GET"] = faulty_s3.once(fault)

    assert setup.fetch() == (b"1", True)
    assert ["downloaded once more" in record.message for record in of_ours(caplog)] == [True]
    assert setup.left() == []


def test_a_checksum_that_fails_twice_is_told_as_the_networks(setup):
    """What S3 sends is not what arrives, so that another archive in its place would help nobody."""
    setup.put(b"1", "small.tar.gz", 1000)
    setup.s3.faults["GET"] = faulty_s3.with_checksum(faulty_s3.passed)
    with pytest.raises(MmeError, match="is not what S3 sent, look at what lies between") as caught:
        setup.fetch("small.tar.gz")

    assert caught.value.kind is Kind.UNAVAILABLE
    assert setup.s3.count("GET") == 2


# -- the store is away -------------------------------------------------------------------------------------------------

AWAY = {
    "500": faulty_s3.status(500),
    "503": faulty_s3.status(503),
    "429": faulty_s3.status(429),
    "reset": faulty_s3.hung_up,
    "silence": faulty_s3.silent,
}


@pytest.mark.parametrize("fault", AWAY.values(), ids=AWAY)
def test_what_is_on_disk_is_served_while_the_store_is_away(setup, fault, caplog):
    """An archive on disk needs no store: one warning, no second question for a while; others are errors still."""
    assert setup.fetch() == (b"1", True)
    setup.s3.faults["HEAD"] = fault
    asked = setup.s3.count("HEAD")

    for _ in range(3):
        assert setup.fetch() == (b"1", False)
    assert setup.s3.count("HEAD") == asked + 1
    with pytest.raises(UnreachableError):
        setup.artifacts.fetch("other.tar.gz")
    assert [record.levelname for record in caplog.records if "served from disk" in record.message] == ["WARNING"]


def test_when_the_store_is_back_it_is_believed_again(setup, monkeypatch, caplog):
    """After a while it is asked again, and an archive that was replaced meanwhile is downloaded."""
    monkeypatch.setattr("serve.sources.artifacts._SECONDS", 0.0)
    setup.fetch()
    setup.put(b"2")
    setup.s3.faults["HEAD"] = faulty_s3.status(500)
    for _ in range(2):
        assert setup.fetch() == (b"1", False)
    setup.s3.faults.clear()

    with caplog.at_level("INFO"):
        assert setup.fetch() == (b"2", True)
    assert [record.message for record in caplog.records if "served from disk" in record.message] != []
    assert "can be asked again" in caplog.text
    setup.s3.faults["HEAD"] = faulty_s3.status(500)
    assert setup.fetch() == (b"2", False)


@pytest.mark.parametrize(("code", "kind"), [(403, Kind.UNAVAILABLE), (404, Kind.UNKNOWN_MODEL)])
def test_a_store_that_answers_is_believed(setup, code, kind):
    """Who may not read an archive any more, or took it away, does not get it from the disk."""
    setup.fetch()
    setup.s3.faults["HEAD"] = faulty_s3.status(code)

    with pytest.raises(MmeError) as caught:
        setup.fetch()
    assert caught.value.kind is kind


def test_an_error_for_one_name_is_no_outage_of_another(setup, caplog):
    """A 503 for one key, or one prefix, has that served from disk; any other asks, and is current."""
    setup.put(b"2", "other.tar.gz")
    setup.fetch()
    setup.fetch("other.tar.gz")
    setup.s3.where = b"t/a.tar.gz"
    setup.s3.faults["HEAD"] = faulty_s3.status(503, "SlowDown")
    setup.put(b"3", "other.tar.gz")

    assert setup.fetch() == (b"1", False)
    assert setup.fetch("other.tar.gz") == (b"3", True)
    assert [record.message.partition(" served")[0] for record in of_ours(caplog)] == ["'t/a.tar.gz' is"]


@pytest.mark.parametrize("asked", [b"0", b"1", b"Thu, 01 Jan 1970 00:00:00 GMT", b"soon"])
def test_a_store_is_asked_again_after_the_pause_that_it_asks_for(setup, asked, monkeypatch):
    """In seconds or by a date; what is no pause is none. Nothing is told of a fault that passes."""
    setup.with_retries()
    slept = []
    monkeypatch.setattr("serve.sources.s3.Retries._waited", lambda _, seconds: not slept.append(seconds))
    setup.s3.faults["HEAD"] = faulty_s3.once(faulty_s3.status(503, "SlowDown", b"Retry-After: " + asked + b"\r\n"))

    assert setup.fetch() == (b"1", True)
    assert [seconds >= 1.0 for seconds in slept] == [asked == b"1"]


def test_a_store_that_asks_for_a_long_pause_is_left_alone(setup):
    """It is asked once, and what is not on disk is refused until then without another question."""
    setup.with_retries()
    setup.s3.faults["HEAD"] = faulty_s3.status(503, "SlowDown", b"Retry-After: 120\r\n")
    with pytest.raises(UnreachableError):
        setup.fetch()
    setup.now += 50
    with pytest.raises(UnreachableError, match=r"503 .*; it is asked again in 70 s"):
        setup.fetch()
    assert setup.s3.count("HEAD") == 1
    setup.s3.faults.clear()
    setup.now += 71
    assert setup.fetch() == (b"1", True)


def test_pauses_double_and_are_half_chance():
    """Four tries take over a second, and no two servers the same."""
    for attempt in (1, 2, 3):
        pauses = {s3.pause(attempt) for _ in range(100)}
        assert 0.2 * 2 ** (attempt - 1) <= min(pauses) < max(pauses) <= 0.4 * 2 ** (attempt - 1)


def test_a_load_that_is_given_up_waits_for_no_other_try(setup):
    """Its pause ends, and nothing more is asked."""
    setup.with_retries()
    setup.s3.faults["HEAD"] = faulty_s3.status(503, "SlowDown", b"Retry-After: 25\r\n")
    with pytest.raises(UnreachableError):
        setup.artifacts.fetch(NAME, token=CancelToken(cancelled=lambda: setup.s3.count("HEAD") > 0))

    assert setup.s3.count("HEAD") == 1


# -- broken archives ---------------------------------------------------------------------------------------------------


def test_a_broken_archive_is_downloaded_once_in_a_while(setup, monkeypatch):
    """For a time its error is remembered, by its etag; another archive in its place is downloaded at once."""
    setup.s3.faults["GET"] = faulty_s3.garbled
    with pytest.raises(MmeError) as first:
        setup.fetch()
    downloads = setup.s3.count("GET")
    for _ in range(3):
        with pytest.raises(MmeError, match="within the last 60 s") as again:
            setup.fetch()
        assert again.value.kind is first.value.kind is Kind.INVALID_MODEL
        assert again.value.message.startswith(first.value.message)
    assert setup.s3.count("GET") == downloads
    setup.s3.faults.clear()
    setup.put(b"2")
    assert setup.fetch() == (b"2", True)


def test_a_broken_archive_is_tried_again_after_a_while(setup):
    """When the time is over, it is downloaded as if it had never been."""
    setup.s3.faults["GET"] = faulty_s3.garbled
    with pytest.raises(MmeError):
        setup.fetch()
    setup.s3.faults.clear()
    with pytest.raises(MmeError, match="within the last 60 s"):
        setup.fetch()
    setup.now += 61

    assert setup.fetch() == (b"1", True)
