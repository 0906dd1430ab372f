"""A model's configuration as frozen values: what config.pbtxt says, defaults filled in; and its `parameters`, typed.

Names are those of the fields of the published message, Triton's ModelConfig; where a field lies elsewhere than its
name says, `metadata` says so to `convert`, which makes these from the message and back. A parameter that is not what
its backend expects is an error that names it; one that no backend knows is logged once. Names that begin with MME_ are
the operator's.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from model_handlers.errors import MmeError, invalid_model

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from typing import Any

    from model_handlers.tensor import DataType, TensorSpec


SCRIPTS = "sagemaker"  # the backend of inference scripts
_NO_STRINGS: Mapping[str, str] = MappingProxyType({})
_NO_POLICIES: Mapping[int, QueuePolicy] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which versions of a model are served: one of these is set, `latest=1` where none is."""

    latest: int | None = field(default=None, metadata={"path": "latest.num_versions"})
    all: bool = field(default=False, metadata={"is_message": True})
    specific: tuple[int, ...] | None = field(default=None, metadata={"path": "specific.versions"})

    def __post_init__(self) -> None:
        if self.latest is None and not self.all and self.specific is None:
            object.__setattr__(self, "latest", 1)

    def select(self, available: tuple[int, ...]) -> tuple[int, ...]:
        if self.all:
            return tuple(sorted(available))
        if self.specific is not None:
            return tuple(version for version in sorted(available) if version in self.specific)
        return tuple(sorted(available)[-self.latest :]) if self.latest else ()


class Guess(Enum):
    """What is known of the first dimension of a model that batches though no configuration says so."""

    NONE = "none"  # nothing is guessed
    BATCH = "batch"  # its names say that it is the batch
    OTHER = "other"  # its names say that it is not
    UNKNOWN = "unknown"


class TimeoutAction(Enum):
    """What happens to a request whose queue time is over."""

    REJECT = 0
    DELAY = 1


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How long requests may wait and how many of them. Zero means no limit."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """The dynamic batcher's settings."""

    # ascending; (max_batch_size,) when none are given. Nothing to a model without batches
    preferred_batch_size: tuple[int, ...]
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0  # that of requests that name none, or none of those there are; 0 without levels
    default_queue_policy: QueuePolicy | None = None
    # level → its own limits, else `default_queue_policy`
    priority_queue_policy: Mapping[int, QueuePolicy] = field(default_factory=lambda: _NO_POLICIES)

    @property
    def policies(self) -> tuple[QueuePolicy, ...]:
        default, levels = self.default_queue_policy or QueuePolicy(), range(1, self.priority_levels + 1)
        return tuple(self.priority_queue_policy.get(level, default) for level in levels) or (default,)


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One model of an ensemble: its tensors → the ensemble's, and the repository that has it, "" for the nearest."""

    model_name: str
    model_version: int = field(metadata={"unset": -1})
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]
    model_namespace: str = ""

    @property
    def version(self) -> int | None:
        return self.model_version if self.model_version > 0 else None


class InstanceKind(Enum):
    """Where an instance group runs."""

    AUTO = 0
    GPU = 1
    CPU = 2
    MODEL = 3


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What instances execute by, beside their framework itself."""

    name: str
    parameters: Mapping[str, str] = field(default_factory=lambda: _NO_STRINGS)


@dataclass(frozen=True, slots=True)
class Resource:
    """What each execution takes of something that instances share: on a device, or in the server (`is_global`)."""

    name: str
    is_global: bool = field(default=False, kw_only=True, metadata={"path": "global"})
    count: int


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """`count` instances of a model on one kind of device, per GPU where it names several.

    With rate limiting, executions wait for `resources`, and get fewer turns the larger `priority` is. `profile` is
    TensorRT's, and `host_policy` told alone; `secondary_devices` and `passive` are refused where they are set.
    """

    name: str
    kind: InstanceKind = InstanceKind.AUTO
    count: int = 1
    gpus: tuple[int, ...] = ()
    resources: tuple[Resource, ...] = field(default=(), metadata={"path": "rate_limiter.resources"})
    priority: int = field(default=1, metadata={"path": "rate_limiter.priority"})
    secondary_devices: tuple[str, ...] = field(default=(), kw_only=True)
    profile: tuple[str, ...] = ()
    passive: bool = field(default=False, kw_only=True)
    host_policy: str = ""


class BatchInputKind(Enum):
    """What a model is told of the tensors that were joined for it: numbers of elements, or shapes.

    With e1, e2, … elements in the requests: (e1, e2, …); (e1, e1 + e2, …); the same behind a zero; a tensor of as many
    elements as the largest has, whose values mean nothing; the shape of each item, a row each, or one behind the other.
    """

    ELEMENT_COUNT = 0
    ACCUMULATED_ELEMENT_COUNT = 1
    ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = 2
    MAX_ELEMENT_COUNT_AS_SHAPE = 3
    ITEM_SHAPE = 4
    ITEM_SHAPE_FLATTEN = 5


@dataclass(frozen=True, slots=True)
class BatchInput:
    """Inputs that no client sends: they are worked out of each batch, from the one input in `source_input`."""

    kind: BatchInputKind
    target_name: tuple[str, ...]
    data_type: DataType
    source_input: tuple[str, ...]


class BatchOutputKind(Enum):
    """How the outputs of a ragged batch are split."""

    SCATTER_WITH_INPUT_SHAPE = 0


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """Outputs of a ragged batch: each request gets elements, and a shape, as its one `source_input` has."""

    target_name: tuple[str, ...]
    kind: BatchOutputKind = field(default=BatchOutputKind.SCATTER_WITH_INPUT_SHAPE, kw_only=True)
    source_input: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """One input of a warm-up sample: zeros or random data where those are not None, else a file in `warmup`."""

    data_type: DataType
    dims: tuple[int, ...]
    zero_data: bool | None = None
    random_data: bool | None = None
    input_data_file: str | None = None


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """Requests that are executed before the model is ready: `count` times `batch_size`, 0 for none at all."""

    name: str
    batch_size: int
    inputs: Mapping[str, WarmupInput]
    count: int = 1


@dataclass(frozen=True, slots=True)
class RepositoryAgent:
    """What is done with a model's directory before a load. `checksum` is the one that there is."""

    name: str
    parameters: Mapping[str, str]  # `MD5:` and a file of the directory → its digest


