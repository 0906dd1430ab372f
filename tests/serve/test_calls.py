"""Models that call models, over a real engine: whoever calls gets every answer, every error, and never waits for ever."""

import asyncio
import gc
import json
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BF16, BOOL, BYTES, DATA_TYPES, INT32
from serve.engine import Engine
from serve.options import EngineOptions
from serve.request import InferenceRequest, Layout
from tests.serve.engines import resident_models
from tests.waiting import eventually

SECONDS = 120  # a hang, not a measure of speed
INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE = 1, 2, 3, 4

CALLER = """
backend: "python"
input { name: "DO" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "TOLD" data_type: TYPE_STRING dims: [ 1 ] }
"""
INLINE = 'parameters { key: "MME_PLACEMENT" value { string_value: "inline" } }\n'
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
PLAIN = """
backend: "python"
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
HEAD = """
import os
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def number_of(request):
    return int(request.inputs()[0].as_numpy()[0])


def out(number, **parameters):
    tensor = pb_utils.Tensor("OUT", np.array([number], np.int32))
    return pb_utils.InferenceResponse([tensor], parameters=parameters or None)

"""


def execute(body):
    """A model.py whose `execute(self, requests)` this is."""
    body = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
    return f"{HEAD}\nclass TritonPythonModel:\n    def execute(self, requests):\n{body}\n"


# Sends as many responses as it is asked for; below nothing, until nobody waits, which it then writes down.
STREAM = execute(
    """
    for request in requests:
        sender, number = request.get_response_sender(), number_of(request)
        for i in range(number):
            sender.send(out(i, index=i))
        if number == -2:
            sender.send(out(0))
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("not this one", 4)))
            sender.send(out(2))
        if number == -3:
            sender.send(out(3), FINAL)
            continue
        while number == -1 and not sender.is_cancelled():
            sender.send(out(1))
            time.sleep(0.001)
        if number == -1:
            (Path(pb_utils.get_model_dir()) / "cancelled").touch()
        sender.send(flags=FINAL)
    """
)
# Says no with the code that it is asked for.
ERRORS = execute(
    """
    error = pb_utils.TritonError("as you wish", number_of(requests[0]))
    return [pb_utils.InferenceResponse(error=error)]
    """
)
# Dies, raises, or tells its process.
FRAGILE = execute(
    """
    number = number_of(requests[0])
    if number == 9:
        os._exit(9)
    if number == 8:
        raise ValueError("eight")
    return [out(os.getpid())]
    """
)
# Says that it is ready while the last number was even.
MOODY = (
    execute("self.ready = number_of(requests[0]) % 2 == 0\nreturn [out(0)]")
    + "\n    def is_ready(self):\n        return self.ready\n"
)
# Waits until the test opens the gate, and counts what it executed.
GATED = execute(
    """
    directory = Path(pb_utils.get_model_dir())
    (directory / "entered").touch()
    while not (directory / "open").exists():
        time.sleep(0.001)
    self.count = getattr(self, "count", 0) + 1
    return [out(self.count)]
    """
)
# Tells what it knows of its request.
FACTS = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        facts = [request.request_id(), request.correlation_id(), request.flags(), request.timeout(),
                 json.loads(request.parameters()), sorted(request.requested_output_names())]
        tensor = pb_utils.Tensor("TOLD", np.array([json.dumps(facts)], object))
        return pb_utils.InferenceResponse([tensor], parameters={"a": 1, "b": "two", "c": True})
"""
# Answers its inputs.
ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(list(map(self.same, request.inputs()))) for request in requests]

    def same(self, tensor):
        if tensor.name() == "BF16":
            return pb_utils.Tensor.from_dlpack("BF16", tensor.to_dlpack())
        return pb_utils.Tensor(tensor.name(), tensor.as_numpy())
"""


def echo_config():
    """Every type, all of them optional."""
    rows = [f'{{ name: "{t.name}" data_type: {t.config_name} dims: [ -1, -1 ] optional: true }}' for t in DATA_TYPES]
    inputs = ", ".join(rows)
    return f'backend: "python"\ninput [ {inputs} ]\noutput [ {inputs.replace(" optional: true", "")} ]\n'


class Server:
    """An engine on a loop of its own, and a client that waits."""

    def __init__(self, folder):
        self.repository = folder / "models"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine")
        self._thread.start()
        options = EngineOptions(Footprint(64 << 30), folder / "cache", repository=self.repository, drain_patience=0.5)
        self.engine = self.on_loop(lambda: Engine(options, self._loop))

    def on_loop(self, function):
        """What a function of the engine returns."""

        async def call():
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(SECONDS)

    def begin(self, model, *inputs, on_response=None):
        """A request under way: it, and a list that its answer comes into."""
        answers = []
        layout = Layout(tuple((name, kind, array.shape) for name, kind, array in inputs), ())
        request = InferenceRequest(layout, [array for _, _, array in inputs], lambda _, answer: answers.append(answer))
        request.on_response = on_response

        async def submit():
            if not self.engine.submit(model, None, request):
                await self.engine.submit_cold(model, None, request)

        self.on_loop(submit)
        return request, answers

    def tell(self, model, code):
        """What a calling model tells when it has run this code."""
        got = []
        inputs = ("DO", BYTES, np.array([textwrap.dedent(code).encode()], object))
        _, answers = self.begin(model, inputs, on_response=lambda _, response: got.append(response))
        eventually(lambda: answers)
        response = got[0] if got else answers[0]
        assert response is not None, "it printed why"
        assert not isinstance(response, MmeError), response
        return json.loads(response.outputs[0][2].item())

    def write(self, name, source, config):
        """A model's folder."""
        version = self.repository / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(source)
        (version.parent / "config.pbtxt").write_text(config)

    def stats(self, name):
        """What was counted for a model."""
        return self.on_loop(lambda: self.engine.stats[name, 1])

    def close(self):
        """The engine, then its loop."""
        self.on_loop(self.engine.close)
        assert self.engine.cache.room.used() == Footprint()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Threads and processes that a test begins are the server's, which ends them behind the last test."""


