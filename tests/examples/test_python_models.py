"""The examples of Python models: their archives, what a real server answers from them, and the demo's sections on them."""

from __future__ import annotations

import io
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from botocore.exceptions import ClientError
from rich.console import Console

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # examples are run from the root, never installed

from examples import build_models, call_counter, call_embedder, demo, demo_sections  # noqa: E402
from examples.demo_client import Endpoint  # noqa: E402
from examples.demo_servers import DemoError  # noqa: E402
from examples.sentences import QUERIES, SENTENCES  # noqa: E402
from serve.sources.archive import extract  # noqa: E402
from serve.sources.repository import open_target  # noqa: E402
from tests.contract.server import Server  # noqa: E402

pytestmark = pytest.mark.slow

REFERENCE = np.load(ROOT / "examples" / "reference_embeddings.npz")
MEMBERS = {
    "embedder": ("pipeline", ["encoder"]),
    "embedder-ensemble": ("ensemble", ["encoder", "tokenizer"]),
    "counter": ("counter", []),
    "digits-script": ("unpacked", []),
}


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    """Everything that is built from folders of Python models."""
    return build_models.build_all(tmp_path_factory.mktemp("examples"), Console(quiet=True), build_models.PYTHON_MODELS)


@pytest.fixture(scope="module")
def server(layout, tmp_path_factory):
    """A server that has all of them in memory."""
    with Server(tmp_path_factory.mktemp("server"), {"MME_MODEL_STORE": str(layout.archives)}) as server:
        for name in build_models.PYTHON_MODELS:
            assert server.ask("POST", f"/v2/repository/models/{name}.tar.gz/load").status == 200
        yield server


@pytest.fixture(scope="module")
def endpoint(server):
    """The demo's client of it."""
    endpoint = Endpoint(server.url)
    yield endpoint
    endpoint.runtime.close()


@pytest.fixture
def screen():
    """A console that remembers."""
    return Console(file=io.StringIO(), width=160)


@pytest.mark.parametrize("name", build_models.PYTHON_MODELS)
def test_an_archive_opens_as_the_server_opens_it(layout, name, tmp_path):
    """As the model that requests are for, with the models that it calls as its members."""
    with layout.archive(name).open("rb") as stream:
        extract(stream, tmp_path / "unpacked", name=name)
    model = open_target(tmp_path / "unpacked", f"{name}.tar.gz")

    assert (model.path.name, [member.path.name for member in model.members]) == MEMBERS[name]


@pytest.mark.parametrize("target", call_embedder.TARGETS)
def test_text_is_embedded_as_the_reference_says(endpoint, target):
    """Sentences of all kinds, in one request: cosine >= 0.9999 to transformers' own tokenizer and BertModel."""
    embeddings = call_embedder.embed(endpoint.runtime, target, REFERENCE["sentences"].tolist())

    assert np.sum(embeddings * REFERENCE["embeddings"], axis=1).min() >= 0.9999


@pytest.mark.parametrize("target", call_embedder.TARGETS)
def test_each_of_many_requests_gets_its_own_embeddings(endpoint, target):
    """However they were put together, those of one to three sentences."""
    asked = [SENTENCES[start : start + 1 + start % 3] for start in range(20)]
    embeddings = call_embedder.embed(endpoint.runtime, target, SENTENCES)
    expected = dict(zip(SENTENCES, embeddings, strict=True))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda sentences: call_embedder.embed(endpoint.runtime, target, sentences), asked))

    for sentences, answer in zip(asked, answers, strict=True):
        np.testing.assert_allclose(answer, [expected[sentence] for sentence in sentences], atol=1e-4)


