"""Every number of a configuration has a bound: none makes the server work or hold memory as much as it says.

The tests walk the descriptor of the published message, so that a field which is added there fails until it has a row.
"""

from __future__ import annotations

import dataclasses
import json
import tracemalloc

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor

from container.observe.trace_settings import TraceSettings
from container.settings import SettingsError, read_settings
from container.settings.schema import VARIABLES
from model_handlers.base import Handler
from model_handlers.config.bounds import BOUNDS, MAX_CONFIG_SIZE, MAX_INSTANCES, excesses
from model_handlers.config.convert import config_json
from model_handlers.config.pbtxt import parse_config, parse_config_json
from model_handlers.errors import Kind, MmeError
from model_handlers.proto import model_config_pb2 as pb
from model_handlers.python.autocomplete import complete
from model_handlers.system.devices import place
from serve.loading.check import understand
from serve.model.model import queue_for
from serve.model.warmup import initial_states, warm_up
from serve.request import InferenceRequest, Layout

MEMORY = 4 << 20  # bytes that reading a configuration with one hostile number may take
TENSORS = """
name: "m" max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [4] reshape { shape: [4] } }
output { name: "Y" data_type: TYPE_FP32 dims: [4] reshape { shape: [4] } }
version_policy { %s }
instance_group {
  name: "g" count: 1 kind: KIND_GPU gpus: [0] rate_limiter { resources { name: "R" count: 1 } priority: 1 }
}
optimization {
  graph { level: 1 } gather_kernel_buffer_threshold: 1
  cuda {
    graph_spec {
      batch_size: 1
      input { key: "X" value { dim: [4] } }
      graph_lower_bound { batch_size: 1 input { key: "X" value { dim: [4] } } }
    }
  }
}
parameters { key: "p" value { string_value: "v" } }
metric_tags { key: "t" value: "v" }
cc_model_filenames { key: "9.0" value: "model.onnx" }
model_warmup {
  name: "w" batch_size: 1 count: 1 inputs { key: "X" value { data_type: TYPE_FP32 dims: [4] zero_data: true } }
}
model_operations { op_library_filename: "a.so" }
model_repository_agents { agents { name: "checksum" parameters { key: "MD5:a" value: "b" } } }
model_metrics {
  metric_control {
    metric_identifier { family: "nv_inference_first_response_histogram_ms" } histogram_options { buckets: [1, 2] }
  }
}
"""
SEQUENCES = """sequence_batching {
  max_sequence_idle_microseconds: 1000 %s
  control_input { name: "C" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
  control_input { name: "D" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [0, 1] } }
  control_input { name: "E" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [false, true] } }
  state {
    input_name: "I" output_name: "O" data_type: TYPE_FP32 dims: [4]
    initial_state { name: "i" data_type: TYPE_FP32 dims: [4] zero_data: true }
  }
}"""
# Configurations that obey every rule; together they have every message.
VALID = [
    TENSORS % "latest { num_versions: 1 }"
    + """dynamic_batching {
      preferred_batch_size: [4] max_queue_delay_microseconds: 1 priority_levels: 2 default_priority_level: 1
      default_queue_policy { default_timeout_microseconds: 1 max_queue_size: 1 }
      priority_queue_policy { key: 1 value { default_timeout_microseconds: 1 max_queue_size: 1 } }
    }""",
    TENSORS % "specific { versions: [1] }" + SEQUENCES % "direct { max_queue_delay_microseconds: 1 }",
    TENSORS % "all { }"
    + SEQUENCES % "oldest { max_candidate_sequences: 2 preferred_batch_size: [4] max_queue_delay_microseconds: 1 }",
    """name: "m" version_policy { all { } } optimization { execution_accelerators {
      gpu_execution_accelerator { name: "a" parameters { key: "k" value: "v" } }
      cpu_execution_accelerator { name: "a" parameters { key: "k" value: "v" } }
    } }""",
    """name: "m" max_batch_size: 8
    input { name: "X" data_type: TYPE_FP32 dims: [4] } output { name: "Y" data_type: TYPE_FP32 dims: [4] }
    instance_group { profile: "0" }""",
    "instance_group { secondary_devices { device_id: 1 } }",
    """name: "m" max_batch_size: 8 batch_input {
      kind: BATCH_ELEMENT_COUNT target_name: "E" data_type: TYPE_FP32 source_input: "X"
    } batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "Y" source_input: "X" }
    input { name: "X" data_type: TYPE_FP32 dims: [4] allow_ragged_batch: true }
    output { name: "Y" data_type: TYPE_FP32 dims: [4] } dynamic_batching { }""",
    """name: "m" max_batch_size: 8 platform: "ensemble"
    input { name: "X" data_type: TYPE_FP32 dims: [4] } output { name: "Y" data_type: TYPE_FP32 dims: [4] }
    ensemble_scheduling {
      max_inflight_requests: 1
      step {
        model_name: "a" model_version: 1 input_map { key: "I" value: "X" } output_map { key: "O" value: "Y" }
      }
    }""",
]
LARGEST = {
    FieldDescriptor.TYPE_INT32: 2**31 - 1,
    FieldDescriptor.TYPE_UINT32: 2**32 - 1,
    FieldDescriptor.TYPE_INT64: 2**63 - 1,
    FieldDescriptor.TYPE_UINT64: 2**64 - 1,
}
UNSIGNED = {FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64}
# Refusals in Triton's words, which do not name the field as its path does.
WORDS = {
    "preferred_batch_size": ("preferred size must be", "preferred batch size must be"),
    "dims": ("dimension", "variable", "different size for dims", "elements", "'state' dim description"),
    "shape": ("dimension", "different"),
    "gpus": ("gpu id",),
    "default_priority_level": ("default priority level must be in range",),
    "key": ("priority queue policy must have priority level in range",),
    "priority_levels": ("priority level must be in range",),
    "max_batch_size": ("max batch size", "must be at most"),
    "level": ("level",),
}


