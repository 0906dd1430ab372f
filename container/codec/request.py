"""What requests of every form mean: layouts, fields, wanted outputs, tensors in shared memory, and bodies as they come.

Two front ends read requests: `codec.decode` JSON and what lies behind it, `grpc.codec` protobuf. What a head means is a
`RequestPlan`, which they keep for later requests with the same head.

SageMaker says in the content type where the JSON ends, KServe in a header of its own: SageMaker strips headers that it
does not know, which is why Triton's SageMaker endpoint carries the number in the media type:
`application/vnd.sagemaker-triton.binary+json;json-header-size=N`.
"""

from __future__ import annotations

import codecs
import json
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from container.steps.shared_memory import DISABLED
from model_handlers.config.bounds import MAX_ITEMS
from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.requests import FLAG_SEQUENCE_END, FLAG_SEQUENCE_START
from model_handlers.scripts.default_script import ACCEPT, BODY, CONTENT_TYPE, CUSTOM_ATTRIBUTES, DEFAULT_TYPE
from model_handlers.tensor import BY_NAME, BYTES, MAX_DIMS, MAX_ELEMENTS, UINT8, decode_bytes_elements, element_count
from serve.request import Bounded, InferenceRequest, Layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Sized

    from container.steps.shared_memory import Place, Regions
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import Array, DataType
    from serve.request import Completion, InferenceResponse


_MAX_LAYOUTS = 4096  # remembered; then all are forgotten, which costs each model one check
_MAX_BYTES = 16 << 20  # that they may take


class Layouts:
    """The layouts that have been seen, whatever the form of their requests."""

    def __init__(self) -> None:
        self._known = Bounded(_MAX_LAYOUTS, _MAX_BYTES)

    def __len__(self) -> int:
        return len(self._known)

    def intern(self, inputs: tuple[tuple[str, DataType, tuple[int, ...]], ...], outputs: tuple[str, ...]) -> Layout:
        """The one layout of these inputs (name, data type, full shape) and requested outputs (() for all of them)."""
        key = (inputs, outputs)
        layout: Layout | None = self._known.get(key)
        if layout is None:
            layout = Layout(inputs, outputs)
            self._known.keep(key, layout, layout.weight())
        return layout


class NoInputsError(MmeError):
    """JSON without `inputs`, as other servers take it: {"instances": …}. Kind INVALID_ARGUMENT."""

    def __init__(self, expected: str = "") -> None:
        super().__init__(
            Kind.INVALID_ARGUMENT,
            f"the request must have 'inputs': an array of objects with name, shape, datatype and data{expected}",
        )

    def of(self, config: ModelConfig) -> MmeError:
        """The same with the inputs that the model takes."""
        shapes = ", ".join(
            f"'{spec.name}' {spec.data_type} {list(spec.shape(config.max_batch_size))}" for spec in config.inputs
        )
        return NoInputsError(f"; model '{config.name}' takes {shapes}")


def check_number(items: Sized, what: str) -> None:
    """Refuse a request of so many inputs, outputs or parameters that others would wait for it.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
    if len(items) > MAX_ITEMS:
        raise invalid_argument(f"a request may have at most {MAX_ITEMS} {what}, got {len(items)}")


def described(name: Any, datatype: Any, shape: Any) -> tuple[str, DataType, tuple[int, ...]]:
    """Name, data type and shape of an input, whatever a client put there.

    Raises:
        MmeError: INVALID_ARGUMENT naming what is wrong.
    """
    if not isinstance(name, str) or not name:
        raise invalid_argument("every input must have a 'name'")
    data_type = BY_NAME.get(datatype) if isinstance(datatype, str) else None
    if data_type is None and datatype is None:
        raise invalid_argument(f"input '{name}' has no 'datatype': give one of {', '.join(BY_NAME)}")
    if data_type is None:
        known = ", ".join(BY_NAME)
        raise invalid_argument(f"input '{name}' has datatype {datatype!r:.100}; the protocol knows {known}")
    return name, data_type, _shape(shape, name)


def _shape(shape: Any, name: str) -> tuple[int, ...]:
    if not isinstance(shape, list):
        raise invalid_argument(f"input '{name}' must have a 'shape', an array of integers such as [1, 4]")
    if len(shape) > MAX_DIMS:
        raise invalid_argument(f"input '{name}' must have a 'shape' of at most {MAX_DIMS} dimensions")
    total = 1
    for dim in shape:
        if not _is_natural(dim):
            raise invalid_argument(f"'shape' of input '{name}' must hold integers of 0 or more, got {dim!r:.100}")
        total *= max(dim, 1)  # nothing at all of something huge is too much for numpy as well
    if total > MAX_ELEMENTS:
        raise invalid_argument(f"'shape' of input '{name}' has too many elements: {shape}")
    return tuple(shape)


def check_size(size: int, name: str, data_type: DataType, shape: Sequence[int]) -> None:
    """Check that so many bytes are a tensor; of BYTES only its elements tell.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
    expected = element_count(shape) * data_type.itemsize
    if data_type is not BYTES and size != expected:
        raise invalid_argument(
            f"input byte size mismatch for input '{name}'. Expected {expected} "
            f"for shape {list(shape)} of {data_type.name}, got {size}"
        )


