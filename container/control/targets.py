"""Which inference route a request target names, and which of the others only read. PURE.

/ping                                             GET, POST   health
/invocations                                      POST        SageMaker, single model or by header
/models/{name}/invoke                             POST        SageMaker, multi-model
/v2/models/{name}[/versions/{v}]/infer            POST        KServe v2
/v2/models/{name}[/versions/{v}]/generate         POST        Triton's generate extension, one answer
/v2/models/{name}[/versions/{v}]/generate_stream  POST        the same, server-sent events
/endpoints/{endpoint}/invocations                 POST        SageMaker Runtime API, what boto3 calls
/endpoints/{endpoint}/invocations-response-stream POST        the same, an AWS event stream
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from urllib.parse import unquote_to_bytes

from model_handlers.errors import Kind, MmeError, invalid_argument

_MAX_VERSION_DIGITS = 19


class Flavor(Enum):
    """Which protocol's conventions an answer follows."""

    SAGEMAKER = "sagemaker"
    KSERVE = "kserve"
    RUNTIME = "runtime"


class InferenceType(Enum):
    """What a body means and how its answers are written."""

    INFER = "infer"
    GENERATE = "generate"
    GENERATE_STREAM = "generate_stream"


@dataclass(frozen=True, slots=True)
class Route:
    """What a target means.

    Attributes:
        flavor: the protocol, None for /ping.
        model, version: as the path has them, "" where a header or the default names the model.
        inference_type: None where the server's setting decides.
        event_stream: whether the answer is an AWS event stream.
    """

    flavor: Flavor | None
    model: str = ""
    version: str = ""
    inference_type: InferenceType | None = None
    event_stream: bool = False


_INFER = re.compile(
    rb"/v2/models/(?P<model>.+?)(?:/versions/(?P<version>[^/]*))?/(?P<type>infer|generate|generate_stream)"
)
_INVOKE = re.compile(rb"/models/(?P<model>.+)/invoke")
_NEGATIVE = re.compile(r"-[0-9]+", re.ASCII)
_RUNTIME = re.compile(rb"/endpoints/[^/]+/invocations(?P<stream>-response-stream)?")
_OF_MODEL = b"/v2/models/"
_FRONT = re.compile(rb"\A/+")
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})?")
_SLASH, _PERCENT = 0x2F, 0x25
_KNOWN_WITHOUT_LOAD = re.compile(rb"/v2/models/(?:.+/(?:stats|trace/setting)|stats)")


def parse_target(target: bytes) -> Route | None:
    """The hot route of a request target, None if it is not one.

    As Flask has it, so that all routes take the same forms: with a trailing slash where it allows one, and with several
    slashes in front (an address that ends in one).
    """
    path = path_of(target)
    if match := _INFER.fullmatch(path):
        inference_type = InferenceType(match["type"].decode())
        return Route(Flavor.KSERVE, _text(match["model"]), _text(match["version"] or b""), inference_type)
    if match := _INVOKE.fullmatch(path):
        return Route(Flavor.SAGEMAKER, _text(match["model"]))
    path = path.removesuffix(b"/")
    if path == b"/ping":
        return Route(None)
    if path == b"/invocations":
        return Route(Flavor.SAGEMAKER)
    if match := _RUNTIME.fullmatch(path):
        return Route(Flavor.RUNTIME, event_stream=match["stream"] is not None)
    return None


def only_reads(method: str, target: bytes) -> bool:
    """Return whether a request that is no inference changes nothing, loads nothing and runs no model's code.

    What is told of a model's configuration is read in memory, so that asking for it loads the model.
    """
    if method not in {"GET", "HEAD"}:
        return False
    path = path_of(target)
    return not path.startswith(_OF_MODEL) or _KNOWN_WITHOUT_LOAD.fullmatch(path) is not None


def shown(target: bytes) -> str:
    """Return a target as logs have it: without its query, where clients put tokens and signatures."""
    return target.partition(b"?")[0].decode("latin-1")


def path_of(target: bytes) -> bytes:
    """Return the path of a target, decoded but for `%2F` and `%25`, which stay, so that a slash in it is a separator.

    A route is matched against this path, and the names in it are decoded afterwards: `/models/a%2Fb` names `a/b`, and
    `/v2%2Fmodels/m` is no route.
    """
    path = target.partition(b"?")[0]
    if b"%" in path:
        path = _ESCAPE.sub(_decoded, path)
    return _FRONT.sub(b"/", path) if path.startswith(b"//") else path


def _decoded(escape: re.Match[bytes]) -> bytes:
    byte = int(escape[1], 16) if escape[1] else _PERCENT  # a percent sign alone stands for itself
    return b"%%%02X" % byte if byte in {_SLASH, _PERCENT} else bytes((byte,))


def parse_version(text: str) -> int | None:
    """A version by its text, None for the latest.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
    if not text:
        return None
    if _NEGATIVE.fullmatch(text):
        raise invalid_argument(
            f"invalid model version specified '{text[:100]}' , version should be an integral value > 0"
        )
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_VERSION_DIGITS:
        raise invalid_argument(
            f"failed to get model version from specified version string '{text[:100]}' (details: no number of at most "
            f"{_MAX_VERSION_DIGITS} digits), version should be an integral value > 0"
        )
    return int(text)


def path_version(text: str) -> int | None:
    """A version from a path, None for the latest; without digits alone it is no path of Triton's.

    Raises:
        MmeError: UNKNOWN_VERSION, INVALID_ARGUMENT.
    """
    try:
        return parse_version(text)
    except MmeError as error:
        if text.isascii() and text.isdigit():
            raise
        raise MmeError(Kind.UNKNOWN_VERSION, error.message) from None


def _text(quoted: bytes) -> str:
    return unquote_to_bytes(quoted).decode("utf-8", "replace")