@dataclass(frozen=True, slots=True)
class MetricControl:
    """The buckets of a metric that is a histogram, ascending."""

    family: str = field(metadata={"path": "metric_identifier.family"})
    buckets: tuple[float, ...] = field(metadata={"path": "histogram_options.buckets"})


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """An input or output, at a `place` of the message, that is not whole: the model's code completes it."""

    name: str
    place: int = 0
    data_type: DataType | None = None
    dims: tuple[int, ...] = ()
    optional: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that is honoured of a model's configuration."""

    name: str
    platform: str = field(default="", kw_only=True)
    backend: str = ""
    runtime: str = field(default="", kw_only=True)
    version_policy: VersionPolicy = field(default_factory=VersionPolicy, kw_only=True)
    max_batch_size: int = 0
    # inputs, outputs: without the batch dimension. Empty until completed from the model
    inputs: tuple[TensorSpec, ...] = field(default=(), metadata={"path": "input", "each": "input"})
    outputs: tuple[TensorSpec, ...] = field(default=(), metadata={"path": "output", "each": "output"})
    batch_input: tuple[BatchInput, ...] = ()
    batch_output: tuple[BatchOutput, ...] = ()
    # field of `optimization` that changes nothing here, and is told → its value
    optimization: Mapping[str, Any] = field(default_factory=lambda: _NO_STRINGS, metadata={"others": True})
    # -1 none, 1 basic, 2 extended, 0 all
    optimization_level: int = field(default=0, metadata={"path": "optimization.graph.level"})
    gpu_accelerators: tuple[Accelerator, ...] = field(
        default=(), metadata={"path": "optimization.execution_accelerators.gpu_execution_accelerator"}
    )
    cpu_accelerators: tuple[Accelerator, ...] = field(
        default=(), metadata={"path": "optimization.execution_accelerators.cpu_execution_accelerator"}
    )
    dynamic_batching: DynamicBatching | None = None
    sequence_batching: SequenceBatching | None = None
    ensemble: tuple[EnsembleStep, ...] = field(default=(), metadata={"path": "ensemble_scheduling.step"})
    max_inflight_requests: int = field(default=0, metadata={"path": "ensemble_scheduling.max_inflight_requests"})
    instance_group: tuple[InstanceGroup, ...] = ()
    default_model_filename: str = ""
    cc_model_filenames: Mapping[str, str] = field(default_factory=lambda: _NO_STRINGS)
    metric_tags: Mapping[str, str] = field(default_factory=lambda: _NO_STRINGS)
    parameters: Mapping[str, str] = field(default_factory=lambda: _NO_STRINGS, metadata={"each": "string_value"})
    model_warmup: tuple[WarmupSample, ...] = ()
    op_libraries: tuple[str, ...] = field(default=(), metadata={"path": "model_operations.op_library_filename"})
    # whether a request may have any number of responses; None where the model's code may say
    decoupled: bool | None = field(default=None, metadata={"path": "model_transaction_policy.decoupled"})
    response_cache: bool = field(default=False, metadata={"path": "response_cache.enable"})
    agents: tuple[RepositoryAgent, ...] = field(default=(), metadata={"path": "model_repository_agents.agents"})
    metric_control: tuple[MetricControl, ...] = field(default=(), metadata={"path": "model_metrics.metric_control"})
    # named_inputs, named_outputs: those that the model's code is to complete
    named_inputs: tuple[NamedTensor, ...] = field(default=(), metadata={"ours": True})
    named_outputs: tuple[NamedTensor, ...] = field(default=(), metadata={"ours": True})
    # whether nothing is taken from the model that the configuration leaves out
    strict: bool = field(default=False, metadata={"ours": True})
    # of a model that batches where the configuration does not say; 0 for its backend's own
    default_max_batch_size: int = field(default=0, metadata={"ours": True})
    # the model that it is a private part of: its name begins with that one's, and a colon
    part_of: str = field(default="", metadata={"ours": True})
    # what is known of the batch dimension where `max_batch_size` was completed
    guess: Guess = field(default=Guess.NONE, metadata={"ours": True})

    @property
    def histograms(self) -> dict[str, tuple[float, ...]]:
        return {control.family: control.buckets for control in self.metric_control}

    @property
    def one_by_one(self) -> bool:
        """Whether each request is executed for itself, has nothing to do with another, and gets one answer."""
        batching = self.dynamic_batching
        related = batching is not None and (self.max_batch_size > 1 or batching.preserve_ordering)
        return not (related or self.decoupled or self.sequence_batching is not None)

    @property
    def preserves_order(self) -> bool:
        """Whether responses leave in the order in which their batches left the queue."""
        sequences = self.sequence_batching
        strategy = self.dynamic_batching if sequences is None else sequences.strategy
        return isinstance(strategy, DynamicBatching | OldestStrategy) and strategy.preserve_ordering

    @property
    def takes_raw_body(self) -> bool:
        """Whether the body of a request to this model is its input as it came."""
        return self.backend == SCRIPTS

    @property
    def joins(self) -> bool:
        return self.max_batch_size > 1 and (self.dynamic_batching or self.sequence_batching) is not None

    def local_name(self, name: str) -> str:
        """The name of the model, or of an instance of it, as its author knows it: without the model it is a part of."""
        return name.removeprefix(f"{self.part_of}:") if self.part_of else name

    def author_view(self) -> ModelConfig:
        groups = tuple(replace(group, name=self.local_name(group.name)) for group in self.instance_group)
        return replace(self, name=self.local_name(self.name), instance_group=groups)

    def input(self, name: str) -> TensorSpec | None:
        return next((spec for spec in self.inputs if spec.name == name), None)

    def output(self, name: str) -> TensorSpec | None:
        return next((spec for spec in self.outputs if spec.name == name), None)


