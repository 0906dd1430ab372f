"""How the requests of a sequence are scheduled and what their model keeps between them, as frozen values.

Names follow the fields of Triton's ModelSequenceBatching. PURE, and without protobuf.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from model_handlers.tensor import BOOL, FP32, INT32, DataType, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_handlers.config import ModelConfig

DEFAULT_IDLE_US = 1_000_000


class ControlKind(Enum):
    """What a control tensor tells a model of a request."""

    CONTROL_SEQUENCE_START = 0
    CONTROL_SEQUENCE_READY = 1
    CONTROL_SEQUENCE_END = 2
    CONTROL_SEQUENCE_CORRID = 3


@dataclass(frozen=True, slots=True)
class Control:
    """One signal, and how it is written: as two numbers for false and true, or as an id of a data type.

    Attributes:
        kind: what it tells.
        int32_false_true, fp32_false_true, bool_false_true: the two values; exactly one of these is set but for CORRID.
        data_type: of CORRID; None for the others.
    """

    kind: ControlKind
    int32_false_true: tuple[int, ...] = ()
    fp32_false_true: tuple[float, ...] = field(default=(), metadata={"single": True})
    bool_false_true: tuple[bool, ...] = ()
    data_type: DataType | None = None

    @property
    def false_true(self) -> tuple[int | float | bool, ...]:
        """The two values, () for CORRID."""
        return self.int32_false_true or self.fp32_false_true or self.bool_false_true

    @property
    def tensor_type(self) -> DataType:
        """The data type of its tensor."""
        if self.data_type is not None:
            return self.data_type
        return INT32 if self.int32_false_true else FP32 if self.fp32_false_true else BOOL


@dataclass(frozen=True, slots=True)
class ControlInput:
    """An input of the model that tells signals and is no client's to send: one, once the configuration is checked."""

    name: str
    control: tuple[Control, ...]


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
    """A tensor that the model hands to itself, from each request of a sequence to the next.

    Attributes:
        input_name, output_name: where it is given the tensor, and where it gives the next one.
        data_type, dims: as of a `TensorSpec`; a dimension of -1 is 1 at the start.
        initial_state: at most one; zeros without it.
        use_same_buffer_for_input_output, use_growable_memory: where the memory lies, which changes no value.
    """

    input_name: str
    output_name: str
    data_type: DataType
    dims: tuple[int, ...]
    initial_state: tuple[InitialState, ...] = ()
    use_same_buffer_for_input_output: bool = False
    use_growable_memory: bool = False


@dataclass(frozen=True, slots=True)
class DirectStrategy:
    """A sequence owns a row of its instance's batch.

    Attributes:
        max_queue_delay_microseconds: microseconds that a request may wait for others of other rows.
        minimum_slot_utilization: share of the rows that is worth an execution before that.
    """

    max_queue_delay_microseconds: int = 0
    minimum_slot_utilization: float = field(default=0.0, metadata={"single": True})


@dataclass(frozen=True, slots=True)
class OldestStrategy:
    """The oldest sequences of an instance take part in its dynamic batches, each with one request at a time.

    Attributes:
        max_candidate_sequences: how many do, others wait; 0 for as many as fit into a batch.
        preferred_batch_size, max_queue_delay_microseconds, preserve_ordering: see `DynamicBatching`.
    """

    max_candidate_sequences: int = 0
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """The sequence batcher's settings.

    Attributes:
        strategy: which requests make a batch.
        max_sequence_idle_microseconds: microseconds after which a sequence that sent nothing is over.
        control_input: what the model is told of each request.
        state: what it keeps between the requests of a sequence.
        iterative_sequence: whether the model may put a request back, to be executed again; such a request needs no id.
    """

    strategy: DirectStrategy | OldestStrategy = field(
        default=DirectStrategy(), metadata={"oneof": {"direct": DirectStrategy, "oldest": OldestStrategy}}
    )
    max_sequence_idle_microseconds: int = DEFAULT_IDLE_US
    control_input: tuple[ControlInput, ...] = ()
    state: tuple[SequenceState, ...] = ()
    iterative_sequence: bool = False

    def controls(self) -> Iterator[tuple[str, Control]]:
        """Every signal with the name of its tensor."""
        for tensor in self.control_input:
            for control in tensor.control:
                yield tensor.name, control


def hidden_inputs(batching: SequenceBatching | None) -> tuple[TensorSpec, ...]:
    """The inputs that a model has and that no client sends: controls and states."""
    if batching is None:
        return ()
    controls = (TensorSpec(name, control.tensor_type, (1,)) for name, control in batching.controls())
    states = (TensorSpec(state.input_name, state.data_type, state.dims) for state in batching.state)
    return (*controls, *states)


def hidden_outputs(batching: SequenceBatching | None) -> tuple[TensorSpec, ...]:
    """The outputs that are states; clients see those alone that the configuration names as outputs, too."""
    if batching is None:
        return ()
    return tuple(TensorSpec(state.output_name, state.data_type, state.dims) for state in batching.state)


def all_inputs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Everything that a model is given."""
    return (*config.inputs, *hidden_inputs(config.sequence_batching))


def all_outputs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Everything that a model is asked for, each tensor once."""
    declared = {spec.name for spec in config.outputs}
    hidden = hidden_outputs(config.sequence_batching)
    return (*config.outputs, *(spec for spec in hidden if spec.name not in declared))
