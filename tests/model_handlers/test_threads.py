"""The models of a process take their frameworks' threads from one budget."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.onnx import OnnxHandler
from model_handlers.system import threads
from model_handlers.system.threads import ThreadBudget, take_threads, within
from tests.cgroups import few_tasks

# Joins the group that is named first, and loads the file behind it.
LOADS = """
import sys
from pathlib import Path

from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import MmeError
from model_handlers.onnx import OnnxHandler

config = ModelConfig("m", parameters={"intra_op_thread_count": "9"})
OnnxHandler.autocomplete(config, Path(sys.argv[2]))
Path(sys.argv[1], "cgroup.procs").write_text("0")
try:
    OnnxHandler.load(config, Path(sys.argv[2]), CPU)
except MmeError as error:
    print(error.kind.name, error.message)
"""


def running():
    """How many threads this process has."""
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize(
    ("processors", "limit", "counts"),
    [
        (2, 64, [2] * 20),
        (8, 64, [8] * 8 + [5, 3, 2] + [1] * 9),
        (64, 256, [64, 64, 64, 34, 18, 9, 5, 3, 2, 2] + [1] * 10),
    ],
)
def test_later_models_get_half_of_what_is_left(processors, limit, counts):
    """None is refused, and all together stay within the limit."""
    with within(budget := ThreadBudget(limit)):
        taken = [take_threads(processors, "m") for _ in counts]
    assert [each.count for each in taken] == counts
    assert sum(counts) - len(counts) == budget.taken <= limit
    for each in taken:
        each.give_back()
        each.give_back()
    assert budget.taken == 0


def test_threads_that_a_configuration_asks_for_are_refused_where_they_are_not_free():
    """At once, with both numbers and the setting."""
    with within(ThreadBudget(10)):
        taken = take_threads(7, "a", "intra_op_thread_count")
        with pytest.raises(MmeError) as caught:
            take_threads(6, "b", "intra_op_thread_count")
        taken.give_back()
        assert take_threads(6, "b", "intra_op_thread_count").count == 6
    assert caught.value.kind is Kind.UNAVAILABLE
    assert caught.value.message == (
        "model 'b': parameter 'intra_op_thread_count' asks for 5 threads, but 6 of the 10 that frameworks may have in "
        "the server's process are taken: ask for fewer, unload a model, or raise MME_FRAMEWORK_THREADS"
    )


def test_without_a_budget_a_model_has_as_many_as_it_wants():
    """As in a process of its own."""
    assert take_threads(64, "m").count == 64


def matrix(folder):
    """A model file of over a megabyte."""
    weights = numpy_helper.from_array(np.zeros((1024, 300), np.float32), "w")
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in (("x", 1024), ("y", 300))
    )
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "graph", [x], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def test_a_session_that_finds_no_room_for_its_threads_is_refused(tmp_path):
    """At once, with what to raise: ONNX Runtime itself would wait for ever for those that did not begin."""
    with few_tasks(8) as group:
        command = [sys.executable, "-c", LOADS, str(group), str(matrix(tmp_path))]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert told == (
        "UNAVAILABLE thread 'worker of 'm'' can't be started: raise the limit of processes and threads "
        "(ulimit -u, or the container's pids limit)\n"
    )


def test_sessions_on_many_processors_stay_within_the_budget(tmp_path, monkeypatch):
    """64 processors, ten models of over a megabyte: as many threads as the budget says, not 630; closed, none."""
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _pid: set(range(64)))
    file = matrix(tmp_path)
    before = running()
    with within(budget := ThreadBudget(100)):
        handlers = [OnnxHandler.load(ModelConfig("m"), file, CPU) for _ in range(10)]
    assert running() - before <= budget.taken <= 100
    for handler in handlers:
        handler.close()
    assert budget.taken == 0
