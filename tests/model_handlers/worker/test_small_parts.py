"""Parameters, configurations as fields, counts of the kernel's kills, and lines of output."""

import logging
import os
from dataclasses import fields
from types import MappingProxyType

import orjson
import pytest

from model_handlers.base import Placement, placement_of
from model_handlers.config.convert import config_fields, config_from
from model_handlers.config.model_config import (
    Accelerator,
    BatchInput,
    BatchInputKind,
    BatchOutput,
    ControlInput,
    ControlKind,
    DirectStrategy,
    DynamicBatching,
    EnsembleStep,
    Guess,
    InitialState,
    InstanceGroup,
    InstanceKind,
    MetricControl,
    ModelConfig,
    NamedTensor,
    OldestStrategy,
    QueuePolicy,
    RepositoryAgent,
    Resource,
    SequenceBatching,
    SequenceControl,
    SequenceState,
    TimeoutAction,
    VersionPolicy,
    WarmupInput,
    WarmupSample,
)
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BF16, BYTES, FP32, INT32, TensorFormat, TensorSpec
from model_handlers.worker.fork_client import MAX_LINE, LineSplitter, ProcessOutput
from model_handlers.worker.limits import Deadlines
from model_handlers.worker.process import OomKills, counters, read_count

_LEVELS = MappingProxyType({1: QueuePolicy(TimeoutAction.DELAY, 2)})
FULL = ModelConfig(
    name="m",
    backend="b",
    platform="p",
    max_batch_size=8,
    guess=Guess.BATCH,
    inputs=(
        TensorSpec("x", BF16, (-1, 2), reshape=(2,), optional=True, format=TensorFormat.NCHW, allow_ragged_batch=True),
    ),
    outputs=(TensorSpec("y", BYTES, (), label_filename="labels.txt"), TensorSpec("z", BYTES, (1,), reshape=())),
    version_policy=VersionPolicy(latest=0, all=True, specific=(1, 3)),
    instance_group=(
        InstanceGroup(
            "g", InstanceKind.GPU, 2, (0, 1), (Resource("r", 2, is_global=True),), 3, ("0", "1"), host_policy="h"
        ),
    ),
    dynamic_batching=DynamicBatching((2, 4), 5, True, 3, 2, QueuePolicy(TimeoutAction.DELAY, 1, True, 2), _LEVELS),
    default_model_filename="f",
    optimization_level=-1,
    optimization=MappingProxyType({"priority": "PRIORITY_MAX"}),
    parameters=MappingProxyType({"a": "ä"}),
    metric_tags=MappingProxyType({"t": "u"}),
    decoupled=True,
    batch_input=(BatchInput(BatchInputKind.ITEM_SHAPE, ("t", "u"), INT32, ("x",)),),
    batch_output=(BatchOutput(("y",), ("x",)),),
    response_cache=True,
    runtime="r",
    max_inflight_requests=3,
    metric_control=(MetricControl("h", (1.0, 2.5)),),
    op_libraries=("ops.so",),
    named_inputs=(NamedTensor("left", 1, FP32, (), optional=True),),
    named_outputs=(NamedTensor("right", 0, None, (2, -1)),),
    strict=True,
    default_max_batch_size=6,
    part_of="whole",
    agents=(RepositoryAgent("checksum", MappingProxyType({"MD5:1/x": "d"})),),
    cc_model_filenames=MappingProxyType({"9.0": "h"}),
    gpu_accelerators=(Accelerator("tensorrt", MappingProxyType({"precision_mode": "FP16"})), Accelerator("gpu_io")),
    cpu_accelerators=(Accelerator("openvino"),),
    model_warmup=(
        WarmupSample("w", 2, MappingProxyType({"x": WarmupInput(BF16, (1, 2), input_data_file="f")}), 3),
        WarmupSample("none", 0, MappingProxyType({})),
    ),
    ensemble=(EnsembleStep("s", 1, MappingProxyType({"i": "x"}), MappingProxyType({"o": "y"}), "r"),),
    sequence_batching=SequenceBatching(
        OldestStrategy(4, (2, 4), 100, preserve_ordering=True),
        max_sequence_idle_microseconds=5,
        control_input=(
            ControlInput("START", (SequenceControl(ControlKind.CONTROL_SEQUENCE_START, int32_false_true=(0, 1)),)),
            ControlInput("ID", (SequenceControl(ControlKind.CONTROL_SEQUENCE_CORRID, data_type=BYTES),)),
        ),
        state=(SequenceState("i", "o", BF16, (-1, 2), (InitialState(BF16, (1, 2), True, "f", name="z"),), True, True),),
        iterative_sequence=True,
    ),
)


