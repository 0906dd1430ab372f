"""config.pbtxt into a ModelConfig, and back into text and JSON."""

import json
import string
from dataclasses import replace

import pytest
from google.protobuf import json_format
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from model_handlers.config.convert import config_json
from model_handlers.config.model_config import (
    Accelerator,
    BatchInput,
    BatchInputKind,
    BatchOutput,
    DynamicBatching,
    InstanceGroup,
    InstanceKind,
    MetricControl,
    ModelConfig,
    QueuePolicy,
    RepositoryAgent,
    Resource,
    TimeoutAction,
    VersionPolicy,
    WarmupInput,
    WarmupSample,
)
from model_handlers.config.pbtxt import config_message, config_text, parse_config
from model_handlers.config.validate import normalise
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BYTES, DATA_TYPES, FP32, INT32, INT64, TensorFormat, TensorSpec
from serve.loading.check import understand

FULL = """
# A comment, and both ways to write lists and messages.
name: "author's name"
platform: "onnxruntime_onnx"
backend: "onnxruntime"
max_batch_size: 8
version_policy: { specific { versions: [ 3, 1 ] } }
input [
  { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "image", data_type: TYPE_FP32, format: FORMAT_NCHW, dims: [ 3, 4, 4 ], optional: true,
    reshape: { shape: [ 1, 3, 4, 4 ] } }
]
output { name: "label" data_type: TYPE_STRING dims: 1 reshape { } label_filename: "labels.txt" }
instance_group [ { count: 2 kind: KIND_CPU }, { name: "big" kind: KIND_GPU gpus: [ 0, 1 ] } ]
dynamic_batching {
  preferred_batch_size: 8
  preferred_batch_size: 4
  max_queue_delay_microseconds: 100
  preserve_ordering: true
  default_queue_policy {
    timeout_action: REJECT default_timeout_microseconds: 5000000000 allow_timeout_override: true max_queue_size: 16
  }
}
default_model_filename: "net.onnx"
cc_model_filenames { key: "9.0" value: "h100.onnx" }
optimization {
  graph { level: -1 }
  execution_accelerators {
    gpu_execution_accelerator: [
      { name: "tensorrt" parameters { key: "precision_mode" value: "FP16" } }, { name: "cuda" }
    ]
    cpu_execution_accelerator { name: "openvino" }
  }
}
parameters { key: "intra_op_thread_count" value: { string_value: "2" } }
parameters { key: "custom" value: { } }
metric_tags { key: "team" value: "search" }
runtime: "libtriton_onnxruntime.so"
model_repository_agents { agents { name: "checksum" parameters { key: "MD5:1/model.onnx" value: "abc" } } }
"""

PARSED = ModelConfig(
    name="bert",
    platform="onnxruntime_onnx",
    backend="onnxruntime",
    max_batch_size=8,
    version_policy=VersionPolicy(specific=(3, 1)),
    inputs=(
        TensorSpec("ids", INT64, (-1,)),
        TensorSpec("image", FP32, (3, 4, 4), reshape=(1, 3, 4, 4), optional=True, format=TensorFormat.NCHW),
    ),
    outputs=(TensorSpec("label", BYTES, (1,), reshape=(), label_filename="labels.txt"),),
    instance_group=(
        InstanceGroup("bert_0", InstanceKind.CPU, count=2),
        InstanceGroup("big", InstanceKind.GPU, gpus=(0, 1)),
    ),
    dynamic_batching=DynamicBatching(
        (4, 8),
        max_queue_delay_microseconds=100,
        preserve_ordering=True,
        default_queue_policy=QueuePolicy(
            default_timeout_microseconds=5_000_000_000, allow_timeout_override=True, max_queue_size=16
        ),
    ),
    default_model_filename="net.onnx",
    optimization_level=-1,
    cc_model_filenames={"9.0": "h100.onnx"},
    gpu_accelerators=(Accelerator("tensorrt", {"precision_mode": "FP16"}), Accelerator("cuda")),
    cpu_accelerators=(Accelerator("openvino"),),
    parameters={"intra_op_thread_count": "2", "custom": ""},
    metric_tags={"team": "search"},
    runtime="libtriton_onnxruntime.so",
    agents=(RepositoryAgent("checksum", {"MD5:1/model.onnx": "abc"}),),
)


def refused(text, kind=Kind.INVALID_MODEL, **options):
    """The sentence with which a text is refused."""
    with pytest.raises(MmeError) as caught:
        parse_config(text, model="bert", **options)
    assert caught.value.kind is kind
    return caught.value.message


