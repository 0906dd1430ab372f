"""A server in the test's own process: from threads, from coroutines, to its end."""

import asyncio
import tarfile
import threading
import time

import numpy as np
import pytest

import mme
from mme.requests import tensors_of
from tests.mme.models import (
    write_adding,
    write_counting,
    write_doubling,
    write_ensemble,
    write_slow,
)

pytestmark = pytest.mark.usefixtures("fork_server")
X = np.arange(3, dtype=np.float32)


@pytest.fixture
def repository(tmp_path):
    """A folder of models."""
    folder = tmp_path / "models"
    write_doubling(folder, "doubles")
    return folder


def test_a_thread_is_answered_by_models_of_all_kinds(repository):
    """A model in this process, one in a process of its own, and an ensemble of both."""
    write_adding(repository, "adds")
    write_ensemble(repository, "both", "doubles", "adds")
    with mme.Server(repository) as server:
        for name, expected in (("doubles", 2 * X), ("adds", X + 1), ("both", 2 * X + 1)):
            outputs = server.model(name).infer({"x": X}, id="7")
            np.testing.assert_array_equal(outputs["y"], expected)
            assert (outputs.model, outputs.version, outputs.id) == (name, 1, "7")


def test_outputs_stay_as_they_are(repository):
    """What a process has answered is not overwritten by what it answers next."""
    write_adding(repository, "adds")
    with mme.Server(repository) as server:
        given = [np.full(50_000, number, np.float32) for number in range(8)]
        answers = [server.model("adds").infer({"x": each})["y"] for each in given]
    for each, answer in zip(given, answers, strict=True):
        np.testing.assert_array_equal(answer, each + 1)


def test_what_a_caller_writes_into_its_outputs_no_other_one_reads(repository):
    """Neither the response that the cache keeps, nor one that comes out of it, is changed by what its caller does to it."""
    config = repository / "doubles" / "config.pbtxt"
    config.write_text(f"{config.read_text()} response_cache {{ enable: true }}")
    with mme.Server(repository) as server:
        model = server.model("doubles")
        for number in range(
            20
        ):  # kept and written into at the same time, each large enough to be copied without the GIL
            given = np.full(50_000, number, np.float32)
            for _ in range(3):
                answer = model.infer({"x": given})["y"]
                np.testing.assert_array_equal(answer, 2 * given)
                answer.fill(-1)


def test_what_a_thread_asks_without_waiting_shares_a_batch(repository):
    """Requests that one thread submits one behind the other, while the loop is busy, are executed together."""
    write_doubling(repository, "rows", batch=64)
    config = repository / "rows" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_queue_delay_microseconds: 20000", ""))
    rows = {"x": X.reshape(1, 3)}

    async def executions(server):
        (row,) = [each for each in await server.statistics_async() if each["name"] == "rows"]
        return int(row["execution_count"])

    async def ask():
        async with mme.Server(repository) as server:
            model, asked = server.model("rows"), []
            await asyncio.to_thread(lambda: [model.infer(rows) for _ in range(9)])
            before = await executions(server)
            asks = threading.Thread(target=lambda: asked.extend([model.submit(rows) for _ in range(64)]))
            asks.start()
            asks.join()  # on the loop, which is busy with that
            await asyncio.gather(*(asyncio.wrap_future(each) for each in asked))
            return await executions(server) - before

    assert asyncio.run(ask()) == 1


def test_threads_batch(repository):
    """Requests of four threads that come together execute together."""
    write_doubling(repository, "rows", batch=8)
    with mme.Server(repository) as server:
        model, together = server.model("rows"), threading.Barrier(4)

        def ask(number):
            row = np.full((1, 3), number, np.float32)
            for _ in range(5):
                together.wait()
                np.testing.assert_array_equal(model.infer({"x": row})["y"], 2 * row)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (row,) = [each for each in server.statistics() if each["name"] == "rows"]
    assert row["inference_count"] == 20
    assert row["execution_count"] < 20


async def test_a_task_that_asks_alone_leaves_the_loop_its_turns(repository):
    """Its requests need not wait for company, but other callbacks are called between them; those of many tasks batch."""
    write_doubling(repository, "rows", batch=8)
    async with mme.Server(repository) as server:
        doubles, turns = server.model("doubles"), []

        def turn():
            turns.append(len(turns))
            ticks[0] = asyncio.get_running_loop().call_soon(turn)

        for _ in range(20):  # it is loaded, and known to be quick
            await doubles.infer_async({"x": X})
        ticks = [asyncio.get_running_loop().call_soon(turn)]
        for number in range(1000):
            assert (await doubles.infer_async({"x": X + number}))["y"].tolist() == (2 * (X + number)).tolist()
        ticks[0].cancel()
        assert len(turns) > 10
        row = np.ones((1, 3), np.float32)
        await asyncio.gather(*(server.model("rows").infer_async({"x": row}) for _ in range(40)))
        (counted,) = [each for each in await server.statistics_async() if each["name"] == "rows"]
    assert counted["inference_count"] == 40
    assert counted["execution_count"] < 20


