"""What a setting's text may be: the kinds of values, and functions from a text to its value. PURE.

A parser raises `ValueError` with what is allowed, worded to follow "expected", or `Refused` with a sentence of its own.
It knows no variable's name, reads no environment and touches no disk; `schema` says which setting uses which.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from decimal import Decimal
from enum import Enum
from ipaddress import IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from container.control.routes import CATEGORIES, InferenceType
from container.steps.access import Restriction
from model_handlers.errors import Kind, MmeError
from model_handlers.scripts.default_script import SELECTABLE
from serve.options import BYTES_ALLOWED, DEFAULT_LATENCIES, DEFAULT_QUANTILES, Latencies, byte_size

if TYPE_CHECKING:
    from collections.abc import Callable

    Parser = Callable[[str], Any]

Value = TypeVar("Value")


class SettingsError(MmeError):
    """Settings that refuse to start.

    Attributes:
        problems: one sentence for each, naming the variable and what it may be.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__(Kind.INVALID_ARGUMENT, "\n".join(self.problems))


class Refused(ValueError):  # noqa: N818 - it is a value that is refused, and reads so where it is raised
    """A value that is understood and cannot be honoured; its text says why and what to do instead."""


class Mode(Enum):
    """Where models come from, and what decides which are loaded."""

    PLATFORM = "platform"  # SageMaker unpacks, loads and unloads
    SINGLE = "single"  # one model directory, pinned
    STORE = "store"  # archives in S3 or a folder, loaded when they are asked for
    REPOSITORY = "repository"  # a Triton model repository on disk or in S3, loaded at start


class RateLimit(Enum):
    """Whether instances wait for resources before they execute."""

    OFF = "off"
    EXECUTION_COUNT = "execution_count"


class GrpcCompression(Enum):
    """How much answers over gRPC are compressed, in Triton's words."""

    NONE = "none"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class PingMode(Enum):
    """What a 200 from /ping means."""

    LIVE = "live"  # the server answers
    READY = "ready"  # the models of the start-up list are loaded


class LogFormat(Enum):
    """How a log line looks."""

    AUTO = "auto"  # text on a terminal, JSON lines elsewhere
    TEXT = "text"
    JSON = "json"
    TRITON = "default"  # as Triton writes lines unless told otherwise
    ISO8601 = "ISO8601"  # and as it writes them when told so


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """What there is of a resource on a device, or on every device that is not named."""

    name: str
    count: int
    device: str = ""

    @property
    def pool(self) -> tuple[str, str]:
        """What the engine knows it by."""
        return self.name.lower(), self.device

    def __str__(self) -> str:
        return f"{self.name}:{self.count}" + (f":{self.device}" if self.device else "")


@dataclass(frozen=True, slots=True)
class BatchSize:
    """What models get that batch and do not say how much: those of a backend, or with "" of any other."""

    backend: str
    size: int

    def __str__(self) -> str:
        return f"{self.backend}:{self.size}" if self.backend else str(self.size)


