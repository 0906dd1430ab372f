"""Bodies and messages: each is a request, or refused by an error of the client's."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf import text_format
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from container.codec.bodies import inflate
from container.codec.decode import Decoder
from container.codec.generate import decode_generate
from container.codec.request import header_length
from container.control.operations import load_override
from container.control.routes import only_reads, parse_target, path_version
from container.grpc import grpc_service_pb2 as pb
from container.grpc.codec import GrpcDecoder, parsed, values
from model_handlers.config.pbtxt import config_text, parse_config
from model_handlers.errors import Kind, MmeError
from model_handlers.proto import model_config_pb2
from model_handlers.scripts import content_types, xgboost
from tests.fuzz.hunt import FindingError, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from serve.request import InferenceRequest

_OF_CLIENTS = {Kind.INVALID_ARGUMENT, Kind.UNSUPPORTED, Kind.TOO_LARGE}
_OF_MODELS = {Kind.INVALID_MODEL, Kind.UNSUPPORTED}
_TOLD = 24  # characters of a sentence by which outcomes are told apart
_NO_DIGITS = dict.fromkeys(range(48, 58))
_INFLATED = 1 << 20


def _refused(error: MmeError, kinds: set[Kind]) -> Hashable:
    if error.kind not in kinds:
        raise FindingError(f"{error.kind}") from error
    return error.kind, error.message[:_TOLD].translate(_NO_DIGITS)


def _ignore(_request: InferenceRequest, _result: object) -> None:
    """Nothing is executed."""


def _checked(request: InferenceRequest) -> Hashable:
    """What a request looks like; its arrays are what its layout says."""
    for (name, data_type, shape), array in zip(request.layout.inputs, request.inputs, strict=True):
        if array.shape != shape or array.dtype != data_type.dtype:
            raise FindingError(f"{name} is {array.dtype} {array.shape} and not {data_type} {shape}")
    kinds = tuple([(data_type.name, len(shape)) for _, data_type, shape in request.layout.inputs])
    return kinds, len(request.layout.outputs), len(request.parameters or ()), request.flags


def _alike(one: InferenceRequest, other: InferenceRequest) -> None:
    """Refuse requests that should be the same and are not."""
    if one.layout.inputs != other.layout.inputs or one.layout.outputs != other.layout.outputs or one.id != other.id:
        raise FindingError("another layout or id where it is remembered")
    for first, second in zip(one.inputs, other.inputs, strict=True):
        if first.dtype != np.object_ and first.tobytes() != second.tobytes():
            raise FindingError("another tensor where it is remembered")
    if (one.parameters or {}, one.timeout_us, one.flags) != (other.parameters or {}, other.timeout_us, other.flags):
        raise FindingError("other parameters where it is remembered")


def infer(data: bytes) -> Hashable:
    """A body that is all JSON."""
    try:
        return _checked(Decoder(1 << 20).decode(data, None, "m", _ignore)[0])
    except MmeError as error:
        return _refused(error, _OF_CLIENTS)


def binary(data: bytes) -> Hashable:
    """A body with tensors behind its JSON, whose length comes first; it means the same when it comes again."""
    size, body = int.from_bytes(data[:2], "big"), data[2:]
    decoder = Decoder(1 << 20)
    try:
        length, _ = header_length({"inference-header-content-length": str(size)}, len(body), kserve=True)
        if not length:
            return "raw"
        request = decoder.decode(body, length, "m", _ignore)[0]
        outcome = _checked(request)
        _alike(request, decoder.decode(body, length, "m", _ignore)[0])
    except MmeError as error:
        return _refused(error, _OF_CLIENTS)
    return outcome


_GENERATE = parse_config(
    """
    max_batch_size: 4
    input { name: "A" data_type: TYPE_FP32 dims: [ -1 ] } input { name: "B" data_type: TYPE_INT8 dims: [ 1 ] }
    input { name: "T" data_type: TYPE_STRING dims: [ 1 ] } input { name: "Z" data_type: TYPE_BOOL dims: [ 2, -1 ] }
    """,
    model="m",
)


def generate(data: bytes) -> Hashable:
    """A body of the generate extension."""
    try:
        return _checked(decode_generate(data, _GENERATE, Decoder().layouts, _ignore))
    except MmeError as error:
        return _refused(error, _OF_CLIENTS)


def grpc(data: bytes) -> Hashable:
    """A ModelInferRequest; one that is remembered means what its message means."""
    decoder = GrpcDecoder()
    try:
        message = parsed(pb.ModelInferRequest, data)
        request, _ = decoder.decode(message, _ignore, data=data)
        outcome = _checked(request)
        again = decoder.remembered(data, _ignore)
    except MmeError as error:
        return _refused(error, _OF_CLIENTS)
    if again is not None:
        _alike(request, again[1])
        if again[0].target != (message.model_name, message.model_version):
            raise FindingError("another model where it is remembered")
    return outcome, again is None


def load(data: bytes) -> Hashable:
    """A RepositoryModelLoadRequest, where clients may send configurations and files."""
    try:
        override = load_override(values(parsed(pb.RepositoryModelLoadRequest, data).parameters), allowed=True)
    except MmeError as error:
        return _refused(error, _OF_CLIENTS)
    return override is None or len(override.files)


def target(data: bytes) -> Hashable:
    """The target of a request."""
    route = parse_target(b"/" + data)
    reads = only_reads("GET", b"/" + data)
    if route is None:
        return reads
    try:
        path_version(route.version)
    except MmeError as error:
        return _refused(error, _OF_CLIENTS | {Kind.UNKNOWN_VERSION})
    return route.flavor, route.inference_type, route.event_stream


def compressed(data: bytes) -> Hashable:
    """A compressed body; its first byte says how."""
    try:
        inflated = inflate(data[1:], ("gzip", "deflate", "identity", "br")[data[0] % 4 if data else 0], _INFLATED)
    except MmeError as error:
        return _refused(error, _OF_CLIENTS)
    if len(inflated) > _INFLATED and data[0] % 4 != 2:
        raise FindingError("more than the limit")
    return len(inflated).bit_length()


def config(data: bytes) -> Hashable:
    """The text of a config.pbtxt; what is taken can be written, and read again as the same."""
    try:
        found = parse_config(data.decode(errors="replace"), model="m")
    except MmeError as error:
        return _refused(error, _OF_MODELS)
    if parse_config(config_text(found), model="m") != found:
        raise FindingError("another configuration once it is written and read")
    return found.backend[:8], found.max_batch_size > 0, len(found.inputs), len(found.outputs)


_FORMS = (content_types.JSON, content_types.CSV, content_types.NPY, content_types.NPZ, content_types.JSON_LINES)
_ROWS = (*xgboost.LIBSVM[:1], content_types.CSV, xgboost.RECORDIO, content_types.NPY)


def _body(read: Callable[[bytes, str], Any], types: tuple[str, ...], data: bytes) -> Hashable:
    """A body for a script, whose first byte says its content type."""
    kind = types[data[0] % len(types) if data else 0]
    try:
        read(data[1:], kind)
    except (content_types.MalformedBodyError, content_types.UnsupportedFormatError) as error:
        return kind, type(error), str(error.__cause__)[:12].translate(_NO_DIGITS)
    return kind


# -- what is expected ------------------------------------------------------------------------------------------------

_WORDS = (
    *b"inputs outputs name shape datatype data parameters binary_data_size id timeout priority classification".split(),
    *b"binary_data binary_data_output sequence_id sequence_start sequence_end shared_memory_region triton_ X Y".split(),
    *b"BOOL INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 FP16 FP32 FP64 BF16 BYTES true false null".split(),
    b'":',
    b'{"',
    b'"}',
    b"[]",
    b"{}",
    b'""',
    b"[[",
    b"\\u0000",
    b"\\ud800",
    b"\xef\xbb\xbf",
)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([word.decode("latin-1") for word in _WORDS])
)
_DOCUMENTS = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([word.decode("latin-1") for word in _WORDS[:20]]), inner, max_size=4)
    ),
    max_leaves=10,
)
_TYPES = [word.decode() for word in _WORDS if word.isupper() and len(word) > 1]


@st.composite
def _requests(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A document, and the bytes of its tensors."""
    inputs, behind = [], b""
    for _ in range(draw(st.integers(0, 3))):
        item: dict[str, Any] = {"name": draw(st.sampled_from("XYA"))}
        item |= {"datatype": draw(st.sampled_from(_TYPES)), "shape": draw(st.lists(st.integers(0, 4), max_size=3))}
        if draw(st.booleans()):
            part = draw(st.binary(max_size=32))
            item["parameters"] = {"binary_data_size": len(part)}
            behind += part
        else:
            item["data"] = draw(st.lists(_SCALARS, max_size=5))
        if draw(st.integers(0, 4)) == 0:
            item[draw(st.sampled_from(["shape", "data", "datatype", "parameters", "name"]))] = draw(_DOCUMENTS)
        inputs.append(item)
    document: dict[str, Any] = {"id": "7", "inputs": inputs}
    if draw(st.booleans()):
        document["outputs"] = draw(
            st.lists(st.fixed_dictionaries({"name": _SCALARS, "parameters": _DOCUMENTS}), max_size=2)
        )
    if draw(st.booleans()):
        document["parameters"] = draw(_DOCUMENTS)
    return json.dumps(document, separators=(",", ":")).encode(), behind


