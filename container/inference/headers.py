"""SageMaker's headers of a request, by the lower-case names that exchanges have them under."""

from __future__ import annotations

TARGET_MODEL = "x-amzn-sagemaker-target-model"
TARGET_VARIANT = "x-amzn-sagemaker-target-variant"
CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
INFERENCE_ID = "x-amzn-sagemaker-inference-id"


def text_of(sent: bytes) -> str:
    """What a header says: UTF-8, which HTTP leaves to the server to read, or Latin-1, as HTTP once said."""
    try:
        return sent.decode()
    except UnicodeDecodeError:
        return sent.decode("latin-1")


def name_of(value: str) -> str:
    """The name of a model that a header holds, which HTTP reads as Latin-1 and boto3 writes as UTF-8."""
    return value if value.isascii() else text_of(value.encode("latin-1"))
