"""Models of a repository in S3 come to disk whole, once per content, or with an error that says why not."""

import asyncio
import itertools
import os
import threading

import pytest
from boto3.session import Session
from botocore.client import BaseClient

from model_handlers.errors import Kind, MmeError
from model_handlers.system.threads import NEVER, CancelToken
from serve.loading.loader import ModelLoader
from serve.sources.s3 import S3Store
from serve.sources.s3_repository import Directories, check_names, open_bucket, transfer
from serve.sources.source import S3Model
from tests.serve import faulty_s3
from tests.serve.faulty_s3 import FaultyS3

pytestmark = pytest.mark.usefixtures("no_leaks")

CONFIG = b'backend: "onnxruntime"\n'
ALL = b'backend: "onnxruntime" version_policy { all {} }\n'


@pytest.fixture
def put(s3_bucket, s3_client):
    """Put objects into the repository `r/`: key → content, or None to remove it."""

    def put(contents):
        for key, content in contents.items():
            if content is None:
                s3_client.delete_object(Bucket=s3_bucket, Key=f"r/{key}")
            else:
                s3_client.put_object(Bucket=s3_bucket, Key=f"r/{key}", Body=content)

    return put


@pytest.fixture
def repository(s3_bucket, tmp_path):
    """A function that makes the tier of the repository, each time anew, as another run does."""
    made = []

    def make(*prefixes, **options):
        prefixes = prefixes or ("r",)
        made.append(
            Directories([S3Store(s3_bucket, prefix, attempts=1) for prefix in prefixes], tmp_path / "disk", **options)
        )
        return made[-1]

    yield make
    for each in made:
        each.room.close()


def error_of(call, *arguments):
    """The kind and the sentence of the error that a call raises."""
    with pytest.raises(MmeError) as caught:
        call(*arguments)
    return caught.value.kind, caught.value.message


def tree(path):
    """Every file below by its name, and every empty directory by its name and a slash."""
    found = {}
    for below in path.rglob("*"):
        name = below.relative_to(path).as_posix()
        if below.is_file():
            found[name] = below.read_bytes()
        elif not any(below.iterdir()):
            found[f"{name}/"] = None
    return found


MODEL = {"m/config.pbtxt": ALL, "m/1/model.onnx": b"one", "m/1/empty": b"", "m/2/": b"", "mm/1/model.onnx": b"no"}


VERSIONS = {f"m/{version}/model.onnx": version.encode() for version in ("1", "2", "10", "010", "labels")}


@pytest.mark.parametrize(
    ("files", "kept"),
    [
        ({}, {"10"}),
        ({"config.pbtxt": b""}, {"10"}),
        ({"config.pbtxt": b"version_policy { latest { num_versions: 2 } }"}, {"2", "10"}),
        ({"config.pbtxt": b"version_policy { specific { versions: [1, 7] } }"}, {"1"}),
        ({"config.pbtxt": b"version_policy { all {} }"}, {"1", "2", "10"}),
        ({"config.pbtxt": b"version_policy { specific { versions: 7 } }"}, {"1", "2", "10"}),
        ({"config.pbtxt": b"no configuration"}, {"1", "2", "10"}),
        ({"config.pbtxt": b"#" * (2 << 20)}, {"10"}),
        ({"config.pbtxt": CONFIG, "1/model.py": b"pass"}, {"1", "2", "10"}),
        ({"config.pbtxt": b'model_operations { op_library_filename: "1/a.so" }'}, {"1", "2", "10"}),
        ({"config.pbtxt": CONFIG, "configs/it.pbtxt": b"version_policy { specific { versions: 2 } }"}, {"2"}),
        ({"config.pbtxt": CONFIG, "configs/other.pbtxt": b"version_policy { specific { versions: 2 } }"}, {"10"}),
    ],
)
def test_versions_that_are_not_served_are_not_downloaded(put, repository, files, kept):
    """Unless code or operators may look into them, or nobody can say which are served; what is no version always is."""
    put(VERSIONS | {f"m/{name}": content for name, content in files.items()})
    artifact = repository(config_name="it").fetch("m")
    names = {path.parent.name for path in artifact.path.rglob("model.onnx")}
    assert names == kept | {"010", "labels"}


