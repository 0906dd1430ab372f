"""A `ModelConfig` and the published message, each made of the other by one walk over the fields of its values. PURE.

A field of a value is the message's field of that name, but for what its `metadata` says:

- `path`: where it lies in the message, `rate_limiter.priority`. Its default is None where the message tells whether it
  is set; else the outer field is there once one of those inside is set.
- `only`: the kind of message that has it; `each`: the kind that its items are, or the field inside of them that counts.
- `oneof`: at most one of several is set; or the name in the message for each class that the value may be of.
- `is_message`: it is set or not, and holds nothing; `others`: it has the fields that no other path names.
- `single`: its numbers have single precision. `unset`: what 0 means. `ours`: the message does not have it.

Without protobuf, which a model's own environment need not have: a message is read by its `ListFields`, and written as
JSON. That is protobuf's with every default in it, but for integers of 64 bits, which are numbers here.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from enum import Enum
from types import MappingProxyType, NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from model_handlers.config import model_config as _config
from model_handlers.config.model_config import BatchInputKind, BatchOutputKind, InstanceKind, ModelConfig, NamedTensor
from model_handlers.tensor import BY_CONFIG_NAME, BY_NUMBER, DataType, TensorFormat, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Json = dict[str, Any]

OPTIMIZATION: Mapping[str, Any] = {  # where config.pbtxt says nothing of it
    "priority": "PRIORITY_DEFAULT",
    "input_pinned_memory": {"enable": True},
    "output_pinned_memory": {"enable": True},
    "gather_kernel_buffer_threshold": 0,
    "eager_batching": False,
}
_PREFIXES: Mapping[Any, str] = {
    InstanceKind: "KIND_",
    BatchInputKind: "BATCH_",
    BatchOutputKind: "BATCH_",
    TensorFormat: "FORMAT_",
}


def config_json(config: ModelConfig, *, filled_in: bool = True) -> Json:
    """The configuration as `GET /v2/models/M/config` answers it, and as an author's code is told.

    Every scalar, list and map is there, with its default if it was not set; messages only where set; enums by name.
    `filled_in` adds what Triton adds: `optimization`, or `model_transaction_policy` to an ensemble.
    """
    if filled_in and config.ensemble:
        nothing: Any = MappingProxyType({})
        config = replace(config, decoupled=bool(config.decoupled), optimization=nothing, optimization_level=0)
        config = replace(config, cpu_accelerators=(), gpu_accelerators=())
    elif filled_in:
        config = replace(config, optimization={**OPTIMIZATION, **config.optimization})
    return _written(config)


def with_named(document: Json, config: ModelConfig) -> Json:
    """The JSON with the tensors that config.pbtxt only names, each in its place."""
    both: tuple[tuple[str, tuple[NamedTensor, ...]], ...] = (
        ("input", config.named_inputs),
        ("output", config.named_outputs),
    )
    for what, tensors in both:
        for named in tensors:
            # Their type may be None, which that of a whole one is not.
            spec = TensorSpec(named.name, named.data_type, named.dims, optional=named.optional)  # type: ignore[arg-type]
            document[what].insert(named.place, _written(spec, what))
    return document


def config_fields(config: ModelConfig) -> Json:
    """Everything that the configuration says, as JSON for another process."""
    return _written(config, ours=True)


def config_from(said: Any) -> ModelConfig:
    """What a published message or its JSON says; no rule is checked.

    Raises KeyError, TypeError, ValueError or AttributeError where it is neither.
    """
    config: ModelConfig = _made(ModelConfig, said)
    return config


# -- the walk ----------------------------------------------------------------------------------------------------------


def _made(value_class: Any, message: Any) -> Any:
    outermost = said_by(message)
    values = {}
    for field in _FIELDS[value_class]:
        said: Any = outermost
        for name in field.path[:-1]:
            said = said_by(said[name]) if said is not None and name in said else None
        if said is not None and field.path[-1] in said:
            values[field.name] = field.form.read(said[field.path[-1]])
        elif field.default is MISSING or (said is not None and field.has_presence and len(field.path) > 1):
            values[field.name] = field.empty
    return value_class(**values)


def said_by(message: Any) -> Mapping[str, Any]:
    """The fields that a message sets, or its JSON."""
    return message if isinstance(message, dict) else {field.name: value for field, value in message.ListFields()}


def _written(value: Any, kind: str = "", *, ours: bool = False) -> Json:
    document: Json = {}
    for field in _FIELDS[type(value)]:
        item = getattr(value, field.name)
        if field.is_left_out(value, item, kind) or (field.is_ours and not ours):
            continue
        place = document
        for name in field.path[:-1]:
            place = place.setdefault(name, {})
        place[field.path[-1]] = field.form.write(item)
    return document


@dataclass(frozen=True, slots=True)
class _Form:
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    empty: Any = None


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    path: tuple[str, ...]
    form: _Form
    default: Any
    empty: Any
    how: Mapping[str, Any]
    has_presence: bool
    is_ours: bool
    value_class: type | None
    beside: tuple[tuple[str, Any], ...]

    def is_left_out(self, value: Any, item: Any, kind: str) -> bool:
        if self.value_class is not None:
            return not isinstance(item, self.value_class)
        if self.how.get("only", kind) != kind:
            return True
        if self.has_presence or {"oneof", "is_message", "others"} & self.how.keys():
            return item is None or (not self.has_presence and not item)
        return bool(self.beside) and all(getattr(value, name) == default for name, default in self.beside)


def _fields_of(value_class: Any) -> tuple[_Field, ...]:
    hints = get_type_hints(value_class, {**vars(_config), **globals()})
    own = fields(value_class)
    return tuple(made for each in own for made in _field(each, hints[each.name], own))


def _field(field: Field[Any], hint: Any, own: Iterable[Field[Any]]) -> Iterable[_Field]:
    how = field.metadata
    path = tuple(how.get("path", field.name).split("."))
    beside = [each for each in own if len(path) > 1 and each.metadata.get("path", "").split(".")[:-1] == [*path[:-1]]]
    siblings = () if _default(field) is MISSING else tuple((each.name, _default(each)) for each in beside)
    names: Any = how.get("oneof")
    classes: dict[str, Any] = names if isinstance(names, dict) else {path[-1]: None}
    for name, value_class in classes.items():
        form = _form(value_class or hint, how) if "others" not in how else _others(field.name, own)
        yield _Field(
            name=field.name,
            path=(*path[:-1], name),
            form=form,
            default=_default(field),
            empty=how.get("unset", form.empty),
            how=how,
            has_presence=field.default is None and hint != _OPTIONAL_TYPE,
            is_ours="ours" in how,
            value_class=value_class,
            beside=siblings,
        )


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


# -- kinds of values ---------------------------------------------------------------------------------------------------

_OPTIONAL_TYPE: Any = DataType | None


def _form(hint: Any, how: Mapping[str, Any]) -> _Form:
    if hint in (DataType, _OPTIONAL_TYPE):
        return _Form(_data_type, _type_name)
    if isinstance(hint, UnionType):
        return _form(next(each for each in get_args(hint) if each is not NoneType), how)
    if "is_message" in how:
        return _Form(lambda _: True, lambda _: {})
    if get_origin(hint) is tuple:
        item = _form(get_args(hint)[0], how)
        return _Form(lambda said: tuple(map(item.read, said)), lambda value: list(map(item.write, value)), ())
    if get_origin(hint) is Mapping:
        key, value = get_args(hint)
        return _map_form(key, value, how)
    if is_dataclass(hint):
        return _Form(lambda said: _made(hint, said), lambda value: _written(value, how.get("each", "")))
    if issubclass(hint, Enum):
        return _enum_form(hint)
    return _Form(_as_single, _shortest, 0.0) if "single" in how else _Form(_same, _same, hint())


def _map_form(key: Any, value: Any, how: Mapping[str, Any]) -> _Form:
    # Of values that are messages, sorted: protobuf has them in any order.
    item, inside, ordered = _form(value, {}), how.get("each", ""), sorted if is_dataclass(value) else iter
    if inside:
        item = _Form(lambda said: said_by(said).get(inside, ""), lambda value: {inside: value})

    def read(said: Any) -> Any:
        return MappingProxyType({key(name): item.read(said[name]) for name in ordered(said)})

    def write(values: Mapping[Any, Any]) -> Json:
        return {str(name): item.write(each) for name, each in values.items()}

    return _Form(read, write, MappingProxyType({}))


def _enum_form(enum: Any) -> _Form:
    prefix = _PREFIXES.get(enum, "")

    def read(said: Any) -> Any:
        return enum[said.removeprefix(prefix)] if isinstance(said, str) else enum(said)

    return _Form(read, lambda value: f"{prefix}{value.name}", next(iter(enum)))


def _others(path: str, own: Iterable[Field[Any]]) -> _Form:
    paths = (each.metadata.get("path", "").split(".") for each in own)
    known = {names[1] for names in paths if names[0] == path}
    return _Form(lambda said: {name: value for name, value in said_by(said).items() if name not in known}, dict)


def _same(value: Any) -> Any:
    return value


def _data_type(said: Any) -> DataType | None:
    return BY_CONFIG_NAME.get(said) if isinstance(said, str) else BY_NUMBER.get(said)


def _type_name(data_type: DataType | None) -> str:
    return "TYPE_INVALID" if data_type is None else data_type.config_name


def _as_single(value: float) -> float:
    (single,) = struct.unpack("f", struct.pack("f", value))
    return float(single)


def _shortest(value: float) -> float:
    # The shortest number that single precision can't tell from this one, as protobuf writes them.
    packed = struct.pack("f", value)
    texts = (f"{value:.{digits}g}" for digits in range(6, 10))
    return next((float(text) for text in texts if struct.pack("f", float(text)) == packed), value)


_FIELDS: Mapping[Any, tuple[_Field, ...]] = {
    value: _fields_of(value)
    for value in {**vars(_config), "TensorSpec": TensorSpec}.values()
    if isinstance(value, type) and is_dataclass(value) and value is not DataType
}