def to_text(value: object) -> str:
    """The text that parses back into `value`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    if isinstance(value, float):
        return f"{Decimal(repr(value)):f}"  # never in exponents
    return str(value.value) if isinstance(value, Enum) else str(value)


# -- parsers ----------------------------------------------------------------------------------------------------------

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
MOST_PAYLOAD_MB = 100_000  # MiB of a request's body
_JSON = "application/json"
_ENDPOINT = r"(?:(?:https?://)?(?:[0-9A-Za-z.-]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}/)?"
_CODE = "/opt/ml/model/code"  # where the SageMaker SDK puts a script into every archive


def boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError("true or false")


def integer(low: int, high: int) -> Parser:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(text)

    return parse


def seconds(low: float, high: float) -> Parser:
    def parse(text: str) -> float:
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) or not low <= float(text) <= high:
            raise ValueError(f"seconds from {low:g} to {high:g}")
        return float(text)

    return parse


def matching(pattern: str, allowed: str, read: Callable[[str], Any] = str) -> Parser:
    """A parser of texts that match a pattern as a whole."""

    def parse(text: str) -> Any:
        if not re.fullmatch(pattern, text):
            raise ValueError(allowed)
        return read(text)

    return parse


def listed(
    pattern: str, allowed: str, read: Callable[[re.Match[str]], Value], key: Callable[[Value], object] = lambda it: it
) -> Callable[[str], tuple[Value, ...]]:
    """A parser of values between commas; a later one of the same key wins."""

    def parse(text: str) -> tuple[Value, ...]:
        found: dict[object, Value] = {}
        for part in text.split(","):
            match = re.fullmatch(pattern, part.strip(), re.IGNORECASE)
            if match is None:
                raise ValueError(allowed)
            value = read(match)
            found[key(value)] = value
        return tuple(found.values())

    return parse


def refusing(accepted: Callable[[str], bool], allowed: str, sentence: str) -> Parser:
    """A parser of texts that are understood, of which one that is not accepted is refused with a sentence."""

    def parse(text: str) -> str:
        if text == "\0":
            raise ValueError(allowed)
        if not accepted(text):
            raise Refused(sentence)
        return text

    return parse


def _absolute(text: str) -> Path:
    """A path as it is meant where the server is started."""
    return Path(os.path.abspath(Path(text).expanduser()))  # noqa: PTH100 - resolve() would follow links


fraction = matching(r"0\.[0-9]*[1-9][0-9]*|1(\.0+)?", "a fraction above 0 and up to 1, such as 0.8", float)
directory = matching(r"[^\0]+", "a folder", _absolute)
file = matching(r"[^\0]+", "a file", _absolute)
model_name = matching(r"(?!\.\.?\Z)[^/\0]+", "the name of a directory in the model repository, not a path")
namespace = matching(
    r"(?!AWS/)[A-Za-z0-9_./#:-]{1,255}", "at most 255 letters, digits and ._-/#:, not beginning with AWS/"
)
task = matching(r"[A-Za-z0-9][A-Za-z0-9_-]*", "a task of Hugging Face's, such as text-classification")
script_name = matching(  # `.py` may be left out, as in Amazon's containers
    r"(?!\.)[A-Za-z0-9_.-]+",
    "the file name of a Python script, without a folder",
    lambda text: text if text.endswith(".py") else f"{text}.py",
)
names = listed(r"[^\0]+", "model names between commas, none of them empty", lambda found: found[0])
hosts = listed(
    r"(\*\.)?[0-9a-z_-]+(\.[0-9a-z_-]+)*\.?|\[[0-9a-f:.]+\]\.?",
    "names such as mme.example.com, *.example.com or [fe80::1], without a port, between commas",
    lambda found: found[0].lower().removesuffix("."),
)
resource_limits = listed(
    r"([^:\0]+):([0-9]{1,9})(?::([0-9]{1,4}))?",
    "NAME:COUNT or NAME:COUNT:DEVICE, several of them between commas",
    lambda found: ResourceLimit(found[1], int(found[2]), found[3] or ""),
    key=lambda limit: limit.pool,
)
batch_sizes = listed(
    r"(?:((?-i:[a-z0-9_]+)):)?([1-9][0-9]{0,8})",
    "SIZE or BACKEND:SIZE, several of them between commas",
    lambda found: BatchSize(found[1] or "", int(found[2])),
    key=lambda size: size.backend,
)
handler_service = refusing(
    lambda text: text.startswith("sagemaker_"),
    "a handler service of Amazon's containers",
    "handler services of MMS and TorchServe are not run: put what this one does into code/inference.py",
)
universal_script = refusing(
    lambda _: False, "unset", "pack the scripts for all models, and name their archive by SAGEMAKER_SUBMIT_DIRECTORY"
)


def same_folder(there: str, instead: str) -> Parser:
    """A parser of a place that the containers look for models in, for which there is another variable here."""
    sentence = f"models are looked for elsewhere: name their place by {instead}"
    return refusing(lambda text: text.rstrip("/") == there, there, sentence)


def printable(length: int) -> Parser:
    """A parser of printable ASCII text, which is what CloudWatch takes for names."""
    return matching(rf"[ -~]{{1,{length}}}", f"at most {length} printable ASCII characters")


def body_size(text: str) -> int:
    """A number of bytes that a request may have, which SAGEMAKER_MAX_PAYLOAD_IN_MB bounds alike."""
    allowed = f"a size such as 67108864, 350MB or 2GiB, at most {MOST_PAYLOAD_MB}MiB"
    try:
        size = byte_size(text)
    except ValueError:
        raise ValueError(allowed) from None
    if size > MOST_PAYLOAD_MB << 20:
        raise ValueError(allowed)
    return size


def response_cache(text: str) -> int:
    """A number of bytes, 0 for no cache; or what tritonserver's --cache-config takes: `local,size=1048576`."""
    size = text.removeprefix("local,size=")
    try:
        return 0 if size == "0" else byte_size(size)
    except ValueError:
        raise ValueError(f"{BYTES_ALLOWED}, 0 for none, or local,size=1048576") from None


