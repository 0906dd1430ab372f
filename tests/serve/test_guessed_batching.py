"""Clients of a model that does not say whether it batches get their own numbers, and batches once that is proven."""

import asyncio
import contextlib
import logging

import numpy as np
import onnxruntime
import pytest

from model_handlers.errors import MmeError
from model_handlers.tensor import BY_DTYPE
from serve.options import BatchGuess
from serve.request import InferenceRequest, layout_of
from tests.guessed_models import crossed, cumulative_sum, dense, one_row, recurrent, scaled, swapped, thinned
from tests.serve.engines import engine_of


@contextlib.asynccontextmanager
async def serving(folder, *models, **options):
    """An engine over these models, each called as its function, and what ONNX Runtime itself says."""
    bare = {}
    for write in models:
        path = folder / "models" / write.__name__ / "1" / "model.onnx"
        if not path.exists():
            write(folder / "models" / write.__name__)
        bare[write.__name__] = onnxruntime.InferenceSession(path)
    async with engine_of(folder, repository=folder / "models", **options) as engine:
        yield Served(engine, bare)


class Served:
    """An engine, and sessions of its models to compare with."""

    def __init__(self, engine, bare):
        self.engine = engine
        self.bare = bare

    def ask(self, name, **inputs):
        """Submit a request to a model in memory; its answer is to be awaited."""
        answer = asyncio.get_running_loop().create_future()
        layout = layout_of(tuple((key, BY_DTYPE[array.dtype], array.shape) for key, array in inputs.items()), ())
        request = InferenceRequest(layout, list(inputs.values()), lambda _, result: answer.set_result(result))
        assert self.engine.submit(name, None, request)
        return answer

    async def loaded(self, *names):
        """Bring models into memory."""
        for name in names:
            await self.engine.load(name)

    async def together(self, name, *rows):
        """Ask for several at once, and hold every answer against the framework's."""
        answers = [self.ask(name, x=each) for each in rows]
        for each, answer in zip(rows, answers, strict=True):
            self.check(name, await answer, x=each)

    def check(self, name, answer, **inputs):
        """The answer is what the framework says to that request alone."""
        assert not isinstance(answer, MmeError), answer
        (expected,) = self.bare[name].run(None, inputs)
        assert answer.outputs[0][2].shape == expected.shape
        np.testing.assert_allclose(answer.outputs[0][2], expected, rtol=1e-5, atol=1e-5)

    def stats(self, name):
        """What was counted."""
        return self.engine.stats[name, 1]


def inputs(count, seed=0, rows=1, shape=(4,)):
    """So many inputs of their own contents."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((rows, *shape)).astype("f4") for _ in range(count)]


@pytest.mark.parametrize(("write", "shape"), [(cumulative_sum, (4,)), (recurrent, (1, 4))])
async def test_every_client_of_a_model_over_time_gets_its_own_numbers(tmp_path, write, shape):
    """16 clients, 200 requests each, of 1 to 6 steps: every answer is the framework's own, and the model was found out."""
    name = write.__name__
    async with serving(tmp_path, write) as served:
        await served.loaded(name)

        async def client(number):
            rng = np.random.default_rng(number)
            for _ in range(200):
                x = rng.standard_normal((rng.integers(1, 7), *shape)).astype("f4")
                served.check(name, await served.ask(name, x=x), x=x)

        await asyncio.gather(*(client(number) for number in range(16)))
        assert served.stats(name).batching == "refuted"
        assert served.stats(name).execution_count == served.stats(name).success.count == 3200


async def test_a_batch_proves_itself_after_three(tmp_path):
    """Until then each request is an execution of its own; then four of them are one. What is shown stays as it is."""
    async with serving(tmp_path, dense) as served:
        await served.loaded("dense")
        shown = served.engine.index.config("dense")
        stats = served.stats("dense")
        for number in range(3):
            assert stats.batching == "unproven"
            await served.together("dense", *inputs(4, number))
            await asyncio.sleep(0)
        assert (stats.execution_count, stats.inference_count, stats.batching) == (12, 12, "proven")
        await served.together("dense", *inputs(4, 9))
        assert (stats.execution_count, stats.inference_count) == (13, 16)
        assert served.engine.index.config("dense") == shown
        assert (shown.max_batch_size, shown.dynamic_batching.preferred_batch_size) == (4, (4,))


