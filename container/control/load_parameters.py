"""What loads and unloads of the repository extension may ask for, and how their failures read. PURE.

Parameters and sentences are Triton's, since clients look for them: `config`, the JSON of a configuration, and
`file:<path>`, a file (in base64 where it comes as JSON), for that one load; `unload_dependents`.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.model_calls import Override
from serve.sources.override import FILE

if TYPE_CHECKING:
    from collections.abc import Mapping

_SHOWN = 200  # characters of a key in a message
_TYPES = ((bool, "BOOL"), (int, "INT"), (float, "DOUBLE"), (str, "STRING"), (bytes, "BYTES"))
# What Triton calls an error; kinds that are not the model's fault keep their own sentence.
_CODES = {
    Kind.INVALID_MODEL: "Internal",  # of one version: its code raised, or its file can't be read
    Kind.UNSUPPORTED: "Unsupported",
    Kind.EXECUTION_FAILED: "Internal",
    Kind.INTERNAL: "Internal",
}


def check_name(name: str) -> None:
    """Refuse a name that leads somewhere else.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
    if any(part in {"", ".", ".."} for part in name.split("/")) or "\0" in name:
        raise invalid_argument(f"Model name cannot be empty or a way to another directory, got '{name[:_SHOWN]}'")


def repository_error() -> MmeError:
    """A request says which repository it means."""
    return MmeError(Kind.UNSUPPORTED, "'repository_name' specification is not supported")


def load_override(parameters: Mapping[str, Any], *, allowed: bool) -> Override | None:
    """Return what a load request has a model loaded with; None for what the model has itself.

    Args:
        parameters: the request's.
        allowed: whether the server takes configurations and files of clients: they are code that it runs.

    Raises:
        MmeError: FORBIDDEN for a configuration or a file where these are not allowed; INVALID_ARGUMENT for a parameter
            that is none, not of its type, or an empty configuration.
    """
    if not allowed and (named := next((key for key in parameters if key == "config" or key.startswith(FILE)), "")):
        raise overrides_forbidden(f"load parameter '{named[:_SHOWN]}'")
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key.startswith(FILE):
            files[key] = _decoded(key, value)
        elif key != "config" or not isinstance(value, str):
            raise invalid_argument(f"Unrecognized load parameter '{key[:_SHOWN]}' with type '{_type_of(value)}'")
    config = parameters.get("config")
    if config == "":
        raise invalid_argument("load parameter 'config' is empty: leave it out for the model's own configuration")
    return Override(config or "", files) if config or files else None


def overrides_forbidden(what: str) -> MmeError:
    """Return the refusal of something of a client's that a model is to be loaded with."""
    return MmeError(
        Kind.FORBIDDEN,
        f"{what} is not allowed: what clients send with a load is code that the server runs; start the server with "
        "--allow-load-overrides/MME_ALLOW_LOAD_OVERRIDES=true if all of its clients may do that",
    )


def unload_dependents(parameters: Mapping[str, Any]) -> bool:
    """Whether an unload request means the models too that the model consists of.

    Raises:
        MmeError: INVALID_ARGUMENT for a parameter that is none, or not of its type.
    """
    for key, value in parameters.items():
        if key != "unload_dependents" or not isinstance(value, bool):
            raise invalid_argument(
                f"Unable to parse '{key[:_SHOWN]}': an unload has one parameter, unload_dependents, true or false"
            )
    return bool(parameters.get("unload_dependents", False))


def load_error(name: str, error: MmeError) -> MmeError:
    """How Triton tells that a model could not be loaded: with the version, where it is one that is at fault."""
    if error.kind is Kind.UNKNOWN_MODEL:
        return MmeError(Kind.INTERNAL, f"failed to load '{name}', failed to poll from model repository")
    code = _CODES.get(error.kind)
    if code is None:
        return error
    why = error.message
    if error.version is not None:
        why = f"version {error.version} is at UNAVAILABLE state: {code}: {why};"
    return MmeError(Kind.INVALID_MODEL, f"load failed for model '{name}': {why}")


def _decoded(key: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    # Triton's C++ client sends lines of 72 characters.
    text = value.replace("\n", "").replace("\r", "") if isinstance(value, str) else value
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise invalid_argument(f"file parameter '{key[:_SHOWN]}' must be the file in base64") from None


def _type_of(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), type(value).__name__)