@pytest.fixture(scope="module")
def server(tmp_path_factory, write_repository_model, fork_server):
    """One engine and all models for the tests here."""
    server = Server(tmp_path_factory.mktemp("calls"))
    source = Path(__file__).with_name("calling_model.py").read_text()
    for name in ("caller", "second", "third"):
        server.write(name, source, CALLER)
    server.write("inline", source, CALLER + INLINE)
    server.write("decoupled", source, CALLER + DECOUPLED)
    server.write("stream", STREAM, PLAIN + DECOUPLED)
    server.write("inline-stream", STREAM, PLAIN + DECOUPLED + INLINE)
    server.write("errors", ERRORS, PLAIN)
    server.write("fragile", FRAGILE, PLAIN)
    server.write("moody", MOODY, PLAIN)
    server.write("facts", FACTS, PLAIN.replace('"OUT" data_type: TYPE_INT32', '"TOLD" data_type: TYPE_STRING'))
    server.write("echo", ECHO, echo_config())
    policy = "version_policy { all { } } max_batch_size: 8"
    write_repository_model(server.repository / "double", policy, versions=(1, 2))
    yield server
    server.close()
    assert [
        thread.name for thread in threading.enumerate() if thread.name.startswith(("load", "unload", "engine"))
    ] == []


@pytest.fixture(params=["caller", "inline", "decoupled"])
def caller(request):
    """A model that calls: from its process, from this one, and from threads of a decoupled model."""
    return request.param


# -- one answer --------------------------------------------------------------------------------------------------------


def test_a_model_calls_another(server, caller):
    """It is loaded if need be, in the version that is asked for, the latest otherwise."""
    assert server.tell(caller, "told = short(request_of('double', pairs(1, 2)).exec())") == {"y": [3, 3, 6, 6]}
    assert server.tell(caller, "told = short(request_of('double', pairs(1), model_version=1).exec())") == {"y": [2, 2]}


def test_a_model_is_called_by_a_name_that_a_request_brought(server, caller):
    """Tensors of strings hold bytes."""
    code = """
        [name] = pb_utils.Tensor('NAME', np.array([b'double'], object)).as_numpy()
        told = [short(request_of(name, pairs(1)).exec()), pb_utils.is_model_ready(name)]
    """
    assert server.tell(caller, code) == [{"y": [3, 3]}, True]


def test_a_model_asks_another_whether_it_is_ready(server, caller):
    """Its code has a say in that, as it has over HTTP."""
    code = """
        told = []
        for number in (0, 1, 2):
            request_of('moody', pb_utils.Tensor('N', np.array([number], np.int32))).exec()
            told.append(pb_utils.is_model_ready('moody'))
    """
    assert server.tell(caller, code) == [True, False, True]


def test_many_calls_at_once(server, caller):
    """Those of one coroutine, each with its own answer."""
    code = """
        async def main():
            return await gathered(*(request_of('double', pairs(n)).async_exec() for n in range(50)))
        told = run(main)
    """
    assert server.tell(caller, code) == [{"y": [3 * n, 3 * n]} for n in range(50)]


def test_calls_of_many_threads(server, caller):
    """A model may call from threads of its own."""
    code = """
        told = [None] * 20
        def call(n):
            told[n] = short(request_of('double', pairs(n)).exec())
        threads = [threading.Thread(target=call, args=(n,)) for n in range(20)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    """
    assert server.tell(caller, code) == [{"y": [3 * n, 3 * n]} for n in range(20)]


def test_a_call_says_what_a_client_may_say(server, caller):
    """Id, sequence, flags, timeout, parameters and wanted outputs; numpy's integers are integers."""
    code = """
        facts = request_of('facts', pb_utils.Tensor('N', np.zeros(1, np.int32)), request_id='me', flags=np.int32(3),
                           correlation_id=np.uint64(2**63), timeout=np.int64(5), parameters={'p': 1, 'q': 'r'},
                           requested_output_names=['TOLD'])
        response = facts.exec()
        told = [json.loads(short(response)['TOLD'][0]), json.loads(response.parameters())]
    """
    assert server.tell(caller, code) == [
        ["me", 2**63, 3, 5, {"p": 1, "q": "r"}, ["TOLD"]],
        {"a": 1, "b": "two", "c": True},
    ]


