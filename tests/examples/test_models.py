"""The example models: the encoder against an independent reference, the classifiers against scikit-learn."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # examples are run from the root, never installed

from examples import build_models, classifiers, minilm  # noqa: E402
from examples.sentences import QUERIES, SENTENCES, TOPICS  # noqa: E402

pytestmark = pytest.mark.slow

REFERENCE = np.load(ROOT / "examples" / "reference_embeddings.npz")


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    """A session on one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def encoder_model():
    """The encoder, built from the real weights once."""
    return minilm.build_encoder("bert-0", minilm.read_shape(), minilm.read_weights())


@pytest.fixture(scope="module")
def embed(encoder_model):
    """Sentences to embeddings."""
    run, tokenize = session(encoder_model), minilm.SentenceTokenizer()
    return lambda sentences: run.run(["embedding"], tokenize(sentences))[0]


@pytest.fixture(scope="module", params=list(classifiers.RECIPES))
def classifier(request):
    """Each classifier, trained once."""
    return classifiers.train(request.param)


def test_the_encoder_agrees_with_the_reference(embed):
    """Every sentence, embedded alone, points where transformers' BertModel says: cosine >= 0.9999."""
    ours = np.concatenate([embed([sentence]) for sentence in REFERENCE["sentences"].tolist()])
    cosines = np.sum(ours * REFERENCE["embeddings"], axis=1)
    assert len(cosines) == 12
    assert cosines.min() >= 0.9999


@pytest.mark.long
def test_no_two_encoders_share_a_large_tensor(tmp_path, encoder_model):
    """So that each needs memory of its own; `bert-0` has the published weights."""
    tensors = {}
    for name in build_models.ENCODERS[:2]:
        build_models.write(name, tmp_path / name)
        model = onnx.load(tmp_path / name / "1" / "model.onnx")
        tensors[name] = {each.raw_data for each in model.graph.initializer if len(each.raw_data) > 1000}
    published = {each.raw_data for each in encoder_model.graph.initializer if len(each.raw_data) > 1000}

    assert tensors["bert-0"] == published
    assert len(tensors["bert-1"]) == len(published)
    assert not tensors["bert-0"] & tensors["bert-1"]


def test_embeddings_have_length_one(embed):
    """A dot product of two embeddings is their cosine."""
    np.testing.assert_allclose(np.linalg.norm(embed(REFERENCE["sentences"].tolist()), axis=1), 1, atol=1e-5)


def test_padding_changes_nothing(embed):
    """A batch of sentences of 3 to 170 tokens answers what each sentence answers alone."""
    sentences = REFERENCE["sentences"].tolist()
    alone = np.concatenate([embed([sentence]) for sentence in sentences])
    np.testing.assert_allclose(embed(sentences), alone, atol=1e-5)


def test_a_row_without_a_token_answers_zeros(encoder_model):
    """A mask of zeros gives a zero vector and no NaN, and leaves its neighbour in the batch alone."""
    feed = minilm.SentenceTokenizer()(["Hello"])
    run = session(encoder_model)
    expected = run.run(None, feed)[0]
    ids = np.concatenate([feed["input_ids"], np.zeros_like(feed["input_ids"])])
    mask = np.concatenate([feed["attention_mask"], np.zeros_like(feed["attention_mask"])])
    got = run.run(None, {"input_ids": ids, "attention_mask": mask})[0]
    np.testing.assert_allclose(got[0], expected[0], atol=1e-5)
    np.testing.assert_array_equal(got[1], np.zeros(384, np.float32))


def test_a_sentence_beyond_the_limit_is_cut():
    """More than 256 tokens become 256, so that the position table is never left."""
    tokens = minilm.SentenceTokenizer()(["word " * 600])
    assert tokens["input_ids"].shape == (1, minilm.MAX_TOKENS)


def test_the_encoder_is_a_valid_graph_of_standard_operators(encoder_model):
    """The ONNX checker accepts it, shapes inferred, and no operator is of one runtime alone."""
    onnx.checker.check_model(encoder_model, full_check=True)
    assert {node.domain for node in encoder_model.graph.node} == {""}


def test_a_query_finds_its_topic(embed):
    """The sentence nearest to each of the demo's queries is of the topic that a reader would name."""
    topics = [topic for topic, sentences in TOPICS.items() for _ in sentences]
    nearest = np.argmax(embed(QUERIES) @ embed(SENTENCES).T, axis=1)
    assert [topics[index] for index in nearest] == ["computers", "health", "space", "cooking"]


def test_a_classifier_answers_as_its_estimator_does(classifier):
    """Labels are scikit-learn's own, and probabilities differ by less than a ten-thousandth."""
    rows = classifier.split.held_out_features
    label, probabilities = session(classifier.onnx).run(["label", "probabilities"], {"features": rows})
    np.testing.assert_array_equal(label, classifier.estimator.predict(rows))
    np.testing.assert_allclose(probabilities, classifier.estimator.predict_proba(rows), atol=1e-4)
    assert label.dtype == np.int64
    assert probabilities.dtype == np.float32
    assert probabilities.shape == (len(rows), len(classifier.split.classes))


def test_a_classifier_has_learnt_something(classifier):
    """It labels more than nine of ten rows that it never saw."""
    assert classifier.accuracy > 0.9


def test_a_classifier_never_sees_the_rows_held_out():
    """No digit held out is among those trained on."""
    split = classifiers.split_data("digits")
    trained_on = {row.tobytes() for row in split.train_features}
    assert not [row for row in split.held_out_features if row.tobytes() in trained_on]
    assert len(split.train_features) + len(split.held_out_features) == 1797


@pytest.fixture
def small_world(tmp_path):
    """One classifier, built below a fresh folder by the real `mme pack`."""
    console = build_models.Console(quiet=True)
    return tmp_path, lambda: build_models.build_all(tmp_path, console, ("iris",))


def test_a_built_model_is_a_triton_repository_and_an_archive(small_world):
    """A folder with config, labels and a version, and an archive of it."""
    _, build = small_world
    layout = build()
    files = {str(path.relative_to(layout.model("iris"))) for path in layout.model("iris").rglob("*") if path.is_file()}
    assert files == {"config.pbtxt", "labels.txt", "1/model.onnx"}
    assert layout.archive("iris").read_bytes()[:2] == b"\x1f\x8b"
    assert (layout.model("iris") / "labels.txt").read_text().split() == ["setosa", "versicolor", "virginica"]


@pytest.mark.long
def test_what_is_unchanged_is_not_built_again(small_world):
    """A second run leaves the archive's very inode alone; a stale stamp or a missing archive builds it anew."""
    _, build = small_world
    layout = build()
    first = layout.archive("iris").stat()
    build()
    assert layout.archive("iris").stat().st_mtime_ns == first.st_mtime_ns
    layout.stamp("iris").write_text("another recipe")
    build()
    assert layout.archive("iris").stat().st_mtime_ns != first.st_mtime_ns
    layout.archive("iris").unlink()
    build()
    assert layout.archive("iris").is_file()


def test_a_build_that_fails_leaves_no_stamp(small_world, monkeypatch):
    """A model whose packing failed counts as not built."""
    root, build = small_world
    layout = build()
    layout.stamp("iris").write_text("another recipe")

    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr(build_models, "pack", refuse)
    with pytest.raises(OSError, match="no space left"):
        build()
    assert not layout.stamp("iris").exists()
    assert root.is_dir()
