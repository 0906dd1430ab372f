"""Errors: a kind, and a sentence that every client can be sent."""

import json
import os

from model_handlers.errors import Kind, invalid_model


def test_a_sentence_is_text_whatever_it_names():
    """Bytes of a file's name that are no characters are escapes in it; all else is as it was written."""
    name = os.fsdecode(b"gr\xc3\xb6\xc3\x9fe-\xff.onnx")
    error = invalid_model(f"found '{name}'")
    assert error.kind is Kind.INVALID_MODEL
    assert error.message == str(error) == "found 'größe-\\udcff.onnx'"
    json.dumps({"error": error.message}, ensure_ascii=False).encode()
