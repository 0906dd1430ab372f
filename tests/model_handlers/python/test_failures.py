"""Models that misbehave: whose error it is, what it says, and that the process lives on."""

import textwrap
import threading

import numpy as np
import pytest

from model_handlers.base import CPU
from model_handlers.errors import Kind, MmeError
from model_handlers.python.handler import PythonHandler

GOOD = 'pb_utils.InferenceResponse([pb_utils.Tensor("SUM", request.inputs()[0].as_numpy())])'


@pytest.fixture
def failure(models, kit):
    """Loads such a model and gives the error of a batch of two."""

    def run(source, **load):
        handler = models.load(source, lane="m_0_0", **load)
        with pytest.raises(MmeError) as caught:
            handler.execute_requests([kit.request(["SUM"], A=[[1, 2]]), kit.request(["SUM"], A=[[3, 4]])])
        return caught.value

    return run


@pytest.fixture
def answers(models, kit):
    """Loads a model whose answer to each request is the expression; gives the answers to rows 0, 1 and 2."""

    def run(answer, config=None, outputs=("SUM",)):
        handler = models.load(
            kit.each(f"row = int(request.inputs()[0].as_numpy()[0, 0])\n{textwrap.dedent(answer).strip()}"),
            config or kit.VECTORS,
        )
        return handler.execute_requests([kit.request(outputs, id=str(n), A=[[n, n]]) for n in range(3)])

    return run


# -- model.py that cannot be loaded ------------------------------------------------------------------------------------

BROKEN = {
    "a syntax error": ("class TritonPythonModel:\n    def\n", "1/model.py line 2: SyntaxError: invalid syntax"),
    "wrong indentation": ("class X:\n\tdef a(): 1\n        x = 1\n", "1/model.py line 3: TabError"),
    "no class": ("class Model:\n    pass\n", "defines no class TritonPythonModel; the classes in it are: Model"),
    "an object instead": ("TritonPythonModel = 3\n", "1/model.py defines no class TritonPythonModel"),
    "no execute": ("class TritonPythonModel:\n    pass\n", "does not implement `execute` method"),
    "a missing import": ("import no_such_module_anywhere\n", "No module named 'no_such_module_anywhere'\n\nAt:\n  "),
    "an exit while imported": ("import sys\nsys.exit('gone')\n", "SystemExit: gone\n\nAt:\n  "),
    "a name that pb_utils lacks": (
        "from triton_python_backend_utils import Tensors\n",
        "cannot import name 'Tensors' from 'model_handlers.python.pb_utils'",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_cannot_be_loaded_says_why(models, what):
    """The error names the model, the file, and the line or what is missing."""
    source, words = BROKEN[what]
    error = models.refused(source)
    assert error.kind is Kind.INVALID_MODEL
    assert words in error.message
    assert "'m'" in error.message
    assert str(models.root / "m/1/model.py") in error.message


def test_a_syntax_error_in_a_file_beside_it_names_that_file(models):
    """Not model.py, which only imports it."""
    error = models.refused("import helper_with_error\n", files={"1/helper_with_error.py": "\n\nx = (\n"})
    assert "1/helper_with_error.py line 3: SyntaxError" in error.message


@pytest.mark.parametrize(
    ("statement", "kind", "words"),
    [
        ("raise ValueError('weights are gone')", Kind.INVALID_MODEL, "initialize ran: ValueError: weights are gone"),
        ("import sys; sys.exit(1)", Kind.INVALID_MODEL, "initialize ran: SystemExit: 1"),
        ("raise KeyboardInterrupt", Kind.INVALID_MODEL, "initialize ran: KeyboardInterrupt"),
        ("raise MemoryError('8 GB')", Kind.OUT_OF_MEMORY, "ran out of memory while initialize ran: MemoryError: 8 GB"),
        ("args['no such key']", Kind.INVALID_MODEL, "KeyError: 'no such key'"),
    ],
)
def test_an_initialize_that_fails_is_the_models_error(models, statement, kind, words):
    """It says what was raised and where; memory is told apart."""
    source = f"""
        class TritonPythonModel:
            def initialize(self, args):
                {statement}
            def execute(self, requests):
                return []
    """
    error = models.refused(source)
    assert error.kind is kind
    assert words in error.message
    assert f"At:\n  {models.root}/m/1/model.py(4): initialize\n" in error.message
    assert "model_handlers" not in error.message


@pytest.mark.parametrize(
    ("statement", "advice"),
    [
        ("np.load('weights.npy')", "write Path(__file__).parent / 'weights.npy'"),
        ("open('data/labels.txt')", "write Path(__file__).parents[1] / 'data/labels.txt'"),
        ("open('nowhere.txt')", "A relative path begins where the server runs: begin it with Path(__file__).parent"),
    ],
)
def test_a_relative_path_is_told_where_its_file_lies(models, statement, advice):
    """The model's files are not where the server runs."""
    source = f"""
        import numpy as np
        class TritonPythonModel:
            def initialize(self, args):
                {statement}
            def execute(self, requests):
                return []
    """
    error = models.refused(source, files={"1/weights.npy": "", "data/labels.txt": ""})
    assert advice in error.message.splitlines()[-1]


def test_an_absolute_path_needs_no_advice(models):
    """It says where the file should be."""
    error = models.refused("open('/nowhere/at/all.txt')")
    assert error.message.endswith("<module>\n")


def test_a_load_that_failed_leaves_nothing_in_the_interpreter(models):
    """The next load of the same, mended model runs its new files."""
    import sys  # noqa: PLC0415 - beside what it looks at

    before = list(sys.path)
    models.refused("import helper_mended\nraise ValueError", files={"1/helper_mended.py": "X = 1"})
    assert sys.path == before
    assert "helper_mended" not in sys.modules
    assert "1.model" not in sys.modules


# -- execute that fails as a whole -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("raise ValueError('bad luck')", "ValueError: bad luck"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt: <EMPTY MESSAGE>"),
        ("raise pb_utils.TritonModelException('mine')", "TritonModelException: mine"),
        ("requests[0].inputs()[9]", "IndexError: list index out of range"),
        ("pb_utils.Tensor('', np.zeros(1))", "TritonModelException: Tensor name cannot be an empty string."),
    ],
)
@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_what_execute_raises_is_the_error_of_the_batch(models, kit, keyword, statement, words):
    """In Triton's words, with the place in the author's file and nothing of ours."""
    source = kit.body(statement).replace("    def execute", f"    {keyword} execute")
    handler = models.load(source)
    for _ in range(2):  # and the model goes on
        with pytest.raises(MmeError) as caught:
            handler.execute_requests([kit.request(["SUM"], A=[[1, 2]])])
        assert caught.value.kind is Kind.EXECUTION_FAILED
        assert caught.value.message == (
            f"Failed to process the request(s) for model 'm_0_0', message: {words}\n\n"
            f"At:\n  {models.root}/m/1/model.py(6): execute\n"
        )


