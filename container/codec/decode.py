"""KServe v2 inference requests: a JSON header, and tensors in JSON or as binary data behind it.

A binary request's header says the same thing again and again: names, types, shapes. What one header means is worked
out once and kept as a *plan*, keyed by the header's bytes; a header met before costs one dictionary look-up, and its
tensors are views into the body. Clients give each request an id of its own and write it first: the key leaves it out.
A header that names a region of shared memory is worked out each time, since what lies there is another thing each time.

A `Decoder` belongs to the event loop. A thread that decodes for it, a request of many strings, may remember something
beside it: that is one operation of a dict, and a layout that two have made costs a model one check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from container.codec import NeedsThread
from container.codec.json_data import array_from_json
from container.codec.json_numbers import NotNumbers, whole, with_numbers
from container.codec.request import (
    FORM_OF_INFER,
    LARGE,
    REGION,
    BinaryInput,
    Layouts,
    NoInputsError,
    OutputOptions,
    RequestFields,
    RequestPlan,
    check_number,
    check_size,
    client_id,
    described,
    goes_beyond,
    json_object,
    names_region,
    natural,
    parameters_of,
    shared_input,
)
from container.steps.shared_memory import AT_ONCE, Regions
from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.tensor import BYTES, element_count
from serve.request import Bounded, InferenceRequest

if TYPE_CHECKING:
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import Array, DataType
    from serve.request import Completion

    Document = dict[str, Any]
    Description = tuple[str, DataType, tuple[int, ...]]

_MAX_PLANS = 1024  # headers remembered; then all are forgotten, which costs each one parse
_MAX_PLANS_BYTES = 16 << 20  # that they may take
_LONGEST_HEADER = 8 << 10  # bytes of one
_ID = b'{"id":"'  # as tritonclient and perf_analyzer write it
_BACKSLASH = 0x5C
_STRINGS = b'"BYTES"'  # in the header of a request that sends some


class Decoder:
    """Decodes requests, and remembers the headers and layouts it has seen.

    Args:
        limit: bytes that an input may have once its JSON is read.
        regions: of shared memory, in which tensors may lie.

    Attributes:
        layouts: those of its requests, for decoders of other forms of request for the same models.
    """

    def __init__(self, limit: int = 64 << 20, regions: Regions | None = None) -> None:
        self.layouts = Layouts()
        self._limit = limit
        self._regions = Regions() if regions is None else regions
        self._plans = Bounded(_MAX_PLANS, _MAX_PLANS_BYTES)

    def __len__(self) -> int:
        """How many headers it remembers."""
        return len(self._plans)

    def decode(
        self,
        body: bytes,
        header_length: int | None,
        model: str,
        on_complete: Completion,
        regions: Regions | None = None,
        document: Document | None = None,
    ) -> tuple[InferenceRequest, OutputOptions]:
        """A request from its body: a JSON header of so many bytes and binary data behind it, or JSON as a whole (None).

        On a thread, where it may take long, `regions` stand in place of the decoder's; a `document` is what its JSON
        says, where that was read already.

        Raises:
            MmeError: INVALID_ARGUMENT naming the field or tensor that is wrong; see also `shared_input`.
            NeedsThread: it takes long (large JSON, many strings), or a tensor is to be read first: decode it by one.
        """
        size = len(body) if header_length is None else header_length
        if regions is None and (size > LARGE or (len(body) - size > AT_ONCE and _STRINGS in body[:size])):
            raise NeedsThread
        if header_length is None:
            plan, request_id = self._plan(body, model, regions, document), ""
            header_length = len(body)
        else:
            header = body[:header_length]
            key, request_id = _without_id(header) if header.startswith(_ID) else (header, "")
            known = None if document is not None else self._plans.get(key)
            plan = self._remember(header, key, request_id, model, regions, document) if known is None else known
        if header_length + plan.size != len(body):
            raise _size_mismatch(plan, len(body) - header_length, model)
        inputs: list[Array] = [
            tensor.view(body, header_length, model) if isinstance(tensor, BinaryInput) else tensor
            for tensor in plan.tensors
        ]
        return plan.request(inputs, on_complete, request_id), plan.options

    def decode_long(
        self, body: bytes, header_length: int | None, model: str, on_complete: Completion, regions: Regions
    ) -> tuple[InferenceRequest, OutputOptions]:
        """As `decode`, on a thread: large JSON is read slice by slice.

        Raises:
            MmeError: as there; TOO_LARGE for JSON that can't be read so, and is too much to be read at once.
        """
        text = body if header_length is None else body[:header_length]
        if len(text) <= LARGE:
            return self.decode(body, header_length, model, on_complete, regions)
        reason = None
        for beyond in (False, True):
            if beyond and not goes_beyond(text):
                break
            try:
                document = with_numbers(text, beyond=beyond)
                return self.decode(body, header_length, model, on_complete, regions, document)
            except NotNumbers as none:
                reason = none.reason
            except MmeError as error:  # of one input, where another may be no JSON at all
                reason = error.bare()
        return self.decode(body, header_length, model, on_complete, regions, whole(text, FORM_OF_INFER, reason))

    def decode_raw(
        self, body: bytes, config: ModelConfig, on_complete: Completion
    ) -> tuple[InferenceRequest, OutputOptions]:
        """A raw binary request: the whole body is the data of the model's only input, its shape is deduced.

        Of BYTES it is the one string itself.

        Raises:
            MmeError: INVALID_ARGUMENT when shape or input can't be deduced.
        """
        if len(config.inputs) != 1:
            raise invalid_argument(
                f"Raw request must only have 1 input (found 1) to be deduced but got {len(config.inputs)} inputs in "
                f"'{config.name}' model configuration"
            )
        spec = config.inputs[0]
        if spec.data_type is BYTES:
            shape, array = _one_string(body, spec.dims, spec.name)
        else:
            shape = _deduced_shape(spec.dims, len(body), spec.data_type.itemsize, spec.name, config.name)
            array = np.frombuffer(body, spec.data_type.dtype).reshape(shape)
        if config.max_batch_size > 0:
            shape = (1, *shape)
        layout = self.layouts.intern(((spec.name, spec.data_type, shape),), ())
        return InferenceRequest(layout, [array.reshape(shape)], on_complete), OutputOptions(binary=True)

    def _remember(
        self,
        header: bytes,
        key: bytes,
        request_id: str,
        model: str,
        regions: Regions | None,
        document: Document | None,
    ) -> RequestPlan:
        plan = self._plan(header, model, regions, document, remember=True)
        if not plan.lasts:
            return plan
        if key is not header:
            if plan.id != request_id:  # a second "id" further on, which JSON lets win: not worth remembering
                return plan
            plan.id = ""  # every request of this plan brings its own
        if len(header) <= _LONGEST_HEADER:
            self._plans.keep(key, plan, len(key) + plan.layout.weight())
        return plan

    def _plan(
        self,
        header: bytes,
        model: str,
        regions: Regions | None,
        document: Document | None,
        *,
        remember: bool = False,
    ) -> RequestPlan:
        regions = regions or self._regions
        document = json_object(header, FORM_OF_INFER) if document is None else document
        request_id, parameters = client_id(document), parameters_of(document, "the request")
        fields = RequestFields(parameters) if parameters else None
        options = OutputOptions(binary=None if fields is None else fields.binary, remember=remember)
        tensors: list[BinaryInput | Array] = []
        descriptions: list[Description] = []
        offset, lasts = 0, True
        for item in _objects(document, "inputs"):
            description = described(item.get("name"), item.get("datatype"), item.get("shape"))
            descriptions.append(description)
            parameters = _source(item, description[0])
            if names_region(parameters, description[0]):
                tensors.append(shared_input(regions, parameters, *description, model))
                lasts = False
                continue
            tensor, offset = _tensor(item, parameters, description, offset)
            if isinstance(tensor, np.ndarray) and tensor.nbytes > self._limit:
                raise MmeError(
                    Kind.TOO_LARGE,
                    f"JSON input '{description[0]}' has a byte_size ({tensor.nbytes} bytes) that exceeds the maximum "
                    f"allowed value of {self._limit} bytes; send it as binary data, or raise MME_MAX_BODY",
                )
            tensors.append(tensor)
        outputs = _objects(document, "outputs") if "outputs" in document else ()
        names = [options.add(item.get("name"), _parameters_of(item), regions) for item in outputs]
        layout = self.layouts.intern(tuple(descriptions), tuple(names))
        plan = RequestPlan(layout, options, fields if fields is not None and fields.of_request else None)
        plan.id, plan.tensors, plan.size = request_id, tensors, offset
        plan.lasts = plan.lasts and lasts
        return plan


# -- requests --------------------------------------------------------------------------------------------------------


def _without_id(header: bytes) -> tuple[bytes, str]:
    """A header without the id that it begins with, and that id; the header itself and "" if that is no plain text.

    What is left begins with the quote behind the id, and so is never taken for a whole header.
    """
    end = header.find(b'"', len(_ID))
    text = header[len(_ID) : end]
    if end < 0 or not text.isascii() or _BACKSLASH in text or not (request_id := text.decode("ascii")).isprintable():
        return header, ""
    return header[end:], request_id


def _source(item: dict[str, Any], name: str) -> dict[str, Any]:
    """The input's parameters, if it says once where its data are."""
    parameters = parameters_of(item, f"input '{name}'")
    fields = ["'data'"] if "data" in item else []
    fields += [f"'{key}' in 'parameters'" for key in ("binary_data_size", REGION) if key in parameters]
    if len(fields) != 1:
        found = f"set {', '.join(fields)}" if fields else "no field is set"
        raise invalid_argument(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. But {found} for input '{name}'"
        )
    return parameters