def test_every_honoured_field_arrives():
    """All that we honour of a configuration is in the result, defaults filled in."""
    assert parse_config(FULL, model="bert") == PARSED


def test_an_empty_text_is_a_configuration_without_wishes():
    """Everything else is completed from the model file."""
    assert parse_config("", model="bert") == ModelConfig("bert", version_policy=VersionPolicy(latest=1))


def test_the_author_of_an_archive_may_call_the_model_otherwise():
    """A model goes by the name under which it is served."""
    assert parse_config('name: "other"', model="bert").name == "bert"


def test_a_repository_insists_on_the_directory_name():
    """In a repository on disk, directory and configuration must agree; saying nothing is agreement."""
    assert refused('name: "other"', strict_name=True) == (
        "unexpected directory name 'bert' for model 'other', directory name must equal model name: "
        'write name: "bert", or leave the field out'
    )
    assert parse_config("", model="bert", strict_name=True).name == "bert"
    assert parse_config('name: "bert"', model="bert", strict_name=True).name == "bert"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('name: "x"\nbakend: "onnxruntime"', 2, 'has no field named "bakend"'),
        ('input {\n  name: "I"\n  datatype: TYPE_FP32\n}', 3, '"ModelInput" has no field named "datatype"'),
        ('input {\n  name: "I"\n  data_type: TYPE_FLOAT\n}', 3, "data_type: TYPE_FLOAT"),
        ("\nmax_batch_size: many", 2, "max_batch_size: many"),
        ("max_batch_size: 1.5", 1, "max_batch_size: 1.5"),
        ("max_batch_size: 3000000000", 1, "max_batch_size: 3000000000"),
        ("dynamic_batching { max_queue_delay_microseconds: -1 }", 1, "max_queue_delay_microseconds: -1"),
        ("max_batch_size: 1\nmax_batch_size: 2", 2, "max_batch_size"),
        ("name: 'bert", 1, "name: 'bert"),
        ("name: '\\xff'", 1, "Couldn't parse string"),
        ("\n\ninput {", 3, 'Expected "}"'),
        ("dynamic_batching { }\nsequence_batching { }", 2, "sequence_batching"),
        ('parameters { key: "a" value: "b" }', 1, 'value: "b"'),
        ("[type.googleapis.com/x.Y] { }", 1, "does not have extensions"),
        ("\x00", 1, ""),
        ("max_batch_size: 8" + " " * 10_000 + "!", 1, ""),
    ],
)
def test_text_that_is_no_configuration_is_refused_by_line_and_field(text, line, words):
    """The sentence leads the author to the line, shows the field and stays short."""
    message = refused(text)

    assert message.startswith(f"model 'bert': config.pbtxt line {line}, column ")
    assert words in message
    assert "mme." not in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("max_batchsize: 8", "did you mean max_batch_size?"),
        ("input { data_type: FP32 }", "did you mean TYPE_FP32?"),
        ('input { data_type: "TYPE_FP32" }', "write TYPE_FP32 without quotes"),
        ("instance_group { kind: cpu }", "did you mean KIND_CPU?"),
        ('max_batch_size: "8"', "write 8 without quotes"),
        ("backend: onnxruntime", 'write "onnxruntime", in quotes'),
        ("max_batch_size = 8", "between a field and its value stands a colon"),
        ('parameters { key: "a" value: "b" }', 'write value: { string_value: "b" }'),
        ('parameters { a: "b" }', 'write parameters { key: "a" value: { string_value: "…" } }'),
        ("version_policy { latest: 2 }", "latest holds fields: write latest { … }"),
        ("// a comment", "comments begin with #"),
        ('{ "backend": "python" }', 'write backend: "onnxruntime" and so on, without braces around it'),
        ("input [ { dims: [ 4 ] ]", "a bracket before it is not closed"),
    ],
)
def test_the_sentence_ends_with_what_was_meant(text, hint):
    """Where that can be told from the text; a check of all problems has it as what to do."""
    message = refused(text)
    problem, *_ = understand(text, model="bert").problems

    assert message.endswith(hint)
    assert problem.mend.endswith(hint)
    assert hint not in problem.sentence