def fields(message=pb.ModelConfig.DESCRIPTOR, seen=None):
    """Every field of every message that a configuration can hold, each once."""
    seen = set() if seen is None else seen
    for field in message.fields:
        if field.full_name in seen:
            continue
        seen.add(field.full_name)
        yield field
        if field.message_type is not None:
            yield from fields(field.message_type, seen)


def row(field):
    """The bound of a field."""
    return BOUNDS[field.full_name.removeprefix("mme.")]


def named(field):
    """How a test calls a field."""
    return field.full_name.removeprefix("mme.")


FIELDS = list(fields())
INTEGERS = [field for field in FIELDS if field.type in LARGEST]
REPEATED = [field for field in FIELDS if field.is_repeated]


def holders(message, wanted):
    """The messages of a kind inside of another one, itself included; of a map's entries the map."""
    if message.DESCRIPTOR is wanted:
        yield message
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        is_map = field.message_type.GetOptions().map_entry
        if is_map and field.message_type is wanted:
            yield value
        values = value.values() if is_map else value if field.is_repeated else [value]
        for each in values:
            if hasattr(each, "DESCRIPTOR"):
                yield from holders(each, wanted)


def parsed(text):
    """A message."""
    return text_format.Parse(text, pb.ModelConfig())


def with_value(field, value):
    """A valid configuration that has the message of a field, with that value in it."""
    message, holder = holding(field)
    if field.containing_type.GetOptions().map_entry:
        holder[value].SetInParent()
    elif field.is_repeated:
        getattr(holder, field.name)[:] = [value]
    else:
        setattr(holder, field.name, value)
    return message


def holding(field):
    """The first valid configuration that has the message of a field, and that message."""
    for text in VALID:
        message = parsed(text)
        for holder in holders(message, field.containing_type):
            return message, holder
    raise AssertionError(f"no configuration of these tests has {named(field)}")


