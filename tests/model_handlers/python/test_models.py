"""Models that work: what their authors write, and what clients get."""

import functools
import json
import logging
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import model_handlers
from model_handlers.base import Device
from model_handlers.metrics import METRICS
from model_handlers.python.handler import PythonHandler
from model_handlers.requests import ModelResponse

ADD_SUB = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "B")
            b = np.zeros_like(a) if b is None else b.as_numpy()
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("SUM", a + b), pb_utils.Tensor("DIFF", a - b)])
            )
        return responses
"""


def lists(answer):
    """Outputs by name, as lists."""
    assert isinstance(answer, ModelResponse), answer
    return {name: array.tolist() for name, array in answer.outputs.items()}


def test_a_batch_is_one_call_and_each_request_gets_its_own_rows(models, kit):
    """Requests of one and two rows come to one `execute` as two requests, and go back as they came."""
    handler = models.load(ADD_SUB)
    first, second = handler.execute_requests(
        [kit.request(A=[[1, 2]], B=[[10, 20]]), kit.request(A=[[3, 4], [5, 6]], B=[[1, 1], [2, 2]])]
    )
    assert lists(first) == {"SUM": [[11, 22]], "DIFF": [[-9, -18]]}
    assert lists(second) == {"SUM": [[4, 5], [7, 8]], "DIFF": [[2, 3], [3, 4]]}


def test_outputs_nobody_asked_for_are_left_out(models, kit):
    """A model may compute all of its outputs; the client gets those that it named."""
    handler = models.load(ADD_SUB)
    [answer] = handler.execute_requests([kit.request(["DIFF"], A=[[1, 2]], B=[[1, 1]])])
    assert lists(answer) == {"DIFF": [[0, 1]]}


def test_an_optional_input_left_out_is_none(models, kit):
    """`get_input_tensor_by_name` gives None for what the client did not send."""
    handler = models.load(ADD_SUB)
    [answer] = handler.execute_requests([kit.request(A=[[1, 2]])])
    assert lists(answer) == {"SUM": [[1, 2]], "DIFF": [[1, 2]]}


def test_strings_come_as_bytes_and_go_as_bytes_or_text(models, kit):
    """A string tensor is an object array; what is returned may hold `str`, `bytes`, or numpy's own strings."""
    config = """max_batch_size: 4
        input { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] }
        output [ { name: "UPPER" data_type: TYPE_STRING dims: [ -1 ] },
                 { name: "RAW" data_type: TYPE_STRING dims: [ -1 ] },
                 { name: "SIZE" data_type: TYPE_INT32 dims: [ -1 ] } ]"""
    source = kit.each(
        """
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
        upper = np.array([[t.decode().upper() for t in row] for row in text], dtype=object)
        sizes = np.array([[len(t) for t in row] for row in text], np.int32)
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("UPPER", upper),
            pb_utils.Tensor("RAW", text.astype(np.bytes_)),
            pb_utils.Tensor("SIZE", sizes),
        ])
        """
    )
    text = np.array([["grün".encode(), b"x"]], dtype=object)
    handler = models.load(source, config)
    [answer] = handler.execute_requests([kit.request(("UPPER", "RAW", "SIZE"), TEXT=text)])
    assert lists(answer) == {"UPPER": [["GRÜN", "X"]], "RAW": [["grün".encode(), b"x"]], "SIZE": [[5, 1]]}
    assert answer.outputs["RAW"].dtype == object


def test_a_model_may_run_all_requests_as_one_batch(models, kit):
    """The way of models that gain by batching: join the inputs, compute once, split the rows."""
    source = kit.body(
        """
        tensors = [pb_utils.get_input_tensor_by_name(r, "A").as_numpy() for r in requests]
        rows = np.concatenate(tensors)
        total = np.broadcast_to(rows.sum(axis=0, keepdims=True, dtype=np.float32), rows.shape)
        ends = np.cumsum([len(t) for t in tensors])[:-1]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SUM", part)]) for part in np.split(total, ends)]
        """
    )
    handler = models.load(source)
    requests = [kit.request(["SUM"], A=[[1, 1]]), kit.request(["SUM"], A=[[2, 2], [3, 3]])]
    assert [lists(a) for a in handler.execute_requests(requests)] == [{"SUM": [[6, 6]]}, {"SUM": [[6, 6], [6, 6]]}]