async def test_requests_that_are_all_alike_prove_nothing(tmp_path):
    """They go on one by one."""
    async with serving(tmp_path, dense) as served:
        await served.loaded("dense")
        for _ in range(5):
            await served.together("dense", *inputs(1) * 4)
        assert (served.stats("dense").execution_count, served.stats("dense").batching) == (20, "unproven")


async def test_any_number_of_rows_is_taken_before_and_after(tmp_path):
    """The largest batch of 4 is what the server joins, and bounds no client."""
    async with serving(tmp_path, dense) as served:
        await served.loaded("dense")
        await served.together("dense", *inputs(1, rows=9))
        for number in range(3):
            await served.together("dense", *inputs(4, number))
        await served.together("dense", *inputs(2, rows=9), *inputs(2))
        assert served.stats("dense").batching == "proven"


async def test_names_decide_at_once(tmp_path):
    """A batch is joined from the first; time never is, without a word."""

    def batch(folder):
        return dense(folder, "batch")

    def time(folder):
        return cumulative_sum(folder, "T")

    async with serving(tmp_path, batch, time) as served:
        await served.loaded("batch", "time")
        await served.together("batch", *inputs(4))
        await served.together("time", *inputs(4, rows=5))
        counted = [(served.stats(name).execution_count, served.stats(name).batching) for name in ("batch", "time")]
        assert counted == [(1, "named"), (4, "other")]


async def test_dimensions_that_change_places_are_answered(tmp_path):
    """["batch", 5, "time"] → ["time", "batch", 5], of which a single request failed."""
    async with serving(tmp_path, swapped) as served:
        await served.loaded("swapped")
        await served.together("swapped", *inputs(8, rows=2, shape=(5, 7)))
        assert served.stats("swapped").fail.count == 0


async def test_inputs_of_different_lengths_are_taken(tmp_path):
    """Their first dimensions are not one batch; such requests share none."""
    async with serving(tmp_path, crossed) as served:
        await served.loaded("crossed")
        pairs = [(inputs(1, number, rows=3)[0], inputs(1, number + 9, rows=5)[0]) for number in range(4)]
        for (a, b), answer in [(pair, served.ask("crossed", a=pair[0], b=pair[1])) for pair in pairs]:
            served.check("crossed", await answer, a=a, b=b)
        assert served.stats("crossed").execution_count == 4


@pytest.mark.parametrize(
    ("write", "why"),
    [(thinned, "returned output 'y' with shape [2, 4] for a batch of 3"), (one_row, "failed, which succeed alone")],
)
async def test_a_batch_of_another_shape_or_that_fails_is_never_joined(tmp_path, caplog, write, why):
    """The single answers go out; one warning; the verdict holds for the next life of the server, without another."""
    name = write.__name__
    async with serving(tmp_path, write) as served:
        await served.loaded(name)
        for number in range(4):
            await served.together(name, *inputs(3, number))
        assert served.stats(name).batching == "refuted"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert why in warning
    caplog.clear()
    async with serving(tmp_path, write) as served:
        await served.loaded(name)
        assert served.stats(name).batching == "refuted"
        await served.together(name, *inputs(3))
    assert [record for record in caplog.records if record.levelno == logging.WARNING] == []


async def test_a_proof_survives_a_reload_and_the_server(tmp_path):
    """It is of the file's content: a copy under another name is known; another content of the same size is not."""
    async with serving(tmp_path, dense) as served:
        await served.loaded("dense")
        for number in range(3):
            await served.together("dense", *inputs(4, number))
        await served.engine.reload("dense")
        assert served.stats("dense").batching == "proven"
    content = (tmp_path / "models" / "dense" / "1" / "model.onnx").read_bytes()
    changed = bytearray(content)
    changed[content.index(np.random.default_rng(5).standard_normal((4, 3)).astype("f4").tobytes())] ^= 1
    for name, data in (("copy", content), ("other", bytes(changed))):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "1" / "model.onnx").write_bytes(data)
    async with serving(tmp_path, dense) as served:
        await served.loaded("dense", "copy", "other")
        assert [served.stats(name).batching for name in ("dense", "copy", "other")] == ["proven", "proven", "unproven"]
        await served.together("dense", *inputs(4))
        assert served.stats("dense").execution_count == 1