def fill(holder, field, number):
    """Put so many entries into a list or map, each like the first."""
    entries = getattr(holder, field.name)
    entry = field.message_type if field.message_type and field.message_type.GetOptions().map_entry else None
    for index in range(len(entries), number):
        if entry is not None:
            key = 1000 + index if entry.fields_by_name["key"].type in LARGEST else f"k{index}"
            if entry.fields_by_name["value"].message_type is None:
                entries[key] = ""
            else:
                entries[key].SetInParent()
        elif field.message_type is not None:
            entries.add()
        else:
            entries.append(entries[0] if entries else "" if field.type == FieldDescriptor.TYPE_STRING else 0)


def make_all(text):
    """Everything that a load makes of a configuration before it opens the model's file."""
    config = parse_config(text, model="m")
    queue_for("m", config, 2)
    place(config.instance_group, "m", gpu_capable=False, require_gpu=False)
    config_json(config)


@pytest.fixture(autouse=True, scope="module")
def imported():
    """Modules that are imported by need are no memory of a configuration's."""
    make_all(VALID[0])


def outcome(message):
    """What comes of a configuration: the sentence that refuses it, or "" where nothing does."""
    text = text_format.MessageToString(message)
    tracemalloc.start()
    try:
        make_all(text)
    except MmeError as error:
        return error.message if error.kind in {Kind.INVALID_MODEL, Kind.UNSUPPORTED} else f"{error.kind}"
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MEMORY, f"{peak} bytes"
    return ""


@pytest.mark.parametrize("text", VALID)
def test_the_configurations_of_these_tests_obey_every_rule(text):
    """But for a secondary device, so that a refusal is of the number that is put into them."""
    assert outcome(parsed(text)) == "" or "secondary_devices" in text


def test_every_integer_and_every_list_has_a_row_and_no_other_field():
    """With a reason; a number without a limit says why any is harmless."""
    assert set(BOUNDS) == {named(field) for field in (*INTEGERS, *REPEATED)}
    for field in FIELDS:
        if field in INTEGERS or field in REPEATED:
            bound = row(field)
            assert bound.reason
            assert (bound.entries is not None) == field.is_repeated, named(field)
            if field in INTEGERS and bound.most is None:
                assert bound.reason.startswith(("any value is harmless", "any value is refused")), named(field)


@pytest.mark.parametrize("field", INTEGERS, ids=named)
def test_no_integer_is_work_or_memory(field):
    """The largest of its type, zero and what is below: refused by name, or without a bound because it is harmless."""
    bound = row(field)
    for value in {LARGEST[field.type], 2**31 - 1, 0, -1} - ({-1} if field.type in UNSIGNED else set()):
        sentence = outcome(with_value(field, value))
        if bound.most is not None and value > bound.most:
            assert f" is {value}, at most {bound.most}" in sentence
        elif sentence:
            words = (field.name, "secondary_devices", *WORDS.get(field.name, ()))
            assert any(word in sentence for word in words), sentence


@pytest.mark.parametrize("field", REPEATED, ids=named)
def test_no_list_is_longer_than_its_bound(field):
    """It is refused with its length, before its entries are looked at."""
    most = row(field).entries
    message, holder = holding(field)
    fill(holder, field, most)
    assert not list(excesses(message))
    fill(holder, field, most + 1)
    (excess,) = excesses(message)
    assert excess.path.endswith(field.name)
    assert excess.sentence == f"{excess.path} has {most + 1} entries, at most {most}"


def test_a_count_that_took_17_gigabytes_is_refused_wherever_it_comes_from():
    """In an archive's text, in a client's JSON, and by `mme config check`, in the same words."""
    sentence = f"instance_group[0].count is 2147483647, at most {MAX_INSTANCES}"
    with pytest.raises(MmeError) as of_text:
        parse_config("instance_group { count: 2147483647 }", model="m")
    with pytest.raises(MmeError) as of_json:
        parse_config_json('{"instance_group": [{"count": 2147483647}]}', model="m")
    assert of_text.value.message == of_json.value.message == f"model 'm': {sentence}"
    assert [each.sentence for each in understand("instance_group { count: 2147483647 }", model="m").problems] == [
        sentence
    ]


