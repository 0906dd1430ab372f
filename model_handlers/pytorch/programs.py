"""Loaded models of PyTorch's formats and of code, behind one face: what they take and give, and how they are called.

Which input of a configuration is which argument, and which output which result, by Triton's rules: TorchScript has
names for arguments and none for results; an exported program has both only inside. So a name is, for all inputs alike:

1. a name that the model knows: forward's argument, a key of its dictionary, `ARGS[0]`, `KWARGS[x]`, `RESULT[0]`;
2. or anything with a position behind it: `INPUT__0`, `OUTPUT__1`;
3. or, where there are as many as the model has, anything: the order of the configuration counts.
"""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from model_handlers.errors import MmeError, RefusedError, invalid_argument, invalid_model
from model_handlers.python.author_code import ImportedFile, free_name
from model_handlers.pytorch.runtime import data_type, never_unpickling, pytorch, translated
from model_handlers.system.disk import identity_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers.config.autocomplete import SignatureTensor
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import TensorSpec


_POSITION = re.compile(r".*__(\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for a tensor: an argument or a result."""

    name: str
    aliases: tuple[str, ...] = ()
    required: bool = True  # whether it must be given
    strings: bool | None = None  # whether it is a list of strings; None where that is unknown
    scalar: str = ""  # the Python type of an argument that is no tensor: "int", "float" or "bool", else ""
    given: bool = False  # whether it must be there though it may be None

    @property
    def names(self) -> set[str]:
        return {self.name, *self.aliases}


def bound(what: str, specs: Sequence[TensorSpec], slots: Sequence[Slot], model: str) -> list[int]:
    """For each spec the position of its slot; `what` is "input" or "output"."""
    positions = _by_name(specs, slots)
    if positions is None:
        positions = _by_position(what, specs, slots, model)
    if positions is None and len(specs) == len(slots):
        positions = list(range(len(slots)))
    if positions is None:
        raise invalid_model(
            f"model '{model}' has {len(slots)} {what}s{_shown(slots)} and its configuration {len(specs)} "
            f"({', '.join(spec.name for spec in specs)}), whose names fit none of them: use the model's own names, or "
            f"{what.upper()}__0, {what.upper()}__1, …"
        )
    return positions


def check_given(specs: Sequence[TensorSpec], positions: Sequence[int], slots: Sequence[Slot], model: str) -> None:
    """Every argument that a model can't do without is declared. Raises INVALID_MODEL, naming those that are not."""
    left = [slot.name for index, slot in enumerate(slots) if slot.required and index not in positions]
    if left:
        raise invalid_model(
            f"model '{model}' takes {len(slots)} inputs{_shown(slots)} and its configuration declares {len(specs)}: "
            f"declare {', '.join(left)} too"
        )


def position(name: str, otherwise: int) -> int:
    match = _POSITION.fullmatch(name)
    return otherwise if match is None else int(match.group(1))


def _by_name(specs: Sequence[TensorSpec], slots: Sequence[Slot]) -> list[int] | None:
    where = {name: index for index, slot in enumerate(slots) for name in slot.names}
    positions = [where.get(spec.name, -1) for spec in specs]
    return None if -1 in positions or len(set(positions)) < len(positions) else positions


def _by_position(what: str, specs: Sequence[TensorSpec], slots: Sequence[Slot], model: str) -> list[int] | None:
    matches = [_POSITION.fullmatch(spec.name) for spec in specs]
    positions = [int(match.group(1)) for match in matches if match is not None]
    if len(positions) < len(specs) or len(set(positions)) < len(positions):
        return None
    for spec, position in zip(specs, positions, strict=True):
        if position >= len(slots):
            raise invalid_model(
                f"model '{model}' has no {what} of position {position}, which the name '{spec.name}' asks for: it has "
                f"{len(slots)}{_shown(slots)}"
            )
    return positions


def _shown(slots: Sequence[Slot]) -> str:
    return f" ({', '.join(slot.name for slot in slots)})" if slots else ""


class Code:
    """A module made by its author's code. Its arguments are the configuration's inputs, in their order."""

    arguments = None
    results = None
    tensors = None

    def __init__(self, path: str, device: Any, model: str) -> None:
        torch, source = pytorch(), source_of(Path(path))
        self._imported = ImportedFile(model, source, free_name(source.stem), [str(source.parent)], source.parent)
        try:
            module = _class_of(self._imported, torch.nn.Module, model)()
            weights = weights_of(Path(path))
            if weights is not None:
                module.load_state_dict(torch.load(weights, map_location=device or "cpu", weights_only=True))
            self._module = module.to(device or "cpu").eval()
        except BaseException:
            self.forget()
            raise

    def call(self, values: dict[str, Any]) -> list[Any] | dict[str, Any]:
        return _results_of(self._module(*values.values()))

    def forget(self) -> None:
        self._imported.forget()


def check_declared(config: ModelConfig) -> None:
    """Refuse a configuration that declares nothing: code tells no inputs and outputs, and is not run to learn more."""
    if not (config.inputs and config.outputs):
        raise invalid_model(
            f"model '{config.name}' is code, which tells neither inputs nor outputs: declare both in config.pbtxt, in "
            "the order of forward's arguments and results"
        )


def _class_of(imported: ImportedFile, base: type, model: str) -> Any:
    module = imported.module
    own = [
        each
        for _, each in sorted(vars(module).items())
        if isinstance(each, type) and issubclass(each, base) and each.__module__ == module.__name__
    ]
    if not own:
        raise invalid_model(f"model '{model}': Cannot find a subclass of torch.nn.Module in {module.__file__}")
    return own[0]


_CODE, _WEIGHTS = ".py", ".pt"
_PICKLE = b"\x80"  # the first byte of a pickle of any protocol in use
_GROWTH = 4  # weights are stored as they are; only code is compressed
_SPARE = 64 << 20  # bytes of code that a small archive may unfold into
_SCRIPT = "constants.pkl"
_PROGRAMS = ("models/", "serialized_exported_program.json")
_COMPILED = "data/aotinductor/"
_OPAQUE = "data/constants/opaque_obj_"  # pickles that torch.export.load would run
_INSTEAD = "save the model with torch.jit.script(model).save(…), or torch.export.save(…) for a .pt2"


class Format(Enum):
    """What PyTorch has to do to load a file."""

    SCRIPT = "TorchScript"
    EXPORTED = "exported program"
    COMPILED = "AOTInductor package"
    CODE = "code of a module, with its weights"


def recognise(path: Path, model: str) -> Format:
    """The format of a file. Refuses a pickle without the code that it is of, and a zip bomb."""
    if path.suffix == _CODE:
        return Format.CODE
    try:
        with path.open("rb") as file:
            start = file.read(1)
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        if isinstance(error, zipfile.BadZipFile) and start == _PICKLE:
            if source_of(path).is_file():
                return Format.CODE
            raise invalid_model(f"{_pickled(path, model)}") from None
        raise invalid_model(
            f"'{path.name}' of model '{model}' is no PyTorch file, which is a zip archive: {error}; {_INSTEAD}"
        ) from None
    _check_growth(path, sum(member.file_size for member in members), model)
    return _format(path, {member.filename.partition("/")[2] for member in members}, model)


def source_of(path: Path) -> Path:
    return path.with_suffix(_CODE)


def weights_of(path: Path) -> Path | None:
    weights = path.with_suffix(_WEIGHTS)
    return weights if weights.is_file() else None


def _check_growth(path: Path, unfolded: int, model: str) -> None:
    size = path.stat().st_size
    if unfolded > _GROWTH * size + _SPARE:
        raise invalid_model(
            f"'{path.name}' of model '{model}' has {size} bytes and would unfold into {unfolded}: PyTorch stores "
            "weights as they are, so this is no file of its making"
        )


def _format(path: Path, names: set[str], model: str) -> Format:
    if any(name.startswith(_OPAQUE) for name in names):
        raise invalid_model(
            f"'{path.name}' of model '{model}' holds pickled Python objects as constants, which could run any code and "
            "are not read: export the model without them"
        )
    if _SCRIPT in names:
        return Format.SCRIPT
    if any(name.startswith(_PROGRAMS) for name in names):
        return Format.EXPORTED
    if any(name.startswith(_COMPILED) for name in names):
        return Format.COMPILED
    if "data.pkl" in names:
        if source_of(path).is_file():
            return Format.CODE
        raise invalid_model(_pickled(path, model))
    raise invalid_model(
        f"'{path.name}' of model '{model}' is a zip archive, but neither TorchScript nor an exported program; "
        f"{_INSTEAD}"
    )


def _pickled(path: Path, model: str) -> str:
    return (
        f"'{path.name}' of model '{model}' is a pickle (torch.save), which could run any code when it is read, and is "
        f"not read: {_INSTEAD}; weights alone are read beside {source_of(path).name}, the code of their module"
    )


_SCALARS: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "bool": bool}