def test_execute_may_be_a_coroutine_and_its_loop_lives_on(models, kit):
    """`async def execute` runs on one loop for all batches, which keeps turning between them."""
    source = """
        import asyncio
        import threading
        import numpy as np
        import triton_python_backend_utils as pb_utils


        class TritonPythonModel:
            def initialize(self, args):
                self.lock, self.loops, self.background = asyncio.Lock(), [], threading.Event()

            async def later(self):
                await asyncio.sleep(0)
                self.background.set()

            async def one(self, request):
                async with self.lock:
                    a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
                    await asyncio.sleep(0)
                    return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", a * len(self.loops))])

            async def execute(self, requests):
                loop = asyncio.get_running_loop()
                assert not self.loops or self.loops[-1] is loop
                self.loops.append(loop)
                self.task = asyncio.create_task(self.later())
                return list(await asyncio.gather(*(self.one(r) for r in requests)))
    """
    handler = models.load(source)
    requests = [kit.request(["SUM"], A=[[1, 2]]), kit.request(["SUM"], A=[[3, 4]])]
    assert [lists(a)["SUM"] for a in handler.execute_requests(requests)] == [[[1, 2]], [[3, 4]]]
    assert models.author(handler).background.wait(60)
    assert [lists(a)["SUM"] for a in handler.execute_requests(requests)] == [[[2, 4]], [[6, 8]]]


def test_initialize_is_told_where_it_is_and_what_its_configuration_says(models, kit):
    """All arguments are text; the configuration is JSON with every default, the model's own parameters included."""
    config = kit.VECTORS + 'parameters { key: "factor" value { string_value: "3" } }'
    source = """
        import json
        import numpy as np
        import triton_python_backend_utils as pb_utils


        class TritonPythonModel:
            def initialize(self, args):
                self.args, self.calls = args, 0
                config = json.loads(args["model_config"])
                self.factor = float(config["parameters"]["factor"]["string_value"])
                sum_type = pb_utils.get_output_config_by_name(config, "SUM")["data_type"]
                self.dtype = pb_utils.triton_string_to_numpy(sum_type)

            def execute(self, requests):
                self.calls += 1
                tensors = [pb_utils.get_input_tensor_by_name(r, "A").as_numpy() for r in requests]
                return [
                    pb_utils.InferenceResponse([pb_utils.Tensor("SUM", (self.factor * self.calls * t).astype(self.dtype))])
                    for t in tensors
                ]
    """
    handler = models.load(source, config, device=Device("gpu", 3), lane="m_0_7", version=5)
    args = dict(models.author(handler).args)
    told = json.loads(args.pop("model_config"))
    assert args == {
        "model_instance_kind": "GPU",
        "model_instance_name": "m_0_7",
        "model_instance_device_id": "3",
        "model_repository": str(models.root / "m"),
        "model_version": "5",
        "model_name": "m",
    }
    assert (told["name"], told["max_batch_size"], told["input"][1]["optional"]) == ("m", 8, True)
    for total in (3, 6):
        [answer] = handler.execute_requests([kit.request(["SUM"], A=[[1, 2]])])
        assert lists(answer) == {"SUM": [[total, 2 * total]]}


