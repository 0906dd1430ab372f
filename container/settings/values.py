"""What one setting's text may be: functions from a variable's text to its value. See `kinds` for what values are.

Each parser raises `ValueError` with what is allowed, worded to follow "expected". They know no variable's name, read no
environment and touch no disk; `table` says which variable uses which.
"""

from __future__ import annotations

import os
import re
from ipaddress import IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from container.settings.kinds import BatchSize, ResourceLimit
from serve.sizes import BYTES_ALLOWED, byte_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from enum import Enum

    Parser = Callable[[str], Any]


_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
MOST_PAYLOAD_MB = 100_000  # MiB of a request's body
_JSON = "application/json"
_ENDPOINT = r"(?:(?:https?://)?(?:[0-9A-Za-z.-]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}/)?"
_CODE = "/opt/ml/model/code"  # where the SageMaker SDK puts a script into every archive


def boolean(text: str) -> bool:
    """`true` or `false`, also as 1/0, yes/no, on/off."""
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError("true or false")


def integer(low: int, high: int) -> Parser:
    """A parser of whole numbers from `low` to `high`."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(text)

    return parse


def seconds(low: float, high: float) -> Parser:
    """A parser of seconds from `low` to `high`, with or without a fraction."""

    def parse(text: str) -> float:
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) or not low <= float(text) <= high:
            raise ValueError(f"seconds from {low:g} to {high:g}")
        return float(text)

    return parse


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


def fraction(text: str) -> float:
    """A share between 0 and 1, as `0.8` or `1`."""
    if not re.fullmatch(r"[01](\.[0-9]+)?", text) or not 0 < float(text) <= 1:
        raise ValueError("a fraction above 0 and up to 1, such as 0.8")
    return float(text)


def names(text: str) -> tuple[str, ...]:
    """Model names between commas."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found) or "\0" in text:
        raise ValueError("model names between commas, none of them empty")
    return tuple(dict.fromkeys(found))


def resource_limits(text: str) -> tuple[ResourceLimit, ...]:
    """Limits between commas, each as `NAME:COUNT` or `NAME:COUNT:DEVICE`; a later one of the same resource wins."""
    found = {}
    for part in text.split(","):
        match = re.fullmatch(r"([^:\0]+):([0-9]{1,9})(?::([0-9]{1,4}))?", part.strip())
        if match is None:
            raise ValueError("NAME:COUNT or NAME:COUNT:DEVICE, several of them between commas")
        limit = ResourceLimit(match[1], int(match[2]), match[3] or "")
        found[limit.pool] = limit
    return tuple(found.values())


def batch_sizes(text: str) -> tuple[BatchSize, ...]:
    """Sizes between commas, each as `SIZE` or `BACKEND:SIZE`; a later one of the same backend wins."""
    found = {}
    for part in text.split(","):
        match = re.fullmatch(r"(?:([a-z0-9_]+):)?([1-9][0-9]{0,8})", part.strip())
        if match is None:
            raise ValueError("SIZE or BACKEND:SIZE, several of them between commas")
        found[match[1] or ""] = BatchSize(match[1] or "", int(match[2]))
    return tuple(found.values())


def directory(text: str) -> Path:
    """A folder, made absolute here because the server runs in another working directory."""
    if "\0" in text:
        raise ValueError("a folder")
    return Path(os.path.abspath(Path(text).expanduser()))  # noqa: PTH100 - resolve() would follow links


def file(text: str) -> Path:
    """A file, made absolute as a folder is."""
    if "\0" in text:
        raise ValueError("a file")
    return directory(text)


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


def model_name(text: str) -> str:
    """The name of a model directory, not a path."""
    if "/" in text or "\0" in text or text in {".", ".."}:
        raise ValueError("the name of a directory in the model repository, not a path")
    return text


def printable(length: int) -> Parser:
    """A parser of printable ASCII text, which is what CloudWatch takes for names."""

    def parse(text: str) -> str:
        if not text.isascii() or not text.isprintable() or len(text) > length:
            raise ValueError(f"at most {length} printable ASCII characters")
        return text

    return parse


def namespace(text: str) -> str:
    """A CloudWatch namespace; those that begin with AWS/ are Amazon's own."""
    if not re.fullmatch(r"[A-Za-z0-9_./#:-]{1,255}", text) or text.startswith("AWS/"):
        raise ValueError("at most 255 letters, digits and ._-/#:, not beginning with AWS/")
    return text


def choice(*allowed: str) -> Parser:
    """A parser of a few words; letter case does not count."""
    by_lower = {word.lower(): word for word in allowed}

    def parse(text: str) -> str:
        if text.lower() not in by_lower:
            raise ValueError(", ".join(allowed[:-1]) + f" or {allowed[-1]}")
        return by_lower[text.lower()]

    return parse


def enum_of(kind: type[Enum]) -> Parser:
    """A parser of the values of an enumeration of words."""
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


def script_name(text: str) -> str:
    """The file name of a Python script; `.py` may be left out, as in Amazon's containers."""
    name = text if text.endswith(".py") else f"{text}.py"
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name.startswith("."):
        raise ValueError("the file name of a Python script, without a folder")
    return name


def task(text: str) -> str:
    """A task of Hugging Face's libraries."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", text):
        raise ValueError("a task of Hugging Face's, such as text-classification")
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