class TorchProgram(Protocol):
    """A model as PyTorch has loaded it: what it takes and gives, and its call."""

    # what it takes; None for a dictionary that takes whatever the configuration declares
    arguments: Sequence[Slot] | None
    results: Sequence[Slot] | None  # what it gives; None where only an execution tells
    # the types and shapes of both, where the file tells them
    tensors: tuple[list[SignatureTensor], list[SignatureTensor]] | None

    def call(self, values: dict[str, Any]) -> list[Any] | dict[str, Any]:
        """Execute it on tensors and lists of strings by argument: its results in order, or by name."""


def load_program(path: Path, form: Format, device: Any, model: str) -> TorchProgram:
    made: dict[Format, Any] = {
        Format.SCRIPT: Script,
        Format.EXPORTED: Exported,
        Format.COMPILED: Compiled,
        Format.CODE: Code,
    }
    try:
        with never_unpickling():
            program: TorchProgram = made[form](str(path), device, model)
    except MmeError:
        raise
    except Exception as error:  # PyTorch raises whatever its layers do: RuntimeError, KeyError, AssertionError, …
        raise translated(error, model, loading=True) from error
    return program


_shared: WeakValueDictionary[tuple[object, ...], TorchProgram] = WeakValueDictionary()
_sharing = Lock()