def test_requests_tell_what_the_client_sent(models, kit):
    """Id, parameters, timeout and wanted outputs arrive; what requests cannot have has its default."""
    source = kit.HEAD + textwrap.dedent("""
        class TritonPythonModel:
            seen = []
            def execute(self, requests):
                self.seen += requests
                return [pb_utils.InferenceResponse([pb_utils.Tensor("SUM", r.inputs()[0].as_numpy())]) for r in requests]
    """)
    handler = models.load(source)
    sent = kit.request(["SUM"], id="me", parameters={"k": "ü", "n": 2, "b": True}, timeout_us=250, A=[[1, 2]])
    handler.execute_requests([sent])
    [request] = models.author(handler).seen
    assert (request.request_id(), request.timeout(), request.requested_output_names()) == ("me", 250, {"SUM"})
    assert request.parameters() == '{"k":"ü","n":2,"b":true}'
    assert (request.correlation_id(), request.flags(), request.is_cancelled()) == (0, 0, False)
    assert request.preferred_memory().preferred_memory_type == 0
    assert request.trace().get_context() is None
    assert [tensor.name() for tensor in request.inputs()] == ["A"]


def test_a_model_may_write_to_its_inputs_without_anybody_seeing(models, kit):
    """Arrays of a request are read-only views; what `as_numpy` gives is the model's own, the same each time."""
    source = kit.each(
        """
        tensor = pb_utils.get_input_tensor_by_name(request, "A")
        array = tensor.as_numpy()
        array += 1
        assert tensor.as_numpy() is array
        return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", array)])
        """
    )
    body = np.array([[1, 2]], np.float32).tobytes()
    sent = np.frombuffer(body, np.float32).reshape(1, 2)
    handler = models.load(source)
    [answer] = handler.execute_requests([kit.request(["SUM"], A=sent)])
    assert lists(answer) == {"SUM": [[2, 3]]}
    assert sent.tolist() == [[1, 2]]


def test_a_writable_input_is_handed_over_as_it_is(models, kit):
    """No byte of a large one is copied that the model may write to already."""
    sent = kit.request(["SUM"], A=[[1.0] * (16 << 10)])
    handler = models.load(
        kit.each('return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", request.inputs()[0].as_numpy())])')
    )
    [answer] = handler.execute_requests([sent])
    assert answer.outputs["SUM"] is sent.inputs["A"]


def test_a_small_input_that_a_model_keeps_keeps_nothing_else(models, kit):
    """It is a copy, though it could be written to: others lie in the same memory."""
    whole = np.zeros((100, 2), np.float32)
    handler = models.load(
        kit.each("""
        own = request.inputs()[0].as_numpy()
        own += 1
        return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", own)])
        """)
    )
    [answer] = handler.execute_requests([kit.request(["SUM"], A=whole[:1])])
    assert lists(answer) == {"SUM": [[1, 1]]}
    assert answer.outputs["SUM"].base is None
    assert not whole.any()


def test_tensors_are_reshaped_between_client_and_model(models, kit):
    """With `reshape` the model sees its own shapes, variable dimensions in their order, and clients see theirs."""
    config = """max_batch_size: 8
        input { name: "A" data_type: TYPE_FP32 dims: [ -1, -1 ] reshape { shape: [ 1, -1, -1 ] } }
        output [ { name: "SAME" data_type: TYPE_FP32 dims: [ -1, 1, -1 ] reshape { shape: [ -1, -1 ] } },
                 { name: "SHAPE" data_type: TYPE_INT32 dims: [ 4 ] } ]"""
    source = kit.each(
        """
        a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
        shape = np.tile(np.array(a.shape, np.int32), (len(a), 1))
        return pb_utils.InferenceResponse([pb_utils.Tensor("SAME", a[:, 0]), pb_utils.Tensor("SHAPE", shape)])
        """
    )
    handler = models.load(source, config)
    sent = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    [answer] = handler.execute_requests([kit.request(("SAME", "SHAPE"), A=sent)])
    assert answer.outputs["SHAPE"].tolist() == [[2, 1, 3, 2]] * 2
    assert answer.outputs["SAME"].shape == (2, 3, 1, 2)
    assert answer.outputs["SAME"].ravel().tolist() == sent.ravel().tolist()


