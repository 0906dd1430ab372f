"""Rules that a configuration obeys, one by one, and the defaults that depend on other fields."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_handlers.config.model_config import (
    DynamicBatching,
    InstanceGroup,
    InstanceKind,
    MetricControl,
    ModelConfig,
    QueuePolicy,
    RepositoryAgent,
    TimeoutAction,
    WarmupInput,
    WarmupSample,
)
from model_handlers.config.validate import normalise
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import FP32, TensorFormat, TensorSpec


def tensor(**changes):
    """A tensor that obeys every rule, but for the changes."""
    return replace(TensorSpec("I", FP32, (4, -1)), **changes)


def batching(*sizes, **changes):
    """A dynamic batcher with these preferred sizes."""
    return DynamicBatching(sizes, **changes)


def warmup(batch_size=1, dims=(4, 2), file=""):
    """A warm-up sample of the input I."""
    return WarmupSample("w", batch_size, {"I": WarmupInput(FP32, dims, input_data_file=file)})


DELAYING = QueuePolicy(timeout_action=TimeoutAction.DELAY, default_timeout_microseconds=1)
WHOLE = "must be integer >= 1, or -1 to indicate a variable-size dimension"

BROKEN = {
    "'max_batch_size' must be non-negative value for bert": {"max_batch_size": -1},
    "model input 'I' must specify 'dims' for bert": {"inputs": (tensor(dims=()),)},
    f"model input 'I' dimension {WHOLE} for bert": {"inputs": (tensor(dims=(2, 0)),)},
    f"model output 'I' dimension {WHOLE} for bert": {"outputs": (tensor(dims=(-2,)),)},
    "model input 'I' specified more than once for bert": {"inputs": (tensor(), tensor())},
    "model output 'I' specified more than once for bert": {"outputs": (tensor(), tensor(dims=(1,)))},
    f"model input 'I' reshape dimensions {WHOLE} for bert": {"inputs": (tensor(reshape=(0,)),)},
    "model input 'I' has different number of variable-size dimensions for dims and reshape for bert": {
        "inputs": (tensor(reshape=(4, -1, -1)),)
    },
    "model output 'I' has different size for dims and reshape for bert": {"outputs": (tensor(reshape=(2, -1)),)},
    "model input NHWC/NCHW require 3 dims for bert: model input 'I' has [4, -1]": {
        "inputs": (tensor(format=TensorFormat.NHWC),)
    },
    "dynamic batching preferred size must be positive for bert": {"dynamic_batching": batching(0, 4)},
    "dynamic batching preferred size must be <= max batch size for bert": {"dynamic_batching": batching(4, 9)},
    "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for bert": {
        "dynamic_batching": batching(preserve_ordering=True, default_queue_policy=DELAYING)
    },
    "Only one priority level is allowed when 'preserve_ordering' is true for bert": {
        "dynamic_batching": batching(preserve_ordering=True, priority_levels=2, default_priority_level=1)
    },
    "default priority level must be in range [1, 2] for bert": {
        "dynamic_batching": batching(priority_levels=2, default_priority_level=3)
    },
    "priority queue policy must have priority level in range [1, 2] for bert": {
        "dynamic_batching": batching(priority_levels=2, default_priority_level=1, priority_queue_policy={3: DELAYING})
    },
    "model 'bert': max_batch_size is 2147483648, at most 2147483647": {"max_batch_size": 2**31},
    "model 'bert': input has 4097 entries, at most 4096": {"inputs": (tensor(),) * 4097},
    "model input 'I' has more than 1099511627776 elements, the limit, for bert": {
        "inputs": (tensor(dims=(1 << 20, -1, 1 << 21)),)
    },
    "model 'bert': instance_group asks for 1026 instances in all, at most 1024": {
        "instance_group": (InstanceGroup("g", InstanceKind.GPU, 513, gpus=(0, 1)),)
    },
    "warmup sample 'w' has batch_size 9, must be at most 8 for bert": {"model_warmup": (warmup(batch_size=9),)},
    "input 'I' of warmup sample 'w' has 33 dimensions, must be at most 32 for bert": {
        "model_warmup": (warmup(dims=(1,) * 33),)
    },
    "model input 'I' has 33 dimensions, must be at most 32 for bert": {"inputs": (tensor(dims=(1,) * 33),)},
    "warmup setting expects all variable-size dimensions are specified for input 'I' for bert": {
        "model_warmup": (warmup(dims=(4, -1)),)
    },
    "'input_data_file of warmup sample 'w'' of bert is '../../etc/passwd'; it must name a file inside the model's "
    "directory": {"model_warmup": (warmup(file="../../etc/passwd"),)},
    "Response Cache does not currently support model bert with 'decoupled' transaction policy. Please disable the "
    "response cache.": {"response_cache": True, "decoupled": True},
    "metric identifier must specify non-empty 'family' for bert": {"metric_control": (MetricControl("", (1.0,)),)},
    "histogram options must specify non-empty 'buckets' of 'h' for bert": {"metric_control": (MetricControl("h", ()),)},
    "model_metrics buckets of 'h' must be ascending numbers for bert": {
        "metric_control": (MetricControl("h", (1.0, 1.0)),)
    },
    "instance group bert_0 of model bert has kind KIND_CPU but specifies one or more GPUs": {
        "instance_group": (InstanceGroup("", InstanceKind.CPU, gpus=(0,)),)
    },
    "instance group g of model bert has kind KIND_MODEL but specifies one or more GPUs": {
        "instance_group": (InstanceGroup("g", InstanceKind.MODEL, gpus=(1,)),)
    },
    "instance group g of model bert specifies profile field which is only supported for TensorRT models": {
        "backend": "onnxruntime",
        "instance_group": (InstanceGroup("g", profile=("1",)),),
    },
    "instance group g of model bert has count -2, must be at least 1": {
        "instance_group": (InstanceGroup("g", count=-2),)
    },
    "instance group g of model bert specifies invalid or unsupported gpu id -1": {
        "instance_group": (InstanceGroup("g", InstanceKind.GPU, gpus=(0, -1)),)
    },
}


@pytest.mark.parametrize(("sentence", "changes"), BROKEN.items(), ids=BROKEN)
def test_a_broken_rule_is_told_in_one_sentence(sentence, changes):
    """Each rule has its own sentence, which names the model and the field."""
    with pytest.raises(MmeError) as caught:
        normalise(replace(ModelConfig("bert", max_batch_size=8), **changes))

    assert caught.value.kind is Kind.INVALID_MODEL
    assert caught.value.message == sentence


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "1/../../x", "a\0b"])
@pytest.mark.parametrize("field", ["default_model_filename", "label_filename of model output 'I'"])
def test_no_file_outside_the_model_can_be_named(field, path):
    """A configuration from a stranger's archive can't point at the host's files."""
    label = path if field.startswith("label") else ""
    config = ModelConfig("bert", outputs=(tensor(label_filename=label),), default_model_filename="" if label else path)

    with pytest.raises(MmeError, match="must name a file inside the model's directory") as caught:
        normalise(config)

    assert caught.value.kind is Kind.INVALID_MODEL
    assert field in caught.value.message