def _tensor(
    item: dict[str, Any], parameters: dict[str, Any], description: Description, offset: int
) -> tuple[BinaryInput | Array, int]:
    """The input's array, or where its bytes lie; and where the next one's begin."""
    name, data_type, shape = description
    if "data" in item:
        array = array_from_json(item["data"], data_type, shape, name)
        array.flags.writeable = False  # a plan hands it to every request of its form, as bodies hand out views
        return array, offset
    size = natural(parameters["binary_data_size"], "binary_data_size", f"input '{name}'")
    check_size(size, name, data_type, shape)
    return BinaryInput(name, data_type, shape, offset, offset + size), offset + size


def _parameters_of(output: dict[str, Any]) -> dict[str, Any]:
    return parameters_of(output, f"output '{output.get('name')}'")


def _one_string(body: bytes, dims: tuple[int, ...], name: str) -> tuple[tuple[int, ...], Array]:
    """The body as the one element of an input, without a length before it: it ends with the body."""
    if dims != (1,):
        raise invalid_argument(f"For BYTE datatype raw input '{name}', the model must have input shape [1]")
    array = np.empty(1, np.object_)
    array[0] = bytes(body)
    return dims, array


def _deduced_shape(dims: tuple[int, ...], size: int, itemsize: int, name: str, model: str) -> tuple[int, ...]:
    if dims.count(-1) > 1:
        raise invalid_argument(
            f"The shape of the raw input '{name}' can not be deduced because there are more than one variable-sized "
            "dimension"
        )
    known = itemsize * element_count(dim for dim in dims if dim != -1)
    if -1 in dims and size % known == 0:
        return tuple(size // known if dim == -1 else dim for dim in dims)
    if -1 in dims or size != known:
        raise invalid_argument(
            f"input byte size mismatch for input '{name}' for model '{model}'. Expected "
            f"{'a multiple of ' if -1 in dims else ''}{known}, got {size}"
        )
    return dims


def _size_mismatch(plan: RequestPlan, got: int, model: str) -> MmeError:
    expected = plan.size
    if got > expected:
        return invalid_argument(
            f"unexpected additional input data for model '{model}': its header describes {expected} bytes, {got} came"
        )
    short = next(tensor for tensor in plan.tensors if isinstance(tensor, BinaryInput) and tensor.end > got)
    return invalid_argument(
        f"unexpected size for input '{short.name}', expecting {short.end - max(got, short.start)} additional bytes for "
        f"model '{model}': its header describes {expected} bytes, {got} came"
    )


def _objects(document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    items = document.get(key)
    if isinstance(items, list):
        check_number(items, key)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        if key == "inputs":
            raise NoInputsError
        raise invalid_argument(f"the request must have '{key}': an array of objects with a name")
    return items
