"""From an ONNX model to an engine: parse, say what is wanted, build, write.

TensorRT builds by running candidates on the GPU, so it needs the GPU that the engine is for. TensorRT-RTX builds on a
CPU. Versions of TensorRT from 11 on, and TensorRT-RTX, compute in the precisions that the model's file has; there the
file is converted first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model_handlers.errors import invalid_argument, invalid_model, unsupported
from model_handlers.system.disk import replacing
from model_handlers.tensorrt.engine import installed, last_words, make_logger, require_driver, tensorrt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Progress = Callable[[str, int, int], None]
    from collections.abc import Mapping, Sequence

    Shape = tuple[int, ...]
    Range = tuple[Shape, Shape, Shape]


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Everything that is said beside the model."""

    profiles: tuple[Mapping[str, Range], ...] = ()  # each: input → smallest, best and largest shape
    fp16: bool = False
    int8: bool = False
    workspace: int = 0  # bytes that building may take on the GPU, 0 for all
    timing_cache: Path | None = None  # a file that remembers what was measured; None for none
    level: int | None = None  # how hard it is tried, None for the builder's own idea
    version_compatible: bool = False
    hardware_compatible: bool = False
    builder: str = ""  # `TensorRT` or `TensorRT-RTX`; "" for whichever is installed


def profiles_of(smallest: Sequence[str], best: Sequence[str], largest: Sequence[str]) -> tuple[dict[str, Range], ...]:
    """Profiles out of texts, one of each kind for each profile; where a kind is missing, the nearest stands for it."""
    count = max(len(smallest), len(best), len(largest))
    for name, texts in (("min", smallest), ("opt", best), ("max", largest)):
        if len(texts) not in {0, count}:
            raise invalid_argument(
                f"--{name} is given {len(texts)} times: once for each of the {count} profiles, or never"
            )
    return tuple(
        _profile(*(_shapes(texts[index]) if texts else {} for texts in (smallest, best, largest)))
        for index in range(count)
    )


def _profile(smallest: dict[str, Shape], best: dict[str, Shape], largest: dict[str, Shape]) -> dict[str, Range]:
    found = {}
    for name in {**smallest, **best, **largest}:
        low = smallest.get(name) or best.get(name) or largest[name]
        high = largest.get(name) or best.get(name) or smallest[name]
        middle = best.get(name) or high
        ordered = len(low) == len(middle) == len(high) and all(
            a <= b <= c for a, b, c in zip(low, middle, high, strict=True)
        )
        if not ordered:
            raise invalid_argument(
                f"shapes of input '{name}' must grow from --min {_text(low)} over --opt {_text(middle)} to --max "
                f"{_text(high)}, in as many dimensions"
            )
        found[name] = (low, middle, high)
    return found


def _shapes(text: str) -> dict[str, Shape]:
    # `ids:1x16,mask:1x16`; a name may hold colons.
    found = {}
    for part in text.split(","):
        name, _, dims = part.strip().rpartition(":")
        sizes = dims.split("x")
        if not name or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise invalid_argument(f"'{part}' is no shape of an input; write its name and sizes, as in ids:1x16")
        found[name] = tuple(map(int, sizes))
    return found


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))


def build(model: Path, plan: Path, options: BuildOptions, progress: Progress) -> str:
    """Build the engine of `model` and write it to `plan`; `progress` is told phases and steps. Returns the builder."""
    framework = tensorrt(options.builder)
    rtx = "rtx" in installed(options.builder)
    if not hasattr(framework, "Builder"):
        raise unsupported(f"{framework.__name__} runs engines and can't build them: install tensorrt")
    if not rtx:
        require_driver(model.name)
    logger = make_logger(framework)
    builder = framework.Builder(logger)
    network = _parsed(framework, builder, logger, _source(framework, model, options), model)
    config = _configured(framework, builder, network, options)
    config.progress_monitor = _monitor(framework, progress)
    cache = None if rtx or options.timing_cache is None else options.timing_cache
    if cache is not None:  # what an earlier build measured; TensorRT-RTX measures nothing while it builds
        known = cache.read_bytes() if cache.is_file() else b""
        config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=False)
    made = builder.build_serialized_network(network, config)
    if made is None:
        raise invalid_model(f"TensorRT can't build an engine of '{model.name}': {last_words(logger.said)}")
    _write(plan, bytes(made))
    if cache is not None:
        _write(cache, bytes(config.get_timing_cache().serialize()))
    return f"{'TensorRT-RTX' if rtx else 'TensorRT'} {framework.__version__}"