def test_a_model_without_a_batch_dimension_answers_in_any_shape(models, kit):
    """Without max_batch_size the first dimension is one like the others."""
    config = """input { name: "A" data_type: TYPE_FP32 dims: [ -1 ] }
        output { name: "SUM" data_type: TYPE_FP32 dims: [ -1 ] }"""
    handler = models.load(
        kit.each('return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", request.inputs()[0].as_numpy()[:1])])'),
        config,
    )
    [answer] = handler.execute_requests([kit.request(["SUM"], A=[7, 8, 9])])
    assert lists(answer) == {"SUM": [7]}


def test_bf16_passes_through_as_bits(models, kit):
    """Where numpy has no type, elements travel over DLPack, and come back as their bit patterns."""
    config = """max_batch_size: 8
        input { name: "A" data_type: TYPE_BF16 dims: [ 2 ] }
        output [ { name: "SAME" data_type: TYPE_BF16 dims: [ 2 ] }, { name: "BITS" data_type: TYPE_BF16 dims: [ 2 ] } ]"""
    source = kit.each(
        """
        tensor = pb_utils.get_input_tensor_by_name(request, "A")
        assert tensor.triton_dtype() == 14
        same = pb_utils.Tensor.from_dlpack("SAME", tensor.to_dlpack())
        try:
            same.as_numpy()
        except pb_utils.TritonModelException as error:
            assert str(error).startswith("Tensor dtype is BF16 and cannot be converted to NumPy.")
        else:
            raise AssertionError
        return pb_utils.InferenceResponse([same, pb_utils.Tensor("BITS", np.full((1, 2), 0x3F80, np.uint16))])
        """
    )
    handler = models.load(source, config)
    sent = np.array([[0x4000, 0x4040]], np.uint16)
    [answer] = handler.execute_requests([kit.request(("SAME", "BITS"), A=sent)])
    assert lists(answer) == {"SAME": [[0x4000, 0x4040]], "BITS": [[0x3F80, 0x3F80]]}


def test_a_model_may_import_files_beside_it(models, kit):
    """By name from the directories of version and model, and relatively, as in Triton."""
    source = """
        import triton_python_backend_utils as pb_utils
        import beside_version
        from lib_of_model.deep import THREE
        from .beside_version import ONE
        from . import also


        class TritonPythonModel:
            def execute(self, requests):
                import late
                total = ONE + beside_version.ONE + THREE + also.TEN + late.HUNDRED
                return [
                    pb_utils.InferenceResponse([pb_utils.Tensor("SUM", r.inputs()[0].as_numpy() * total)])
                    for r in requests
                ]
    """
    files = {
        "1/beside_version.py": "ONE = 1",
        "1/also.py": "TEN = 10",
        "late.py": "HUNDRED = 100",
        "lib_of_model/deep.py": "THREE = 3",
    }
    handler = models.load(source, files=files)
    [answer] = handler.execute_requests([kit.request(["SUM"], A=[[1, 2]])])
    assert lists(answer) == {"SUM": [[115, 230]]}
    assert type(models.author(handler)).__module__ == "1.model"


def test_no_file_of_a_model_hides_pythons_own(models, kit, monkeypatch):
    """A library that imports `colorsys` gets Python's; the model gets its own by a relative import, as in Triton."""
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    source = "import colorsys\nfrom . import colorsys as own\n" + kit.each(
        'assert hasattr(colorsys, "rgb_to_hsv")\n'
        'return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", request.inputs()[0].as_numpy() * own.BY)])'
    )
    handler = models.load(source, files={"1/colorsys.py": "BY = 2", "colorsys.py": "BY = 3"})
    [answer] = handler.execute_requests([kit.request(["SUM"], A=[[1, 2]])])
    assert lists(answer) == {"SUM": [[2, 4]]}


