"""Sentences to tokens. Which model gets them is the ensemble's business."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

MAX_TOKENS = 256  # what the encoder was trained for; longer sentences are cut
MULTIPLE = 16  # of which every length is one: the encoder puts requests of one length into one batch


class TritonPythonModel:
    """TEXT, strings [batch, 1] → input_ids and attention_mask, INT64 [batch, tokens]."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the tokenizer, which lies beside this file."""
        here = Path(args["model_repository"]) / args["model_version"]
        self.tokenizer = Tokenizer.from_file(str(here / "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.enable_padding(pad_id=0, pad_token="[PAD]", pad_to_multiple_of=MULTIPLE)

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Tokenize each request's sentences, padded to the longest of that request."""
        return [self.tokens(request) for request in requests]

    def tokens(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        """One request's."""
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
        tokens = self.tokenizer.encode_batch([sentence.decode("utf-8", "replace") for sentence in text.ravel()])
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("input_ids", np.array([each.ids for each in tokens], np.int64)),
                pb_utils.Tensor("attention_mask", np.array([each.attention_mask for each in tokens], np.int64)),
            ]
        )