@pytest.mark.parametrize("escape", [r"\m", r"\8", r"\?", r"\777", r"\N", r"\\\m"])
def test_a_backslash_before_an_ordinary_letter_is_refused(escape):
    """A path with backslashes is a mistake that its author hears about, with the line."""
    message = refused(f'# a comment\nname: "bert"\ndefault_model_filename: "C:{escape}odel"')

    assert message.startswith("model 'bert': config.pbtxt line 3: ")
    assert message.endswith("in a string is no escape sequence; write a backslash twice")


def test_escapes_mean_what_they_mean_in_c():
    """Octal, hexadecimal and letter escapes work in both kinds of quotes; comments may hold anything."""
    text = r"""# C:\models "don't \m"
        metric_tags { key: 'a' value: "\x41\102\t\\m\"" }"""

    assert parse_config(text, model="bert").metric_tags == {"a": 'AB\t\\m"'}


def test_the_sentence_about_broken_unicode_can_be_sent():
    """A lone surrogate in the text does not break the error that complains about it."""
    assert refused("name: '\ud800'").encode()


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("input { } input { is_shape_tensor: true }", "input[1].is_shape_tensor"),
    ],
)
def test_a_feature_that_is_not_honoured_is_refused_by_name(text, path):
    """No configuration is served in another way than it asks for."""
    message = refused(text, Kind.UNSUPPORTED)

    assert message.startswith(f"model 'bert': config.pbtxt field '{path}' is not honoured (")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max_batch_size: -1", "'max_batch_size' must be non-negative value for bert"),
        ("input { data_type: TYPE_FP32 dims: 1 }", "model input must specify 'name' for bert"),
        ("output { dims: 1 }", "model output must specify 'name' for bert"),
        ("backend: 'fil' input { name: 'I' dims: 1 }", "model input 'I' must specify 'data_type' for bert"),
        ("backend: 'fil' output { name: 'O' dims: 1 }", "model output 'O' must specify 'data_type' for bert"),
        ("backend: 'fil' input { name: 'I' data_type: TYPE_FP32 }", "model input 'I' must specify 'dims' for bert"),
        (
            "model_warmup { inputs { key: 'I' value { data_type: TYPE_FP32 dims: 1 } } }",
            "warmup setting expects input 'I' to have input_data_type set for bert",
        ),
        (
            "model_warmup { inputs { key: 'I' value { zero_data: true } } }",
            "warmup setting expects input 'I' to have data_type set for bert",
        ),
        ("model_metrics { metric_control { } }", "metric control must specify 'metric_identifier'"),
        (
            "model_metrics { metric_control { metric_identifier { family: 'f' } } }",
            "metric control must specify 'histogram_options'",
        ),
        ("batch_input { data_type: TYPE_INT64 }", "batch input data type must be TYPE_INT32 or TYPE_FP32"),
        (
            "batch_input { kind: BATCH_ITEM_SHAPE data_type: TYPE_INT32 source_input: ['A', 'B'] }",
            "batch input kind 'BATCH_ITEM_SHAPE' expects 1 source input, got 2 for bert",
        ),
        (
            "batch_output { target_name: 'O' }",
            "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 0 for bert",
        ),
        (
            "batch_output { target_name: ['O', 'O'] source_input: 'I' }",
            "target output name 'O' can only be specified once for bert",
        ),
        ("batch_input { data_type: TYPE_FP32 source_input: 'I' }", "batch input must specify 'target_name' for bert"),
        ("instance_group { count: -1 }", "instance group bert_0 of model bert has count -1, must be at least 1"),
    ],
)
def test_values_are_checked(text, sentence):
    """A field that is missing or out of range is told in Triton's words where it has some."""
    assert refused(text) == sentence


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", VersionPolicy(latest=1)),
        ("version_policy { }", VersionPolicy(latest=1)),
        ("version_policy { latest { } }", VersionPolicy(latest=0)),
        ("version_policy { latest { num_versions: 2 } }", VersionPolicy(latest=2)),
        ("version_policy { all { } }", VersionPolicy(all=True)),
        ("version_policy { specific { versions: 7 } }", VersionPolicy(specific=(7,))),
    ],
)
def test_a_version_policy_means_what_triton_means(text, policy):
    """The latest version is served unless the configuration says otherwise; `latest {}` serves none."""
    assert parse_config(text, model="bert").version_policy == policy


def test_a_specific_policy_names_versions():
    """A policy that selects nothing is a mistake, not a model without versions."""
    assert "version_policy.specific.versions" in refused("version_policy { specific { } }")