def _message(kind: Any, draw: st.DrawFn, depth: int = 3) -> Any:
    """A message with some of its fields."""
    message = kind()
    for each in kind.DESCRIPTOR.fields:
        if not depth or draw(st.integers(0, 2)) == 0:
            continue
        place = getattr(message, each.name)
        if each.message_type is None:
            enum = each.enum_type
            choice = _VALUES[each.type] if enum is None else st.sampled_from([value.number for value in enum.values])
            if each.is_repeated:
                place.extend(draw(st.lists(choice, max_size=3)))
            else:
                setattr(message, each.name, draw(choice))
        elif each.message_type.GetOptions().map_entry:
            inner = each.message_type.fields_by_name["value"]
            keys = each.message_type.fields_by_name["key"]
            for key in draw(st.lists(_VALUES[keys.type], max_size=2)):
                if inner.message_type is None:
                    place[key] = draw(_VALUES[inner.type])
                else:
                    place[key].CopyFrom(_message(GetMessageClass(inner.message_type), draw, depth - 1))
        elif each.is_repeated:
            for _ in range(draw(st.integers(0, 2))):
                place.append(_message(GetMessageClass(each.message_type), draw, depth - 1))
        else:
            place.CopyFrom(_message(GetMessageClass(each.message_type), draw, depth - 1))
    return message


