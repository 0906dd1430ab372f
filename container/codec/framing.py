"""Where the JSON of a request ends: SageMaker says it in the content type, KServe in a header of its own.

SageMaker strips headers that it does not know, which is why Triton's SageMaker endpoint carries the number in the
media type: `application/vnd.sagemaker-triton.binary+json;json-header-size=N`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.errors import MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Mapping

BINARY_TYPE = b"application/vnd.sagemaker-triton.binary+json;json-header-size="
_BINARY_TYPE = BINARY_TYPE.decode()
_BINARY_MEDIA_TYPE = _BINARY_TYPE.partition(";")[0]
_KSERVE_HEADER = "inference-header-content-length"
# What clients call JSON, boto3 and curl among them, where they do not think about it.
_SAID_OF_JSON = {
    "application/json",
    "application/octet-stream",
    "application/x-www-form-urlencoded",
    _BINARY_MEDIA_TYPE,
}


def header_length(headers: Mapping[str, str], body_length: int, *, kserve: bool) -> tuple[int | None, bool]:
    """How long the JSON header of a request is.

    Args:
        headers: the request's, by lower-case name.
        body_length: bytes of the body.
        kserve: whether the route is KServe's, where binary answers use its header.

    Returns:
        the length, None when the whole body is JSON, 0 for a raw binary request; and whether a binary answer uses
        KServe's header.

    Raises:
        MmeError: INVALID_ARGUMENT when the number is no number, negative, or larger than the body.
    """
    text = headers.get(_KSERVE_HEADER)
    if text is not None:
        return _checked(text, body_length, "Inference-Header-Content-Length"), True
    content_type = headers.get("content-type", "")
    if content_type.startswith(_BINARY_TYPE):
        size, _, _ = content_type[len(_BINARY_TYPE) :].partition(";")  # some clients add ;charset=UTF-8 to any +json
        return _checked(size, body_length, "inference header size"), kserve
    if _BINARY_MEDIA_TYPE in content_type:
        raise invalid_argument(f"expect MIME type for binary data starts with '{_BINARY_TYPE}', got: {content_type}")
    return None, kserve


def explained(error: MmeError, content_type: str, body: bytes) -> MmeError:
    """Why a body was not understood, with a word about one that its content type calls no JSON, and that is none."""
    base = content_type.partition(";")[0].strip().lower()
    if not base or base in _SAID_OF_JSON or body.lstrip()[:1] == b"{":
        return error
    return MmeError(
        error.kind,
        f"{error.message}; this model takes tensors, in JSON or Triton's binary form: bodies of {base[:64]} are for "
        "models with an inference script",
    )


def accepts_binary(accept: str) -> bool:
    """Whether an Accept header asks for the binary form first of all. What else it may say, JSON is the answer."""
    return accept[: len(_BINARY_MEDIA_TYPE)].lower() == _BINARY_MEDIA_TYPE


def _checked(text: str, body_length: int, what: str) -> int:
    if text.isdecimal() and len(text) < 10 and text.isascii() and int(text) <= body_length:
        return int(text)
    digits = text.strip()
    number = digits[1:] if digits[:1] == "-" else digits
    if not (number.isascii() and number.isdigit()):
        raise invalid_argument(f"Unable to parse {what}, got: {text[:64]}")
    if len(number) > 10 or not -(1 << 31) <= int(digits) < 1 << 31:
        raise invalid_argument(
            f"Unable to parse {what}, value is out of range [ -2147483648, 2147483647 ], got: {text[:64]}"
        )
    length = int(digits)
    if length < 0 or length > body_length:
        raise invalid_argument(f"inference header size should be in range (0, {body_length}), got: {length}")
    return length
