"""Every field of the published message has a fate, and meets it."""

import logging

import pytest
from google.protobuf.descriptor import FieldDescriptor

from model_handlers.config.pbtxt import _NOT_HONOURED, Support, check_fields, parse_config, rule_of
from model_handlers.errors import Kind, MmeError
from model_handlers.proto import model_config_pb2 as pb

SCALARS = {FieldDescriptor.CPPTYPE_STRING: "x", FieldDescriptor.CPPTYPE_BOOL: True}


def is_map(field):
    """Whether a field is a map, which the schema stores as a list of entries."""
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def inside(field):
    """The message that a field leads to, through a map as well, or None."""
    return field.message_type.fields_by_name["value"].message_type if is_map(field) else field.message_type


def touch(message, field):
    """Set one field of a message to something that is not its default: (the step to it, the message it holds)."""
    if is_map(field):
        held = getattr(message, field.name)
        if inside(field) is None:
            held["k"] = "x"
            return field.name, None
        key = "k" if field.message_type.fields_by_name["key"].cpp_type == FieldDescriptor.CPPTYPE_STRING else 1
        return f"{field.name}['{key}']", held[key]
    if field.message_type is not None:
        if field.is_repeated:
            return f"{field.name}[0]", getattr(message, field.name).add()
        getattr(message, field.name).SetInParent()
        return field.name, getattr(message, field.name)
    value = SCALARS.get(field.cpp_type, 1)
    if field.enum_type is not None:
        value = field.enum_type.values[-1].number
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)
    return field.name, None


def reachable(make=pb.ModelConfig, prefix=""):
    """(path, rule, a ModelConfig with nothing but that field set) of every field that the rows lead to."""
    for field in descend(make(), prefix).DESCRIPTOR.fields:
        message = make()
        rule = rule_of(field)
        step, held = touch(descend(message, prefix), field)
        yield prefix + field.name, rule, message
        if held is not None and rule.support is Support.HONOURED:
            yield from reachable(lambda message=message: clone(message), f"{prefix}{step}.")


def clone(message):
    """Another message with the same contents."""
    copy = pb.ModelConfig()
    copy.CopyFrom(message)
    return copy


def descend(message, path):
    """The message to which a path such as `input[0].reshape.` leads."""
    for step in filter(None, path.split(".")):
        name, _, index = step.partition("[")
        message = getattr(message, name)
        if index:
            key = index.rstrip("]")
            message = message[key.strip("'")] if key == "'k'" else message[int(key.strip("'"))]
    return message


CASES = list(reachable())


def of_fate(fate):
    """Run a test for every field whose row says so."""
    return pytest.mark.parametrize(
        ("path", "message"),
        [pytest.param(path, message, id=path) for path, rule, message in CASES if rule.support is fate],
    )


def test_every_row_is_of_a_field_and_says_why():
    """A field that is ignored or refused gives its reader a reason; whoever adds a field that is honoured counts it."""
    fields, waiting = {}, [pb.ModelConfig.DESCRIPTOR]
    while waiting:
        descriptor = waiting.pop()
        for field in descriptor.fields:
            held = inside(field)
            if field.full_name.removeprefix("mme.") not in fields and held is not None:
                waiting.append(held)
            fields[field.full_name.removeprefix("mme.")] = rule_of(field)

    assert fields.keys() >= _NOT_HONOURED.keys()
    assert all(bool(rule.reason) == (rule.support is not Support.HONOURED) for rule in fields.values())
    assert [rule.support for rule in fields.values()].count(Support.HONOURED) == 148


@of_fate(Support.REFUSED)
def test_a_refused_field_is_named_by_its_full_path(path, message):
    """A field that we can't honour stops the load and says which one it is, wherever it is nested."""
    with pytest.raises(MmeError) as caught:
        check_fields(message, "bert-0")

    assert caught.value.kind is Kind.UNSUPPORTED
    assert caught.value.message.startswith(f"model 'bert-0': config.pbtxt field '{path}' is not honoured (")
    assert caught.value.message.endswith("; remove it or serve the model elsewhere")


@of_fate(Support.HARMLESS)
def test_a_harmless_field_is_logged_once(path, message, caplog):
    """A field that changes no result is ignored with one warning that names it."""
    with caplog.at_level(logging.WARNING, "mme.config"):
        check_fields(message, "bert-0")

    assert [record.name for record in caplog.records] == ["mme.config"]
    assert f"model 'bert-0': config.pbtxt field '{path}' is ignored: " in caplog.text


@of_fate(Support.HONOURED)
def test_an_honoured_field_passes_in_silence(path, message, caplog):
    """A field that we honour is neither refused nor logged."""
    with caplog.at_level(logging.DEBUG, "mme.config"):
        check_fields(message, "bert-0")

    assert not caplog.records


def test_a_harmless_field_of_many_groups_is_logged_once(caplog):
    """A model with a hundred instance groups does not fill the log."""
    parse_config('instance_group { host_policy: "a" } ' * 100, model="m")

    assert len(caplog.records) == 1
    assert "instance_group[0].host_policy" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "model_transaction_policy { decoupled: false }",
        "response_cache { enable: false }",
        "input { name: 'I' data_type: TYPE_FP32 dims: 1 allow_ragged_batch: false is_shape_tensor: false }",
        "dynamic_batching { priority_levels: 0 default_priority_level: 0 }",
        "instance_group { passive: false rate_limiter { priority: 0 } profile: [] host_policy: '' }",
        "optimization { execution_accelerators { } cuda { graphs: false } eager_batching: false }",
        "model_repository_agents { } model_operations { } model_metrics { } cc_model_filenames: [] runtime: ''",
    ],
)
def test_a_default_that_is_spelled_out_counts_as_not_set(text, caplog):
    """Generated configurations print defaults; those ask for nothing."""
    parse_config(text, model="m")

    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "path", "names"),
    [
        ("input { name: 'I' data_type: 99 dims: 1 }", "input[0].data_type", "TYPE_BOOL"),
        ("input { name: 'I' data_type: TYPE_FP32 dims: 1 format: 7 }", "input[0].format", "FORMAT_NCHW"),
        ("instance_group { } instance_group { kind: 9 }", "instance_group[1].kind", "KIND_CPU"),
        (
            "dynamic_batching { default_queue_policy { timeout_action: 5 } }",
            "dynamic_batching.default_queue_policy.timeout_action",
            "REJECT, DELAY",
        ),
    ],
)
def test_an_enum_number_without_a_name_is_refused(text, path, names):
    """The text format takes any number for an enum; a number that means nothing is named with those that do."""
    with pytest.raises(MmeError, match="must be one of") as caught:
        parse_config(text, model="m")

    assert caught.value.kind is Kind.INVALID_MODEL
    assert f"'{path}'" in caught.value.message
    assert names in caught.value.message
