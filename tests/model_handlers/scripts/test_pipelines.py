"""Models as Hugging Face's libraries save them; a module of that name beside each stands in for transformers."""

import base64
import json

import pytest

from model_handlers.errors import Kind

TRANSFORMERS = """
class Pipeline:
    def __init__(self, **given):
        self.given = given
    def __call__(self, inputs, **parameters):
        if isinstance(inputs, bytes):
            inputs = len(inputs)
        elif hasattr(inputs, "size"):
            inputs = [*inputs.size, inputs.mode]
        if parameters.pop("rows", False):
            return [{"label": "A", "score": 0.5}, {"label": "B, or C", "score": 0.25}]
        return [{"task": self.given["task"], "device": self.given["device"], "inputs": inputs, **parameters}]

def pipeline(task, model, device):
    return Pipeline(task=task, model=model, device=device)
"""
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC")


def files(architecture="BertForSequenceClassification", **more):
    """What lies in the archive."""
    config = json.dumps({"architectures": [architecture]})
    return {"config.json": config, "model.safetensors": b"", "transformers.py": TRANSFORMERS, **more}


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertForSequenceClassification", "text-classification"),
        ("TapasForQuestionAnswering", "table-question-answering"),
        ("RobertaForQuestionAnswering", "question-answering"),
        ("GPT2LMHeadModel", "text-generation"),
        ("LlamaForCausalLM", "text-generation"),
        ("T5ForConditionalGeneration", "text2text-generation"),
        ("ViTForImageClassification", "image-classification"),
    ],
)
def test_the_architecture_tells_the_task(scripts, architecture, task):
    """It is asked with `inputs` and `parameters`, on the device of its instance."""
    loaded = scripts.load("", files=files(architecture))

    answer = loaded.told(json.dumps({"inputs": ["a", "b"], "parameters": {"top_k": 2}}))
    assert answer == [{"task": task, "device": -1, "inputs": ["a", "b"], "top_k": 2}]


@pytest.mark.parametrize("architecture", ["BertModel", "MPNetModel"])
def test_an_encoder_of_text_answers_with_features(scripts, architecture):
    """It was saved with a tokenizer, and without a head."""
    loaded = scripts.load("", files=files(architecture, **{"tokenizer.json": "{}"}))

    assert loaded.told('{"inputs": "hi"}')[0]["task"] == "feature-extraction"


@pytest.mark.parametrize(
    ("architecture", "beside"),
    [
        ("CLIPModel", ("tokenizer.json", "preprocessor_config.json")),
        ("ViTModel", ()),
        ("EncoderDecoderModel", ("tokenizer.json",)),
        ("GPT2DoubleHeadsModel", ("tokenizer.json",)),
    ],
)
def test_other_models_without_a_head_are_not_guessed_at(scripts, architecture, beside):
    """They read images as well, or nobody knows what."""
    error = scripts.refused("", files=files(architecture, **dict.fromkeys(beside, "{}")))

    assert f"an architecture '{architecture}' of config.json" in error.message


def test_the_task_may_be_said(scripts):
    """By HF_TASK, whatever the architecture is."""
    loaded = scripts.load("", files=files("BertModel"), parameters={"HF_TASK": "feature-extraction"})

    assert loaded.told('{"inputs": "hi"}')[0]["task"] == "feature-extraction"


def test_a_task_that_nobody_knows_is_asked_for(scripts):
    """The sentence names the architecture, and the variable."""
    error = scripts.refused("", files=files("BertModel"))

    assert error.kind is Kind.INVALID_MODEL
    assert "an architecture 'BertModel' of config.json" in error.message
    assert "HF_TASK=text-classification" in error.message


def test_transformers_that_is_not_there_is_asked_for(scripts):
    """The sentence says what the model would have been."""
    error = scripts.refused("", files=files(**{"transformers.py": "raise ImportError('none here')"}))

    assert error.kind is Kind.INVALID_MODEL
    assert "install transformers" in error.message
    assert "its pipeline for text-classification (none here)" in error.message


def test_a_description_that_is_none_says_so(scripts):
    """Before anything is imported."""
    error = scripts.refused("", files=files(**{"config.json": "[]"}))

    assert "config.json does not tell an architecture" in error.message


@pytest.mark.parametrize(
    ("body", "content_type", "inputs"),
    [
        ('inputs\nhello\n"a, b"\n', "text/csv", ["hello", "a, b"]),
        (f"inputs\n{'long' * 50_000}\n", "text/csv", ["long" * 50_000]),
        ("question,context\nwho,me\n", "text/csv", [{"question": "who", "context": "me"}]),
        (b"RIFF....", "audio/wave", 8),
        (PIXEL, "image/png", [1, 1, "RGB"]),
    ],
)
def test_other_forms_than_json_are_read(scripts, body, content_type, inputs):
    """CSV with a header, sounds and images, as Amazon's container reads them."""
    if content_type == "image/png":
        pytest.importorskip("PIL")
    loaded = scripts.load("", files=files())

    assert loaded.told(body, content_type)[0]["inputs"] == inputs


@pytest.mark.parametrize(
    ("body", "content_type", "words"),
    [
        ("{", "application/json", "the body is not application/json"),
        ("a,b\n1,2\n", "text/csv", "with a header of inputs, question, context"),
    ],
)
def test_a_body_that_cannot_be_read_is_the_clients_fault(scripts, body, content_type, words):
    """The sentence says what it should be."""
    error = scripts.load("", files=files()).refused(body, content_type)

    assert error.kind is Kind.INVALID_ARGUMENT
    assert words in error.message


def test_rows_are_written_below_a_header(scripts):
    """Where the client wants CSV."""
    body = scripts.load("", files=files()).body('{"inputs": "x", "parameters": {"rows": true}}', accept="text/csv")

    assert body.decode() == 'label,score\nA,0.5\n"B, or C",0.25\n'


def test_a_script_of_the_container_of_hugging_face_runs_as_it_is(scripts):
    """Its decoder and encoder are there without the package; without model_fn the pipeline is loaded."""
    loaded = scripts.load(
        """
        from sagemaker_huggingface_inference_toolkit import content_types, decoder_encoder

        def input_fn(input_data, content_type):
            return decoder_encoder.decode(input_data, content_type)

        def predict_fn(data, model):
            return [{"read": data["inputs"], "answer": model(data["inputs"])[0]["task"]}]

        def output_fn(prediction, accept):
            assert content_types.JPEG in content_types.VISION_TYPES
            return decoder_encoder.encode(prediction, accept)
        """,
        files=files(),
    )

    assert loaded.told('{"inputs": "hi"}') == [{"read": "hi", "answer": "text-classification"}]
    assert loaded.body("inputs\nhi\n", "text/csv", "text/csv") == b"read,answer\n['hi'],text-classification\n"


def test_a_torchscript_file_comes_before_a_description(scripts):
    """model.pt beside a config.json is what it was."""
    error = scripts.refused("", files=files(**{"model.pt": b"PK"}))

    assert "model.pt would be loaded by torch" in error.message or "failed while model_fn ran" in error.message