def view(
    buffer: bytes, start: int, end: int, name: str, data_type: DataType, shape: tuple[int, ...], model: str
) -> Array:
    """The tensor that lies at a place of a buffer: without a copy, but for BYTES.

    Raises:
        MmeError: INVALID_ARGUMENT when BYTES do not hold as many elements as the shape says.
    """
    if data_type is BYTES:
        window = memoryview(buffer)[start:end]
        return decode_bytes_elements(window, element_count(shape), name, model).reshape(shape)
    return np.ndarray(shape, data_type.dtype, buffer, start)


def natural(value: Any, field: str, where: str, what: str = "bytes") -> int:
    """Return the number in a field.

    Raises:
        MmeError: INVALID_ARGUMENT when it is none, or negative.
    """
    if not _is_natural(value):
        raise invalid_argument(f"'{field}' of {where} must be a number of {what}, got {value!r:.100}")
    number: int = value
    return number


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


BINARY_TYPE = b"application/vnd.sagemaker-triton.binary+json;json-header-size="
_BINARY_TYPE = BINARY_TYPE.decode()
_BINARY_MEDIA_TYPE = _BINARY_TYPE.partition(";")[0]
_KSERVE_HEADER = "inference-header-content-length"


def header_length(headers: Mapping[str, str], body_length: int, *, kserve: bool) -> tuple[int | None, bool]:
    """The length of a request's JSON header; and whether a binary answer uses KServe's header, as on KServe's routes.

    The length is None where the whole body is JSON, and 0 for a raw binary request.

    Raises:
        MmeError: INVALID_ARGUMENT when the number is no number, negative, or larger than the body.
    """
    text, what = headers.get(_KSERVE_HEADER), "Inference-Header-Content-Length"
    if text is not None:
        kserve = True
    else:
        content_type = headers.get("content-type", "")
        if not content_type.startswith(_BINARY_TYPE):
            if _BINARY_MEDIA_TYPE in content_type:
                expected = f"expect MIME type for binary data starts with '{_BINARY_TYPE}', got: {content_type}"
                raise invalid_argument(expected)
            return None, kserve
        text, _, _ = content_type[len(_BINARY_TYPE) :].partition(";")  # some clients add ;charset=UTF-8 to any +json
        what = "inference header size"
    if text.isdecimal() and len(text) < 10 and text.isascii() and int(text) <= body_length:
        return int(text), kserve
    return _number(text, body_length, what), kserve


def accepts_binary(accept: str) -> bool:
    """Whether an Accept header asks for the binary form first of all. What else it may say, JSON is the answer."""
    return accept[: len(_BINARY_MEDIA_TYPE)].lower() == _BINARY_MEDIA_TYPE


def _number(text: str, body_length: int, what: str) -> int:
    """Return the length that a header says with a sign or spaces.

    Raises:
        MmeError: INVALID_ARGUMENT for what is none, or is larger than the body.
    """
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


FORM_OF_INFER = "a JSON object with 'inputs'"
FORM_OF_GENERATE = "a JSON object"
_HINT = "; send a JSON object with 'inputs', or binary data behind one whose length the request tells"
OF_SEQUENCES = frozenset({"sequence_id", "sequence_start", "sequence_end"})
RESERVED = frozenset({"priority", "timeout", "binary_data_output"}) | OF_SEQUENCES
_NONFINITE = (b"NaN", b"Infinity")  # and -Infinity: as Triton's parser and Python's write and read them
LARGE = 1 << 18  # bytes of JSON from which a thread reads it: up to there the loop does, in half a millisecond or three
_TURN_SECONDS = 0.00005
_LONGEST_SEQUENCE_ID = 128  # bytes, as Triton has it