async def test_reloads_meanwhile_cost_nobody_the_right_answer(tmp_path):
    """Models come and go while they are found out."""
    async with serving(tmp_path, cumulative_sum, dense) as served:
        await served.loaded("cumulative_sum", "dense")

        async def client(name, number):
            for turn in range(40):
                (x,) = inputs(1, 1000 * number + turn, rows=1 + turn % 3)
                served.check(name, await served.ask(name, x=x), x=x)

        clients = [client(name, number) for number in range(6) for name in ("cumulative_sum", "dense")]
        reloads = [served.engine.reload(name) for name in ("cumulative_sum", "dense") * 2]
        await asyncio.gather(*clients, *reloads)


async def test_nothing_is_guessed_where_the_server_is_told_so(tmp_path):
    """Then a model without a max_batch_size executes one request at a time, whatever its dimensions are called."""

    def batch(folder):
        return dense(folder, "batch")

    async with serving(tmp_path, batch, dense, batch_guess=BatchGuess.OFF) as served:
        await served.loaded("batch", "dense")
        for name in ("batch", "dense"):
            for number in range(4):
                await served.together(name, *inputs(4, number))
            assert (served.stats(name).execution_count, served.stats(name).batching) == (16, "off")


async def test_a_written_batch_size_is_trusted(tmp_path):
    """As it is: four requests are one execution, of a model that can't share one, too; and five rows are refused."""
    dense(tmp_path / "models" / "dense")
    (tmp_path / "models" / "dense" / "config.pbtxt").write_text("max_batch_size: 4")
    async with serving(tmp_path, dense) as served:
        await served.loaded("dense")
        await served.together("dense", *inputs(4))
        assert (served.stats("dense").execution_count, served.stats("dense").batching) == (1, "")
        with pytest.raises(MmeError, match="batch-size must be <= 4"):
            served.ask("dense", x=inputs(1, rows=5)[0])


ENSEMBLE = """
platform: "ensemble"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1, 4 ] } ]
ensemble_scheduling { step [ { model_name: "cumulative_sum" input_map { key: "x" value: "X" }
  output_map { key: "y" value: "Y" } } ] }
"""


async def test_a_step_of_an_ensemble_is_found_out_as_well(tmp_path):
    """Requests through an ensemble get their own numbers."""
    async with serving(tmp_path, cumulative_sum) as served:
        folder = tmp_path / "models" / "pipeline"
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(ENSEMBLE)
        await served.loaded("pipeline")
        rows = [inputs(1, number, rows=3)[0] for number in range(8)]
        for x, answer in [(x, served.ask("pipeline", X=x)) for x in rows]:
            result = await answer
            assert not isinstance(result, MmeError), result
            np.testing.assert_allclose(result.outputs[0][2], np.cumsum(x, axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (1,)])
async def test_a_scalar_has_no_dimension_or_one(tmp_path, shape):
    """As the model declares it, and as Triton does."""
    async with serving(tmp_path, scaled) as served:
        await served.loaded("scaled")
        x = np.array([1, 2], "f4")
        answer = await served.ask("scaled", x=x, times=np.full(shape, 3))
        assert answer.outputs[0][2].tolist() == [3, 6]
        with pytest.raises(MmeError, match=r"Expected \[1\], got \[2\]"):
            served.ask("scaled", x=x, times=np.array([3, 4]))


IN_A_PROCESS = 'backend: "onnxruntime" parameters { key: "MME_PLACEMENT" value: { string_value: "process" } }'


async def test_models_in_processes_of_their_own_are_found_out_as_well(tmp_path, fork_server):
    """They are sent batches ahead once those are proven."""
    for write in (cumulative_sum, dense):
        write(tmp_path / "models" / write.__name__)
        (tmp_path / "models" / write.__name__ / "config.pbtxt").write_text(IN_A_PROCESS)
    async with serving(tmp_path, cumulative_sum, dense) as served:
        await served.loaded("cumulative_sum", "dense")
        for name, found in (("cumulative_sum", "refuted"), ("dense", "proven")):
            for number in range(6):
                await served.together(name, *inputs(9, number))
            assert served.stats(name).batching == found
        assert served.stats("cumulative_sum").execution_count == 54
        assert served.stats("dense").execution_count < 40