def test_instances_are_counted_over_groups_and_gpus():
    """A thousand on each of two GPUs are more than a model may have."""
    for text in ("instance_group { count: 600 kind: KIND_GPU gpus: [0, 1] }", "instance_group { count: 600 }" * 2):
        with pytest.raises(MmeError, match=f"asks for 1200 instances in all, at most {MAX_INSTANCES}"):
            parse_config(text, model="m")


def test_every_excess_is_told_by_config_check_with_what_else_is_wrong():
    """And nothing is made of them to find the rest."""
    text = """max_batch_size: -1 instance_group { count: 5000 }
    dynamic_batching { priority_levels: 18446744073709551615 }"""
    found = {problem.field: problem.sentence for problem in understand(text, model="m").problems}
    assert found["instance_group[0].count"] == "instance_group[0].count is 5000, at most 1024"
    assert "at most 1024" in found["dynamic_batching.priority_levels"]
    assert "must be non-negative" in found["max_batch_size"]


def test_an_override_is_as_long_and_as_deep_as_a_configuration_at_most():
    """Its JSON comes in a request, whose body may be larger."""
    for text, words in (
        (json.dumps({"name": "x" * MAX_CONFIG_SIZE}), "at most 1048576"),
        ('{"input": ' + "[" * 1000 + "]" * 1000 + "}", "Invalid config override"),
    ):
        with pytest.raises(MmeError, match=words) as raised:
            parse_config_json(text, model="m")
        assert raised.value.kind is Kind.INVALID_ARGUMENT


# -- settings ----------------------------------------------------------------------------------------------------------

HOSTILE = ("1000000000000000000", "-1", "inf", "nan", "1e18", "9" * 5000, f"0.{'9' * 5000}")
FORMS = (
    "{}",
    "{}%",
    "80%-{}",
    "{}GiB",
    "R:{}",
    "R:1:{}",
    "onnxruntime:{}",
    "time={}",
    "local,size={}",
    "summary_quantiles={}:0.1",
    "{}-65535",
    "1-{}",
)
UNLIMITED = {"MME_TRACE_COUNT": "-1"}  # all


def numbers(value):
    """The numbers in a setting's value; how many names there are is none."""
    if isinstance(value, bool | str) or value is None:
        return []
    if isinstance(value, int | float):
        return [value]
    if isinstance(value, tuple | list):
        return [number for each in value for number in numbers(each)]
    if dataclasses.is_dataclass(value):
        return [number for each in dataclasses.fields(value) for number in numbers(getattr(value, each.name))]
    return []


def accepted(variable, text):
    """The numbers that a setting takes from a text, none where it refuses it."""
    try:
        return numbers(variable.parse(text))
    except ValueError:
        return []


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_no_setting_takes_a_number_beyond_its_bound(variable):
    """In any form that a number can have there: infinities and what is none are refused as well."""
    for hostile in HOSTILE:
        for form in FORMS:
            text = form.format(hostile)
            if UNLIMITED.get(variable.name) == text:
                continue
            assert all(0 <= number < 10**18 for number in accepted(variable, text)), text


def test_a_setting_beyond_its_bound_refuses_to_start_by_its_name():
    """With what it may be."""
    with pytest.raises(SettingsError) as raised:
        read_settings({"MME_MAX_BODY": "1000000000000000000", "MME_MEMORY_BUDGET": "2PiB"})
    budget, body = raised.value.problems
    assert "--memory-budget/MME_MEMORY_BUDGET='2PiB': expected a size" in budget
    assert "at most 1PiB" in budget
    assert "--max-body/MME_MAX_BODY='1000000000000000000': expected a size" in body
    assert "at most 100000MiB" in body


# -- what is made of a configuration that is within its bounds ---------------------------------------------------------


X = 'name: "X" data_type: TYPE_FP32'
COPIED = 'name: "m" output { name: "Y" data_type: TYPE_FP32 dims: [-1] }'