class RequestFields:
    """What a request says beside its tensors.

    Args:
        parameters: by name.
        reserved: the names that mean something here.

    Attributes:
        binary: whether outputs are binary by default, None where it says nothing.
        timeout_us, priority, correlation_id, flags: as in `InferenceRequest`.
        parameters: the others, which are the client's own.

    Raises:
        MmeError: INVALID_ARGUMENT naming the parameter that is reserved, or of another type; UNSUPPORTED for a text
            that is too long to name a sequence.
    """

    def __init__(self, parameters: Mapping[str, Any], reserved: frozenset[str] = RESERVED) -> None:
        check_number(parameters, "parameters")
        for key, value in parameters.items():
            if key.startswith("triton_"):
                raise invalid_argument(
                    "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
                )
            if not isinstance(value, str | int | bool | float):
                raise invalid_argument(f"parameter '{key}' must be a string, a number or a boolean")
            if isinstance(value, float) and not math.isfinite(value):  # which messages to models' processes can't carry
                raise invalid_argument(f"parameter '{key}' must be a finite number, got {value}")
        self.parameters = {key: value for key, value in parameters.items() if key not in reserved}
        meant = parameters if reserved is RESERVED else {key: parameters[key] for key in reserved if key in parameters}
        self.timeout_us = _natural(meant, "timeout", "a number of microseconds")
        self.priority = _natural(meant, "priority", "a priority level")
        self.binary = boolean_field(meant, "binary_data_output", "the request")
        self.correlation_id = _correlation_id(meant)
        self.flags = FLAG_SEQUENCE_START * bool(boolean_field(meant, "sequence_start", "the request"))
        self.flags |= FLAG_SEQUENCE_END * bool(boolean_field(meant, "sequence_end", "the request"))

    @property
    def of_request(self) -> bool:
        """Whether anything is said of the request, rather than of its outputs."""
        return bool(self.parameters or self.timeout_us or self.priority or self.correlation_id or self.flags)

    def request(
        self, layout: Layout, inputs: list[Array], on_complete: Completion, request_id: str
    ) -> InferenceRequest:
        """The request of these tensors."""
        request = InferenceRequest(layout, inputs, on_complete, request_id, self.parameters, self.timeout_us)
        request.priority = self.priority
        request.correlation_id, request.flags = self.correlation_id, self.flags
        return request


class OutputOptions:
    """How a client wants its answer.

    Args:
        outputs: output → whether it is binary, for those that say so themselves.
        binary: whether outputs are binary by default; None where the request leaves it to its Accept header.
        remember: whether other requests of its form get the same.
    """

    def __init__(
        self, outputs: dict[str, bool] | None = None, *, binary: bool | None = None, remember: bool = False
    ) -> None:
        self.outputs: dict[str, bool] = {} if outputs is None else outputs
        self.binary = binary
        self.classes: dict[str, int] = {}  # output → how many are wanted in place of it, see `classified`
        self.places: dict[str, Place] = {}  # output → where in shared memory it goes; cleared at its end
        self.empty_final = False  # the end of several responses is an empty one, where none was said to be the last
        self.heads: dict[Any, bytes] | None = {} if remember else None  # of responses, by what they depend on
        self._accepting: OutputOptions | None = None

    def add(self, name: Any, parameters: Mapping[str, Any], regions: Regions) -> str:
        """Take what a request says of one output; return its name.

        Raises:
            MmeError: INVALID_ARGUMENT naming the output and what is wrong; see also `shared_input`.
        """
        if not isinstance(name, str) or not name:
            raise invalid_argument("every requested output must have a 'name'")
        where = f"output '{name}'"
        if "binary_data" in parameters:
            self.outputs[name] = bool(boolean_field(parameters, "binary_data", where))
        elif self.binary:  # which speaks of all outputs where none is named
            self.outputs[name] = False
        if names_region(parameters, name):
            for other in ("classification", "binary_data"):
                if parameters.get(other):
                    raise invalid_argument(f"{where} can not be in a shared memory region and have '{other}' as well")
            self.places[name] = _place(regions, parameters, where)
            self.outputs[name] = False
        count = natural(parameters.get("classification", 0), "classification", where, "classes")
        if count:
            self.classes[name] = count
        return name

    def accepting_binary(self) -> OutputOptions:
        """The same for a client whose Accept header asks for binary data; what the request says itself comes first."""
        if self.binary is not None:
            return self
        if self._accepting is None:
            accepting = OutputOptions(self.outputs, binary=True, remember=self.heads is not None)
            accepting.classes, accepting.places = self.classes, self.places
            self._accepting = accepting
        return self._accepting


