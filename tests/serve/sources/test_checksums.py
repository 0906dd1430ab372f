"""Files by their digests: what fits loads, and what does not is refused by its name."""

import hashlib

import pytest

from model_handlers.errors import Kind, MmeError
from serve.sources.repository import open_model

AGENT = 'model_repository_agents {{ agents {{ name: "checksum" parameters {{ key: "MD5:{}" value: "{}" }} }} }}'


@pytest.mark.parametrize(
    ("file", "digest", "words"),
    [
        ("1/model.onnx", "{}", ""),
        ("1/model.onnx", " {} ", ""),
        ("1/model.onnx", "0123", "mismatched MD5 hash, expected 0123, got {}"),
        ("1/other.onnx", "{}", "there is no such file in the model's directory"),
    ],
)
def test_files_are_what_their_digests_say(tmp_path, write_repository_model, file, digest, words):
    """Before the model is loaded from them."""
    folder = write_repository_model(tmp_path / "m")
    actual = hashlib.md5((folder / "1" / "model.onnx").read_bytes()).hexdigest()  # noqa: S324 - the agent's own
    (folder / "config.pbtxt").write_text(AGENT.format(file, digest.format(actual)))
    if not words:
        assert open_model(folder, "m").config.agents
        return
    with pytest.raises(MmeError) as caught:
        open_model(folder, "m")
    assert caught.value.kind is Kind.INVALID_MODEL
    assert caught.value.message == f"checksum of '{file}' of model 'm': {words.format(actual)}"