def test_the_place_of_an_error_is_told_innermost_first(failure, kit, models):
    """Helpers of the author's own are named, then what called them."""
    source = kit.HEAD + "def helper():\n    1 / 0\n" + kit.body("helper()")
    error = failure(source)
    model = models.root / "m/1/model.py"
    assert error.message.endswith(f"At:\n  {model}(5): helper\n  {model}(11): execute\n")


@pytest.mark.parametrize(
    "statement", ["raise MemoryError", "raise type('OutOfMemoryError', (RuntimeError,), {})('gpu')"]
)
def test_memory_that_ran_out_is_told_apart(failure, kit, statement):
    """On the host and, by the name of the frameworks' class, on a GPU."""
    assert failure(kit.body(statement)).kind is Kind.OUT_OF_MEMORY


def test_an_allocation_that_cannot_be_is_out_of_memory(failure, kit):
    """What numpy raises is one of them."""
    assert failure(kit.body("np.empty(2**58, np.uint8)")).kind is Kind.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("None", "Expected a list in the execute return, found type '<class 'NoneType'>'."),
        ("(1, 2)", "Expected a list in the execute return, found type '<class 'tuple'>'."),
        ("iter(requests)", "Expected a list in the execute return, found type '<class 'list_iterator'>'."),
        (
            "[pb_utils.InferenceResponse([])]",
            (
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                "InferenceRequest(s) size is:2, and InferenceResponse(s) size is:1"
            ),
        ),
        (
            "[pb_utils.InferenceResponse([])] * 3",
            (
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                "InferenceRequest(s) size is:2, and InferenceResponse(s) size is:3"
            ),
        ),
        (
            "[pb_utils.InferenceResponse([]), 'text']",
            "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'str'>'.",
        ),
    ],
)
def test_what_is_no_list_of_responses_fails_the_batch(failure, kit, returned, words):
    """Nobody can tell which answer is whose."""
    error = failure(kit.body(f"return {returned}"))
    assert error.kind is Kind.EXECUTION_FAILED
    assert error.message == f"Failed to process the request(s) for model 'm_0_0', message: {words}"


