"""Sentences to embeddings: tokenizes them, and calls the model `encoder` of the same archive.

The sentences of all requests that come together go to the encoder in one call.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

MAX_TOKENS = 256  # what the encoder was trained for; longer sentences are cut


class TritonPythonModel:
    """TEXT, strings [batch, 1] → EMBEDDING, FP32 [batch, 384]."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the tokenizer, which lies beside this file."""
        here = Path(args["model_repository"]) / args["model_version"]
        self.tokenizer = Tokenizer.from_file(str(here / "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Embed the sentences of all requests at once, and give each request its own."""
        sentences = [_sentences(request) for request in requests]
        answer = self.encode([sentence for each in sentences for sentence in each])
        if answer.has_error():
            return [pb_utils.InferenceResponse(error=answer.error()) for _ in requests]
        embeddings = pb_utils.get_output_tensor_by_name(answer, "embedding").as_numpy()
        ends = np.cumsum([len(each) for each in sentences])
        parts = np.split(embeddings, ends[:-1])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("EMBEDDING", part)]) for part in parts]

    def encode(self, sentences: list[str]) -> pb_utils.InferenceResponse:
        """What the encoder answers."""
        tokens = self.tokenizer.encode_batch(sentences)
        inputs = [
            pb_utils.Tensor("input_ids", np.array([each.ids for each in tokens], np.int64)),
            pb_utils.Tensor("attention_mask", np.array([each.attention_mask for each in tokens], np.int64)),
        ]
        return pb_utils.InferenceRequest(
            model_name="encoder", inputs=inputs, requested_output_names=["embedding"]
        ).exec()


def _sentences(request: pb_utils.InferenceRequest) -> list[str]:
    text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
    # One text that is not UTF-8 must not fail those of other requests.
    return [sentence.decode("utf-8", "replace") for sentence in text.ravel()]
