"""What several tests of the engine share: an S3 server on loopback, archives, event loops, models under control."""

import asyncio
import gzip
import io
import os
import tarfile
import threading
import uuid
from pathlib import Path

import boto3
import numpy as np
import onnx
import pytest
from botocore.config import Config
from onnx import TensorProto, helper, numpy_helper

from model_handlers.base import Handler
from model_handlers.config.model_config import ModelConfig
from model_handlers.tensor import FP32, TensorSpec
from serve.request import InferenceRequest, InferenceResponse, Layout
from tests.aws import moto_server
from tests.event_loop import idle
from tests.waiting import PATIENCE, ends

_OWN_THREADS = ("inflate ", "download ")


@pytest.fixture(scope="session")
def s3_url():
    """The endpoint of an S3 server that lives as long as the tests do."""
    with moto_server() as url:
        yield url


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
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(_OWN_THREADS)]
    assert [thread.name for thread in threads if not ends(thread)] == []
    assert _open_files() - files == set()
    assert list(tmp_path.rglob(".staging-*")) == []


def _open_files():
    """The files and directories that this process has open.

    Not sockets, which belong to the S3 server and its clients, nor the file of locks, which is open as long as its tier
    is there.
    """
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/")) and "/.locks/" not in target:
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


@pytest.fixture(name="idle")
def _idle():
    return idle


# -- models that do what the test says ---------------------------------------------------------------------------------


class Gate:
    """A place that executions stop at until the test opens it."""

    def __init__(self):
        self._arrived = threading.Semaphore(0)
        self._open = threading.Semaphore(0)
        self._for_good = False

    def __call__(self, rows):
        """What a model does: say that it is here, wait, double."""
        self._arrived.release()
        if not self._for_good:
            assert self._open.acquire(timeout=PATIENCE)
        return [rows * 2]

    async def arrived(self):
        """Wait for the next execution to get here."""
        assert await asyncio.to_thread(self._arrived.acquire, timeout=PATIENCE)

    def let(self, executions=1):
        """Let so many through."""
        self._open.release(executions)

    def open(self):
        """Let everybody through from now on."""
        self._for_good = True
        self._open.release(1000)


class Scripted(Handler):
    """A model of one input `x` and one output `y`, [-1, 2] each, whose execution is a function of the test's.

    Attributes:
        script: rows → outputs; replace it at any time.
        batches: the first column of every batch that was executed, in order.
        threads: the names of the threads that executed them.
        closed: how often it was closed.
    """

    backend = "scripted"
    default_filename = "model.scripted"

    def __init__(self, config, script=None):
        super().__init__(config)
        self.script = script or (lambda rows: [rows * 2])
        self.batches = []
        self.threads = []
        self.closed = 0

    @classmethod
    def autocomplete(cls, config, model_file):  # noqa: ARG003 - nothing to read
        """Nothing is left out."""
        return config

    @classmethod
    def load(cls, config, model_file, device, lane=""):
        """Made by the test itself."""
        raise NotImplementedError

    def execute(self, inputs, outputs):  # noqa: ARG002 - there is one
        """Note it and do as the script says."""
        rows = inputs["x"]
        self.batches.append(rows[:, 0].astype(int).tolist())
        self.threads.append(threading.current_thread().name)
        return self.script(rows)

    def close(self):
        """Count."""
        self.closed += 1


class Inline(Scripted):
    """One that may run on the event loop."""

    inline = True


def scripted_config(name="m", max_batch_size=8, **fields):
    """The configuration of a `Scripted` model."""
    specs = {"inputs": (TensorSpec("x", FP32, (2,)),), "outputs": (TensorSpec("y", FP32, (2,)),)}
    return ModelConfig(name, backend="scripted", max_batch_size=max_batch_size, **{**specs, **fields})


class Call:
    """A client's request of rows [n, n] each, and the answers that it got."""

    def __init__(self, *numbers, timeout_us=0, layout=None, on_answer=None):
        self.numbers = numbers
        self.answers = []
        self.answered = asyncio.get_running_loop().create_future()
        rows = np.array([[number, number] for number in numbers], np.float32)
        layout = layout or Layout((("x", FP32, rows.shape),), ("y",))
        self._on_answer = on_answer
        self.request = InferenceRequest(layout, [rows], self._complete, str(numbers[0]), timeout_us=timeout_us)

    def _complete(self, request, result):
        assert request is self.request
        self.answers.append(result)
        if not self.answered.done():
            self.answered.set_result(result)
        if self._on_answer is not None:
            self._on_answer(self)

    async def answer(self):
        """The answer, once it is there."""
        return await asyncio.shield(self.answered)

    @property
    def kind(self):
        """The kind of the error that it got, None for a response with the right numbers."""
        assert len(self.answers) == 1
        result = self.answers[0]
        if isinstance(result, InferenceResponse):
            assert result.id == self.request.id
            [(name, _, rows)] = result.outputs
            assert (name, rows.tolist()) == ("y", [[2 * number] * 2 for number in self.numbers])
            return None
        return result.kind


class Toolbox:
    """The above by one name, for tests that cannot import from here."""

    Gate = Gate
    Scripted = Scripted
    Inline = Inline
    Call = Call
    config = staticmethod(scripted_config)


@pytest.fixture(scope="session")
def toys():
    """Models under the test's control, and clients that count their answers."""
    return Toolbox


# -- small real models -------------------------------------------------------------------------------------------------


def write_onnx(path, factor=2.0, weights=0):
    """An ONNX model `y = factor * x` of [-1, 2]; `weights` adds as many bytes that it has to hold."""
    nodes = [helper.make_node("Mul", ["x", "factor"], ["y"])]
    constants = [numpy_helper.from_array(np.array([factor], np.float32), "factor")]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])]
    if weights:
        columns = weights // 8
        table = np.random.default_rng(0).standard_normal((2, columns), np.float32)
        constants.append(numpy_helper.from_array(table, "table"))
        nodes.append(helper.make_node("MatMul", ["x", "table"], ["wide"]))
        outputs.append(helper.make_tensor_value_info("wide", TensorProto.FLOAT, ["batch", columns]))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])]
    graph = helper.make_graph(nodes, "toy", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)


def write_repository_model(folder, config="", versions=(1,), weights=0):
    """A model of a Triton repository whose version v multiplies by v + 1."""
    for version in versions:
        write_onnx(folder / str(version) / "model.onnx", version + 1.0, weights)
    if config:
        (folder / "config.pbtxt").write_text(config)
    return folder


@pytest.fixture(name="write_onnx", scope="session")
def _write_onnx():
    return write_onnx


@pytest.fixture(name="write_repository_model", scope="session")
def _write_repository_model():
    return write_repository_model


@pytest.fixture
def repository(tmp_path, write_repository_model):
    """A repository with the models a, b and c, of one version each."""
    for name in "abc":
        write_repository_model(tmp_path / "models" / name)
    return tmp_path / "models"


@pytest.fixture
def store(tmp_path, targz_bytes, write_repository_model):
    """A local store with a.tar.gz and b.tar.gz."""
    (tmp_path / "store").mkdir()
    for name in "ab":
        content = (write_repository_model(tmp_path / "packed" / name) / "1" / "model.onnx").read_bytes()
        (tmp_path / "store" / f"{name}.tar.gz").write_bytes(targz_bytes(("1/model.onnx", content)))
    return tmp_path / "store"