class BinaryInput:
    """Where one binary input lies in the bytes behind a head."""

    def __init__(self, name: str, data_type: DataType, shape: tuple[int, ...], start: int, end: int) -> None:
        self.name = name
        self.data_type = data_type
        self.shape = shape
        self.start = start
        self.end = end

    def view(self, body: bytes, base: int, model: str) -> Array:
        """It, in a body whose head ends at `base`."""
        if self.data_type is BYTES:
            return view(body, base + self.start, base + self.end, self.name, BYTES, self.shape, model)
        return np.ndarray(self.shape, self.data_type.dtype, body, base + self.start)


class RequestPlan:
    """What a head means, for every request that has it."""

    def __init__(self, layout: Layout, options: OutputOptions, fields: RequestFields | None) -> None:
        self.layout = layout  # of the inputs
        self.options = options  # how the client wants its answer
        self.fields = fields  # what the head says beside; None for nothing
        self.id = ""  # the client's of the request, "" where each brings its own
        self.target = ("", "")  # the model and version that the head names, where it does
        self.tensors: Sequence[BinaryInput | Array] = ()  # those in JSON as arrays; () where each request has its own
        self.size = 0  # bytes behind the head
        self.lasts = not options.places  # it means the same for another request

    def request(self, inputs: list[Array], on_complete: Completion, request_id: str) -> InferenceRequest:
        """The request of these tensors; the head's id comes first."""
        fields = self.fields
        if fields is None:
            return InferenceRequest(self.layout, inputs, on_complete, self.id or request_id)
        return fields.request(self.layout, inputs, on_complete, self.id or request_id)


def json_object(text: bytes, form: str) -> dict[str, Any]:
    """The object that a request's JSON is, NaN and infinities allowed; `form` says which, for the message.

    Raises:
        MmeError: INVALID_ARGUMENT when it is no JSON, or no object.
    """
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        try:
            document = beyond_json(text) if goes_beyond(text) else None
        except (ValueError, TypeError, RecursionError):
            document = None
        if document is None:
            hint = _HINT if form == FORM_OF_INFER else ""
            raise invalid_argument(f"failed to parse the request JSON buffer: {error}{hint}") from None
    if not isinstance(document, dict):
        raise NoInputsError if form == FORM_OF_INFER else invalid_argument(f"the request must be {form}")
    return document


def goes_beyond(text: bytes) -> bool:
    """Whether text that is no JSON may be JSON but for NaN, infinities and a byte order mark."""
    return text.startswith(codecs.BOM_UTF8) or any(find(text, word) >= 0 for word in _NONFINITE)


def find(text: bytes, word: bytes, start: int = 0) -> int:
    """Return where the word is, or -1, as `bytes.find`; in a large text other threads have their turn meanwhile."""
    for at in range(start, len(text), LARGE):
        found = text.find(word, at, at + LARGE + len(word) - 1)
        if found >= 0:
            return found
        if at + LARGE < len(text):
            turn()
    return -1


def turn() -> None:
    """Let other threads have their turn, amid work that takes long on a thread."""
    time.sleep(_TURN_SECONDS)


def beyond_json(text: bytes) -> Any:
    """What text means that is JSON but for that. Triton's parser reads these as well.

    Raises:
        ValueError, TypeError, RecursionError: it is other text.
    """
    document = json.loads(text.decode("utf-8-sig"))
    orjson.dumps(document)  # refuses what orjson would not have read: larger numbers, half characters, deep nesting
    return document


def client_id(document: Mapping[str, Any]) -> str:
    """The client's id of a request, or "".

    Raises:
        MmeError: INVALID_ARGUMENT when it is no string.
    """
    value = document.get("id", "")
    if not isinstance(value, str):
        raise invalid_argument("'id' must be a string")
    return value