# -- sequences ---------------------------------------------------------------------------------------------------------

DEFAULT_IDLE_US = 1_000_000


class ControlKind(Enum):
    """What a control tensor tells a model of a request."""

    CONTROL_SEQUENCE_START = 0
    CONTROL_SEQUENCE_READY = 1
    CONTROL_SEQUENCE_END = 2
    CONTROL_SEQUENCE_CORRID = 3


@dataclass(frozen=True, slots=True)
class SequenceControl:
    """One signal, and how it is written: as two numbers for false and true, or as an id of `data_type` (CORRID)."""

    kind: ControlKind
    int32_false_true: tuple[int, ...] = ()
    fp32_false_true: tuple[float, ...] = field(default=(), metadata={"single": True})
    bool_false_true: tuple[bool, ...] = ()
    data_type: DataType | None = None

    @property
    def false_true(self) -> tuple[int | float | bool, ...]:
        return self.int32_false_true or self.fp32_false_true or self.bool_false_true

    @property
    def tensor_type(self) -> DataType:
        if self.data_type is not None:
            return self.data_type
        from model_handlers.tensor import BOOL, FP32, INT32  # noqa: PLC0415 - which needs numpy, and commands do not

        return INT32 if self.int32_false_true else FP32 if self.fp32_false_true else BOOL


@dataclass(frozen=True, slots=True)
class ControlInput:
    """An input of the model that tells signals and is no client's to send: one, once the configuration is checked."""

    name: str
    control: tuple[SequenceControl, ...]


@dataclass(frozen=True, slots=True)
class InitialState:
    """What a sequence's state is at its start: zeros, or the contents of a file in the folder `initial_state`."""

    data_type: DataType | None
    dims: tuple[int, ...]
    zero_data: bool = field(default=False, metadata={"oneof": True})
    data_file: str = field(default="", metadata={"oneof": True})
    name: str = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A tensor that the model hands to itself, from each request of a sequence to the next."""

    input_name: str
    output_name: str
    data_type: DataType
    dims: tuple[int, ...]  # one of -1 is 1 at the start
    initial_state: tuple[InitialState, ...] = ()  # at most one; zeros without it
    use_same_buffer_for_input_output: bool = False
    use_growable_memory: bool = False


@dataclass(frozen=True, slots=True)
class DirectStrategy:
    """A sequence owns a row of its instance's batch; a share of rows is worth an execution before the delay is over."""

    max_queue_delay_microseconds: int = 0
    minimum_slot_utilization: float = field(default=0.0, metadata={"single": True})