@pytest.mark.parametrize("kind", [kind for kind in DATA_TYPES if kind is not BF16], ids=repr)
def test_tensors_of_any_type(server, caller, kind):
    """Come back bit by bit, empty ones too."""
    values = {BOOL: "[[True, False]]", BYTES: "[[b'\\\\xff\\\\x00', 'ä'.encode()]]"}.get(kind, "[[1, 0], [7, 100]]")
    dtype = "object" if kind is BYTES else f"np.dtype('{kind.dtype.str}')"
    code = f"""
        sent = np.array({values}, {dtype})
        got = []
        for array in (sent, sent[:0], sent.T):
            response = request_of('echo', pb_utils.Tensor('{kind.name}', array), requested_output_names=['{kind.name}']).exec()
            [tensor] = response.output_tensors()
            back = tensor.as_numpy()
            got.append(bool(back.dtype == array.dtype and back.shape == array.shape and (back == array).all()))
            back[:] = 0  # the model's own, to read and to write
        told = got
    """
    assert server.tell(caller, code) == [True] * 3


def test_bf16_tensors(server, caller):
    """Which numpy does not have: their bits cross, and they are BF16 on the other side."""
    code = """
        class Bits:
            def __init__(self, array): self.array = array
            def __dlpack_device__(self): return (1, 0)
            def __dlpack__(self, **_): return self.array.__dlpack__()
        bits = pb_utils.Tensor.from_dlpack('BF16', Bits(np.array([[16256, 16384]], np.uint16)))
        bits._data_type = pb_utils.BF16
        response = request_of('echo', bits, requested_output_names=['BF16']).exec()
        [tensor] = response.output_tensors()
        kind, carried = tensor.carried()
        told = [kind.name, tensor.triton_dtype(), carried.tolist(), refused(tensor.as_numpy)]
    """
    name, number, bits, words = server.tell(caller, code)

    assert (name, number, bits) == ("BF16", BF16.number, [[16256, 16384]])
    assert "BF16" in words


def test_large_tensors(server, caller):
    """Of many megabytes, both ways."""
    code = """
        sent = np.arange(6_000_000, dtype=np.float32).reshape(1, -1)
        response = request_of('echo', pb_utils.Tensor('FP32', sent), requested_output_names=['FP32']).exec()
        [tensor] = response.output_tensors()
        told = bool((tensor.as_numpy() == sent).all())
    """
    assert server.tell(caller, code) is True


def test_calls_within_calls(server):
    """Three deep."""
    code = """
        inner = "told = short(request_of('double', pairs(7)).exec())"
        middle = f"told = short(request_of('third', words({inner!r})).exec())"
        told = short(request_of('second', words(middle)).exec())
    """
    [told] = server.tell("caller", code)["TOLD"]
    assert json.loads(json.loads(told)["TOLD"][0]) == {"y": [21, 21]}


# -- errors ------------------------------------------------------------------------------------------------------------