def test_dynamic_batching_may_be_asked_for_without_a_batch_dimension():
    """Models that do not batch, or not yet, keep the settings of their queue."""
    text = "dynamic_batching { default_queue_policy { max_queue_size: 2 timeout_action: DELAY } }"

    batching = parse_config(text, model="bert").dynamic_batching

    assert batching == DynamicBatching((), default_queue_policy=QueuePolicy(TimeoutAction.DELAY, max_queue_size=2))


def test_priority_levels_have_policies_of_their_own():
    """A level that names no policy has the default one."""
    text = """dynamic_batching { priority_levels: 3 default_priority_level: 2 default_queue_policy { max_queue_size: 7 }
      priority_queue_policy { key: 1 value { } }
      priority_queue_policy { key: 3 value {
        timeout_action: DELAY default_timeout_microseconds: 50 allow_timeout_override: true max_queue_size: 1 } } }"""

    batching = parse_config(text, model="bert").dynamic_batching

    assert batching == LEVELS
    assert batching.policies == (QueuePolicy(), LEVELS.default_queue_policy, LEVELS.priority_queue_policy[3])
    assert DynamicBatching((), default_queue_policy=QueuePolicy(max_queue_size=7)).policies == (
        QueuePolicy(max_queue_size=7),
    )


def test_priorities_without_levels_are_told_to_change_nothing(caplog):
    """Triton takes them without a word."""
    parse_config("dynamic_batching { default_priority_level: 1 }", model="bert")
    assert "model 'bert': priorities change nothing, since dynamic_batching.priority_levels is 0" in caplog.text


def test_the_result_can_not_be_changed_by_who_reads_it():
    """Configurations are shared by threads; their maps are read-only as well."""
    config = parse_config(FULL, model="bert")

    with pytest.raises(TypeError):
        config.parameters["custom"] = "x"


OPTIMIZATION = {  # of a model that says nothing of it
    "priority": "PRIORITY_DEFAULT",
    "input_pinned_memory": {"enable": True},
    "output_pinned_memory": {"enable": True},
    "gather_kernel_buffer_threshold": 0,
    "eager_batching": False,
}


def test_the_json_form_has_every_default_and_only_messages_that_are_set():
    """Clients find each scalar, list and map under the message's own name, enums by name, integers as numbers."""
    config = parse_config("input { name: 'I' data_type: TYPE_STRING dims: [ -1, 8000000000 ] }", model="bert")

    assert config_json(config) == {
        "name": "bert",
        "platform": "",
        "backend": "",
        "runtime": "",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [
            {
                "name": "I",
                "data_type": "TYPE_STRING",
                "format": "FORMAT_NONE",
                "dims": [-1, 8_000_000_000],
                "is_shape_tensor": False,
                "allow_ragged_batch": False,
                "optional": False,
                "is_non_linear_format_io": False,
            }
        ],
        "output": [],
        "batch_input": [],
        "batch_output": [],
        "optimization": OPTIMIZATION,
        "instance_group": [],
        "default_model_filename": "",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {},
        "model_warmup": [],
    }


def test_the_json_form_tells_what_is_set():
    """Sub-messages appear once they say something, and nested values keep their types."""
    document = json.loads(json.dumps(config_json(PARSED)))

    assert document["parameters"] == {"intra_op_thread_count": {"string_value": "2"}, "custom": {"string_value": ""}}
    assert document["metric_tags"] == {"team": "search"}
    assert document["optimization"]["graph"] == {"level": -1}
    assert document["output"][0]["reshape"] == {"shape": []}
    assert document["output"][0]["label_filename"] == "labels.txt"
    assert document["version_policy"] == {"specific": {"versions": [3, 1]}}
    assert [(group["kind"], group["gpus"]) for group in document["instance_group"]] == [
        ("KIND_CPU", []),
        ("KIND_GPU", [0, 1]),
    ]
    assert document["dynamic_batching"]["preferred_batch_size"] == [4, 8]
    assert document["dynamic_batching"]["default_queue_policy"]["default_timeout_microseconds"] == 5_000_000_000


def test_the_json_form_tells_what_changes_nothing_here():
    """As config.pbtxt has it, which clients may compare it with; and of sequences a strategy, though it names none."""
    more = "optimization { priority: PRIORITY_MAX cuda { graphs: true } input_pinned_memory { } eager_batching: true }"
    groups = "instance_group [ { kind: KIND_CPU host_policy: 'one' } ]"
    config = parse_config(f"sequence_batching {{ }} {more} {groups}", model="bert")

    document = config_json(config)

    assert document["optimization"] == OPTIMIZATION | {
        "priority": "PRIORITY_MAX",
        "cuda": {"graphs": True, "busy_wait_events": False, "graph_spec": [], "output_copy_stream": False},
        "input_pinned_memory": {"enable": False},
        "eager_batching": True,
    }
    assert document["instance_group"][0]["host_policy"] == "one"
    assert "direct" in document["sequence_batching"]
    assert parse_config(config_text(config), model="bert") == config