def test_what_an_author_writes_reaches_the_client_in_bounds(failure, kit):
    """A message of a megabyte is cut, and half a character cannot break the answer."""
    error = failure(kit.body("raise ValueError('\\ud800' + 'x' * 1_000_000)"))
    assert len(error.message) < 200_000
    error.message.encode()


def test_an_exception_that_cannot_be_printed_is_still_an_error(failure, kit):
    """Its type is told."""
    source = (
        kit.HEAD + "class Odd(Exception):\n    def __str__(self):\n        raise RuntimeError\n" + kit.body("raise Odd")
    )
    assert "message: Odd: " in failure(source).message


def test_a_task_that_exits_ends_nothing_but_itself(models, kit, caplog):
    """`sys.exit` in a task of the model's own does not stop the loop of the others."""
    source = kit.HEAD + textwrap.dedent("""
        import asyncio, sys
        class TritonPythonModel:
            async def leave(self):
                sys.exit(1)
            async def execute(self, requests):
                self.task = asyncio.create_task(self.leave())
                await asyncio.sleep(0)
                self.task.exception() if self.task.done() else None
                return [pb_utils.InferenceResponse([pb_utils.Tensor("SUM", r.inputs()[0].as_numpy())]) for r in requests]
    """)
    handler = models.load(source)
    for _ in range(2):
        [answer] = handler.execute_requests([kit.request(["SUM"], A=[[1, 2]])])
        assert answer.outputs["SUM"].tolist() == [[1, 2]]
    assert "raised SystemExit" in caplog.text


# -- answers that are wrong by themselves ------------------------------------------------------------------------------


def own_error(results):
    """The error of request 1, where 0 and 2 were answered."""
    assert [r.outputs["SUM"].tolist() for r in (results[0], results[2])] == [[[0, 0]], [[2, 2]]]
    assert isinstance(results[1], MmeError)
    return results[1]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (None, Kind.EXECUTION_FAILED),
        ("UNKNOWN", Kind.UNKNOWN),
        ("INTERNAL", Kind.EXECUTION_FAILED),
        ("NOT_FOUND", Kind.NOT_FOUND),
        ("INVALID_ARG", Kind.INVALID_ARGUMENT),
        ("UNAVAILABLE", Kind.UNAVAILABLE),
        ("UNSUPPORTED", Kind.UNSUPPORTED),
        ("ALREADY_EXISTS", Kind.CONFLICT),
        ("CANCELLED", Kind.CANCELLED),
    ],
)
def test_the_error_of_one_request_stays_with_it(answers, code, kind):
    """It has the kind of its code and its own words, and the rest of the batch is answered."""
    argument = f", pb_utils.TritonError.{code}" if code else ""
    error = own_error(
        answers(
            f"""
            if row == 1:
                return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"row {{row}} is odd"{argument}))
            return {GOOD}
            """
        )
    )
    assert (error.kind, error.message) == (kind, "row 1 is odd")