def test_the_pipeline_calls_the_encoder_once_for_all_that_came_together(endpoint):
    """Requests at the same time make fewer executions than there are requests, and each execution one call."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: call_embedder.embed(endpoint.runtime, "embedder.tar.gz", (text,)), SENTENCES))

    executions = endpoint.executions("embedder.tar.gz")
    assert endpoint.executions("embedder.tar.gz:encoder") == executions
    assert executions < len(SENTENCES)


def test_a_text_that_is_not_utf_8_is_embedded_all_the_same(server):
    """So that no other request of its batch fails with it."""
    header = b'{"inputs":[{"name":"TEXT","shape":[1,1],"datatype":"BYTES","parameters":{"binary_data_size":5}}]}'
    answer = server.ask(
        "POST",
        "/v2/models/embedder.tar.gz/infer",
        header + b"\x01\x00\x00\x00\xff",
        Inference_Header_Content_Length=str(len(header)),
    )

    assert answer.status == 200, answer.body
    assert answer.json["outputs"][0]["shape"] == [1, 384]


@pytest.mark.parametrize("count", [0, 1, 30])
def test_the_counter_answers_as_many_parts_as_it_is_asked_for(server, count):
    """The same by boto3 and by plain HTTP."""
    runtime = call_counter.streaming_client(server.url, call_counter.TARGET)
    by_boto3 = list(call_counter.count_by_boto3(runtime, count, 0.0))
    by_http = list(call_counter.count_by_http(server.url, count, 0.0))
    runtime.close()

    assert by_boto3 == by_http == list(range(1, count + 1))


def test_a_stream_is_of_the_model_that_its_client_names(server):
    """The hook is what names it: another client of the same server streams from another model."""
    runtime = call_counter.streaming_client(server.url, "nobody.tar.gz")
    with pytest.raises(ClientError, match=r"nobody\.tar\.gz"):
        next(call_counter.count_by_boto3(runtime, 1, 0.0))
    runtime.close()


def test_the_section_on_embeddings_shows_what_answers_each_question(endpoint, layout, screen):
    """Both archives' calls, the nearest sentences, and the check."""
    demo_sections.embed_text(endpoint, layout.model("embedder") / "encoder" / "1" / "model.onnx", screen)
    shown = screen.file.getvalue()

    for query in QUERIES:
        assert query in shown
    assert "Lying awake at night" in shown
    assert "✓ cosine" in shown


def test_the_section_on_streams_shows_that_all_parts_came(endpoint, screen, capsys):
    """Each number once for either way, and the check."""
    demo_sections.count(endpoint, screen)

    lines = capsys.readouterr().out
    assert [lines.count(f"NUMBER {number}") for number in range(demo_sections.COUNT + 2)] == [0, 2, 2, 2, 2, 2, 0]
    assert "✓" in screen.file.getvalue()


def test_the_section_on_the_script_shows_how_well_it_reads(endpoint, screen, capsys):
    """What was sent and came back, digits as pictures, and the share that it reads rightly."""
    demo_sections.read_digits(endpoint, screen)
    shown = screen.file.getvalue()

    assert "JSON of 360 digits" in capsys.readouterr().out
    assert "7 (100%), is 7" in shown
    assert "of 360 digits" in shown


def test_wrong_answers_end_the_demo():
    """Embeddings of other sentences, too few of them, NaN; parts missing or out of order; digits misread or missing."""
    right = REFERENCE["embeddings"]

    assert demo_sections.check_embeddings("right", right, right) >= 0.9999
    for wrong in (right[::-1], right[:-1], right * np.float32("nan")):
        with pytest.raises(DemoError, match="wrong answered"):
            demo_sections.check_embeddings("wrong", wrong, right)
    for numbers in ([], [1, 2, 3, 4], [1, 2, 4, 3, 5]):
        with pytest.raises(DemoError, match="counted"):
            demo_sections.check_count("stream", numbers)
    assert demo_sections.check_digits([1] * 99 + [2], [1] * 100) == 0.99
    for labels in ([1] * 94 + [2] * 6, [1] * 99, []):
        with pytest.raises(DemoError, match="digits"):
            demo_sections.check_digits(labels, [1] * 100)


def test_the_demo_exits_with_an_error_when_something_is_wrong(monkeypatch, capsys, tmp_path):
    """And says what it was."""
    monkeypatch.setattr(sys, "argv", ["demo", "--folder", str(tmp_path)])

    def fail(*_):
        raise DemoError("nothing is right")

    monkeypatch.setattr(demo, "run", fail)
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    assert demo.main() == 1
    assert "nothing is right" in capsys.readouterr().out