def shared_program(path: Path, form: Format, device: Any, model: str) -> TorchProgram:
    """The same, once for all in this process that ask for this very file on this device while one is in use."""
    key = (str(path), identity_of(path.stat()), str(device))
    with _sharing:
        program = _shared.get(key)
        if program is None:
            program = _shared[key] = load_program(path, form, device, model)
        return program


class Script:
    """A TorchScript module. Its forward has names and types of Python for arguments, and types for results."""

    tensors = None

    def __init__(self, path: str, device: Any, model: str) -> None:
        self._module = pytorch().jit.load(path, map_location=device or "cpu").eval()
        schema = getattr(self._module, "forward").schema  # noqa: B009 - a module without forward says so here
        arguments = schema.arguments[1:]  # behind the module itself, whatever forward calls it
        self._dictionary = arguments[0].name if len(arguments) == 1 and _kind(arguments[0].type) == "Dict" else ""
        self.arguments = None if self._dictionary else tuple(_argument(argument, model) for argument in arguments)
        self.results = _results(schema.returns[0].type) if schema.returns else ()

    def call(self, values: dict[str, Any]) -> list[Any] | dict[str, Any]:
        if self._dictionary:
            return _results_of(self._module(**{self._dictionary: values}), strings=True)
        told = [slot for slot in self.arguments or () if slot.given or slot.name in values]
        return _results_of(self._module(**{slot.name: _taken(slot, values) for slot in told}), strings=True)


def _results_of(result: Any, *, strings: bool = False) -> list[Any] | dict[str, Any]:
    # With `strings` a list of nothing else is one result.
    if isinstance(result, dict):
        return {str(name): value for name, value in result.items()}
    several = isinstance(result, (tuple, list)) and not (strings and all(isinstance(each, str) for each in result))
    return list(result) if several else [result]


def _kind(kind: Any) -> str:
    text = str(kind.annotation_str)
    return text if text in {"Tensor", "List[str]"} else text.partition("[")[0]


def _argument(argument: Any, model: str) -> Slot:
    kind = argument.type
    required = not argument.has_default_value()
    given = False
    if _kind(kind) == "Optional":
        kind, required, given = kind.getElementType(), False, required
    scalar = _kind(kind) if _kind(kind) in _SCALARS else ""
    if (required or given) and not scalar and _kind(kind) not in {"Tensor", "List[str]"}:
        raise RefusedError(
            f"model '{model}': forward's argument '{argument.name}' is {argument.type.annotation_str}, and what can be "
            "sent is Tensor, int, float, bool, Optional of these, List[str], or one Dict[str, Tensor]"
        )
    strings = _kind(kind) == "List[str]"
    return Slot(argument.name, required=required, strings=strings, scalar=scalar, given=given)


def _taken(slot: Slot, values: dict[str, Any]) -> Any:
    value = values.get(slot.name)
    if not slot.scalar or value is None:
        return value
    shape = list(value.shape)
    number: Any = value.item() if value.numel() == 1 else None
    fits = isinstance(number, _SCALARS[slot.scalar]) and isinstance(number, bool) is (slot.scalar == "bool")
    if fits:
        return float(number) if slot.scalar == "float" else number
    raise invalid_argument(
        f"forward's argument '{slot.name}' is {slot.scalar}: it takes a tensor of one element of that kind, got "
        f"{str(value.dtype).removeprefix('torch.')} {shape}"
    )


def _results(kind: Any) -> tuple[Slot, ...] | None:
    match _kind(kind):
        case "Tensor" | "List[str]":
            return (_result(0, ("RESULT", "RESULT[0]"), strings=_kind(kind) == "List[str]"),)
        case "Tuple":
            parts = [_kind(part) == "List[str]" for part in kind.elements()]
            return tuple(_result(index, (f"RESULT[{index}]",), strings=strings) for index, strings in enumerate(parts))
    return None


def _result(index: int, aliases: tuple[str, ...], *, strings: bool) -> Slot:
    return Slot(f"OUTPUT__{index}", aliases, strings=strings)