def repositories(text: str) -> tuple[Path, ...] | tuple[str, ...]:
    """Folders between commas; or prefixes in S3, maybe of another S3 than AWS's, as Triton has it."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts) or "\0" in text:
        raise ValueError("folders, or s3://bucket/prefix, between commas, none of them empty")
    if all(part.startswith("s3://") for part in parts):
        allowed = "s3://bucket/prefix, or s3://https://host:port/bucket/prefix"
        return tuple(dict.fromkeys(_s3_url(part, _ENDPOINT, allowed) for part in parts))
    if any("://" in part for part in parts):
        raise ValueError("folders of this machine, or s3://bucket/prefix, not both")
    return tuple(dict.fromkeys(directory(part) for part in parts))


def _s3_url(text: str, before: str, allowed: str) -> str:
    """A prefix in a bucket, without needless slashes; `before` is the pattern of what may stand before the bucket."""
    pattern = rf"s3://({before})([a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9])(?:/([^\0]*))?"
    if found := re.fullmatch(pattern, text, re.DOTALL):
        place, bucket, prefix = found.groups()
        return f"s3://{place}{bucket}/{(prefix or '').strip('/')}".rstrip("/")
    raise ValueError(allowed)


def model_store(text: str) -> str:
    """`s3://bucket/prefix`, or a folder (made absolute; `file://` may stand before it)."""
    msg = "s3://bucket/prefix or a folder of .tar.gz archives"
    if text.startswith("s3://"):
        return _s3_url(text, "", msg)
    if "://" not in text.removeprefix("file://") and "\0" not in text:
        return str(directory(text.removeprefix("file://")))
    raise ValueError(msg)


def trace_levels(text: str) -> tuple[str, ...]:
    """What traces tell, between commas; OFF for nothing until a client asks for something."""
    found = tuple(dict.fromkeys(part.strip().upper() for part in text.split(",")))
    if found != ("OFF",) and not {*found} <= {"TIMESTAMPS", "TENSORS"}:
        raise ValueError("TIMESTAMPS, TENSORS or both between commas, or OFF")
    return found


def trace_url(text: str) -> str:
    """Where a collector of OpenTelemetry takes traces; without a path it is that of its protocol."""
    url = urlsplit(text)
    if url.scheme not in {"http", "https"} or not url.hostname:
        raise ValueError("a URL such as http://localhost:4318")
    return text if url.path.strip("/") else f"{url.scheme}://{url.netloc}/v1/traces"


def host(text: str) -> str:
    """An address or host name to listen on; an IPv6 one may come as URLs and gRPC have it: `[::1]`, `ipv6:[::1]`."""
    bracketed = re.fullmatch(r"(?:ipv6:)?\[(.*:.*)\]", text)
    address = bracketed[1] if bracketed else text
    try:
        known = str(IPv6Address(address)) if ":" in address else address
    except ValueError:
        known = ""
    if not re.fullmatch(r"[0-9A-Za-z.:_-]+", known):
        raise ValueError("an address such as 0.0.0.0, 127.0.0.1 or ::")
    return known


def choice(*allowed: str) -> Parser:
    by_lower = {word.lower(): word for word in allowed}

    def parse(text: str) -> str:
        if text.lower() not in by_lower:
            raise ValueError(", ".join(allowed[:-1]) + f" or {allowed[-1]}")
        return by_lower[text.lower()]

    return parse


def enum_of(kind: type[Enum]) -> Parser:
    words = choice(*(str(member.value) for member in kind))
    return lambda text: kind(words(text))


def log_level(text: str) -> str:
    """A level by name, or by the number Python's logging gives it; numbers between two levels mean the lower."""
    levels = ("debug", "info", "warning", "error", "critical")
    if re.fullmatch(r"[0-9]{1,3}", text):
        return levels[min(max(int(text) // 10, 1), 5) - 1]
    word = {"warn": "warning", "fatal": "critical"}.get(text.lower(), text.lower())
    if word not in levels:
        raise ValueError(f"{', '.join(levels)}, or a number from 0 to 50")
    return word


def media_type(text: str) -> str:
    """A media type that an answer can have; parameters after `;` are kept."""
    base = text.partition(";")[0].strip().lower()
    if base in {"*/*", "application/*"}:
        return _JSON
    if not re.fullmatch(r"[a-z0-9.+-]+/[a-z0-9.+-]+", base) or not text.isascii() or not text.isprintable():
        raise ValueError("one media type, such as application/json or text/csv")
    return text


def submit_directory(text: str) -> str:
    """A folder of scripts outside of the models, or the URL of its archive; "" for the place inside of each model."""
    if text.removeprefix("file://").rstrip("/") == _CODE:
        return ""
    if re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]+/[^\0]*[^/\0]\.tar\.gz", text):
        return text
    if "://" in text.removeprefix("file://") or "\0" in text:
        raise ValueError(f"{_CODE}, a folder or a .tar.gz of this machine, or s3://bucket/…/sourcedir.tar.gz")
    path = directory(text.removeprefix("file://"))
    return f"file://{path}" if path.name.endswith(".tar.gz") else str(path)


def port_range(text: str) -> tuple[int, int]:
    """An inclusive range of ports, `21000-21999`."""
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    if not match or not int(match[1]) <= int(match[2]) <= 65535:
        raise ValueError("an inclusive range of ports such as 21000-21999")
    return int(match[1]), int(match[2])


# -- restrictions, forwarded headers, keepalive, latencies ------------------------------------------------------------

_RESTRICTIONS = f"CATEGORY[,CATEGORY]:HEADER=VALUE, several of them between commas, of {', '.join(CATEGORIES)}"


def _seconds(milliseconds: int) -> float:
    return milliseconds / 1000


# Names of settings → those of `http2.connection.Keepalive`, and what their numbers are there.
_KEEPALIVE: dict[str, tuple[str, Callable[[int], float]]] = {
    "time": ("time", _seconds),
    "timeout": ("timeout", _seconds),
    "permit-without-calls": ("permit_without_calls", bool),
    "max-pings-without-data": ("max_pings_without_data", int),
    "min-recv-ping-interval-without-data": ("min_ping_interval", _seconds),
    "max-ping-strikes": ("max_ping_strikes", int),
    "max-connection-age": ("max_age", _seconds),
    "max-connection-age-grace": ("grace", _seconds),
}
_WORDS = {"true": 1, "false": 0}
_MOST = 2**31 - 1
_MOST_QUANTILES = 32  # each is a series of every model's metrics
_SWITCHES = {"counter_latencies": "counters", "summary_latencies": "summaries", "histogram_latencies": "histograms"}
_METRICS = (
    "counter_latencies=BOOL, summary_latencies=BOOL, summary_quantiles=0.5:0.05,0.99:0.001 and "
    "histogram_latencies=BOOL, between commas"
)


def restrictions(text: str) -> tuple[Restriction, ...]:
    """Groups as tritonserver's flags have them: `health,metadata:admin-key=secret`, several between commas."""
    found: list[Restriction] = []
    names: list[str] = []
    for part in text.split(","):
        category, colon, secret = part.partition(":")
        names.append(category.strip())
        if colon:
            header, equals, value = secret.partition("=")
            if not (equals and value and re.fullmatch(r"[0-9A-Za-z!#$%&'*+.^_`|~-]+", header)):
                raise ValueError(_RESTRICTIONS)
            found.append(Restriction(tuple(names), header, value))
            names = []
    found = list(dict.fromkeys(found))  # an operator's variable and flag may say the same
    named = [name for restriction in found for name in restriction.categories]
    if names or not set(named) <= set(CATEGORIES):
        raise ValueError(_RESTRICTIONS)
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"one header for each category, and '{twice}' has two")
    return tuple(found)


def header_pattern(text: str) -> str:
    """A regular expression; letter case does not count unless it begins with (?-i)."""
    try:
        re.compile(text.removeprefix("(?-i)"))
    except re.error as error:
        raise ValueError(f"a regular expression: {error}") from None
    if "\0" in text:
        raise ValueError("a regular expression such as x-tenant-.*")
    return text


def keepalive(text: str) -> tuple[str, ...]:
    """Settings of gRPC's pings and connections between commas, as `time=7200000`; times are milliseconds."""
    found = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        number = _WORDS.get(value.lower(), int(value) if re.fullmatch(r"[0-9]{1,10}", value) else -1)
        if name not in _KEEPALIVE or not 0 <= number <= _MOST:
            raise ValueError(f"NAME=NUMBER between commas, of {', '.join(_KEEPALIVE)}")
        found[name] = number
    return tuple(f"{name}={number}" for name, number in found.items())


def keepalive_rules(settings: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of `http2.connection.Keepalive` that the settings are which `keepalive` has read."""
    rules: dict[str, Any] = {}
    for name, number in (setting.split("=") for setting in settings):
        argument, value_of = _KEEPALIVE[name]
        rules[argument] = value_of(int(number))
    return rules


def latencies(text: str) -> Latencies:
    """What tritonserver's --metrics-config takes, between commas; a later word on one thing wins."""
    found: dict[str, str] = {}
    last = ""
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if equals:
            found[name], last = value, name
        elif last == "summary_quantiles":
            found[last] += f",{name}"
        else:
            raise ValueError(_METRICS)
    if not found.keys() <= {*_SWITCHES, "summary_quantiles"}:
        raise ValueError(_METRICS)
    try:
        quantiles = _quantiles(found.pop("summary_quantiles", ""))
        switches = {_SWITCHES[name]: boolean(value) for name, value in found.items()}
    except ValueError:
        raise ValueError(_METRICS) from None
    return replace(DEFAULT_LATENCIES, quantiles=quantiles, **switches)


def _quantiles(text: str) -> tuple[float, ...]:
    """The quantiles of pairs as `0.5:0.05`; how far a value may be off is no question here, where none is."""
    found = []
    for pair in text.strip("\"'").split(",") if text else ():
        quantile, _, error = pair.partition(":")
        if not 0 <= float(quantile) <= 1 or not 0 <= float(error) <= 1:
            raise ValueError(pair)
        found.append(float(quantile))
    if len(found) > _MOST_QUANTILES:
        raise ValueError(text)
    return tuple(found) or DEFAULT_QUANTILES


# -- of SageMaker's, Triton's and Amazon's containers -----------------------------------------------------------------

_MOST_DIGITS = 9


def inference_type(text: str) -> InferenceType:
    """One of Triton's three; a wrong one is refused in its words."""
    allowed = ", ".join(inference_type.value for inference_type in InferenceType)
    try:
        return InferenceType(text)
    except ValueError:
        if text == "\0":
            raise ValueError(allowed) from None
        raise Refused(f"ERROR: Invalid SAGEMAKER_TRITON_INFERENCE_TYPE '{text}'. Allowed: {allowed}") from None


def log_switch(text: str) -> bool:
    """A boolean, or a verbosity of which anything above 0 is on."""
    if not re.fullmatch(r"[0-9]+", text):
        return boolean(text)
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"true, false or a verbosity of at most {_MOST_DIGITS} digits")
    return int(text) > 0


def selected(text: str) -> tuple[str, ...]:
    """Keys of selectable inference, in the order of an answer in CSV."""
    keys = tuple(text.replace(" ", "").lower().split(","))
    if len(set(keys)) != len(keys) or not set(keys) <= set(SELECTABLE):
        raise ValueError(f"one or several of {', '.join(SELECTABLE)}, each once")
    return keys
