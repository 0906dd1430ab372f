"""SageMaker's headers of a request, by the lower-case names that exchanges have them under."""

from __future__ import annotations

TARGET_MODEL = "x-amzn-sagemaker-target-model"
TARGET_VARIANT = "x-amzn-sagemaker-target-variant"
CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
INFERENCE_ID = "x-amzn-sagemaker-inference-id"