DIRECT = ModelConfig("m", sequence_batching=SequenceBatching(DirectStrategy(5, 0.5)))


@pytest.mark.parametrize("config", [FULL, ModelConfig("m"), DIRECT], ids=["full", "empty", "direct"])
def test_configurations_cross(config):
    """A configuration is the same after it went through JSON, whatever is set."""
    assert config_from(orjson.loads(orjson.dumps(config_fields(config)))) == config


def test_the_full_configuration_is_full():
    """The test above forgets no field: each differs from its default."""
    empty = ModelConfig("")

    assert not [f.name for f in fields(ModelConfig) if getattr(FULL, f.name) == getattr(empty, f.name)]


@pytest.mark.parametrize(
    ("usual", "text", "placement"),
    [
        (Placement.INLINE, None, Placement.INLINE),
        (Placement.PROCESS, None, Placement.PROCESS),
        (Placement.INLINE, "process", Placement.PROCESS),
        (Placement.PROCESS, "inline", Placement.INLINE),
        (Placement.PROCESS, " INLINE ", Placement.INLINE),
    ],
)
def test_placement(usual, text, placement):
    """MME_PLACEMENT says where a model executes, else its handler does."""
    config = ModelConfig("m", parameters={} if text is None else {"MME_PLACEMENT": text})

    assert placement_of(config, usual) is placement


@pytest.mark.parametrize("text", ["", "thread", "proc ess"])
def test_unknown_placement(text):
    """A placement that does not exist is refused by name."""
    with pytest.raises(MmeError, match=f"MME_PLACEMENT.*'inline' or 'process', got '{text}'") as raised:
        placement_of(ModelConfig("m", parameters={"MME_PLACEMENT": text}), Placement.PROCESS)

    assert raised.value.kind is Kind.INVALID_MODEL


def test_deadlines():
    """Deadlines are what the parameters say, else 300 seconds for a load and 60 for a batch."""
    assert Deadlines.of(ModelConfig("m")) == Deadlines(300, 60)
    parameters = {"MME_LOAD_TIMEOUT": "7.5", "MME_EXECUTION_TIMEOUT": "3"}

    assert Deadlines.of(ModelConfig("m", parameters=parameters)) == Deadlines(7.5, 3)


def test_the_operator_may_allow_executions_more_time(monkeypatch):
    """It counts for models that say nothing themselves."""
    monkeypatch.setattr(Deadlines, "usual_execution", 3600.0)

    assert Deadlines.of(ModelConfig("m")) == Deadlines(300, 3600)
    assert Deadlines.of(ModelConfig("m", parameters={"MME_EXECUTION_TIMEOUT": "3"})) == Deadlines(300, 3)


@pytest.mark.parametrize("key", ["MME_LOAD_TIMEOUT", "MME_EXECUTION_TIMEOUT"])
@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf"])
def test_bad_deadlines(key, text):
    """A deadline that is no positive number of seconds is refused by name."""
    with pytest.raises(MmeError, match=f"{key}.*positive number of seconds, got '{text}'") as raised:
        Deadlines.of(ModelConfig("m", parameters={key: text}))

    assert raised.value.kind is Kind.INVALID_MODEL