WRONG = {
    "an unknown model": (
        "'nobody', pairs(1)",
        NOT_FOUND,
        (
            "Failed for execute the inference request. Model 'nobody' is not ready. Request for unknown model: 'nobody' "
            "is not found"
        ),
    ),
    "an unknown version": ("'double', pairs(1), model_version=9", NOT_FOUND, "version 9 is not found"),
    "a name that is a path": ("'../double', pairs(1)", NOT_FOUND, "Model '../double' is not ready."),
    "a wrong type": (
        "'double', pb_utils.Tensor('x', np.zeros((1, 2), np.int8))",
        INVALID_ARG,
        "inference input 'x' data-type is 'INT8', but model 'double' expects 'FP32'",
    ),
    "a wrong shape": ("'double', pb_utils.Tensor('x', np.zeros((1, 3), np.float32))", INVALID_ARG, "unexpected shape"),
    "a missing input": ("'double'", INVALID_ARG, "missing required input(s) ['x']"),
    "an unexpected input": (
        "'double', pb_utils.Tensor('z', np.zeros((1, 2), np.float32))",
        INVALID_ARG,
        "'z'",
    ),
    "an unknown output": (
        "'double', pairs(1), requested_output_names=['q']",
        INVALID_ARG,
        "unexpected inference output 'q'",
    ),
    "a decoupled model": (
        "'stream', pb_utils.Tensor('N', np.ones(1, np.int32))",
        INVALID_ARG,
        (
            "Model stream is using the decoupled. The current BLS request call doesn't support models using the "
            "decoupled transaction policy. Please use 'decoupled=True' argument"
        ),
    ),
    "parameters that JSON lacks": ("'double', pairs(1), parameters={'a': {1}}", None, "found type <class 'set'>"),
    "an exception": ("'fragile', pb_utils.Tensor('N', np.array([8], np.int32))", INTERNAL, "ValueError: eight"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_call_is_its_response(server, caller, case):
    """With a code and the words that a client would get; the model that called goes on."""
    arguments, code, words = WRONG[case]
    if code is None:
        assert words in server.tell(caller, f"told = refused(lambda: request_of({arguments}).exec())")
        return
    got = server.tell(caller, f"told = short(request_of({arguments}).exec())")

    assert got[0] == code
    assert words in got[1]
    assert server.tell(caller, "told = short(request_of('double', pairs(1)).exec())") == {"y": [3, 3]}


@pytest.mark.parametrize("code", range(8))
def test_the_code_of_a_called_models_error_is_seen(server, code):
    """Whichever it is."""
    call = f"told = short(request_of('errors', pb_utils.Tensor('N', np.array([{code}], np.int32))).exec())"
    assert server.tell("caller", call) == [code, "as you wish"]


REFUSED = {
    "no name": ("request_of('').exec()", "needs a model_name"),
    "async_exec without a loop": ("request_of('double', pairs(1)).async_exec()", "async_exec is for coroutines"),
    "a version to ask for": ("pb_utils.is_model_ready('double', 'x')", "'x' is no version"),
    "files that are none": ("pb_utils.load_model('double', files=['x'])", "files should be a dictionary of file paths"),
    "files alone": ("pb_utils.load_model('double', files={'file:1/x': b''})", "'config' must be specified"),
    "a file outside": ("pb_utils.load_model('double', '{}', {'file:../x': b''})", "must stay within model directory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_call_raises(server, caller, case):
    """As TritonModelException, which says what is wrong."""
    statement, words = REFUSED[case]
    told = server.tell(caller, f"told = refused(lambda: {statement})")

    assert told.startswith("TritonModelException: ")
    assert words in told


def test_a_circle_is_refused(server):
    """A model can't call itself, nor one that waits for it; the sentence tells the way."""
    code, words = server.tell("caller", "told = short(request_of('caller', words('told = 1')).exec())")
    assert code == INVALID_ARG
    assert words == "model 'caller' can't call 'caller', which waits for it: caller → caller"

    code = """
        inner = "told = short(request_of('caller', words('told = 1')).exec())"
        told = short(request_of('second', words(inner)).exec())
    """
    [told] = server.tell("caller", code)["TOLD"]
    assert json.loads(told) == [
        INVALID_ARG,
        "model 'second' can't call 'caller', which waits for it: caller → second → caller",
    ]


def test_models_call_only_while_they_execute(server, caller):
    """Neither in initialize, where they may ask for others, nor in finalize, where they may not even do that."""
    words = "TritonModelException: BLS is only supported during the 'execute' function."
    assert server.tell(caller, "told = model.begun") == [words, False]
    server.on_loop(lambda: server.engine.unload(caller))

    calls, loads = (server.repository / caller / "1" / "finalized").read_text().splitlines()
    assert calls == words
    assert "neither before it nor in 'finalize'" in loads


# -- any number of answers ---------------------------------------------------------------------------------------------


def stream_of(number, model="stream"):
    """A request of the model that streams."""
    return f"request_of('{model}', pb_utils.Tensor('N', np.array([{number}], np.int32)))"


@pytest.mark.parametrize("model", ["stream", "inline-stream"])
@pytest.mark.parametrize("number", [0, 1, 100])
def test_the_responses_of_a_decoupled_model_are_iterated(server, caller, model, number):
    """All of them in order and an empty one of the model that says so, then the end; then from the beginning."""
    code = f"""
        responses = {stream_of(number, model)}.exec(decoupled=True)
        told = [[short(response).get('OUT', ['empty'])[0] for response in responses]]
        told += [next(responses, 'the end'), [len(response.output_tensors()) for response in responses]]
    """
    assert server.tell(caller, code) == [[*range(number), "empty"], "the end", [1] * number + [0]]


@pytest.mark.parametrize("model", ["stream", "inline-stream"])
def test_the_last_response_may_say_that_it_is(server, caller, model):
    """Then nothing is behind it."""
    code = f"told = [short(response) for response in {stream_of(-3, model)}.exec(decoupled=True)]"
    assert server.tell(caller, code) == [{"OUT": [3]}]


def test_the_responses_of_a_model_that_is_not_decoupled(server, caller):
    """Are one."""
    code = "told = [short(response) for response in request_of('double', pairs(1)).exec(decoupled=True)]"
    assert server.tell(caller, code) == [{"y": [3, 3]}]


def test_an_error_is_one_of_the_responses(server, caller):
    """The model may send more behind it; that of a call is the last."""
    code = f"told = [short(response) for response in {stream_of(-2)}.exec(decoupled=True)]"
    assert server.tell(caller, code) == [{"OUT": [0]}, [UNAVAILABLE, "not this one"], {"OUT": [2]}, {}]
    [[code, _]] = server.tell(caller, "told = [short(r) for r in request_of('nobody').exec(decoupled=True)]")
    assert code == NOT_FOUND


def test_responses_in_coroutines(server, caller):
    """More streams at once than there are threads to wait in, some awaited first; one that is cancelled loses nothing."""
    code = f"""
        async def stream(n):
            call = {stream_of(20)}.async_exec(decoupled=True)
            responses = await call if n % 2 else call
            return [short(response)['OUT'][0] async for response in responses if response.output_tensors()]
        async def main():
            endless = {stream_of(-1, "inline-stream")}.async_exec(decoupled=True)
            streams = await asyncio.gather(*(stream(n) for n in range(40)))
            responses = {stream_of(3)}.async_exec(decoupled=True)
            waiting = asyncio.ensure_future(responses.__anext__())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            first = not waiting.cancelled()
            rest = [short(response)['OUT'][0] async for response in responses if response.output_tensors()]
            endless.cancel()
            return streams, rest[-3 + first:]
        told = run(main)
    """
    streams, rest = server.tell(caller, code)
    assert streams == [list(range(20))] * 40
    assert rest in ([0, 1, 2], [1, 2])


@pytest.mark.parametrize(
    "ending",
    [
        "responses.cancel()",
        "del responses; gc.collect()",
        "cycle = [responses]; cycle.append(cycle); del cycle, responses; gc.collect()",
    ],
)
def test_who_waits_for_no_more_is_not_sent_more(server, caller, ending):
    """The called model learns it, whether the iterator was cancelled or let go of."""
    mark = server.repository / "stream" / "1" / "cancelled"
    mark.unlink(missing_ok=True)
    code = f"""
        responses = {stream_of(-1)}.exec(decoupled=True)
        told = [short(next(responses)), short(next(responses))]
        {ending}
    """
    assert server.tell(caller, code) == [{"OUT": [1]}] * 2
    eventually(mark.exists)
    assert server.tell(caller, f"told = [short(r) for r in {stream_of(2)}.exec(decoupled=True)]") == [
        {"OUT": [0]},
        {"OUT": [1]},
        {},
    ]


def test_a_cancelled_iterator_ends(server, caller):
    """For a thread that waits for it, too."""
    code = f"""
        responses = {stream_of(-1)}.exec(decoupled=True)
        count = []
        def iterate():
            for response in responses:
                count.append(1)
        thread = threading.Thread(target=iterate)
        thread.start()
        while len(count) < 3: time.sleep(0.001)
        responses.cancel()
        thread.join()
        told = next(responses, 'the end')
    """
    assert server.tell(caller, code) == "the end"


# -- those who go ------------------------------------------------------------------------------------------------------


def test_a_called_model_that_dies(server, caller):
    """Is an error of the call, with how it died; the next call finds a new process."""
    call = "request_of('fragile', pb_utils.Tensor('N', np.array([{}], np.int32))).exec()"
    code, words = server.tell(caller, f"told = short({call.format(9)})")

    assert code == INTERNAL
    assert "ended with exit code 9" in words
    assert server.tell(caller, f"told = short({call.format(1)})")["OUT"][0] > 0


@pytest.fixture
def gated(server, request):
    """A model that waits, of the test's own name, and what opens its gate."""
    name = request.node.name.replace("[", "-").replace("]", "")
    server.write(name, GATED, PLAIN)
    folder = server.repository / name / "1"
    yield name, folder
    (folder / "open").touch()


def hold(server, name, folder):
    """Have the gated model busy."""
    request, answers = server.begin(name, ("N", INT32, np.zeros(1, np.int32)))
    eventually((folder / "entered").exists)
    return request, answers


def test_what_a_dead_model_had_called_is_not_executed(server, gated):
    """Its calls that still wait in a queue are dropped, and counted as cancelled."""
    name, folder = gated
    _, first = hold(server, name, folder)
    call = f"request_of('{name}', pb_utils.Tensor('N', np.zeros(1, np.int32)))"
    code = f"""
        import os
        {call}.exec(decoupled=True)
        kept = [{call}.exec(decoupled=True) for _ in range(3)]
        threading.Timer(0.2, lambda: os._exit(5)).start()
        next(kept[0])
    """
    inputs = ("DO", BYTES, np.array([textwrap.dedent(code).encode()], object))
    _, answers = server.begin("caller", inputs)
    eventually(lambda: answers)
    assert "exit code 5" in answers[0].message
    (folder / "open").touch()
    eventually(lambda: first)

    assert first[0].outputs[0][2].tolist() == [1]
    eventually(lambda: server.stats(name).failures["CANCELED"] == 4)
    assert server.stats(name).success.count == 1


def test_a_coroutine_that_is_cancelled_drops_its_call(server, gated, caller):
    """It is not executed if it still waits."""
    name, folder = gated
    _, first = hold(server, name, folder)
    code = f"""
        async def main():
            call = request_of('{name}', pb_utils.Tensor('N', np.zeros(1, np.int32))).async_exec()
            try:
                await asyncio.wait_for(call, 0.05)
            except asyncio.TimeoutError:
                return 'gave up'
        told = run(main)
    """
    assert server.tell(caller, code) == "gave up"
    queue = next(model for each, model in resident_models(server.engine) if each == name)._queue
    eventually(lambda: all(waiting.cancelled for waiting in queue._all()))
    (folder / "open").touch()
    eventually(lambda: first)
    eventually(lambda: server.stats(name).failures["CANCELED"] == 1)
    assert server.stats(name).success.count == 1


def test_a_model_that_is_unloaded_while_it_is_called(server, gated, caller):
    """Those who still wait for it when patience is over are told."""
    name, folder = gated
    _, first = hold(server, name, folder)
    call = f"told = short(request_of('{name}', pb_utils.Tensor('N', np.zeros(1, np.int32))).exec())"
    told = []
    calling = threading.Thread(target=lambda: told.append(server.tell(caller, call)))
    calling.start()
    eventually(lambda: next(m for n, m in resident_models(server.engine) if n == name).queued == 1)
    unloading = threading.Thread(target=lambda: server.on_loop(lambda: server.engine.unload(name)))
    unloading.start()
    calling.join(SECONDS)
    (folder / "open").touch()
    unloading.join(SECONDS)

    [[code, words]] = told
    assert code == UNAVAILABLE
    assert "is being unloaded" in words
    assert len(first) == 1


# Never answers what it is asked.
HOLDS = execute(
    """
    self.held = [*getattr(self, "held", []), *(request.get_response_sender() for request in requests)]
    self.held[-1].send(out(1))
    """
)


@pytest.mark.parametrize("placement", ["", INLINE], ids=["process", "inline"])
def test_a_decoupled_model_that_never_ends_a_request_can_be_unloaded(server, caller, placement):
    """When patience is over its clients and callers are told, behind what they have got, and its memory is given back."""
    name = f"holds-{caller}-{bool(placement)}"
    server.write(name, HOLDS, PLAIN + DECOUPLED + placement)
    got, told = [], []
    _, answers = server.begin(name, ("N", INT32, np.zeros(1, np.int32)), on_response=lambda _, each: got.append(each))
    eventually(lambda: got)
    code = f"""
        responses = {stream_of(0, name)}.exec(decoupled=True)
        told = [short(response) for response in responses]
    """
    calling = threading.Thread(target=lambda: told.append(server.tell(caller, code)))
    calling.start()
    eventually(lambda: next(m for n, m in resident_models(server.engine) if n == name).outstanding == 2)
    server.on_loop(lambda: server.engine.unload(name))
    calling.join(SECONDS)

    [error] = answers
    assert (error.kind, len(got)) == (Kind.UNAVAILABLE, 1)
    [[*responses, [code, words]]] = told
    assert (code, len(responses)) == (UNAVAILABLE, 1)
    assert "is being unloaded" in words
    assert name not in [n for n, _ in resident_models(server.engine)]


# -- loads and unloads -------------------------------------------------------------------------------------------------


def test_models_load_and_unload_models(server, caller):
    """And ask whether one is ready; what is unknown can't be loaded, and is unloaded already."""
    code = """
        told = [pb_utils.is_model_ready('double')]
        pb_utils.load_model('double')
        pb_utils.load_model('double')
        told += [pb_utils.is_model_ready('double'), pb_utils.is_model_ready('double', '2'),
                 pb_utils.is_model_ready('double', '3')]
        pb_utils.unload_model('double')
        pb_utils.unload_model('double')
        pb_utils.unload_model('nobody')
        told += [pb_utils.is_model_ready('double'), refused(pb_utils.load_model, 'nobody'),
                 pb_utils.is_model_ready('nobody')]
    """
    first, *rest, unknown, ready = server.tell(caller, code)

    assert isinstance(first, bool)
    assert rest == [True, True, False, False]
    assert unknown == "TritonModelException: Request for unknown model: 'nobody' is not found"
    assert ready is False


WARMED = (
    PLAIN
    + """
model_warmup { name: "w" batch_size: 1 inputs { key: "N" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } }
"""
)
# Calls another one as soon as both of its kind are in the middle of their loads.
WARMS = execute(
    """
    here = Path(pb_utils.get_model_dir())
    (here / "loading").touch()
    while not all((here.parents[1] / name / "1" / "loading").exists() for name in ("warms-1", "warms-2")):
        time.sleep(0.001)
    called = here.parent.name.replace("warms", "called")
    return [pb_utils.InferenceRequest(model_name=called, inputs=request.inputs()).exec() for request in requests]
    """
)


def test_models_whose_loads_call_models_that_are_not_loaded(server):
    """They have every turn there is, and those whom they wait for get theirs."""
    for n in (1, 2):
        server.write(f"warms-{n}", WARMS, WARMED)
        server.write(f"called-{n}", FRAGILE, PLAIN)

    assert load(server, "warms-1", "warms-2") == [None, None]
    assert {"warms-1", "warms-2", "called-1", "called-2"} <= {name for name, _ in resident_models(server.engine)}


PLAINLY = 'parameters { key: "MME_WEIGHTS" value: { string_value: "plain" } }'


def initializes(body):
    """A model.py that does this in `initialize`, and answers with what it left in `told`."""
    body = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
    source = execute("return [out(self.told) for _ in requests]")
    return f"{source}\n    def initialize(self, args):\n        self.told = 0\n{body}\n"


def load(server, *names):
    """Load models at the same time: for each None, or why it was not loaded."""

    async def all_of_them():
        async with asyncio.timeout(SECONDS):
            return await asyncio.gather(*map(server.engine.reload, names), return_exceptions=True)

    return server.on_loop(all_of_them)


# Loads another one as soon as both of its kind are being initialized.
LOADS = initializes(
    """
    here = Path(pb_utils.get_model_dir())
    (here / "loading").touch()
    while not all((here.parents[1] / name / "1" / "loading").exists() for name in ("loads-1", "loads-2")):
        time.sleep(0.001)
    needed = here.parent.name.replace("loads", "needed")
    before = pb_utils.is_model_ready(needed)
    pb_utils.load_model(needed)
    self.told = 10 * before + pb_utils.is_model_ready(needed)
    """
)


def test_models_load_others_while_they_are_loaded(server):
    """They have every turn there is, and those that they load get theirs."""
    for n in (1, 2):
        server.write(f"loads-{n}", LOADS, PLAIN)
        server.write(f"needed-{n}", FRAGILE, PLAIN)

    assert load(server, "loads-1", "loads-2") == [None, None]

    assert {"needed-1", "needed-2"} <= {name for name, _ in resident_models(server.engine)}
    _, answers = server.begin("loads-1", ("N", INT32, np.zeros(1, np.int32)))
    eventually(lambda: answers)
    assert answers[0].outputs[0][2].tolist() == [1]


def test_what_another_one_takes_is_not_counted_as_its_loaders(server, write_repository_model):
    """Of two in the serving process, of which one is loaded in the middle of the load of the other."""
    write_repository_model(server.repository / "heavy", weights=10_000_000)
    server.write("holder", initializes("pb_utils.load_model('heavy')"), PLAIN + INLINE)

    assert load(server, "holder") == [None]

    entries = server.engine.cache.entries
    assert entries["heavy"].footprint.host >= 10_000_000
    assert entries["holder"].footprint.host < 10_000_000


def test_two_that_another_one_loads_at_once_are_measured_one_by_one(server, write_repository_model):
    """Neither is counted as the other's, though both have the turn of who waits for them; give or take other tests."""
    for name in ("twin-1", "twin-2", "alone"):
        write_repository_model(server.repository / name, PLAINLY, weights=40_000_000)
    both = "twins = [threading.Thread(target=pb_utils.load_model, args=(f'twin-{n}',)) for n in (1, 2)]"
    wait = "for twin in twins: twin.start()\nfor twin in twins: twin.join()"
    server.write("mother", initializes(f"{both}\n{wait}"), PLAIN + INLINE)

    assert load(server, "alone") == load(server, "mother") == [None]

    taken = {name: entry.footprint.host for name, entry in server.engine.cache.entries.items()}
    for twin in ("twin-1", "twin-2"):
        assert abs(taken[twin] - taken["alone"]) < 25_000_000
    assert taken["mother"] < 25_000_000


def test_loads_that_would_wait_for_each_other_are_refused(server):
    """In bounded time and with the circle, whoever comes first: two of them, and one by itself."""
    for name, other in (("egg", "hen"), ("hen", "egg"), ("self", "self"), ("cuts", "saw"), ("saw", "cuts")):
        verb = "unload" if name == "saw" else "load"
        server.write(name, initializes(f"pb_utils.{verb}_model('{other}')"), PLAIN)

    [egg] = load(server, "egg")
    both = load(server, "egg", "hen")
    [itself] = load(server, "self")
    [cuts] = load(server, "cuts")

    circles = "egg → hen → egg", "hen → egg → hen"
    assert "model 'hen' can't load 'egg', which waits for it: egg → hen → egg" in egg.message
    assert all(isinstance(error, MmeError) and any(circle in error.message for circle in circles) for error in both)
    assert "model 'self' can't load 'self', which waits for it: self → self" in itself.message
    assert "model 'saw' can't unload 'cuts', which waits for it: cuts → saw → cuts" in cuts.message
    assert not {"egg", "hen", "self", "cuts", "saw"} & {name for name, _ in resident_models(server.engine)}


def test_a_model_that_executes_may_load_one_that_loads_others(server, caller):
    """But none that would load the caller anew, which waits for it."""
    name = f"loader-of-{caller}"
    server.write(name, initializes(f"pb_utils.load_model('double')\npb_utils.load_model('{caller}')"), PLAIN)

    told = server.tell(caller, f"told = refused(pb_utils.load_model, '{name}')")

    assert f"model '{name}' can't load '{caller}', which waits for it: {caller} → {name} → {caller}" in told
    assert server.tell(caller, "told = pb_utils.is_model_ready('double')") is True


def test_a_load_fails_of_what_it_can_not_load(server):
    """With the other one's reason, unless its code goes on without it."""
    server.write("needs-nobody", initializes("pb_utils.load_model('nobody')"), PLAIN)
    alone = "try:\n    pb_utils.load_model('nobody')\nexcept pb_utils.TritonModelException:\n    self.told = 7"
    server.write("does-without", initializes(alone), PLAIN)

    [refusal, without] = load(server, "needs-nobody", "does-without")

    assert refusal.kind is Kind.INVALID_MODEL
    assert "TritonModelException: Request for unknown model: 'nobody' is not found" in refusal.message
    assert without is None


def test_a_model_that_ends_while_it_has_another_one_loaded(server):
    """Is not loaded; the other one is."""
    dies = "threading.Thread(target=pb_utils.load_model, args=('outlives',)).start()"
    until = "while not pb_utils.is_model_ready('outlives'): time.sleep(0.001)"
    server.write("dies", initializes(f"{dies}\n{until}\nos._exit(5)"), PLAIN)
    server.write("outlives", FRAGILE, PLAIN)

    [death] = load(server, "dies")

    assert "ended with exit code 5 while it loaded the model" in death.message
    assert "outlives" in [name for name, _ in resident_models(server.engine)]


def test_a_load_that_is_given_up_while_it_waits_for_another_one(server):
    """It ends at once; the other one is loaded all the same, and stays."""
    gate = "while not (Path(pb_utils.get_model_dir()) / 'open').exists(): time.sleep(0.001)"
    server.write("slow", initializes(gate), PLAIN)
    server.write("waits", initializes("pb_utils.load_model('slow')"), PLAIN)
    loaded = []
    loading = threading.Thread(target=lambda: loaded.extend(load(server, "waits")))
    loading.start()
    eventually(lambda: (entry := server.engine.cache.entries.get("slow")) is not None and entry.load is not None)
    unloading = threading.Thread(target=lambda: server.on_loop(lambda: server.engine.unload("waits")))
    unloading.start()
    unloading.join(SECONDS)
    loading.join(SECONDS)
    assert "was unloaded while it was loading" in loaded[0].message
    (server.repository / "slow" / "1" / "open").touch()
    eventually(lambda: "slow" in [name for name, _ in resident_models(server.engine)])

    assert "waits" not in [name for name, _ in resident_models(server.engine)]


def test_models_load_models_with_files_of_their_own(server, caller):
    """Which may be new ones, and of any size that memory holds."""
    code = """
        tensors = {name: [{"name": name, "data_type": "TYPE_INT32", "dims": [1]}] for name in ("IN", "OUT")}
        config = json.dumps({"backend": "python", "input": tensors["IN"], "output": tensors["OUT"]})
        source = b'''
        import numpy as np
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                answer = pb_utils.Tensor("OUT", np.array([41], np.int32))
                return [pb_utils.InferenceResponse([answer]) for _ in requests]
        '''
        files = {'file:1/model.py': textwrap.dedent(source.decode()).encode(), 'file:big': bytes(1 << 20)}
        pb_utils.load_model('made', config, files)
        tensor = pb_utils.Tensor('IN', np.array([1], np.int32))
        request = pb_utils.InferenceRequest(model_name='made', requested_output_names=['OUT'], inputs=[tensor])
        told = [pb_utils.is_model_ready('made'), short(request.exec())]
        pb_utils.unload_model('made')
        told += [pb_utils.is_model_ready('made')]
    """
    ready, answer, gone = server.tell(caller, code)

    assert (ready, gone) == (True, False)
    assert answer == {"OUT": [41]}


def test_a_model_cannot_have_itself_unloaded(server):
    """Nor one that waits for it, nor either loaded anew: each would wait for the other."""
    code = """
        inner = "told = [refused(pb_utils.unload_model, 'caller'), refused(pb_utils.load_model, 'caller')]"
        [text] = short(request_of('second', words(inner)).exec())['TOLD']
        told = [refused(pb_utils.unload_model, 'caller'), *json.loads(text)]
    """
    itself, unload, load = server.tell("caller", code)

    assert "model 'caller' can't unload 'caller', which waits for it: caller → caller" in itself
    assert "model 'second' can't unload 'caller', which waits for it" in unload
    assert "model 'second' can't load 'caller', which waits for it" in load


# -- nothing is left ---------------------------------------------------------------------------------------------------


def test_calls_leave_nothing_behind(server, caller):
    """No lease, no request under way, no descriptor, whether calls succeed, fail or stream."""
    code = f"""
        for n in range(30):
            request_of('double', pairs(n)).exec()
            request_of('nobody', pairs(n)).exec()
            list({stream_of(3)}.exec(decoupled=True))
            large = pb_utils.Tensor('FP32', np.zeros((1, 50_000), np.float32))
            assert not request_of('echo', large, requested_output_names=['FP32']).exec().has_error()
        told = 'done'
    """

    def nothing_came_of_a_round():
        before = held(server)
        server.tell(caller, code)
        return held(server) <= before

    server.tell(caller, code)
    eventually(nothing_came_of_a_round)  # a leak would be there after every one


def held(server):
    """(leases and requests under way, descriptors)."""
    gc.collect()
    models = server.on_loop(lambda: [model for _, model in resident_models(server.engine)])
    leases = sum(entry.leases for entry in server.engine.cache.entries.values())
    return leases + sum(model.outstanding for model in models), len(list(Path("/proc/self/fd").iterdir()))


def test_statistics_of_streams_are_sane(server):
    """One success for each request of a decoupled model, whatever it sent; the time is that until its end."""
    before = server.stats("stream")
    succeeded, executed, inferred = before.success.count, before.execution_count, before.inference_count
    server.tell(
        "caller", f"told = [len(list({stream_of('{n}')}.exec(decoupled=True))) for n in (0, 1, 5)]".replace("{n}", "n")
    )
    stats = server.stats("stream")

    assert stats.success.count == succeeded + 3
    assert stats.queue.count == stats.compute_infer.count == stats.success.count
    assert stats.execution_count == executed + 3
    assert stats.inference_count == inferred + 3
    assert stats.success.ns >= stats.compute_infer.ns
    assert sum(stats.failures.values()) == stats.fail.count
