"""What a person gives as a request, as the bytes that a server gets: JSON, tensors, text, or any body.

Tensors are sent in binary behind a JSON header; what they are called and how they are shaped is the person's to say,
and the server's to check.
"""

from __future__ import annotations

import json
import mimetypes
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from container.ship.client import JSON
from model_handlers.errors import invalid_argument
from model_handlers.tensor import BY_DTYPE, BYTES, decode_bytes_elements, encode_bytes_elements

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from container.ship.client import HttpResponse

_NUMPYS = {".npy": "application/x-npy", ".npz": "application/x-npz"}
_BINARY = "application/vnd.sagemaker-triton.binary+json;json-header-size="


@dataclass(frozen=True, slots=True)
class Request:
    """A request's content type and body, and the content type that is wanted back ("" for any)."""

    content_type: str
    body: bytes
    accept: str = JSON


def request_of(arguments: argparse.Namespace) -> Request:
    accept = arguments.accept or ""
    if arguments.json:
        return Request(JSON, _content(arguments.json), accept or JSON)
    if arguments.body:
        return Request(arguments.content_type or _type_of(arguments.body), _content(arguments.body), accept)
    if arguments.text and not any(_pair(spec) for spec in arguments.text):
        return Request(arguments.content_type or "text/plain", _content(arguments.text[0]), accept)
    tensors = {**_texts(arguments.text or ()), **_arrays(arguments.npy or ())}
    header, body = _binary(tensors, wants_binary=_is_arrays(arguments))
    return Request(f"{_BINARY}{header}", body, accept or ("" if _is_arrays(arguments) else JSON))


def write_arrays(output: Path, answer: HttpResponse) -> None:
    np.savez(output, **arrays_of(answer.headers.get("content-type", ""), answer.body))


def arrays_of(content_type: str, body: bytes) -> dict[str, Any]:
    if not content_type.startswith(_BINARY) and content_type.partition(";")[0].strip() != JSON:
        raise invalid_argument(
            f"the answer is {content_type or 'of no content type'} and no tensors: give another FILE"
        )
    size = int(content_type.removeprefix(_BINARY)) if content_type.startswith(_BINARY) else len(body)
    data, found = memoryview(body)[size:], {}
    by_name = {each.name: dtype for dtype, each in BY_DTYPE.items()}
    for output in json.loads(body[:size]).get("outputs", ()):
        name, shape, dtype = output["name"], output["shape"], by_name.get(output["datatype"])
        length = output.get("parameters", {}).get("binary_data_size")
        if length is None:
            found[name] = np.array(output["data"], dtype).reshape(shape)
            continue
        raw, data = data[:length], data[length:]
        is_bytes = output["datatype"] == BYTES.name
        flat = decode_bytes_elements(raw, prod(shape), name, "") if is_bytes else np.frombuffer(raw, dtype)
        if is_bytes and any(each.endswith(b"\0") for each in flat.tolist()):
            raise invalid_argument(
                f"output '{name}' has an element that ends in a zero, which .npz loses: give another FILE"
            )
        found[name] = (flat.astype(np.bytes_) if is_bytes else flat).reshape(shape)
    return found


def _is_arrays(arguments: argparse.Namespace) -> bool:
    output = getattr(arguments, "output", None)
    return output is not None and output.suffix == ".npz"


def _type_of(file: str) -> str:
    told = _NUMPYS.get(Path(file).suffix) or mimetypes.guess_type(file)[0]
    return told or "application/octet-stream"


def _content(source: str) -> bytes:
    """What is given itself as JSON, on standard input (`-`), or in a file."""
    if source == "-":
        return sys.stdin.buffer.read()
    return source.encode() if source.lstrip().startswith(("{", "[")) else Path(source).read_bytes()


def _pair(spec: str) -> tuple[str, str] | None:
    name, equals, file = spec.partition("=")
    return (name, file) if name and equals and file else None


def _named(flag: str, spec: str) -> tuple[str, str]:
    pair = _pair(spec)
    if pair is None:
        raise invalid_argument(f"{flag} '{spec}' is not INPUT=FILE")
    return pair


def _texts(specs: list[str] | tuple[str, ...]) -> dict[str, Any]:
    """One element a line, as [lines, 1]."""
    pairs = [_named("--text", spec) for spec in specs]
    lines = {name: _content(file).removesuffix(b"\n").split(b"\n") for name, file in pairs}
    return {name: np.array(each, np.object_).reshape(-1, 1) for name, each in lines.items()}


def _arrays(specs: list[str] | tuple[str, ...]) -> dict[str, Any]:
    arrays = {}
    for spec in specs:
        name, file = _named("--npy", spec)
        try:
            array = np.load(file, allow_pickle=False)
        except (ValueError, EOFError, BadZipFile) as error:
            raise invalid_argument(f"--npy '{spec}': {file} is no .npy file of plain numbers or strings") from error
        if not isinstance(array, np.ndarray):
            inside = ", ".join(f"'{each}'" for each in array)
            raise invalid_argument(
                f"--npy '{spec}': {file} holds arrays by name ({inside}): np.save the one that is meant"
            )
        arrays[name] = array
    return arrays


def _binary(tensors: Mapping[str, Any], *, wants_binary: bool) -> tuple[int, bytes]:
    """A binary request with these inputs: the size of its header, and all of it."""
    inputs, data = [], []
    for name, given in tensors.items():
        array = given.astype(given.dtype.newbyteorder("<"), copy=False)
        data_type = BYTES if array.dtype.kind in "SUO" else BY_DTYPE.get(array.dtype)
        if data_type is None:
            raise invalid_argument(f"--npy '{name}': the protocol has no data type for {array.dtype}")
        raw = encode_bytes_elements(array) if data_type is BYTES else array.tobytes()
        entry = {"name": name, "shape": list(array.shape), "datatype": data_type.name}
        inputs.append({**entry, "parameters": {"binary_data_size": len(raw)}})
        data.append(raw)
    document: dict[str, Any] = {"inputs": inputs}
    if wants_binary:
        document["parameters"] = {"binary_data_output": True}
    header = json.dumps(document).encode()
    return len(header), b"".join((header, *data))