@pytest.mark.parametrize(
    ("membership", "first"),
    [
        ("0::/a/b\n", "/sys/fs/cgroup/a/b/memory.events"),
        ("0::/\n", "/sys/fs/cgroup/memory.events"),
        ("4:memory:/a:b\n0::/\n", "/sys/fs/cgroup/memory/a:b/memory.oom_control"),
        ("3:cpu,memory:/a\n", "/sys/fs/cgroup/memory/a/memory.oom_control"),
        ("nonsense\n\n", "/sys/fs/cgroup/memory.events"),
    ],
)
def test_where_kills_are_counted(membership, first):
    """The process's own control group counts first, the whole machine last."""
    paths = [str(path) for path in counters(membership)]

    assert first in paths[:2]  # which has the files of one version or the other
    assert paths[-1] == "/proc/vmstat"


def test_kills_are_counted_where_the_kernel_does(tmp_path):
    """By the first file that has a count."""
    missing, without, counter = tmp_path / "missing", tmp_path / "without", tmp_path / "counter"
    without.write_text("oom_kill_disable 0\nunder_oom 0\n")
    counter.write_text("oom 9\noom_kill 2\noom_group_kill 7\n")
    kills = OomKills([missing, without, counter])
    assert kills.count() == 2
    counter.write_text("oom_kill 4\n")

    assert kills.count() == 4
    assert read_count([missing, without]) == 0


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_lines(size):
    """Lines come out whole however the bytes are cut; blank ones do not; control characters are written out."""
    data = "first\r\n\n  \nsecond ä\twith tab\n\x1b[2Jthird\nno end".encode()
    lines = LineSplitter()
    got = [line for i in range(0, len(data), size) for line in lines.feed(data[i : i + size])]

    assert got == ["first", "second ä\twith tab", "\\x1b[2Jthird"]
    assert list(lines.flush()) == ["no end"]
    assert list(lines.flush()) == []


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_of_a_line_that_is_written_over_the_last_state_counts(size):
    """As a terminal would show it in the end, whatever pieces it comes in; lines of Windows are lines."""
    data = b"\r 0%\r 50%\r100%\nlines\r\nof two\r\r\n\rdone\r\n"
    lines = LineSplitter()
    got = [line for i in range(0, len(data), size) for line in lines.feed(data[i : i + size])]

    assert got == ["100%", "lines", "of two", "done"]


def test_long_lines_are_cut():
    """A line without an end takes no more than its bound, and the next one is whole again."""
    lines = LineSplitter()
    for _ in range(100):
        assert list(lines.feed(b"x" * 1000)) == []
    assert len(lines._rest) == MAX_LINE

    assert list(lines.feed(b"\nnext\n")) == ["x" * MAX_LINE + " … (cut)", "next"]


def test_a_line_of_standard_error_may_name_its_level(caplog):
    """It is logged at that level, without the name; standard output is what it is. The last words have no details."""
    output = ProcessOutput("m", "m_0")
    stdout, stderr = output.writers
    os.write(stdout, b"ERROR: not one\n")
    os.write(stderr, b"DEBUG: a\nINFO: b\nWARNING: c: d\nERROR: e\nFATAL: f\nERROR:g\nERROR: \n")
    with caplog.at_level(logging.DEBUG, "mme.model"):
        output.start()
        output.close_writers()
        words = output.last_words()
        output.close()

    told = [(record.levelname, record.getMessage()) for record in caplog.records if record.stream == "stderr"]
    assert told == [
        ("DEBUG", "a"),
        ("INFO", "b"),
        ("WARNING", "c: d"),
        ("ERROR", "e"),
        ("INFO", "FATAL: f"),
        ("INFO", "ERROR:g"),
        ("INFO", "ERROR:"),
    ]
    assert ("INFO", "ERROR: not one") in [(record.levelname, record.getMessage()) for record in caplog.records]
    assert words == ["INFO: b", "WARNING: c: d", "ERROR: e", "FATAL: f", "ERROR:g", "ERROR:"]