def test_nothing_of_a_model_stays_in_the_process(models, kit):
    """Closing takes out of the interpreter what loading put in, so that the next model's files are its own."""
    path, modules = list(sys.path), {name for name in sys.modules if not name.startswith("model_handlers.")}
    source = "import helper_of_model\n" + kit.each(
        'return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", request.inputs()[0].as_numpy() * helper_of_model.BY)])'
    )
    for name, factor in (("first", 2), ("second", 5)):
        handler = models.load(source, name=name, files={"helper_of_model.py": f"BY = np_float = {factor}"})
        [answer] = handler.execute_requests([kit.request(["SUM"], A=[[1, 2]])])
        assert lists(answer) == {"SUM": [[factor, 2 * factor]]}
        models.close(handler)
        assert sys.path == path
    left = {name for name in sys.modules if not name.startswith("model_handlers.")} - modules
    assert left <= {"triton_python_backend_utils", "c_python_backend_utils"}


def test_two_models_in_one_process_know_which_they_are(models, kit):
    """`get_model_dir` and the log say the model whose code is running, also from a coroutine."""
    source = """
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def initialize(self, args):
                self.dirs = [pb_utils.get_model_dir()]
            {keyword}def execute(self, requests):
                self.dirs.append(pb_utils.get_model_dir())
                return [pb_utils.InferenceResponse([]) for r in requests]
    """
    handlers = [
        models.load(source.format(keyword=keyword), name=name) for name, keyword in (("a", ""), ("b", "async "))
    ]
    for handler in handlers:
        handler.execute_requests([kit.request([], A=[[1, 2]])])
    assert [models.author(h).dirs for h in handlers] == [[str(models.root / n / "1")] * 2 for n in ("a", "b")]


def test_models_that_run_at_the_same_time_know_which_they_are(models, kit):
    """What another model does meanwhile, on another thread, does not change whose code this is."""
    source = """
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            meanwhile = None
            def execute(self, requests):
                if self.meanwhile:
                    self.meanwhile()
                self.directory = pb_utils.get_model_dir()
                return [pb_utils.InferenceResponse([]) for r in requests]
    """
    first, second = (models.load(source, name=name) for name in ("first", "second"))
    with ThreadPoolExecutor(1) as other:
        execute = functools.partial(second.execute_requests, [kit.request([], A=[[1, 2]])])
        models.author(first).meanwhile = lambda: other.submit(execute).result()
        first.execute_requests([kit.request([], A=[[1, 2]])])
    assert models.author(first).directory == str(models.root / "first" / "1")
    assert models.author(second).directory == str(models.root / "second" / "1")


def test_the_log_of_a_model_is_the_servers_with_the_models_name(models, kit, caplog):
    """`Logger` writes at four levels; each line names the model."""
    source = kit.HEAD + textwrap.dedent("""
        class TritonPythonModel:
            def initialize(self, args):
                logger = pb_utils.Logger
                logger.log("plain 100%")
                logger.log("as told", logger.ERROR)
                logger.log_info("info")
                logger.log_warn("warn")
                logger.log_error("error")
                logger.log_verbose("verbose")
            def execute(self, requests):
                return []
    """)
    with caplog.at_level(logging.DEBUG, "mme.model"):
        models.load(source, name="talker")
    assert [(r.getMessage(), r.levelname, r.target_model) for r in caplog.records if r.name == "mme.model"] == [
        ("plain 100%", "INFO", "talker"),
        ("as told", "ERROR", "talker"),
        ("info", "INFO", "talker"),
        ("warn", "WARNING", "talker"),
        ("error", "ERROR", "talker"),
        ("verbose", "DEBUG", "talker"),
    ]