def parameters_of(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The object in the field `parameters`, {} where there is none.

    Raises:
        MmeError: INVALID_ARGUMENT when something else is there.
    """
    value = document.get("parameters")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid_argument(f"'parameters' of {where} must be an object")
    return value


def boolean_field(parameters: Mapping[str, Any], key: str, where: str) -> bool | None:
    """The boolean in a parameter, None where there is none.

    Raises:
        MmeError: INVALID_ARGUMENT when something else is there.
    """
    if key not in parameters:
        return None
    value = parameters[key]
    if not isinstance(value, bool):
        raise invalid_argument(f"parameter '{key}' of {where} must be true or false")
    return value


def _natural(parameters: Mapping[str, Any], key: str, what: str) -> int:
    value: int = parameters.get(key, 0)
    if not _is_natural(value):
        raise invalid_argument(f"parameter '{key}' must be {what}, 0 or more")
    return value


def _correlation_id(parameters: Mapping[str, Any]) -> int | str:
    value = parameters.get("sequence_id", 0)
    if isinstance(value, bool) or not isinstance(value, int | str) or (isinstance(value, int) and value < 0):
        raise invalid_argument("parameter 'sequence_id' must be a string or a number, 0 or more")
    if isinstance(value, str) and len(value.encode()) > _LONGEST_SEQUENCE_ID:
        raise MmeError(
            Kind.UNSUPPORTED, f"string correlation ID cannot be longer than {_LONGEST_SEQUENCE_ID} characters"
        )
    return value


REGION = "shared_memory_region"
_SIZE = "shared_memory_byte_size"
_OFFSET = "shared_memory_offset"


def names_region(parameters: Mapping[str, Any], name: str) -> bool:
    """Whether a tensor's parameters say that it lies in a region.

    Raises:
        MmeError: INVALID_ARGUMENT for a place in a region that has no name.
    """
    if REGION in parameters:
        return True
    for field in (_SIZE, _OFFSET):
        if field in parameters:
            raise invalid_argument(f"'{field}' can not be specified without '{REGION}' parameter for tensor '{name}'")
    return False


def shared_input(
    regions: Regions, parameters: Mapping[str, Any], name: str, data_type: DataType, shape: tuple[int, ...], model: str
) -> Array:
    """The tensor that an input's parameters name, as it is now.

    Raises:
        MmeError: UNSUPPORTED where clients share no memory, NOT_FOUND, INVALID_ARGUMENT, OUT_OF_MEMORY.
        NeedsThread: see `Regions.read`.
    """
    place = _place(regions, parameters, f"input '{name}'")
    check_size(place.byte_size, name, data_type, shape)
    data = regions.read(place)
    return view(data, 0, len(data), name, data_type, shape, model)


def write_output(place: Place, name: str, data: bytes | memoryview) -> None:
    """Write an output's bytes to its place.

    A response says nothing of the place, which its client knows: of parameters of an output Triton's C++ client takes
    `binary_data_size` alone, and gives the whole response up.

    Raises:
        MmeError: INTERNAL when there is too little room for it; INVALID_ARGUMENT when the region has become shorter.
    """
    region, offset, room = place
    if len(data) > room:
        raise MmeError(
            Kind.INTERNAL,
            f"shared memory size specified with the request for output '{name}' ({room} bytes) should be at least "
            f"{len(data)} bytes to hold the results",
        )
    region.write(offset, data)


def _place(regions: Regions, parameters: Mapping[str, Any], what: str) -> Place:
    if not regions.allowed:
        raise MmeError(Kind.UNSUPPORTED, f"{what} names a shared memory region. {DISABLED}")
    region = parameters[REGION]
    if not isinstance(region, str):
        raise invalid_argument(f"'{REGION}' of {what} must be a string, got {region!r}")
    if _SIZE not in parameters:
        raise invalid_argument(f"{what} has '{REGION}' and no '{_SIZE}'")
    size, offset = (natural(parameters.get(field, 0), field, what) for field in (_SIZE, _OFFSET))
    return regions.place(region, offset, size)


_LINE_ENDS = str.maketrans("\r\n", "  ")


def body_request(
    body: bytes, content_type: str, accept: str, custom_attributes: str, on_complete: Completion
) -> InferenceRequest:
    """The request of a body: a view into it, and what its headers say of it; "" for a header that did not come."""
    said = {CONTENT_TYPE: content_type, ACCEPT: accept, CUSTOM_ATTRIBUTES: custom_attributes}
    # Not interned: bodies have as many sizes as there are requests, and would drive all other layouts out.
    layout = Layout(((BODY, UINT8, (len(body),)),), ())
    parameters = {name: value for name, value in said.items() if value}
    return InferenceRequest(layout, [np.frombuffer(body, np.uint8)], on_complete, parameters=parameters)


def body_of(response: InferenceResponse) -> memoryview:
    """The body of an answer, where it lies.

    Raises:
        MmeError: INTERNAL, for a response that is none of such a model.
    """
    for name, _, array in response.outputs:
        if name == BODY and array.dtype == np.uint8 and array.flags.c_contiguous:
            return array.data.cast("B")
    raise MmeError(Kind.INTERNAL, f"model '{response.model_name}' was to answer with a body, and did not")


def content_type_of(response: InferenceResponse) -> bytes:
    """The content type that the model gave it, fit for a header."""
    said = (response.parameters or {}).get(CONTENT_TYPE) or DEFAULT_TYPE
    return str(said).translate(_LINE_ENDS).encode("latin-1", "replace")
