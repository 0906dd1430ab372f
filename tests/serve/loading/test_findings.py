"""Every problem of a configuration at once: texts in, findings out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_handlers.config.pbtxt import parse_config
from model_handlers.errors import MmeError
from serve.loading.check import understand

GOOD = 'name: "m" max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } dynamic_batching { }'


def told(text, **options):
    """(field, mend) → the sentence, of every problem."""
    return {(each.field, each.mend): each.sentence for each in understand(text, model="m", **options).problems}


def fields(text, **options):
    """The fields that are complained about, in order."""
    return [each.field for each in understand(text, model="m", **options).problems]


def test_what_is_right_is_understood_as_a_load_does():
    """The same configuration, and nothing to say."""
    understood = understand(GOOD, model="m", strict_name=True)
    assert understood.problems == understood.notes == ()
    assert understood.config == parse_config(GOOD, model="m")


def test_all_that_is_wrong_is_told():
    """What can't be read (of fields that do not exist, the first), is refused, is missing, or breaks a rule."""
    text = """
        name: "other" platform: "tensorrt_plan"
        max_batchsize: 8
        max_batch_size: -2
        input { name: "a" data_type: TYPE_FLOAT32 dims: [ 4 ] }
        input { data_type: TYPE_FP32 }
        input [ { name: "a" data_type: TYPE_INT32 dims: [ 0 ] } ]
        output { name: "y" dims: [ 1 ] lables: "x" }
        instance_group { kind: KIND_GPUS count: -1 }
        instance_group { kind: KIND_CPU gpus: [ 0 ] passive: true host_policy: "x" }
        version_policy { specific { } }
        foo { bar { baz: "}" } # }
        }
        dynamic_batching { preferred_batch_size: [ 0 ] }
    """
    understood = understand(text, model="m", strict_name=True)
    assert [each.field for each in understood.problems] == [
        "max_batchsize",
        "data_type",
        "kind",
        "instance_group[1].passive",
        "name",
        "input[1].name",
        "output[0].data_type",
        "version_policy",
        "max_batch_size",
        "input[1]",
        "input[2].name",
        "input[2]",
        "instance_group[0]",
        "instance_group[1]",
        "dynamic_batching",
    ]
    assert [each.field for each in understood.notes] == ["instance_group[1].host_policy"]
    assert understood.config is not None


@pytest.mark.parametrize(
    ("text", "field", "mend", "words"),
    [
        ("max_batchsize: 8", "max_batchsize", "did you mean max_batch_size?", "line 1, column 1"),
        ('\n  imput { name: "x" }', "imput", "did you mean input?", "line 2, column 3"),
        ("zzz: [1, 2]", "zzz", "", 'no field named "zzz"'),
        ("zzz < a: 1 >", "zzz", "", 'no field named "zzz"'),
        ("zzz: 'a' 'b'", "zzz", "", 'no field named "zzz"'),
        ("instance_group { kind: KIND_CPUS }", "kind", "did you mean KIND_CPU?", "no value named KIND_CPUS"),
        ("instance_group { passive: true }", "instance_group[0].passive", "remove it", "is not honoured"),
    ],
)
def test_what_can_not_be_read_is_set_aside(text, field, mend, words):
    """It is named with what was probably meant, and the rest is judged as if it were not there."""
    for rest in ("", " max_batch_size: -1"):
        found = told(text + rest)
        assert words in found[field, mend]
        assert len(found) == (2 if rest else 1), found
    assert fields(f"{text} max_batch_size: -1")[-1] == "max_batch_size"


@pytest.mark.parametrize(
    "text", ["input {", "max_batch_size: ", "}", "input { name: } }", 'name: "\\q"', "= 3", "[a]: 3"]
)
def test_text_that_goes_nowhere_ends_the_search(text):
    """One problem with its place, and no configuration."""
    understood = understand(text, model="m")
    assert len(understood.problems) == 1
    assert understood.config is None


@given(
    st.lists(
        st.sampled_from(
            [
                "{",
                "}",
                "[",
                "]",
                ":",
                '"x"',
                "input",
                "name",
                "TYPE_FP32",
                "data_type",
                "1",
                "-1",
                "#",
                "\n",
                "zzz",
                "'",
            ]
        ),
        max_size=12,
    )
)
def test_any_text_is_looked_through_to_its_end(tokens):
    """There is a problem exactly where a load would fail."""
    text = " ".join(tokens)
    understood = understand(text, model="m")
    try:
        config = parse_config(text, model="m")
    except MmeError:
        assert understood.problems
    else:
        assert understood.config == config
        assert understood.problems == ()


def test_an_ensemble_with_several_faults():
    """Each by its step."""
    text = """
        platform: "ensemble" backend: "python" instance_group { }
        input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } input { name: "z" data_type: TYPE_FP32 dims: [ 1 ] }
        output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
        ensemble_scheduling {
          step { model_name: "a" input_map { key: "i" value: "x" } output_map { key: "o" value: "h" } }
          step { input_map { key: "i" value: "lost" } output_map { key: "o" value: "h" } }
        }
    """
    assert fields(text) == [
        "backend",
        "instance_group",
        "ensemble_scheduling.step[1].model_name",
        "ensemble_scheduling.step[1].output_map",
        "input[1]",
        "output[0]",
    ]