async def test_coroutines_on_the_loop_of_the_server(repository):
    """Two hundred at once, each with its own answer; what would block the loop is refused."""
    write_adding(repository, "adds")
    async with mme.Server(repository) as server:
        for name, add, factor in (("doubles", 0, 2), ("adds", 1, 1)):
            model = server.model(name)
            given = [np.full(4, number, np.float32) for number in range(100)]
            answers = await asyncio.gather(*(model.infer_async({"x": each}) for each in given))
            for each, answer in zip(given, answers, strict=True):
                np.testing.assert_array_equal(answer["y"], factor * each + add)
        with pytest.raises(RuntimeError, match="await the form that ends in _async"):
            server.model("doubles").infer({"x": X})
        with pytest.raises(RuntimeError, match="await the form that ends in _async"):
            server.index()
        with pytest.raises(mme.Error, match="unknown model") as caught:
            await server.model("nothing").infer_async({"x": X})
        assert caught.value.kind is mme.Kind.UNKNOWN_MODEL
        assert [row["state"] for row in await server.index_async()] == ["READY", "READY"]
        assert await server.is_ready_async("adds")
        await server.unload_async("adds")
        assert not await server.is_ready_async("adds")


def test_coroutines_on_another_loop(repository):
    """The server's thread answers a program of asyncio, and a future of any thread."""
    with mme.Server(repository) as server:
        model = server.model("doubles")

        async def ask():
            answers = await asyncio.gather(*(model.infer_async({"x": X + number}) for number in range(20)))
            return [answer["y"].tolist() for answer in answers], await server.config_async("doubles")

        answers, config = asyncio.run(ask())
        assert answers == [(2 * (X + number)).tolist() for number in range(20)]
        assert config["name"] == "doubles"
        assert model.submit({"x": X}).result()["y"].tolist() == (2 * X).tolist()
        with pytest.raises(mme.Error, match="unexpected inference input 'z'"):
            model.submit({"z": X}).result()


def test_a_stream_has_each_response(repository):
    """A decoupled model answers any number of times, another one once; an error ends it."""
    write_counting(repository, "counts")
    with mme.Server(repository) as server:
        counts = server.model("counts")
        assert [each["y"].tolist() for each in counts.stream({"x": X})] == [[0.0], [1.0], [2.0]]
        assert [each["y"].tolist() for each in server.model("doubles").stream({"x": X})] == [(2 * X).tolist()]
        assert list(counts.stream({"x": np.empty(0, np.float32)})) == []
        with pytest.raises(mme.Error, match="a negative one"):
            list(counts.stream({"x": np.float32([0, 1, -1, 2])}))
        assert counts.infer({"x": X[:1]})["y"].tolist() == [0.0]
        for many, elements in (("none", 0), ("several", 3)):
            with pytest.raises(mme.Error, match=f"sent {many}, not one response: call `stream`") as caught:
                counts.infer({"x": X[:elements]})
            assert caught.value.kind is mme.Kind.UNSUPPORTED

        async def read():
            return [each["y"].tolist() async for each in counts.stream_async({"x": X})]

        assert asyncio.run(read()) == [[0.0], [1.0], [2.0]]
        for each in counts.stream({"x": np.arange(1000, dtype=np.float32)}):
            assert each["y"].tolist() == [0.0]
            break  # and the model's next answer goes nowhere
        assert [each["y"].tolist() for each in counts.stream({"x": X})] == [[0.0], [1.0], [2.0]]


def test_a_stream_that_is_not_read_ends(repository):
    """Responses of 64 MiB wait for a slow caller, and no more."""
    write_counting(repository, "counts")
    with mme.Server(repository) as server:
        elements = np.full(2500, 8191, np.float32)  # as many responses of 32 KiB
        stream = server.model("counts").stream({"x": elements})
        next(stream)
        counted = server.statistics
        while sum(row["execution_count"] for row in counted() if row["name"] == "counts") < 1:
            time.sleep(0.05)
        with pytest.raises(mme.Error, match="64 MiB of responses are unread"):
            list(stream)