def test_a_client_that_has_a_model_loaded_otherwise_may_want_any_version(put, repository):
    """From then on; another policy that is stored has what it wants fetched."""
    put(VERSIONS | {"m/config.pbtxt": CONFIG})
    models = repository()
    before = models.fetch("m")
    put({"m/config.pbtxt": b"version_policy { latest { num_versions: 2 } }"})
    after = models.fetch("m")
    models.want_whole("m")
    whole = models.fetch("m")
    assert [len(list(each.path.rglob("model.onnx"))) for each in (before, after, whole)] == [3, 4, 5]
    assert not models.fetch("m").downloaded


def test_a_model_comes_to_disk_as_a_directory_of_its_name(put, repository):
    """All objects below it, empty files and directories too, and nothing of a model whose name begins alike."""
    put(MODEL)
    artifact = repository().fetch("m")
    assert tree(artifact.path) == {"m/config.pbtxt": ALL, "m/1/model.onnx": b"one", "m/1/empty": b"", "m/2/": None}
    assert artifact.downloaded
    assert artifact.path.stat().st_mode & 0o777 == 0o755
    assert (artifact.path / "m" / "config.pbtxt").stat().st_mode & 0o777 == 0o644


def test_known_content_is_not_downloaded_again(put, repository, s3_client, s3_bucket, monkeypatch):
    """Neither by the same run nor by a later one; another content is, beside the old one; the old one is found again."""
    put({name: content for name, content in MODEL.items() if name != "m/2/"})
    first = repository().fetch("m")
    later = repository()
    with monkeypatch.context() as patched:
        patched.setattr(S3Store, "open", None)
        again = later.fetch("m")
    assert (again.path, again.downloaded, again.identity) == (first.path, False, first.identity)
    put({"m/1/model.onnx": b"two"})
    second = later.fetch("m")
    assert second.downloaded
    assert (second.path / "m" / "1" / "model.onnx").read_bytes() == b"two"
    assert (first.path / "m" / "1" / "model.onnx").read_bytes() == b"one"
    put({"m/1/model.onnx": b"one"})
    assert later.fetch("m").path == first.path


@pytest.mark.parametrize("change", [{"m/1/new": b""}, {"m/1/empty": None}, {"m/1/model.onnx": b"two"}])
def test_a_scan_tells_each_change(change, put, repository):
    """Every model has an etag, which any object's coming, going or changing changes; others keep theirs."""
    put(MODEL)
    models = repository()
    before = models.scan()
    put(change)
    now = models.scan()
    assert list(before) == list(now) == ["m", "mm"]
    assert before["m"] != now["m"]
    assert before["mm"] == now["mm"]


def test_what_a_scan_takes_for_models(put, repository, caplog):
    """Directories that hold a file; none of hidden ones, of marks that the console leaves, nor of what lies beside."""
    models = repository()
    assert models.scan() == models.scan() == {}
    assert caplog.text.count("has no models: put directories there, or name another prefix") == 1
    put(
        {
            **MODEL,
            "README.md": b"",
            ".git/HEAD": b"",
            "mark/": b"",
            "mark/1/": b"",
            "b\\ad/1/x": b"",
            "deep/1/a/b/c": b"",
        }
    )
    assert list(models.scan()) == ["deep", "m", "mm"]
    assert [name for name in ("m", "deep", "mark", "nobody") if models.has(name)] == ["m", "deep"]
    put({"deep/1/a/b/c": None})
    models.scan()
    assert not models.has("deep")
    put(dict.fromkeys(MODEL))
    assert error_of(models.fetch, "m")[0] is Kind.UNKNOWN_MODEL
    assert not models.has("m")


def test_a_scan_goes_on_behind_the_first_page(put, repository, s3_client, s3_bucket, monkeypatch):
    """More objects than one answer has are all told."""
    put({f"m{number}/1/x": b"" for number in range(7)})
    models = repository()
    paginator = BaseClient.get_paginator
    monkeypatch.setattr(BaseClient, "get_paginator", lambda client, name: _Paged(paginator(client, name)))
    assert list(models.scan()) == [f"m{number}" for number in range(7)]


class _Paged:
    """A paginator of small pages."""

    def __init__(self, paginator):
        self._paginator = paginator

    def paginate(self, **options):
        """Two objects a page."""
        return self._paginator.paginate(**options, PaginationConfig={"PageSize": 2})


