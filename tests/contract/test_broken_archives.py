"""Archives that nobody should load: each is one sentence to the caller, and leaves nothing behind in the server."""

from __future__ import annotations

import gzip
import io
import json
import tarfile

import pytest

from tests.contract import models
from tests.contract.server import Server, eventually

GOOD = models.plus(1)


def member(name, content=b"", **fields):
    """A member of a tar: its header and its content."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def tar(*members):
    """A tar of members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def targz(*members):
    """The same, compressed."""
    return gzip.compress(tar(*members), 1)


def model(config="", content=GOOD, folder="m"):
    """The members of a model directory."""
    files = [member(f"{folder}/1/model.onnx", content)]
    return [*files, member(f"{folder}/config.pbtxt", config.encode())] if config else files


ARCHIVES = {
    "climbs": (targz(member("../evil", b"x"), *model()), "'../evil'"),
    "climbs-within": (targz(member("m/1/../../../evil", b"x"), *model()), ".."),
    "absolute": (targz(member("/etc/evil", b"x"), *model()), "absolute"),
    "symlink": (targz(member("m/1/w", type=tarfile.SYMTYPE, linkname="/etc/passwd"), *model()), "symbolic link"),
    "hardlink": (targz(*model(), member("m/1/w", type=tarfile.LNKTYPE, linkname="m/1/model.onnx")), "hard link"),
    "device": (targz(member("m/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3), *model()), "device"),
    "pipe": (targz(member("m/1/model.onnx", type=tarfile.FIFOTYPE)), "named pipe"),
    "file-and-folder": (targz(member("m", b"x"), *model()), "both"),
    "twice": (targz(*model(), *model()), "twice"),
    "truncated-gzip": (targz(*model())[:-20], "truncated"),
    "truncated-tar": (gzip.compress(tar(*model())[:900]), "truncated"),
    "bit-flip": (targz(*model())[:-8] + bytes(8), "checksum"),
    "not-gzip": (tar(*model()), "gzip"),
    "not-an-archive": (b"<html>404</html>", "gzip"),
    "no-tar": (gzip.compress(b"hello" * 500), "tar"),
    "nothing": (b"", "empty"),
    "no-files": (targz(), "no files"),
    "trailing": (targz(*model()) + b"garbage behind", "garbage"),
    "bomb": (gzip.compress(member("m/1/model.onnx", size=1 << 40)[0].tobuf(tarfile.GNU_FORMAT) + bytes(4096)), "bytes"),
    "no-model": (targz(member("readme.txt", b"hello")), "no model found"),
    "unknown-file": (targz(member("m/1/model.bin", b"hello")), "config.pbtxt"),
    "two-models": (targz(*model(folder="one"), *model(folder="two")), "two models or more"),
    "ensemble": (targz(*model('platform: "ensemble"\n', folder="e"), *model(folder="part")), "must specify 'step'"),
    "unknown-field": (targz(*model("max_batch_sise: 8\n")), "max_batch_sise"),
    "refused-field": (targz(*model("instance_group { passive: true }\n")), "passive"),
    "not-text": (targz(*model("max_batch_size: {{{")), "config.pbtxt"),
    "other-backend": (targz(*model('backend: "tensorflow"\n')), "tensorflow"),
    "no-such-file": (targz(*model('default_model_filename: "other.onnx"\nbackend: "onnxruntime"\n')), "other.onnx"),
    "climbing-file": (targz(*model('default_model_filename: "../../x"\nbackend: "onnxruntime"\n')), "../../x"),
    "not-onnx": (targz(*model(content=b"not a model")), "ONNX Runtime"),
    "empty-onnx": (targz(*model(content=b"")), "ONNX Runtime"),
    "cut-onnx": (targz(*model(content=models.plus(1, 1)[:500_000])), "ONNX Runtime"),
    "no-such-input": (targz(*model('input { name: "Q" data_type: TYPE_FP32 dims: [4] }\n')), "'Q'"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory, bucket, s3, s3_url, aws):
    """A server over a store of broken archives and one good one."""
    for name, (content, _) in ARCHIVES.items():
        s3.put_object(Bucket=bucket, Key=f"{name}.tar.gz", Body=content)
    s3.put_object(Bucket=bucket, Key="good.tar.gz", Body=targz(*model()))
    environ = {"MME_MODEL_STORE": f"s3://{bucket}", **aws(s3_url)}
    with Server(tmp_path_factory.mktemp("broken"), environ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server, runtime):
    """boto3's client of it."""
    return runtime(server)


def invoke(client, target):
    """The numbers that a model answered."""
    answer = client.invoke_endpoint(
        EndpointName="e", TargetModel=target, ContentType="application/json", Body=json.dumps(models.ONE)
    )
    return models.y(json.load(answer["Body"]))


def refused(client, target):
    """The container's status and sentence for an archive that it does not load."""
    with pytest.raises(client.exceptions.ModelError) as raised:
        invoke(client, target)
    response = raised.value.response
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 424
    document = json.loads(response["OriginalMessage"])
    assert list(document) == ["error"]
    return response["OriginalStatusCode"], document["error"]


@pytest.mark.parametrize(("name", "named"), [(name, named) for name, (_, named) in ARCHIVES.items()])
def test_a_broken_archive_is_one_sentence(server, client, name, named):
    """It is refused with 400 in a sentence that names it and what is wrong; nothing of it stays; the next is served."""
    unpacked = server.unpacked()

    status, sentence = refused(client, f"{name}.tar.gz")

    assert status == 400
    assert named in sentence
    assert name in sentence
    assert "\n" not in sentence
    assert [path for path in server.unpacked() if path not in unpacked] == []
    assert invoke(client, "good.tar.gz") == [2, 3, 4, 5]
    assert f"{name}.tar.gz" not in json.dumps(server.ask("GET", "/models").json)


def test_nothing_is_leaked_however_often_they_are_tried(server, client):
    """All of them cost the server no file, thread, connection or byte once what it starts on demand is there."""
    invoke(client, "good.tar.gz")

    def holdings():
        worker = server.worker
        connections = len(worker.net_connections("inet"))
        used = server.metric("mme_memory_used_bytes", kind="host")
        return server.open_files(), worker.num_threads(), connections, used, server.unpacked(), server.staging()

    def nothing_came_of_all():
        before = holdings()
        for name in ARCHIVES:
            refused(client, f"{name}.tar.gz")
        return holdings() == before

    eventually(nothing_came_of_all, "a round that leaves nothing behind")  # a leak would be there after every one


def test_the_index_says_why(server, client):
    """The repository index names a model that failed to load as unavailable, with the reason."""
    refused(client, "not-onnx.tar.gz")

    rows = {row["name"]: row for row in server.ask("POST", "/v2/repository/index", {}).json}
    assert rows["not-onnx.tar.gz"]["state"] == "UNAVAILABLE"
    assert "ONNX Runtime" in rows["not-onnx.tar.gz"]["reason"]
    assert {"version": "1", "state": "READY"}.items() <= rows["good.tar.gz"].items()
    assert "reason" not in rows["good.tar.gz"]


def test_a_broken_archive_that_was_mended_is_served(server, client, s3, bucket):
    """Another archive under the same name is a new start."""
    s3.put_object(Bucket=bucket, Key="mended.tar.gz", Body=targz(*model(content=b"broken")))
    assert refused(client, "mended.tar.gz")[0] == 400
    s3.put_object(Bucket=bucket, Key="mended.tar.gz", Body=targz(*model(content=models.plus(6))))
    assert invoke(client, "mended.tar.gz") == [7, 8, 9, 10]