def test_a_request_is_cancelled(repository):
    """By its future, by the task that waits for it, or by its time in the queue."""
    write_slow(repository, "sleeps")
    with mme.Server(repository) as server:
        sleeps = server.model("sleeps")
        sleeps.infer({"x": np.float32([0])})
        first = sleeps.submit({"x": np.float32([0.5])})
        queued = sleeps.submit({"x": np.float32([30])})
        assert queued.cancel()
        assert queued.cancelled()

        async def ask():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await sleeps.infer_async({"x": np.float32([30])})

        asyncio.run(ask())
        assert first.result()["y"].tolist() == [0.5]
        assert sleeps.infer({"x": np.float32([0])})["y"].tolist() == [0]  # no thirty seconds were slept


def test_models_are_loaded_with_another_configuration_and_unloaded(repository):
    """As by Triton's load API; the index tells of it."""
    with mme.Server(repository, load_models=["doubles"]) as server:
        assert server.index()[0]["state"] == "READY"
        config = server.config("doubles")
        assert config["max_batch_size"] == 0
        server.load("doubles", {**config, "parameters": {"own": {"string_value": "told"}}})
        assert server.config("doubles")["parameters"]["own"]["string_value"] == "told"
        server.load("doubles")
        assert "own" not in server.config("doubles")["parameters"]
        server.unload("doubles")
        assert not server.is_ready("doubles")
        assert server.model("doubles").infer({"x": X})["y"].tolist() == (2 * X).tolist()
        with pytest.raises(mme.Error, match="'config' must be specified"):
            server.load("doubles", files={"1/model.onnx": b""})


def test_one_name_is_not_read_as_letters(repository):
    """Of models to load, and of outputs that are wanted."""
    with mme.Server(repository, load_models="doubles") as server:
        assert server.index()[0]["state"] == "READY"
        assert list(server.model("doubles").infer({"x": X}, outputs="y")) == ["y"]


def test_what_has_no_room_is_told_by_the_arguments_name(repository):
    """The variable of the container is none of this process."""
    with mme.Server(repository, memory_budget=1000) as server:
        for ask in (lambda: server.model("doubles").infer({"x": X}), lambda: server.load("doubles")):
            with pytest.raises(mme.Error, match=r"\bmemory_budget\b") as caught:
                ask()
            assert caught.value.kind is mme.Kind.OUT_OF_MEMORY
            assert "MME_" not in caught.value.message


def test_what_goes_wrong_inside_is_logged_with_its_traceback(repository, caplog):
    """The caller has its last line."""
    with mme.Server(repository) as server, pytest.raises(mme.Error, match="AttributeError") as caught:
        server.model(3).infer({"x": X})

    assert caught.value.kind is mme.Kind.INTERNAL
    assert [record.exc_info[0] for record in caplog.records if record.name == "mme.errors"] == [AttributeError]


def test_archives_of_a_store_leave_when_memory_fills(repository, tmp_path):
    """The one used least recently, and it comes back when it is asked for again."""
    for number in range(4):
        write_adding(tmp_path / "unpacked", f"m{number}")
    store = tmp_path / "store"
    store.mkdir()
    for folder in (tmp_path / "unpacked").iterdir():
        with tarfile.open(store / f"{folder.name}.tar.gz", "w:gz") as archive:
            archive.add(folder, folder.name)
    with mme.Server(model_store=store, memory_budget="14MB", cache_directory=tmp_path / "cache") as server:
        for _ in range(2):
            for number in range(4):
                answer = server.model(f"m{number}.tar.gz").infer({"x": X})
                np.testing.assert_array_equal(answer["y"], X + 1)
        ready = [row["name"] for row in server.index() if row["state"] == "READY" and row["cache"]["host_bytes"]]
        assert 1 <= len(ready) < 4
    assert (tmp_path / "cache").is_dir()


def test_what_can_not_be_begun_is_said(tmp_path, repository):
    """In one sentence, and nothing stays behind."""
    with pytest.raises(mme.Error, match="either model_repository or model_store"):
        mme.Server()
    with pytest.raises(mme.Error, match="there is no folder"):
        mme.Server(tmp_path / "missing")
    with pytest.raises(mme.Error, match="memory_budget='much': a size such as"):
        mme.Server(repository, memory_budget="much")
    with pytest.raises(mme.Error, match="'missing' is not found"):
        mme.Server(repository, load_models=["missing"]).start()
    server = mme.Server(repository)
    with pytest.raises(mme.Error, match="has not begun"):
        server.index()
    model = server.start().model("doubles")
    server.close()
    server.close()
    for ask in (lambda: model.infer({"x": X}), server.index, lambda: model.submit({"x": X})):
        with pytest.raises(mme.Error, match="the server is closed"):
            ask()
    with server:  # and it begins again
        assert server.model("doubles").infer({"x": X})["y"].tolist() == (2 * X).tolist()