def test_without_a_log_the_lines_go_to_standard_error():
    """A process of a model's own keeps no log: the server reads what it prints, levels included."""
    program = (
        "from model_handlers.python.pb_utils import Logger\n"
        "Logger.log_verbose('v'); Logger.log_info('i'); Logger.log_warn('w'); Logger.log_error('e')"
    )
    environ = {"PYTHONPATH": str(Path(model_handlers.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=True)
    assert (done.stdout, done.stderr) == ("", "DEBUG: v\nINFO: i\nWARNING: w\nERROR: e\n")


def test_finalize_is_called_once_and_may_fail(models, kit, caplog):
    """Closing calls `finalize`; what it raises, `sys.exit` included, is in the log and stops nothing."""
    source = """
        import sys
        class TritonPythonModel:
            calls = []
            def execute(self, requests):
                return []
            def finalize(self):
                self.calls.append(1)
                sys.exit(3)
    """
    handler = models.load(source)
    calls = models.author(handler).calls
    models.close(handler)
    assert calls == [1]
    assert "failed in finalize" in caplog.text
    assert "SystemExit: 3" in caplog.text


def test_gauges_of_a_model_end_with_it_and_with_a_load_that_fails(models, kit):
    """They tell where something stands that is no more; what was counted was counted."""
    source = f"""{kit.HEAD}
Family = pb_utils.MetricFamily

class TritonPythonModel:
    def initialize(self, args):
        Family("t_open", "", Family.GAUGE).Metric({{"model": args["model_name"]}}).set(3)
        Family("t_tried", "").Metric().increment(1)
        if args["model_name"] == "fails":
            raise ValueError("no")

    def execute(self, requests):
        return []
"""

    def shown(name):
        return [(each.labels, each.value) for family, rows in METRICS.read() if family.name == name for each in rows]

    handler = models.load(source)
    models.refused(source, name="fails")
    models.refused(f"{kit.HEAD}pb_utils.MetricFamily('t_open', '', 1).Metric().set(4)\nraise ValueError", name="raises")
    assert shown("t_open") == [({"model": "m"}, 3)]
    models.close(handler)
    assert shown("t_open") == []
    assert shown("t_tried") == [({}, 2)]


def test_a_model_needs_neither_initialize_nor_finalize(models, kit):
    """`execute` alone is a model."""
    handler = models.load(ADD_SUB)
    [answer] = handler.execute_requests([kit.request(["SUM"], A=[[1, 2]])])
    assert lists(answer) == {"SUM": [[1, 2]]}


def test_the_model_file_may_have_another_name_and_lie_deeper(models, kit):
    """`default_model_filename` counts from the version's directory; the model is told the same places."""
    config, file = models.write("", kit.VECTORS + 'default_model_filename: "src/served.py"')
    source = textwrap.dedent("""
        import helper, top
        class TritonPythonModel:
            def initialize(self, args):
                self.args = args
            def execute(self, requests):
                return []
    """)
    for path, text in {"src/served.py": source, "src/helper.py": "", "top.py": ""}.items():
        (file.parent / path).parent.mkdir(exist_ok=True)
        (file.parent / path).write_text(text)
    handler = PythonHandler.load(config, file.parent / "src/served.py", Device("cpu"), "m_0")
    assert models.author(handler).args["model_repository"] == str(models.root / "m")
    assert models.author(handler).args["model_version"] == "1"
    handler.close()


def test_a_model_works_in_a_process_of_its_own(models, kit):
    """A fresh interpreter loads, executes and closes it, with nothing on its path but the package."""
    models.write(ADD_SUB, name="alone")
    program = f"""
import numpy as np
from pathlib import Path
from model_handlers.base import CPU
from model_handlers.requests import ModelRequest, ModelResponse
from model_handlers.config.pbtxt import parse_config
from model_handlers.python.handler import PythonHandler

config = parse_config({kit.VECTORS!r}, model="alone")
handler = PythonHandler.load(config, Path({str(models.root)!r}) / "alone/1/model.py", CPU, "alone_0")
[answer] = handler.execute_requests([ModelRequest({{"A": np.ones((1, 2), np.float32)}}, ("SUM",))])
handler.close()
print(type(answer.outputs["SUM"]).__name__, answer.outputs["SUM"].tolist())
"""
    environ = {"PYTHONPATH": str(Path(model_handlers.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd="/", env=environ, check=True
    )
    assert done.stdout == "ndarray [[1.0, 1.0]]\n"
