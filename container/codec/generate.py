"""Triton's generate extension: tensors as the keys of a flat JSON object. PURE.

A key that is an input of the model is that input, and any other is a parameter of the request; what `parameters` holds
counts as if it stood beside it. Of the names that infer reserves, only those of a sequence have a meaning: `timeout`
and `priority` are what the model says. Types and shapes are not sent, they are the model's own: a request fills
the shape of an input with its elements, and an answer is flat. Knows nothing of how many answers a request gets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from container.codec.bodies import event
from container.codec.json_data import (
    array_to_json,
    flat_array_from_json,
    one_to_json,
    parameters_to_json,
    with_literals,
)
from container.codec.json_numbers import whole
from container.codec.request import (
    FORM_OF_GENERATE,
    LARGE,
    OF_SEQUENCES,
    RequestFields,
    client_id,
    json_object,
    parameters_of,
)
from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.tensor import element_count

if TYPE_CHECKING:
    from collections.abc import Collection

    from container.codec.request import Layouts
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import Array, TensorSpec
    from serve.request import Completion, InferenceRequest, InferenceResponse


def decode_generate(body: bytes, config: ModelConfig, layouts: Layouts, on_complete: Completion) -> InferenceRequest:
    """A request from its body, a JSON object: its inputs in the order of the model's; `layouts` interns its layout.

    Raises:
        MmeError: INVALID_ARGUMENT naming the key that is wrong. Missing inputs are left to the check of the layout.
    """
    document = whole(body, FORM_OF_GENERATE) if len(body) > LARGE else json_object(body, FORM_OF_GENERATE)
    names = {spec.name for spec in config.inputs}
    values, given = _values(document, names, config)
    own = RequestFields(given, OF_SEQUENCES)
    inputs = [(spec, _tensor(values[spec.name], spec, config)) for spec in config.inputs if spec.name in values]
    layout = layouts.intern(tuple((spec.name, spec.data_type, array.shape) for spec, array in inputs), ())
    return own.request(layout, [array for _, array in inputs], on_complete, _id(document, names))


def encode_generate(response: InferenceResponse, *, literal: bool = False) -> bytes:
    """A response as a JSON object: its parameters, and each output as its one element or as a flat list.

    Where it is `literal` it says NaN and Infinity, as Triton's does, in place of null.

    Raises:
        MmeError: UNSUPPORTED when an output or a parameter can't be written as JSON, or not under its name.
    """
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document |= {"model_name": response.model_name, "model_version": response.model_version}
    if response.parameters:
        parameters = parameters_to_json(response.parameters, response.model_name)
        _refuse_taken(document, parameters, "response parameter", response.model_name)
        document |= parameters
    for name, data_type, array in response.outputs:
        _refuse_taken(document, (name,), "output", response.model_name)
        elements = array_to_json(array, data_type, name, literal=literal)
        if array.size == 1:
            document[name] = one_to_json(elements, literal=literal)
        else:
            document[name] = with_literals(elements) if literal else elements
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def error_event(message: str) -> bytes:
    """An error as the event that `generate_stream` sends once its answer has begun."""
    return event(orjson.dumps({"error": message}))


def _values(
    document: dict[str, Any], names: Collection[str], config: ModelConfig
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is sent for the model's inputs, and the parameters."""
    if "parameters" in names and "parameters" in document:
        raise invalid_argument(
            f"Keyword 'parameters' for nested schema also given as input tensor name: model '{config.name}' has an "
            "input of that name, which generate can't be sent; ask for inference by the infer route"
        )
    own = {key: value for key, value in document.items() if key != "parameters" and (key != "id" or key in names)}
    values: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for key, value in (*own.items(), *parameters_of(document, "the request").items()):
        what, known = ("input", values) if key in names else ("parameter", parameters)
        if key in known:
            raise invalid_argument(
                f"{what} '{key}' already exists in request for model '{config.name}': send it either in 'parameters' "
                "or beside it"
            )
        known[key] = value
    return values, parameters


def _id(document: dict[str, Any], names: Collection[str]) -> str:
    """The request's id; where an input has that name, a text is both, and anything else is the input alone."""
    if "id" in names and not isinstance(document.get("id"), str):
        return ""
    return client_id(document)


def _tensor(value: Any, spec: TensorSpec, config: ModelConfig) -> Array:
    data = value if isinstance(value, list) else [value]
    array = flat_array_from_json(data, spec.data_type, spec.name)
    expected = spec.shape(config.max_batch_size)
    shape = _filled(expected, array.size)
    if shape is None:
        raise invalid_argument(
            f"The schema can not convert input '{spec.name}' to tensor with proper shape: model '{config.name}' "
            f"expects {list(expected)}, which {array.size} elements do not fill"
        )
    return array.reshape(shape)


def _filled(expected: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """The shape of `count` elements: the innermost variable dimension takes what is left, others are 1."""
    left, over = divmod(count, element_count(dim for dim in expected if dim != -1))
    variable = [axis for axis, dim in enumerate(expected) if dim == -1]
    if over or (left != 1 and not variable):
        return None
    shape = [1 if dim == -1 else dim for dim in expected]
    if variable:
        shape[variable[-1]] = left
    return tuple(shape)


def _refuse_taken(document: dict[str, Any], names: Collection[str], what: str, model: str) -> None:
    for name in names:
        if name in document:
            raise MmeError(
                Kind.UNSUPPORTED,
                f"{what} '{name}' of model '{model}' has the name of another field of the answer; ask by the infer "
                "route, or rename it",
            )
