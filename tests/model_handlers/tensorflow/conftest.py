"""Real models, made by TensorFlow here, and handlers over them in this process."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.tensorflow import GraphdefHandler, SavedModelHandler
from tests.frameworks import framework

WEIGHTS = np.arange(12, dtype="f4").reshape(4, 3) - 5


def pytest_collection_modifyitems(items):
    """TensorFlow warns of what it does itself."""
    for item in items:
        if item.nodeid.startswith("tests/model_handlers/tensorflow/"):
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"))
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tf():
    """The framework, or no test at all."""
    return framework("tensorflow")


@pytest.fixture(scope="session")
def models(tf, tmp_path_factory):
    """A SavedModel of several signatures, one of none, and a frozen graph."""
    folder = tmp_path_factory.mktemp("tensorflow")

    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.weights = tf.Variable(WEIGHTS)
            self.last = tf.Variable(np.zeros([1, 4], "f4"), shape=[None, 4])
            self.calls = tf.Variable(0)
            words = tf.lookup.KeyValueTensorInitializer(["one", "two"], [1, 2])
            self.numbers = tf.lookup.StaticHashTable(words, -1)

        @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")])
        def scores(self, x):
            y = x @ self.weights
            return {"y": y, "best": tf.argmax(y, 1)}

        @tf.function(input_signature=[tf.TensorSpec([None, 1], tf.string, name="text")])
        def shout(self, text):
            return {"loud": tf.strings.upper(text)}

        @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.bfloat16, name="b")])
        def half(self, b):
            return {"b2": b * 2}

        @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.int32, name="i")])
        def picks(self, i):
            return {"picked": tf.gather(tf.constant([10, 20, 30]), i)}

        @tf.function(
            input_signature=[
                tf.TensorSpec([None, 1], tf.float32, name=name) for name in ("x", "start", "total", "size")
            ]
        )
        def sums(self, x, start, total, size):
            total = tf.where(start > 0, tf.zeros_like(total), total) + x * tf.reduce_sum(size)
            return {"sum": total, "next": total}

        @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")])
        def remembers(self, x):
            before = tf.identity(self.last)
            self.last.assign(x)
            return {"before": before}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="word")])
        def counts(self, word):
            before = tf.identity(self.calls)
            self.calls.assign_add(1)
            return {"before": before, "number": self.numbers.lookup(word), "first": word[0]}

    model = Model()
    signatures = {
        "sums": model.sums,
        "serving_default": model.scores,
        "shout": model.shout,
        "half": model.half,
        "picks": model.picks,
        "remembers": model.remembers,
        "counts": model.counts,
    }
    tf.saved_model.save(model, str(folder / "model.savedmodel"), signatures)
    tf.saved_model.save(tf.Module(), str(folder / "bare"))
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4], name="INPUT0")
        tf.identity(tf.matmul(x, tf.constant(WEIGHTS)), name="OUTPUT0")
    (folder / "model.graphdef").write_bytes(graph.as_graph_def().SerializeToString())
    return SimpleNamespace(
        saved=folder / "model.savedmodel", bare=folder / "bare", frozen=folder / "model.graphdef", module=model
    )


@pytest.fixture
def load(tf):
    """Loads a model with what a configuration declares. To close one is to collect garbage: these go when they may."""

    def load(path, inputs=(), outputs=(), max_batch_size=8, **parameters):
        config = ModelConfig(
            "m",
            backend="tensorflow",
            max_batch_size=max_batch_size,
            inputs=inputs,
            outputs=outputs,
            parameters=parameters,
        )
        handler = GraphdefHandler if path.suffix == ".graphdef" else SavedModelHandler
        return handler.load(config, path, CPU)

    return load