def test_a_prefix_of_one_model_is_refused(put, repository):
    """Somebody named one directory too many: the sentence names the file that tells. One beside models is nothing."""
    put({**MODEL, "config.pbtxt": CONFIG})
    assert list(repository().scan()) == ["m", "mm"]
    kind, message = error_of(repository("r/m").scan)
    assert kind is Kind.INVALID_ARGUMENT
    assert "/r/m/config.pbtxt is a model's: name the prefix above it" in message


def test_several_repositories_are_one(put, repository, s3_bucket):
    """Each model is where it is; a name that two have is refused, by the index and by a load, until one is gone."""
    put({"x/a/1/m": b"a", "x/both/1/m": b"x", "y/b/1/m": b"b", "y/both/1/m": b"y"})
    models = repository("r/x", "r/y")
    before = models.scan()
    assert list(before) == ["a", "b", "both"]
    where = f"s3://{s3_bucket}/r/x/ and s3://{s3_bucket}/r/y/"
    assert models.refused == {"both": f"model 'both' is in 2 repositories, {where}: rename or remove one"}
    assert error_of(models.fetch, "both") == (Kind.INVALID_MODEL, models.refused["both"])
    assert [S3Model(models, name).url for name in "ab"] == [f"s3://{s3_bucket}/r/{url}" for url in ("x/a", "y/b")]
    assert tree(models.fetch("b").path) == {"b/1/m": b"b"}
    assert f"nothing under s3://{s3_bucket}/r/x/c/ or s3://{s3_bucket}/r/y/c/, put" in error_of(models.fetch, "c")[1]
    put({"x/both/1/m": None})
    assert models.scan()["both"] != before["both"]
    assert models.refused == {}
    assert tree(models.fetch("both").path) == {"both/1/m": b"y"}
    assert repository("r/y").fetch("both").downloaded, "what is a name of several repositories is no name of one"


@pytest.mark.parametrize(
    ("objects", "kind", "sentence"),
    [
        (
            {},
            Kind.UNKNOWN_MODEL,
            "'m' is not found: there is nothing under s3://{bucket}/r/m/, put config.pbtxt and 1/ there",
        ),
        (
            {"m/": b"", "m/1/": b""},
            Kind.INVALID_MODEL,
            "model 'm' has no files in s3://{bucket}/r/m/: put config.pbtxt",
        ),
        ({"m/1/": b"", "m//x": b""}, Kind.INVALID_MODEL, "object 'm//x' in s3://{bucket}/r/ has an empty part"),
        ({"m/../../x": b""}, Kind.INVALID_MODEL, "object 'm/../../x' in s3://{bucket}/r/ has an empty part"),
        (
            {"m/1": b"", "m/1/x": b""},
            Kind.INVALID_MODEL,
            "'m/1' in s3://{bucket}/r/ is an object and has objects below",
        ),
        ({f"m/{'x' * 256}": b""}, Kind.INVALID_MODEL, "in s3://{bucket}/r/ has a name of more than 255 bytes"),
    ],
)
def test_what_can_be_no_model(objects, kind, sentence, put, repository, s3_bucket, tmp_path, monkeypatch):
    """Nothing is downloaded of it, and the sentence names bucket and key."""
    put(objects)
    monkeypatch.setattr(S3Store, "open", None)
    models = repository()
    found, message = error_of(models.fetch, "m")
    assert found is kind
    assert sentence.format(bucket=s3_bucket) in message
    assert models.has("m") == (kind is not Kind.UNKNOWN_MODEL)
    assert {path.name for path in (tmp_path / "disk").iterdir()} <= {".locks", ".sums"}


def test_names_of_objects_stay_inside():
    """Names of a model are taken, with spaces and foreign letters and as often as they come."""
    check_names(["m/1/a b", "m/1/ü", "m/", "m/1/", "m/config.pbtxt", "m/..a/b.."], "s3://b/")


def test_no_such_bucket(s3_environment, tmp_path):
    """The sentence names it, for all models and for one."""
    models = Directories([S3Store("nobodys-bucket", "r", attempts=1)], tmp_path)
    for call in (models.scan, lambda: models.fetch("m")):
        kind, message = error_of(call)
        assert kind is Kind.UNAVAILABLE
        assert "the bucket of s3://nobodys-bucket/r/ does not exist: create it, or name another" in message
    models.room.close()