WRONG = {
    "an unknown output": (
        'pb_utils.InferenceResponse([pb_utils.Tensor("TOTAL", np.zeros((1, 2), np.float32))])',
        "model 'm' returned unexpected inference output 'TOTAL', its outputs are: SUM, DIFF",
    ),
    "a wrong type": (
        'pb_utils.InferenceResponse([pb_utils.Tensor("SUM", np.zeros((1, 2), np.complex64).real.astype(object))])',
        "model 'm' returned output 'SUM' as BYTES, expected FP32",
    ),
    "text for numbers": (
        'pb_utils.InferenceResponse([pb_utils.Tensor("SUM", np.array([["a", "b"]]))])',
        "model 'm' returned output 'SUM' as BYTES, expected FP32",
    ),
    "a number beyond the type": (
        'pb_utils.InferenceResponse([pb_utils.Tensor("SUM", np.array([[1e39, np.inf]]))])',
        "model 'm' returned output 'SUM' as FP64, expected FP32",
    ),
    "nothing": (
        "None",
        (
            "Failed to process the request(s) for model 'm_0_0', message: Expected an 'InferenceResponse' object in the "
            "execute function return list, found type '<class 'NoneType'>'."
        ),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_answer_is_the_error_of_its_request(answers, what):
    """It names model and output, what was expected and what came; the others of the batch are answered."""
    answer, sentence = WRONG[what]
    error = own_error(answers(f"return {answer} if row == 1 else {GOOD}"))
    assert (error.kind, error.message) == (Kind.EXECUTION_FAILED, sentence)


# What a model returns for `SUM`, which is FP32 [2] → what the client gets for it.
TAKEN = {
    "nothing": ("", {}),
    "another output alone": ('pb_utils.Tensor("DIFF", np.ones((1, 2), np.float32))', {}),
    "an unknown one as well": (
        'pb_utils.Tensor("TOTAL", np.ones(1)), pb_utils.Tensor("SUM", np.ones((1, 2), np.float32))',
        {"SUM": [[1, 1]]},
    ),
    "other rows": ('pb_utils.Tensor("SUM", np.ones((3, 2), np.float32))', {"SUM": [[1, 1]] * 3}),
    "no rows at all": ('pb_utils.Tensor("SUM", np.array(5, np.float32))', {"SUM": 5}),
    "FP64": ('pb_utils.Tensor("SUM", np.array([[0.5, 1]]))', {"SUM": [[0.5, 1]]}),
    "an infinity": ('pb_utils.Tensor("SUM", np.array([[np.inf, 1]]))', {"SUM": [[float("inf"), 1]]}),
    "integers": ('pb_utils.Tensor("SUM", np.array([[2, 1]]))', {"SUM": [[2, 1]]}),
    "pixels": ('pb_utils.Tensor("SUM", np.array([[2, 255]], np.uint8))', {"SUM": [[2, 255]]}),
    "every other element of an array": (
        'pb_utils.Tensor("SUM", np.arange(8, dtype=np.float32).reshape(2, 4)[:1, ::2])',
        {"SUM": [[0, 2]]},
    ),
}


WHOLE = {"integers": np.int64, "pixels": np.uint8}  # which stay what they are


@pytest.mark.parametrize("what", TAKEN)
def test_a_model_may_be_careless_where_it_may_in_triton(answers, what):
    """Outputs that it leaves out are left out; unknown ones go nowhere; floats get the precision that was declared."""
    returned, outputs = TAKEN[what]
    for answer in answers(f"return pb_utils.InferenceResponse([{returned}])"):
        assert {name: array.tolist() for name, array in answer.outputs.items()} == outputs
        assert {array.dtype for array in answer.outputs.values()} <= {np.dtype(WHOLE.get(what, np.float32))}


def test_a_recursion_is_told_in_few_lines(failure):
    """Of a frame that comes again and again there are three, and how many more."""
    source = """
        class TritonPythonModel:
            def execute(self, requests):
                return self.execute(requests)
    """
    error = failure(source)
    assert "RecursionError" in error.message
    assert error.message.count(": execute") == 3
    assert "times more)" in error.message


@pytest.mark.parametrize(
    ("statement", "advice"),
    [
        ("pb_utils.get_input_tensor_by_name(request, 'a').as_numpy()", "names are exact"),
        ("import no_such_module_anywhere", "Install it into the image"),
    ],
)
def test_mistakes_that_many_make_come_with_advice(failure, kit, statement, advice):
    """In `execute` as well."""
    error = failure(kit.each(statement))
    assert advice in error.message.splitlines()[-1]


def test_a_shape_that_was_not_declared_is_logged_once(models, kit, caplog):
    """The response carries it all the same, as Triton's does."""
    answer = 'return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", np.zeros((rows, 2), np.float32))])'
    handler = models.load(kit.each(f"rows = int(request.inputs()[0].as_numpy()[0, 0])\n{answer}"), name="misshapen")
    responses = handler.execute_requests([kit.request(A=[[rows, 0]]) for rows in (1, 2, 3)])

    assert [each.outputs["SUM"].shape for each in responses] == [(1, 2), (2, 2), (3, 2)]
    assert [record.getMessage() for record in caplog.records] == [
        "model 'misshapen' returned output 'SUM' with shape [2, 2], expected [1, 2]"
    ]


def test_an_output_that_there_is_not_is_logged_once(answers, caplog):
    """By its name, so that whoever misspelt one finds out."""
    good = GOOD.replace("([", '([pb_utils.Tensor("SOM", np.zeros(1)), ')
    answers(f"return {good}")
    answers(f"return {good}")
    [line] = [record.getMessage() for record in caplog.records if "SOM" in record.getMessage()]
    assert line == "model 'm' returned unexpected inference output 'SOM', its outputs are: SUM, DIFF"


def test_a_wrong_output_that_nobody_asked_for_harms_nobody(answers):
    """Only what is sent is looked at."""
    results = answers(
        """
        x = request.inputs()[0].as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", x), pb_utils.Tensor("DIFF", np.zeros(5, np.int8))])
        """
    )
    assert [list(answer.outputs) for answer in results] == [["SUM"]] * 3


@pytest.mark.parametrize("shape", ["(1, 5)", "(1, 2, 3, 1)", "(1, 2, 1, 1, 1)"])
def test_an_output_that_cannot_be_reshaped_names_both_shapes(answers, shape):
    """A reshape that the model did not keep to is its request's error."""
    config = """max_batch_size: 8
        input { name: "A" data_type: TYPE_FP32 dims: [ 2 ] }
        output { name: "SUM" data_type: TYPE_FP32 dims: [ 2, -1 ] reshape { shape: [ 2, 1, -1 ] } }"""
    results = answers(
        f'return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", np.zeros({shape}, np.float32))])', config
    )
    for error in results:
        assert "model 'm' returned output 'SUM' with shape" in error.message
        assert "expected [2, 1, -1] behind the batch dimension" in error.message


def test_a_tensor_that_its_framework_cannot_fetch_is_its_requests_error(answers):
    """Elements on a GPU come to the host when the response is made; what fails then fails nobody else's."""
    error = own_error(
        answers(
            f"""
            class Lost:
                dtype, shape = "torch.float32", (1, 2)
                def __dlpack_device__(self):
                    return (2, 0)
                def cpu(self):
                    raise RuntimeError("the GPU fell off the bus")
                detach = cpu
            if row == 1:
                return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("SUM", Lost())])
            return {GOOD}
            """
        )
    )
    assert error.kind is Kind.EXECUTION_FAILED
    assert "message: RuntimeError: the GPU fell off the bus" in error.message


def test_parameters_that_json_does_not_have_fail_where_they_are_given(failure, kit):
    """In the author's own line, not on the way out."""
    error = failure(kit.each("return pb_utils.InferenceResponse([], parameters={'a': object()})"))
    words = "Expect parameters values to have type bool/int/str, found type <class 'object'> for 'a'"
    assert f"TritonModelException: {words}\n\nAt:\n" in error.message


def with_parameters(parameters):
    """The code of a good answer that carries parameters."""
    return f"response = {GOOD}\nreturn pb_utils.InferenceResponse(response.output_tensors(), parameters={parameters})"


def test_parameters_of_a_response_come_with_it(answers):
    """Strings, numbers and booleans do."""
    parameters = {"a": 1, "b": "t", "c": True, "d": 0.5}
    assert [answer.parameters for answer in answers(with_parameters(parameters))] == [parameters] * 3


# -- one call at a time ------------------------------------------------------------------------------------------------


def test_threads_that_share_an_instance_take_turns(models, kit):
    """Two executions of one object never overlap, whoever calls."""
    source = kit.HEAD + textwrap.dedent("""
        import threading, time
        class TritonPythonModel:
            inside, overlaps = 0, 0
            def execute(self, requests):
                self.inside += 1
                self.overlaps += self.inside > 1
                for _ in range(200):
                    time.sleep(0)
                self.inside -= 1
                return [pb_utils.InferenceResponse([pb_utils.Tensor("SUM", r.inputs()[0].as_numpy())]) for r in requests]
    """)
    handler = models.load(source)
    threads = [
        threading.Thread(
            target=lambda: [handler.execute_requests([kit.request(["SUM"], A=[[1, 2]])]) for _ in range(10)]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert models.author(handler).overlaps == 0


# -- what is refused by name -------------------------------------------------------------------------------------------

ALONE = "BLS is only supported during the 'execute' function."
UNASKED = "models can be loaded, unloaded and asked about from 'initialize' on"
REFUSED = {
    'pb_utils.InferenceRequest(model_name="other", inputs=request.inputs()).exec()': ALONE,
    'pb_utils.InferenceRequest(model_name="other").async_exec(decoupled=True)': ALONE,
    'pb_utils.load_model(model_name="other")': UNASKED,
    'pb_utils.unload_model("other", unload_dependents=True)': UNASKED,
    'pb_utils.is_model_ready("other", model_version="1")': UNASKED,
    'pb_utils.load_model("other", config="{}")': UNASKED,
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_is_not_served_says_so_by_name(failure, kit, call):
    """The author reads why in the client's error: here, nobody serves the model who could be called."""
    error = failure(kit.each(f"return {call}"))
    assert "TritonModelException: " in error.message
    assert REFUSED[call] in error.message


def test_a_model_file_that_is_no_python_file_is_refused(models, kit):
    """By its name, before it is read."""
    config, file = models.write("", kit.VECTORS)
    (file.parent / "model.bin").write_bytes(b"")
    with pytest.raises(MmeError, match=r"model.bin is no Python file"):
        PythonHandler.load(config, file.parent / "model.bin", CPU, "m_0")