@dataclass(frozen=True, slots=True)
class OldestStrategy:
    """The oldest sequences of an instance take part in its dynamic batches, each with one request at a time."""

    max_candidate_sequences: int = 0  # so many are taken, 0 for as many as fit into a batch
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """The sequence batcher's settings. With `iterative_sequence` the model may put requests back, which need no id."""

    strategy: DirectStrategy | OldestStrategy = field(
        default=DirectStrategy(), metadata={"oneof": {"direct": DirectStrategy, "oldest": OldestStrategy}}
    )
    max_sequence_idle_microseconds: int = DEFAULT_IDLE_US
    control_input: tuple[ControlInput, ...] = ()
    state: tuple[SequenceState, ...] = ()
    iterative_sequence: bool = False

    def controls(self) -> Iterator[tuple[str, SequenceControl]]:
        for tensor in self.control_input:
            for control in tensor.control:
                yield tensor.name, control


def hidden_inputs(batching: SequenceBatching | None) -> tuple[TensorSpec, ...]:
    if batching is None:
        return ()
    from model_handlers.tensor import TensorSpec  # noqa: PLC0415 - as above

    controls = (TensorSpec(name, control.tensor_type, (1,)) for name, control in batching.controls())
    states = (TensorSpec(state.input_name, state.data_type, state.dims) for state in batching.state)
    return (*controls, *states)


def hidden_outputs(batching: SequenceBatching | None) -> tuple[TensorSpec, ...]:
    """The outputs that are states; clients see those alone that the configuration names as outputs, too."""
    if batching is None:
        return ()
    from model_handlers.tensor import TensorSpec  # noqa: PLC0415 - as above

    return tuple(TensorSpec(state.output_name, state.data_type, state.dims) for state in batching.state)


def all_inputs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    return (*config.inputs, *hidden_inputs(config.sequence_batching))


def all_outputs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Everything that a model is asked for, each tensor once."""
    declared = {spec.name for spec in config.outputs}
    hidden = hidden_outputs(config.sequence_batching)
    return (*config.outputs, *(spec for spec in hidden if spec.name not in declared))


OURS = "MME_"
_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def integer(config: ModelConfig, key: str, default: int, allowed: range) -> int:
    """A whole number within bounds. Raises INVALID_MODEL for anything else, as all of these."""
    text = config.parameters.get(key)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = allowed.stop
    if value not in allowed:
        raise _wrong(config, key, f"an integer from {allowed.start} to {allowed[-1]}")
    return value


def number(
    config: ModelConfig,
    key: str,
    default: float,
    *,
    allowed: Callable[[float], bool] = math.isfinite,
    expected: str = "a number",
) -> float:
    text = config.parameters.get(key)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not allowed(value):
        raise _wrong(config, key, expected)
    return value


def switch(config: ModelConfig, key: str, *, default: bool) -> bool:
    text = config.parameters.get(key)
    if text is None:
        return default
    value = _SWITCH.get(text.strip().lower())
    if value is None:
        raise _wrong(config, key, "'true' or 'false'")
    return value


def choice(config: ModelConfig, key: str, default: str, allowed: Sequence[str]) -> str:
    text = config.parameters.get(key, default).strip()
    if text not in allowed:
        raise _wrong(config, key, f"one of {', '.join(allowed)}")
    return text


def warn_of_unknown(
    config: ModelConfig, known: Collection[str], kind: str, logger: str, harmless: Mapping[str, str] | None = None
) -> None:
    """Log the parameters that change nothing, once a model: those that are unknown, and those with a reason."""
    for key, reason in (harmless or {}).items():
        if key in config.parameters:
            warn_once(logger, f"parameter '{key}' changes nothing: {reason}", config.name)
    reasons = harmless or {}
    unknown = [
        f"'{key}'" for key in config.parameters if key not in known and key not in reasons and not key.startswith(OURS)
    ]
    if unknown:
        warn_once(logger, f"parameters without effect on {kind}: {', '.join(unknown)}", config.name)


@functools.lru_cache(maxsize=1024)
def warn_once(logger: str, sentence: str, model: str) -> None:
    """Log what changes nothing, once: a model is loaded several times in its life."""
    logging.getLogger(logger).warning("%s", sentence, extra={"target_model": model})


def _wrong(config: ModelConfig, key: str, expected: str) -> MmeError:
    return invalid_model(f"model '{config.name}': parameter '{key}' must be {expected}, got '{config.parameters[key]}'")