_NAMES = [
    "X",
    "m",
    "",
    "1",
    "timeout",
    "priority",
    "sequence_id",
    "classification",
    "binary_data",
    "file:1/a",
    "config",
    *_TYPES,
]
_INT64, _UINT64 = st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1)
_SMALL = st.integers(0, 5)
_VALUES: dict[int, st.SearchStrategy[Any]] = {
    1: st.floats(),
    2: st.floats(width=32),
    3: _SMALL | _INT64,
    4: _SMALL | _UINT64,
    5: _SMALL | st.integers(-(2**31), 2**31 - 1),
    8: st.booleans(),
    9: st.sampled_from(_NAMES) | st.text(max_size=4),
    12: st.binary(max_size=16),
    13: _SMALL | st.integers(0, 2**32 - 1),
}


@st.composite
def _messages(draw: st.DrawFn, kind: Any) -> bytes:
    data: bytes = _message(kind, draw).SerializeToString()
    return data


@st.composite
def _configs(draw: st.DrawFn) -> bytes:
    return text_format.MessageToString(_message(model_config_pb2.ModelConfig, draw, 2)).encode()


_LINES = st.lists(
    st.lists(
        st.integers(-9, 9).map(str) | st.floats().map(str) | st.sampled_from(["", "a", "1:2", "3:4.5", "qid:1"]),
        max_size=4,
    ),
    max_size=4,
)


@st.composite
def _tables(draw: st.DrawFn) -> bytes:
    separator = draw(st.sampled_from([",", " ", ";", "\t"]))
    text = "\n".join(separator.join(line) for line in draw(_LINES))
    return bytes((draw(st.integers(0, 3)),)) + text.encode()


TARGETS = (
    Target(
        "infer", infer, _requests().map(lambda parts: parts[0]) | _DOCUMENTS.map(json.dumps).map(str.encode), _WORDS
    ),
    Target(
        "binary", binary, _requests().map(lambda parts: len(parts[0]).to_bytes(2, "big") + parts[0] + parts[1]), _WORDS
    ),
    Target(
        "generate",
        generate,
        _DOCUMENTS.map(lambda each: json.dumps({"A": each}).encode()),
        (*_WORDS, b'"A"', b'"B"', b'"T"', b'"Z"'),
    ),
    Target("grpc", grpc, _messages(pb.ModelInferRequest), _WORDS),
    Target("load", load, _messages(pb.RepositoryModelLoadRequest), (b"config", b"file:", b"=", b"=="), (4 << 20, 256)),
    Target(
        "target",
        target,
        st.lists(
            st.sampled_from([b"v2", b"models", b"/", b"%2F", b"%", b"m", b"versions", b"1", b"infer", b"?", b"ready"])
        ).map(b"/".join),
        (b"v2/models/", b"/versions/", b"/infer", b"/generate_stream", b"/invoke", b"%2F", b"%25", b"%2e", b"//", b"?"),
    ),
    Target("compressed", compressed, st.binary(max_size=64), (b"\x1f\x8b\x08\0", b"\x78\x9c"), (8 << 20, 128)),
    Target(
        "config",
        config,
        _configs(),
        (
            *b"input output name dims data_type TYPE_FP32 instance_group count kind dynamic_batching ensemble_scheduling".split(),
            *b'sequence_batching max_batch_size version_policy parameters { } [ ] : " TYPE_STRING reshape platform'.split(),
        ),
        (8 << 20, 512),
    ),
    Target(
        "formats",
        partial(_body, content_types.decode, _FORMS),
        _tables(),
        (b"\x93NUMPY\1\0", b"'descr'", b"'<f4'", b"PK\3\4"),
        (16 << 20, 256),
    ),
    Target(
        "rows",
        partial(_body, xgboost.matrix, _ROWS),
        _tables(),
        (b"\x0a\x23\xd7\xce", b"1:2 ", b"qid:", b"#"),
        (16 << 20, 256),
        needs="xgboost",
    ),
)