@pytest.fixture
def faulty(s3_url, monkeypatch):
    """An S3 that fails as it is told to."""
    with FaultyS3(s3_url) as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.url)
        yield s3


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        (b"list-type=2", "S3 denies access to s3://{bucket}/r/m/: allow s3:GetObject and s3:ListBucket to this role"),
        (b"/m/1/model.onnx", "S3 denies access to s3://{bucket}/r/m/1/model.onnx: allow s3:GetObject"),
    ],
)
def test_what_a_role_may_not_read(where, sentence, put, faulty, repository, s3_bucket, tmp_path):
    """The sentence names bucket, key and permissions, and nothing is left; once it may, the model is there."""
    put(MODEL)
    models = repository()
    faulty.where, faulty.faults = where, {"GET": faulty_s3.status(403, "AccessDenied")}
    kind, message = error_of(models.fetch, "m")
    assert kind is Kind.UNAVAILABLE
    assert sentence.format(bucket=s3_bucket) in message
    assert {path.name for path in (tmp_path / "disk").iterdir()} <= {".locks", ".sums"}
    faulty.faults.clear()
    assert models.fetch("m").downloaded


def test_while_s3_cannot_be_reached_what_is_on_disk_is_served(put, faulty, repository):
    """Known content is found without asking again and again; what is not there is an error, and so is a scan."""
    put(MODEL)
    models = repository()
    path = models.fetch("m").path
    faulty.where, faulty.faults = b"", {"GET": faulty_s3.hung_up}
    before = faulty.count("GET")
    assert [models.fetch("m").path for _ in range(3)] == [path] * 3
    assert faulty.count("GET") == before + 1
    for call, *arguments in ((models.fetch, "mm"), (models.scan,)):
        kind, message = error_of(call, *arguments)
        assert kind is Kind.UNAVAILABLE
        assert "cannot be reached, check network, endpoint and region" in message


def test_an_outage_of_one_repository_is_none_of_another(put, s3_bucket, s3_url, tmp_path):
    """A model is brought from where it is, though another repository can't be asked; what that may have is told as away."""
    put(MODEL)
    with FaultyS3(s3_url) as s3:
        s3.where = b""
        s3.faults["GET"] = faulty_s3.status(503, "SlowDown")
        broken = S3Store(s3_bucket, "q", endpoint=s3.url, attempts=1)
        models = Directories([broken, S3Store(s3_bucket, "r")], tmp_path / "disk")
        assert models.fetch("m").downloaded
        kind, message = error_of(models.fetch, "n")
    models.room.close()

    assert kind is Kind.UNAVAILABLE
    assert "SlowDown" in message


def changing(monkeypatch, change):
    """From now on `change` is called whenever a model has been looked up, before it is downloaded."""
    listed = S3Store.objects

    def late(self, beginning="", *arguments, **options):
        yield from listed(self, beginning, *arguments, **options)
        change()

    monkeypatch.setattr(S3Store, "objects", late)


@pytest.mark.parametrize("content", [b"two", None])
def test_an_object_that_is_replaced_or_removed_meanwhile(put, repository, monkeypatch, content):
    """Two contents are never mixed: what is there by then is looked up, and downloaded."""
    put(MODEL)
    changing(monkeypatch, lambda: put({"m/1/model.onnx": content}))

    assert tree(repository().fetch("m").path).get("m/1/model.onnx") == content


def test_objects_that_never_stay_what_they_are(put, repository, monkeypatch, tmp_path):
    """The load fails after a few times, nothing is left, and the next one takes what is there."""
    put(MODEL)
    models, contents = repository(), itertools.count()
    with monkeypatch.context() as patched:
        changing(patched, lambda: put({"m/1/model.onnx": b"%d" % next(contents)}))
        with pytest.raises(MmeError, match="was replaced while it was downloaded: try again") as caught:
            models.fetch("m")
    assert caught.value.kind is Kind.UNAVAILABLE
    assert {path.name for path in (tmp_path / "disk").iterdir()} <= {".locks", ".sums"}
    put(MODEL)
    assert tree(models.fetch("m").path)["m/1/model.onnx"] == b"one"