def test_two_servers_in_one_process(repository, tmp_path):
    """Each has models of its own; the end of one is not that of the other."""
    write_adding(repository, "adds")
    write_doubling(tmp_path / "others", "doubles", factor=3.0)
    write_adding(tmp_path / "others", "adds")
    with mme.Server(repository) as one:
        with mme.Server(tmp_path / "others") as other:
            assert other.model("doubles").infer({"x": X})["y"].tolist() == (3 * X).tolist()
            assert one.model("doubles").infer({"x": X})["y"].tolist() == (2 * X).tolist()
            assert other.model("adds").infer({"x": X})["y"].tolist() == (X + 1).tolist()
            assert one.model("adds").infer({"x": X})["y"].tolist() == (X + 1).tolist()
        assert one.model("adds").infer({"x": X})["y"].tolist() == (X + 1).tolist()


async def test_requests_under_way_are_answered_at_the_end(repository):
    """Those that execute have their answers; the queue's are refused; nothing hangs."""
    write_slow(repository, "sleeps")
    async with mme.Server(repository) as server:
        sleeps = server.model("sleeps")
        await sleeps.infer_async({"x": np.float32([0])})
        first = asyncio.ensure_future(sleeps.infer_async({"x": np.float32([0.3])}))
        await asyncio.sleep(0.1)
    assert (await first)["y"].tolist() == [np.float32(0.3)]


def test_a_server_is_closed_by_several_threads_while_others_call_it(repository):
    """Each call ends with an answer or `mme.Error`, each close when all is closed."""
    server = mme.Server(repository).start()
    doubles, ended = server.model("doubles"), []
    calls = [
        lambda: doubles.infer({"x": X}),
        lambda: list(doubles.stream({"x": X})),
        lambda: server.load("doubles"),
        server.index,
    ]

    def ask(call):
        try:
            while True:
                call()
        except mme.Error:
            ended.append(call)

    threads = [threading.Thread(target=ask, args=(call,), daemon=True) for call in calls]
    threads += [threading.Thread(target=server.close, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert len(ended) == len(calls)


async def test_a_server_is_closed_from_elsewhere(repository):
    """One on a loop by a thread, one on a thread by a coroutine."""
    async with mme.Server(repository) as server:
        assert (await server.model("doubles").infer_async({"x": X}))["y"].tolist() == (2 * X).tolist()
        await asyncio.to_thread(server.close)
        with pytest.raises(mme.Error, match="the server is closed"):
            await server.index_async()
    server.start()
    await server.close_async()
    with pytest.raises(mme.Error, match="the server is closed"):
        server.index()


def test_a_server_begins_once(repository):
    """A second time is refused, and the first goes on."""
    with mme.Server(repository) as server:
        with pytest.raises(mme.Error, match="the server has begun already"):
            server.start()
        with pytest.raises(mme.Error, match="queue_timeout"):
            server.model("doubles").infer({"x": X}, queue_timeout=float("inf"))
        assert server.model("doubles").infer({"x": X})["y"].tolist() == (2 * X).tolist()


class Foreign:
    """A tensor of another library."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **how):
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_tensors_are_not_copied():
    """Neither numpy's nor those of other libraries; strings become bytes, big-endian numbers the machine's."""
    layout, arrays = tensors_of({"a": X, "b": Foreign(X), "c": ["one", b"two\0"], "d": X.astype(">f4")}, ("y",))
    assert arrays[0] is X
    assert np.shares_memory(arrays[1], X)
    assert arrays[2].tolist() == [b"one", b"two\0"]
    assert arrays[3].tolist() == X.tolist()
    assert [(name, kind.name) for name, kind, _ in layout.inputs] == [
        ("a", "FP32"),
        ("b", "FP32"),
        ("c", "BYTES"),
        ("d", "FP32"),
    ]
    with pytest.raises(mme.Error, match="input 'a' has an element of type NoneType"):
        tensors_of({"a": [None, "x"]}, ())
    with pytest.raises(mme.Error, match="elements of type complex128"):
        tensors_of({"a": [1j]}, ())