def numbers(value):
    """Protobuf's JSON with its strings of digits as the numbers they stand for."""
    if isinstance(value, dict):
        return {key: numbers(member) for key, member in value.items()}
    if isinstance(value, list):
        return [numbers(member) for member in value]
    return int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value


# A configuration has many parts; how long it takes to draw one says nothing about the code.
QUICK = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
NAMES = st.text(string.ascii_letters + "_é\"'\\\n", min_size=1, max_size=6)
DIMS = st.lists(st.integers(1, 2**10) | st.just(-1), min_size=1, max_size=4).map(tuple)
TYPES = st.sampled_from(DATA_TYPES)
INPUTS = st.builds(TensorSpec, NAMES, TYPES, DIMS, optional=st.booleans(), allow_ragged_batch=st.booleans()).map(
    lambda spec: replace(spec, reshape=(1, *spec.dims) if spec.optional else None)
)
OUTPUTS = st.builds(TensorSpec, NAMES, TYPES, DIMS, label_filename=st.sampled_from(["", "labels.txt"]))
SOURCES = [{"zero_data": True}, {"random_data": True}, {"input_data_file": "a/b"}]
LEVELS = DynamicBatching(
    (),
    default_queue_policy=QueuePolicy(max_queue_size=7),
    priority_levels=3,
    default_priority_level=2,
    priority_queue_policy={1: QueuePolicy(), 3: QueuePolicy(TimeoutAction.DELAY, 50, True, 1)},
)


def levelled(batching):
    """The settings, with priority levels where those can be."""
    return (
        batching
        if batching.preserve_ordering
        else replace(LEVELS, max_queue_delay_microseconds=batching.max_queue_delay_microseconds)
    )


def cached(config):
    """The configuration with a response cache instead of any number of responses, now and then."""
    cached = config.optimization_level > 0
    return replace(config, response_cache=cached, decoupled=not cached)


MAPS = st.dictionaries(NAMES, NAMES, max_size=3)
CONFIGS = (
    st.builds(
        ModelConfig,
        name=NAMES,
        backend=NAMES,
        platform=NAMES,
        max_batch_size=st.integers(0, 2**31 - 1),
        inputs=st.lists(INPUTS, max_size=3, unique_by=lambda spec: spec.name).map(tuple),
        outputs=st.lists(OUTPUTS, max_size=3, unique_by=lambda spec: spec.name).map(tuple),
        version_policy=st.sampled_from(
            [VersionPolicy(), VersionPolicy(latest=3), VersionPolicy(latest=0), VersionPolicy(all=True)]
        )
        | st.lists(st.integers(0, 2**40), min_size=1, max_size=3).map(lambda vs: VersionPolicy(specific=tuple(vs))),
        instance_group=st.lists(
            st.builds(
                InstanceGroup,
                name=NAMES,
                kind=st.sampled_from([InstanceKind.AUTO, InstanceKind.GPU]),
                count=st.integers(1, 9),
                gpus=st.lists(st.integers(0, 7), max_size=2).map(tuple),
                resources=st.lists(
                    st.builds(Resource, NAMES, st.integers(0, 9), is_global=st.booleans()), max_size=2
                ).map(tuple),
                priority=st.integers(1, 3),
                host_policy=st.sampled_from(["", "one"]),
            ),
            max_size=2,
        ).map(tuple),
        dynamic_batching=st.none()
        | st.builds(
            DynamicBatching,
            preferred_batch_size=st.just(()),
            max_queue_delay_microseconds=st.integers(0, 2**40),
            preserve_ordering=st.booleans(),
            default_queue_policy=st.builds(
                QueuePolicy,
                timeout_action=st.just(TimeoutAction.REJECT),
                default_timeout_microseconds=st.integers(0, 2**40),
                allow_timeout_override=st.booleans(),
                max_queue_size=st.integers(0, 2**31),
            ),
        ).map(levelled),
        default_model_filename=st.sampled_from(["", "model.onnx", "a/b"]),
        cc_model_filenames=st.sampled_from([{}, {"8.6": "a100.plan", "9.0": "h100.plan"}]),
        optimization_level=st.integers(-1, 2),
        optimization=st.sampled_from([{}, {"priority": "PRIORITY_MIN", "output_pinned_memory": {"enable": False}}]),
        parameters=MAPS,
        metric_tags=st.dictionaries(st.sampled_from(["team", "stage_2"]), NAMES),
        runtime=st.just(""),
        op_libraries=st.sampled_from([(), ("a.so", "b.so")]),
        metric_control=st.sampled_from([(), (MetricControl("h", (1.0, 2.5)),)]),
        agents=st.lists(
            st.builds(RepositoryAgent, st.just("checksum"), st.sampled_from([{}, {"MD5:1/model.onnx": "abc"}])),
            max_size=2,
        ).map(tuple),
        decoupled=st.just(value=True),
        batch_input=st.lists(
            st.builds(
                BatchInput,
                st.sampled_from(BatchInputKind),
                NAMES.map(lambda name: (name, f"{name}2")),
                st.sampled_from([INT32, FP32]),
                NAMES.map(lambda name: (name,)),
            ),
            max_size=1,
        ).map(tuple),
        batch_output=st.lists(
            st.builds(BatchOutput, NAMES.map(lambda name: (name,)), NAMES.map(lambda name: (name,))), max_size=1
        ).map(tuple),
        model_warmup=st.lists(
            st.builds(
                WarmupSample,
                NAMES,
                st.just(0),
                st.dictionaries(
                    NAMES,
                    st.builds(WarmupInput, TYPES, st.just((2, 3))).flatmap(
                        lambda given: st.sampled_from(SOURCES).map(lambda source: replace(given, **source))
                    ),
                    max_size=2,
                ),
                st.integers(1, 9),
            ),
            max_size=2,
        ).map(tuple),
    )
    .map(cached)
    .map(normalise)
)