def _source(framework: Any, model: Path, options: BuildOptions) -> bytes | None:
    # The model in the precision that is wanted, where its file has to have it; None for the file as it is.
    flags = framework.BuilderFlag
    if options.int8 and b"QuantizeLinear" not in model.read_bytes():
        raise invalid_argument(
            f"--int8 needs a model that says what to quantise, and '{model.name}' has no QuantizeLinear: make it with "
            "onnxruntime.quantization.quantize_static"
        )
    if not options.fp16 or hasattr(flags, "FP16"):
        return None
    try:
        import onnx  # noqa: PLC0415 - for this alone
        from onnxruntime.transformers.float16 import convert_float_to_float16  # noqa: PLC0415
    except ImportError as error:
        raise unsupported(
            f"--fp16 with TensorRT {framework.__version__} converts the model first, which needs {error.name}: run "
            "`pip install onnx onnxruntime`"
        ) from error
    converted: bytes = convert_float_to_float16(onnx.load(str(model)), keep_io_types=True).SerializeToString()
    return converted


def _parsed(framework: Any, builder: Any, logger: Any, source: bytes | None, model: Path) -> Any:
    flags = framework.NetworkDefinitionCreationFlag
    explicit = getattr(flags, "EXPLICIT_BATCH", None)  # before TensorRT 10 there was another way
    network = builder.create_network(0 if explicit is None else 1 << int(explicit))
    parser = framework.OnnxParser(network, logger)
    parsed = parser.parse_from_file(str(model)) if source is None else parser.parse(source)
    if not parsed:
        words = parser.get_error(0).desc() if parser.num_errors else last_words(logger.said)
        raise invalid_model(f"TensorRT can't read '{model.name}': {' '.join(words.split())[:300]}")
    return network


def _configured(framework: Any, builder: Any, network: Any, options: BuildOptions) -> Any:
    config, flags = builder.create_builder_config(), framework.BuilderFlag
    wanted = {
        "FP16": options.fp16 and hasattr(flags, "FP16"),
        "INT8": options.int8 and hasattr(flags, "INT8"),
        "VERSION_COMPATIBLE": options.version_compatible,
    }
    for name in (name for name, is_wanted in wanted.items() if is_wanted):
        config.set_flag(getattr(flags, name))
    if options.hardware_compatible:
        config.hardware_compatibility_level = framework.HardwareCompatibilityLevel.AMPERE_PLUS
    if options.workspace:
        config.set_memory_pool_limit(framework.MemoryPoolType.WORKSPACE, options.workspace)
    if options.level is not None:
        config.builder_optimization_level = options.level
    inputs = {network.get_input(index).name: network.get_input(index) for index in range(network.num_inputs)}
    for ranges in options.profiles:
        for name in ranges:
            if name not in inputs:
                raise invalid_argument(f"the model has no input '{name}'; its inputs are {', '.join(inputs)}")
    variable = [name for name, tensor in inputs.items() if any(dim < 0 for dim in tensor.shape)]
    for ranges in options.profiles or ({},):
        missing = [name for name in variable if name not in ranges]
        if missing:
            shape = "x".join("1" if dim < 0 else str(dim) for dim in inputs[missing[0]].shape)
            raise invalid_argument(
                f"input '{missing[0]}' takes any size in {list(inputs[missing[0]].shape)}: say which, as in "
                f"--min {missing[0]}:{shape} --opt ... --max ..."
            )
        _add_profile(builder, config, ranges)
    return config


def _add_profile(builder: Any, config: Any, ranges: Any) -> None:
    if not ranges:
        return
    profile = builder.create_optimization_profile()
    for name, (low, best, high) in ranges.items():
        profile.set_shape(name, low, best, high)
    if config.add_optimization_profile(profile) < 0:
        raise invalid_argument(f"TensorRT does not take the shapes of {', '.join(ranges)}: they don't fit the model's")


def _monitor(framework: Any, progress: Progress) -> Any:
    class Monitor(framework.IProgressMonitor):  # type: ignore[misc] # of a module that is only known when it runs
        def __init__(self) -> None:
            framework.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, _parent_phase: str | None, num_steps: int) -> None:
            self._steps[phase_name] = num_steps
            progress(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            progress(phase_name, step + 1, self._steps.get(phase_name, 0))
            return True

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

    return Monitor()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(data)
