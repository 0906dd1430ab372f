"""The demo's sections on Python models: what is sent, what comes back and when, and whether it is right.

Each calls one of the examples beside it, by that example's own client. Runs on the demo's thread, but for requests that
are to be under way at the same time.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from examples import call_counter, call_embedder, call_script, demo_screen
from examples.classifiers import split_data
from examples.demo_servers import DemoError
from examples.minilm import SentenceTokenizer
from examples.sentences import QUERIES, SENTENCES, TOPICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray
    from rich.console import Console

    from examples.demo_client import Endpoint

MIN_COSINE = 0.9999
NEAREST = 3
COUNT, PAUSE = 5, 0.2
MIN_ACCURACY = 0.95
DIGITS_SHOWN = 6


def embed_text(endpoint: Endpoint, encoder: Path, console: Console) -> None:
    """Embed sentences that are sent as text, by both archives, and show what lies nearest to each question.

    Args:
        endpoint: the server.
        encoder: the ONNX file of the encoder that the archives hold, for comparison.
        console: where it is shown.

    Raises:
        DemoError: an embedding is not the encoder's.
    """
    answers = {}
    with demo_screen.CallTable(console) as table:
        for target in call_embedder.TARGETS:
            answers[target] = _embed_everything(endpoint, target, table)
    topics = [topic for topic, sentences in TOPICS.items() for _ in sentences]
    embeddings = answers[call_embedder.TARGETS[0]]
    cosines = embeddings[len(SENTENCES) :] @ embeddings[: len(SENTENCES)].T
    for query, row in zip(QUERIES, cosines, strict=True):
        best = np.argsort(-row)[:NEAREST]
        demo_screen.show_nearest(console, query, [(row[i], topics[i], SENTENCES[i]) for i in best])
    expected = embeddings_of(encoder)
    worst = min(check_embeddings(target, answer, expected) for target, answer in answers.items())
    demo_screen.show_check(console, f"cosine to what ONNX Runtime computes here from the same sentences: {worst:.6f}")


def _embed_everything(endpoint: Endpoint, target: str, table: demo_screen.CallTable) -> NDArray[np.float32]:
    """FP32 [sentences and queries, 384], in three ways of asking."""

    def embed(sentences: tuple[str, ...]) -> NDArray[np.float32]:
        return call_embedder.embed(endpoint.runtime, target, sentences)

    _, took = _timed(lambda: embed(SENTENCES[:1]))
    table.add(target, "1 sentence, which loads the models", "EMBEDDING [1, 384]", took, loads=True)
    corpus, took = _timed(lambda: embed(SENTENCES))
    table.add(target, f"{len(SENTENCES)} sentences", f"EMBEDDING {list(corpus.shape)}", took)
    before = endpoint.executions(f"{target}:encoder")
    with ThreadPoolExecutor(len(QUERIES)) as pool:
        queries, took = _timed(lambda: list(pool.map(embed, [(query,) for query in QUERIES])))
    batches = endpoint.executions(f"{target}:encoder") - before
    sent = f"{len(QUERIES)} questions, a request each, at once"
    table.add(target, sent, f"{len(QUERIES)} x EMBEDDING [1, 384], {batches} batches", took)
    return np.concatenate([corpus, *queries])


def embeddings_of(encoder: Path) -> NDArray[np.float32]:
    """What the ONNX file itself says, without a server: FP32 [sentences and queries, 384]."""
    session = ort.InferenceSession(encoder, providers=["CPUExecutionProvider"])
    tokens = SentenceTokenizer()((*SENTENCES, *QUERIES))
    embeddings: NDArray[np.float32] = session.run(["embedding"], tokens)[0]
    return embeddings


def check_embeddings(target: str, embeddings: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """The least cosine between an embedding that the target answered and the expected one.

    Raises:
        DemoError: it is below MIN_COSINE, or there is another number of them.
    """
    if embeddings.shape != expected.shape:
        raise DemoError(f"{target} answered {embeddings.shape}, not {expected.shape}")
    worst = float(np.sum(embeddings * expected, axis=1).min())
    if not worst >= MIN_COSINE:  # false for NaN too
        raise DemoError(f"{target} answered an embedding at cosine {worst:.6f} to the encoder's own")
    return worst


def count(endpoint: Endpoint, console: Console) -> None:
    """Show the parts of two streamed answers as they come.

    Raises:
        DemoError: they are not the numbers in their order.
    """
    runtime = call_counter.streaming_client(endpoint.url, call_counter.TARGET)
    ways = {
        "boto3's response stream": lambda: call_counter.count_by_boto3(runtime, COUNT, PAUSE),
        "generate_stream": lambda: call_counter.count_by_http(endpoint.url, COUNT, PAUSE),
    }
    with demo_screen.CallTable(console) as table:
        for way, begin in ways.items():
            sent = f"COUNT {COUNT} by {way}"
            numbers = []
            for number, took in _as_they_come(begin):
                table.add(call_counter.TARGET if not numbers else "", "" if numbers else sent, f"NUMBER {number}", took)
                numbers.append(number)
            check_count(way, numbers)
    demo_screen.show_check(console, f"each answer came in {COUNT} parts, in their order")


def check_count(way: str, numbers: list[int]) -> None:
    """Whether they are 1 to COUNT.

    Raises:
        DemoError: they are not.
    """
    if numbers != list(range(1, COUNT + 1)):
        raise DemoError(f"{way} counted {numbers} where it was to count to {COUNT}")


def read_digits(endpoint: Endpoint, console: Console) -> None:
    """Let a script of scikit-learn read handwriting that its training never saw, sent as CSV.

    Raises:
        DemoError: it misreads too much of it.
    """
    split = split_data("digits")
    pixels, truth = split.held_out_features, split.held_out_labels
    digits: list[dict[str, Any]] = []
    with demo_screen.CallTable(console) as table:
        for count, loads in ((1, True), (len(pixels), False)):
            csv = call_script.as_csv(pixels[:count])
            digits, took = _timed(lambda csv=csv: call_script.read_digits(endpoint.runtime, csv))
            sent = "1 row of CSV, which loads the model" if loads else f"{count} rows of CSV, {len(csv):,} bytes"
            came_back = json.dumps(digits[0]) if loads else f"JSON of {len(digits)} digits"
            table.add(call_script.TARGET, sent, came_back, took, loads=loads)
    labels = [digit["label"] for digit in digits]
    captions = [
        f"{digit['label']} ({digit['probability']:.0%}), is {true}" for digit, true in zip(digits, truth, strict=False)
    ]
    console.print()
    demo_screen.show_digits(console, pixels[:DIGITS_SHOWN].reshape(-1, 8, 8), captions)
    accuracy = check_digits(labels, truth.tolist())
    demo_screen.show_check(console, f"{accuracy:.1%} of {len(truth)} digits that training never saw are read rightly")


def check_digits(labels: list[int], truth: list[int]) -> float:
    """The share of the digits that are read rightly.

    Raises:
        DemoError: it is below MIN_ACCURACY, or there is another number of them.
    """
    if len(labels) != len(truth):
        raise DemoError(f"{call_script.TARGET} read {len(labels)} digits of {len(truth)}")
    accuracy = sum(label == true for label, true in zip(labels, truth, strict=True)) / len(truth)
    if accuracy < MIN_ACCURACY:
        raise DemoError(f"{call_script.TARGET} reads {accuracy:.1%} of the digits rightly, which is too little")
    return accuracy


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What the call returns, and the milliseconds that it took."""
    began = time.perf_counter()
    returned = call()
    return returned, (time.perf_counter() - began) * 1000


def _as_they_come(begin: Callable[[], Iterator[Any]]) -> Iterator[tuple[Any, float]]:
    """Each part, and the milliseconds from the call until it came."""
    began = time.perf_counter()
    for part in begin():
        yield part, (time.perf_counter() - began) * 1000