def test_a_file_in_a_folder_of_the_model_can_be_named():
    """Dots in names and folders below the model are no crime."""
    config = ModelConfig("bert", default_model_filename="sub/model..v2.onnx")

    assert normalise(config) == config


@pytest.mark.parametrize(
    ("dims", "reshape"),
    [((4, -1), (2, 2, -1)), ((-1,), (1, -1, 1)), ((1,), ()), ((2, -1, 6, -1), (1, 2, -1, 2, 3, -1)), ((3,), (3,))],
)
def test_a_reshape_that_keeps_the_elements_passes(dims, reshape):
    """Dimensions of size one come and go, and a segment between variable dimensions may be cut differently."""
    config = ModelConfig("bert", inputs=(tensor(dims=dims, reshape=reshape),))

    assert normalise(config) == config


def test_elements_may_not_cross_a_variable_dimension():
    """The same product on the wrong side of a -1 is another tensor."""
    with pytest.raises(MmeError, match="has different size for dims and reshape"):
        normalise(ModelConfig("bert", inputs=(tensor(dims=(2, -1, 3), reshape=(3, -1, 2)),)))


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_any_regrouping_of_dimensions_is_a_reshape(dims, data):
    """Merging neighbours never breaks a reshape, changing one entry always does."""
    cut = data.draw(st.integers(1, len(dims)))
    merged = dims[:cut]
    for dim in dims[cut:]:
        merged[-1] *= dim
    spec = tensor(dims=tuple(dims), reshape=tuple(merged))

    assert normalise(ModelConfig("bert", inputs=(spec,))).inputs == (spec,)
    with pytest.raises(MmeError, match="different size"):
        normalise(ModelConfig("bert", inputs=(replace(spec, reshape=(merged[0] + 1, *merged[1:])),)))


def test_preferred_sizes_are_sorted_and_unique():
    """The order in which the author wrote the sizes does not matter."""
    config = normalise(ModelConfig("bert", max_batch_size=8, dynamic_batching=batching(8, 2, 4, 2)))

    assert config.dynamic_batching == batching(2, 4, 8)


def test_the_preferred_size_is_the_largest_batch_where_none_is_given():
    """`dynamic_batching {}` batches up to max_batch_size."""
    config = normalise(ModelConfig("bert", max_batch_size=8, dynamic_batching=batching()))

    assert config.dynamic_batching == batching(8)