class _Graph:
    """A graph whose arguments lie in the tree `_in`, of (args, kwargs); `_tree` is torch's module for trees."""

    _tree: Any
    _in: Any
    _module: Any
    arguments: tuple[Slot, ...]

    def call(self, values: dict[str, Any]) -> list[Any]:
        given = [values.get(slot.name) for slot in self.arguments]
        args, kwargs = self._tree.tree_unflatten(given, self._in)
        results: list[Any] = self._tree.tree_flatten(self._module(*args, **kwargs))[0]
        return results


class Exported(_Graph):
    """A program of torch.export: it knows names, types and shapes of everything."""

    def __init__(self, path: str, device: Any, model: str) -> None:
        torch = pytorch()
        program = torch.export.load(path)
        if device is not None:
            program = torch.export.passes.move_to_device_pass(program, str(device))
        self._tree = torch.utils._pytree  # noqa: SLF001 - the way in which exported programs take arguments
        self._in = program.call_spec.in_spec
        signature = program.graph_signature
        self.arguments = _arguments(self._tree, self._in, signature.user_inputs)
        self.results = _named_results(self._tree, program.call_spec.out_spec)
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        inputs = [values.get(name) for name in signature.user_inputs]
        outputs = [values.get(name) for name in signature.user_outputs]
        self.tensors = _facts(self.arguments, inputs, model), _facts(self.results, outputs, model)
        self._module = program.module()


class Compiled(_Graph):
    """An AOTInductor package: native code for one kind of processor, which keeps no types and shapes."""

    tensors = None

    def __init__(self, path: str, device: Any, model: str) -> None:
        torch = pytorch()
        index = -1 if device is None else device.index
        self._module = torch._inductor.aoti_load_package(path, device_index=index)  # noqa: SLF001 - as documented
        made_for = str(self._module.loader.get_metadata().get("AOTI_DEVICE_KEY", "cpu"))
        if made_for != ("cpu" if device is None else device.type):
            raise invalid_model(
                f"model '{model}' was compiled by AOTInductor for {made_for} and is to run on {device or 'cpu'}: "
                "compile it there, or choose another instance_group"
            )
        self._tree = torch.utils._pytree  # noqa: SLF001 - as above
        spec_in, spec_out = map(self._tree.treespec_loads, self._module.loader.get_call_spec())
        self._in = spec_in
        self.arguments = _arguments(self._tree, spec_in, ())
        self.results = _named_results(self._tree, spec_out)


def _steps(tree: Any, spec: Any) -> list[list[int | str]]:
    nested = tree.tree_unflatten(range(spec.num_leaves), spec)
    paths = [path for path, _ in tree.tree_flatten_with_path(nested)[0]]
    return [[getattr(step, "key", getattr(step, "idx", 0)) for step in path] for path in paths]


def _arguments(tree: Any, spec: Any, names: Sequence[str]) -> tuple[Slot, ...]:
    # By the keys of dictionaries that they lie in, by `names` where there are some, by `ARGS[i]`.
    slots = []
    for index, (where, *steps) in enumerate(_steps(tree, spec)):  # of (args, kwargs)
        alias = f"{'KWARGS' if where else 'ARGS'}{_brackets(steps)}"
        key = steps[-1] if isinstance(steps[-1], str) else names[index] if names else alias
        slots.append(Slot(key, (alias,), strings=False))
    return _distinct(slots)


def _named_results(tree: Any, spec: Any) -> tuple[Slot, ...]:
    slots = []
    for index, steps in enumerate(_steps(tree, spec)):
        key = steps[-1] if steps and isinstance(steps[-1], str) else f"OUTPUT__{index}"
        slots.append(Slot(key, (f"RESULT{_brackets(steps)}", *([] if steps else ["RESULT[0]"])), strings=False))
    return _distinct(slots)


def _distinct(slots: list[Slot]) -> tuple[Slot, ...]:
    # Two dictionaries may have the same keys; then the way to get there is the name.
    names = [slot.name for slot in slots]
    return tuple(replace(slot, name=slot.aliases[0]) if names.count(slot.name) > 1 else slot for slot in slots)


def _brackets(steps: Sequence[int | str]) -> str:
    return "".join(f"[{step}]" for step in steps)


def _facts(slots: Sequence[Slot], values: Sequence[Any], model: str) -> list[SignatureTensor]:
    facts = []
    for slot, value in zip(slots, values, strict=True):
        kind = data_type(value.dtype) if value is not None and hasattr(value, "dtype") else None
        if kind is None:
            found = getattr(value, "dtype", type(value).__name__)
            raise RefusedError(f"model '{model}': '{slot.name}' is {found}, which can't be sent over the protocol")
        facts.append((slot.name, kind, tuple(dim if isinstance(dim, int) else -1 for dim in value.shape)))
    return facts