@QUICK
@given(CONFIGS)
def test_a_configuration_survives_the_round_trip_through_text(config):
    """What `config_text` writes, `parse_config` reads back into an equal configuration."""
    assume(config.platform != "ensemble")

    assert parse_config(config_text(config), model=config.name, strict_name=True) == config


@QUICK
@given(CONFIGS)
def test_the_json_form_is_protobufs_own_with_numbers(config):
    """The JSON differs from protobuf's only in 64-bit integers, and in what Triton adds."""
    protobufs = json_format.MessageToDict(
        config_message(config), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )

    if config.ensemble:
        protobufs.setdefault("model_transaction_policy", {"decoupled": False})
    else:
        protobufs["optimization"] = {**OPTIMIZATION, **protobufs.get("optimization", {})}
    assert numbers(config_json(config)) == numbers(protobufs)


def test_text_keeps_letters_readable():
    """A file that `mme pack` writes is for people: no octal escapes for letters."""
    assert 'value: "größe"' in config_text(ModelConfig("bert", metric_tags={"k": "größe"}))


@QUICK
@given(st.data())
def test_a_damaged_text_is_a_configuration_or_an_error_of_ours(data):
    """Whatever is cut out of or put into a configuration, nothing but an MmeError comes out."""
    start = data.draw(st.integers(0, len(FULL)))
    end = data.draw(st.integers(start, min(len(FULL), start + 40)))
    text = FULL[:start] + data.draw(st.text(max_size=8) | st.text("{}[]:<>\"'\\x0-9#,; \n", max_size=8)) + FULL[end:]

    outcome = attempt(text)

    if isinstance(outcome, MmeError):
        assert outcome.kind in {Kind.INVALID_MODEL, Kind.UNSUPPORTED}
        assert "bert" in outcome.message
    else:
        assert config_json(outcome)["name"] == "bert"


def attempt(text):
    """The configuration, or the error of ours that says why there is none."""
    try:
        return parse_config(text, model="bert")
    except MmeError as error:
        return error


def test_a_number_that_no_enum_has_room_for_is_told_with_its_place():
    """The parser lets it pass, and the message does not."""
    text = 'name: "m"\n  instance_group { kind: 9223372036 }'
    with pytest.raises(MmeError, match=r"line 2, column 26: Value out of range: 9223372036") as caught:
        parse_config(text, model="m")
    assert caught.value.kind is Kind.INVALID_MODEL
    assert any("Value out of range: 9223372036" in each.sentence for each in understand(text, model="m").problems)