def test_preferred_sizes_need_a_batch_dimension():
    """A configuration that names all tensors, and so gets no batch size from its model, must not ask for batches."""
    tensors = {"backend": "onnxruntime", "inputs": (tensor(),), "outputs": (tensor(),)}
    with pytest.raises(MmeError, match="dynamic batching preferred size must be <= max batch size for bert"):
        normalise(ModelConfig("bert", dynamic_batching=batching(4), **tensors))
    assert normalise(ModelConfig("bert", dynamic_batching=batching(), **tensors)).dynamic_batching == batching()


def test_a_delay_that_never_comes_keeps_the_order():
    """Only a queue time that can be over lets anybody be overtaken."""
    never = replace(DELAYING, default_timeout_microseconds=0)
    config = ModelConfig("bert", dynamic_batching=batching(preserve_ordering=True, default_queue_policy=never))

    assert normalise(config) == config


def test_a_library_that_batches_is_refused():
    """By its parameter: it would be left out in silence otherwise."""
    with pytest.raises(MmeError, match="parameter 'TRITON_BATCH_STRATEGY_PATH' is not honoured") as caught:
        normalise(ModelConfig("bert", parameters={"TRITON_BATCH_STRATEGY_PATH": "/batching/strategy.so"}))

    assert caught.value.kind is Kind.UNSUPPORTED


@pytest.mark.parametrize("sizes", [(), (4,)])
def test_dynamic_batching_without_a_batch_dimension_is_harmless(sizes):
    """Until a handler finds a batch dimension, the settings wait: the size that it finds decides about them."""
    config = normalise(ModelConfig("bert", dynamic_batching=batching(*sizes, max_queue_delay_microseconds=5)))

    assert config.dynamic_batching == batching(*sizes, max_queue_delay_microseconds=5)
    completed = normalise(replace(config, max_batch_size=4))
    assert completed.dynamic_batching == batching(4, max_queue_delay_microseconds=5)


def test_groups_without_a_name_are_numbered():
    """A group is called after the model and its place among all groups."""
    groups = (InstanceGroup(""), InstanceGroup("own"), InstanceGroup(""))

    config = normalise(ModelConfig("bert", instance_group=groups))

    assert [group.name for group in config.instance_group] == ["bert_0", "own", "bert_2"]


def test_normalising_twice_changes_nothing():
    """The checks may run again after a handler has completed the configuration."""
    config = normalise(
        ModelConfig(
            "bert",
            max_batch_size=4,
            inputs=(tensor(),),
            instance_group=(InstanceGroup(""),),
            dynamic_batching=batching(3, 1),
        )
    )

    assert normalise(config) == config


@pytest.mark.parametrize(
    ("runtime", "backend", "words"),
    [
        ("", "onnxruntime", ""),
        ("libtriton_onnxruntime.so", "onnxruntime", ""),
        ("libtriton_onnxruntime.so", "", ""),
        ("model.py", "python", ""),
        ("model.py", "pytorch", ""),
        ("libtriton_onnxruntime.so", "openvino", "unable to find backend library 'libtriton_onnxruntime.so' for model"),
        ("model.py", "onnxruntime", "unable to find backend library 'model.py' for model 'm'"),
        ("model.py", "", "unable to find backend library 'model.py' for model 'm'"),
        ("libmine.so", "onnxruntime", "unable to find backend library 'libmine.so' for model 'm'"),
        ("../libmine.so", "onnxruntime", "backend library name '../libmine.so' escapes backend directory"),
    ],
)
def test_a_runtime_may_be_the_backends_own(runtime, backend, words):
    """Any other library can't be had, and nothing leads out of the backend's directory."""
    config = ModelConfig("m", backend=backend, runtime=runtime)
    if not words:
        assert normalise(config).runtime == runtime
        return
    with pytest.raises(MmeError, match=re.escape(words)):
        normalise(config)


@pytest.mark.parametrize("tag", ["", "a-b", "a b", 'a"', "ä"])
def test_a_tag_that_can_be_no_label_is_refused(tag):
    """Or a scrape could not be read."""
    with pytest.raises(MmeError, match="can't be the name of a label"):
        normalise(ModelConfig("m", metric_tags={tag: "x"}))


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (RepositoryAgent("encrypt", {}), "repository agent 'encrypt' of m is not known"),
        (RepositoryAgent("checksum", {"SHA:1/x": "abc"}), "parameter 'SHA:1/x' of agent 'checksum' of m must be MD5:"),
        (RepositoryAgent("checksum", {"MD5:": "abc"}), "must be MD5: and a file's path"),
        (RepositoryAgent("checksum", {"MD5:../x": "abc"}), "it must name a file inside the model's directory"),
    ],
)
def test_an_agent_that_makes_no_sense_is_refused(agent, words):
    """By its name or its parameter."""
    with pytest.raises(MmeError, match=re.escape(words)):
        normalise(ModelConfig("m", agents=(agent,)))