class Copying(Handler):
    """Answers what it is asked, and counts."""

    inline = True

    def __init__(self, text):
        super().__init__(parse_config(text, model="m"))
        self.executed = 0

    @classmethod
    def autocomplete(cls, config, _model_file):
        """Nothing is left out."""
        return config

    @classmethod
    def load(cls, config, _model_file, _device, _lane=""):
        """Made by the test itself."""
        raise NotImplementedError

    def close(self):
        """There is nothing to give back."""

    def execute(self, inputs, _outputs):
        """The input."""
        self.executed += 1
        return {"Y": inputs["X"]}


def test_no_zeros_are_made_for_a_first_execution_that_are_larger_than_memory():
    """A tensor may have as many elements as a request's, which need not be there: the model serves without it."""
    vast = Copying(f"{COPIED} input {{ {X} dims: [1099511627776] }}")
    small = Copying(f"{COPIED} input {{ {X} dims: [4, -1] }}")
    assert (warm_up(vast), warm_up(small)) == (False, True)
    assert (vast.executed, small.executed) == (0, 1)


def test_a_state_larger_than_the_machine_is_refused_by_name(tmp_path):
    """Each sequence begins with it."""
    state = 'state { input_name: "I" output_name: "O" data_type: TYPE_FP64 dims: [1099511627776] }'
    config = parse_config(f"{COPIED} sequence_batching {{ {state} }}", model="m")
    with pytest.raises(
        MmeError, match="state input 'I' of model 'm' takes 8796093022208 bytes, more than this machine"
    ):
        initial_states(config, tmp_path)


def test_limits_of_a_queue_are_compared_and_nothing_is_made_of_their_size():
    """The longest delay and time limit that their type holds: a request waits for them, in a queue of one level."""
    longest = 2**64 - 1
    text = f"""{COPIED} max_batch_size: 2147483647 dynamic_batching {{
      max_queue_delay_microseconds: {longest} default_priority_level: {longest}
      default_queue_policy {{ default_timeout_microseconds: {longest} max_queue_size: 4294967295 }}
    }}"""
    queue = queue_for("m", parse_config(text, model="m"), 1)
    request = InferenceRequest(Layout((), ()), [], lambda _request, _result: None)
    request.batch_size, request.arrival_ns = 1, 10
    queue.push(request)
    take = queue.take(20)
    assert (take.batch, take.wake_at) == ([], 10 + longest * 1000)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 2**31, -(2**63), "9" * 5000, "inf", [1]])
@pytest.mark.parametrize("name", ["trace_rate", "trace_count", "log_frequency"])
def test_no_trace_setting_takes_a_number_beyond_its_bound(name, value):
    """As clients may send them; the sentence quotes the beginning."""
    first = TraceSettings(on=True, mode="triton", file="/t.json")
    with pytest.raises(MmeError, match=name) as raised:
        first.changed({name: value}, first)
    assert raised.value.kind is Kind.INVALID_ARGUMENT
    assert len(raised.value.message) < 200


class Author:
    """A Python model that completes its own configuration with what would take more than there is."""

    batch, dims, tensors = 1, [4], 1

    @classmethod
    def auto_complete_config(cls, config):
        """With the numbers of the class."""
        config.set_max_batch_size(cls.batch)
        for index in range(cls.tensors):
            config.add_input({"name": f"X{index}", "data_type": "TYPE_FP32", "dims": cls.dims})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [4]})
        return config


@pytest.mark.parametrize(
    ("numbers_of", "words"),
    [
        ({"batch": 2**31}, "max_batch_size is 2147483648, at most 2147483647"),
        ({"dims": [2**41]}, "has more than 1099511627776 elements"),
        ({"dims": [1] * 33}, "has 33 dimensions, must be at most 32"),
        ({"tensors": 4097}, "input has 4097 entries, at most 4096"),
    ],
)
def test_what_a_models_code_completes_obeys_the_same_limits(numbers_of, words):
    """It is Python, whose whole numbers have any size."""
    config = parse_config('backend: "python"', model="m")
    assert complete(config, Author).max_batch_size == 1
    with pytest.raises(MmeError, match=words) as raised:
        complete(config, type("Hostile", (Author,), numbers_of))
    assert raised.value.kind is Kind.INVALID_MODEL