def test_models_share_the_disk_by_their_last_use(put, repository):
    """With room for two the one leaves that nobody holds; a model larger than all of it is refused unread."""
    put({f"{name}/1/x": bytes(60_000) for name in "abc"} | {"large/1/x": bytes(200_000)})
    models = repository(budget=130_000)
    models.fetch("a")
    models.fetch("b").hold.release()
    models.fetch("c")
    assert models.fetch("a").downloaded is False
    assert models.room.archives == 120_000
    kind, message = error_of(models.fetch, "large")
    assert kind is Kind.OUT_OF_MEMORY
    assert "'large' takes more than the whole disk budget of 0.1 MB" in message


def test_large_objects_are_fetched_in_parts(put, s3_bucket, tmp_path, monkeypatch):
    """Whatever their sizes, and one after the other where they are large."""
    monkeypatch.setattr("serve.sources.s3_repository._LARGE", 100_000)
    contents = {f"m/1/{number}": os.urandom(number * 30_011) for number in range(8)}
    put(contents)
    models = Directories([S3Store(s3_bucket, "r", part_size=50_000)], tmp_path)
    assert tree(models.fetch("m").path) == contents
    models.room.close()


def test_a_load_that_is_cancelled_leaves_nothing(put, s3_bucket, tmp_path):
    """While bytes are waited for, too."""
    put(MODEL)
    store, waits = S3Store(s3_bucket, "r"), threading.Event()
    objects = [obj for obj in store.objects("m/") if obj.size]

    class Stalled:
        """An object whose bytes don't come."""

        def __init__(self):
            self._closed = threading.Event()

        def read(self, _size):
            """Wait for the end."""
            waits.set()
            assert self._closed.wait(60)
            raise ValueError("closed")

        def close(self):
            """End the wait."""
            self._closed.set()

    kind, message = error_of(
        lambda: transfer(
            objects, lambda _: Stalled(), tmp_path / "m", what="model 'm'", token=CancelToken("model 'm'", waits.is_set)
        )
    )
    assert (kind, message) == (Kind.CANCELLED, "the load of model 'm' was cancelled")
    assert list(tmp_path.iterdir()) == []


ENSEMBLE = b"""platform: "ensemble"
input { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] }
ensemble_scheduling { step { model_name: "part" input_map { key: "x" value: "IN" } output_map { key: "y" value: "OUT" } } }
"""


async def test_a_model_stays_on_disk_while_it_is_loaded(put, repository):
    """It is held until it is released, or does not load; the models of an ensemble hold what is theirs."""
    put({"whole/config.pbtxt": ENSEMBLE})
    models = repository()

    def on_disk():
        models.discard("whole")
        return bool(models.copies("whole"))

    def prepare():
        return ModelLoader(asyncio.get_running_loop(), {}).prepare("whole", S3Model(models, "whole"), NEVER)

    prepared = prepare()
    assert prepared.steps == ("part",)
    assert prepared.download_ns > 0
    assert on_disk()
    prepared.release()
    assert not on_disk()
    put({"whole/config.pbtxt": b"platform: {"})
    with pytest.raises(MmeError):
        prepare()
    assert not on_disk()


@pytest.mark.parametrize(
    ("url", "uri", "endpoint"),
    [
        ("s3://bucket", "s3://bucket/", None),
        ("s3://bucket/a/b", "s3://bucket/a/b/", None),
        ("s3://minio:9000/bucket/a", "s3://http://minio:9000/bucket/a/", "http://minio:9000"),
        ("s3://https://minio:9000/bucket/a", "s3://https://minio:9000/bucket/a/", "https://minio:9000"),
    ],
)
def test_where_a_url_leads(url, uri, endpoint, s3_environment, s3_url, monkeypatch):
    """To AWS, or where boto3 is told to; or to a host and port, by HTTP unless https stands before them."""
    clients, client = [], Session.client
    monkeypatch.setattr(Session, "client", lambda *args, **named: clients.append(client(*args, **named)) or clients[-1])
    assert open_bucket(url).uri == uri
    assert [client.meta.endpoint_url for client in clients] == [endpoint or s3_url]


def test_another_s3_is_asked(put, s3_bucket, s3_url, tmp_path, monkeypatch):
    """The endpoint in the URL counts before the environment's."""
    put(MODEL)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    models = Directories([open_bucket(f"s3://{s3_url.removeprefix('http://')}/{s3_bucket}/r")], tmp_path)
    assert list(models.scan()) == ["m", "mm"]
    assert models.fetch("m").downloaded
    models.room.close()
