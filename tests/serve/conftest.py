"""What several tests of the engine share: a real S3 server on loopback, archives, and a look for leaks."""

import gzip
import io
import os
import tarfile
import threading
import uuid
from pathlib import Path

import boto3
import pytest
from botocore.config import Config
from moto.moto_server.threaded_moto_server import ThreadedMotoServer

_OWN_THREADS = ("inflate ", "download ")


@pytest.fixture(scope="session")
def s3_url():
    """The endpoint of an S3 server that lives as long as the tests do."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def s3_client(s3_url):
    """A client of one's own, to fill buckets with."""
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=s3_url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=Config(retries={"max_attempts": 1}),
    )
    yield client
    client.close()


@pytest.fixture
def s3_environment(s3_url, monkeypatch, tmp_path_factory):
    """What boto3 finds in the environment of a process whose S3 is ours."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    empty = tmp_path_factory.mktemp("aws") / "config"
    empty.touch()
    for name, value in {
        "AWS_ENDPOINT_URL_S3": s3_url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(empty),
        "AWS_SHARED_CREDENTIALS_FILE": str(empty),
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3_bucket(s3_client, s3_environment):
    """The name of a new, empty bucket."""
    name = f"models-{uuid.uuid4().hex[:12]}"
    s3_client.create_bucket(Bucket=name)
    return name


@pytest.fixture
def no_leaks(tmp_path):
    """Fails the test that leaves a thread, an open file or a staging directory of ours behind."""
    files = _open_files()
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith(_OWN_THREADS)] == []
    assert _open_files() - files == set()
    assert list(tmp_path.rglob(".staging-*")) == []


def _open_files():
    """The files and directories that this process has open; sockets belong to the S3 server and its clients."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
            found.add((fd.name, target))
    return found


def tar_bytes(*members, **options):
    """A tar of (name, content) pairs and of ready TarInfo members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **options) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member, io.BytesIO(bytes(member.size)))
                continue
            name, content = member
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def targz_bytes(*members, **options):
    """The same, compressed."""
    return gzip.compress(tar_bytes(*members, **options), 1)


@pytest.fixture(name="tar_bytes")
def _tar_bytes():
    return tar_bytes


@pytest.fixture(name="targz_bytes")
def _targz_bytes():
    return targz_bytes
