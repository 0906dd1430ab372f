"""From files to a target model that executes: versions, lanes, what it takes, and what is left when a part fails."""

import _thread
import asyncio
import contextlib
import errno
import itertools
import os
import threading
from dataclasses import replace

import pytest

from model_handlers import onnx
from model_handlers.base import CPU, Device, Footprint, Placement, Traits
from model_handlers.errors import Kind, MmeError
from model_handlers.system import devices
from model_handlers.system.threads import NEVER, CancelToken
from serve.loading import measuring
from serve.loading.loader import ModelLoader, Target
from serve.model.model import Model
from serve.sources.source import InRepository, Unpacked
from serve.statistics import ModelStats
from tests.serve.inside import lanes_of


def loaded(loader, source, name="m"):
    """A target model, started, and what it takes."""
    resident, footprint = loader.load(loader.prepare(name, source, NEVER))
    resident.start()
    return resident, footprint


@contextlib.asynccontextmanager
async def serving(source):
    """A started target over a source."""
    loader = ModelLoader(asyncio.get_running_loop(), {})
    resident, _ = loaded(loader, source)
    try:
        yield resident
    finally:
        await asyncio.to_thread(resident.close)


@pytest.fixture
def counted(monkeypatch):
    """How many ONNX handlers are loaded and closed, of the real class."""

    class Counts:
        loaded = closed = 0

    load, close = onnx.OnnxHandler.load, onnx.OnnxHandler.close

    def counting_load(*args):
        handler = load(*args)
        Counts.loaded += 1
        return handler

    def counting_close(self):
        Counts.closed += 1
        close(self)

    monkeypatch.setattr(onnx.OnnxHandler, "load", staticmethod(counting_load))
    monkeypatch.setattr(onnx.OnnxHandler, "close", counting_close)
    return Counts


async def product(model, toys, number=3):
    """What a version makes of `number`."""
    call = toys.Call(number)
    model.submit(call.request)
    response = await call.answer()
    assert not isinstance(response, MmeError), response
    assert response.model_version == str(model.version)
    return response.outputs[0][2][0, 0]


@pytest.mark.parametrize(
    ("policy", "served", "latest"),
    [
        ("", [3], 3),
        ("version_policy { all {} }", [1, 2, 3], 3),
        ("version_policy { latest { num_versions: 2 } }", [2, 3], 3),
        ("version_policy { specific { versions: [1, 2] } }", [1, 2], 2),
    ],
    ids=["default", "all", "latest", "specific"],
)
async def test_the_version_policy_says_which_versions_execute(
    toys, tmp_path, write_repository_model, policy, served, latest
):
    """Each selected version executes its own file; a request that names none gets the latest of them."""
    folder = write_repository_model(tmp_path / "m", policy, versions=(1, 2, 3))
    async with serving(InRepository(folder)) as resident:
        assert sorted(resident.versions) == served
        for version in served:
            assert await product(resident.version(version), toys) == 3 * (version + 1)
        assert resident.version(None).version == latest
        for unknown in (0, 9):
            with pytest.raises(MmeError, match=f"version {unknown} is not found; served versions are") as caught:
                resident.version(unknown)
            assert caught.value.kind is Kind.UNKNOWN_VERSION


async def test_lanes_on_one_device_share_the_weights(toys, tmp_path, write_repository_model, counted):
    """Three instances on the CPU are three lanes over one session, named after their group."""
    config = "instance_group [ { count: 2 kind: KIND_CPU }, { name: 'more' kind: KIND_CPU } ]"
    folder = write_repository_model(tmp_path / "m", config)
    loader = ModelLoader(asyncio.get_running_loop(), {})
    prepared = loader.prepare("m", InRepository(folder), NEVER)
    assert prepared.lanes == [("m_0_0", CPU), ("m_0_1", CPU), ("more_0", CPU)]
    async with serving(InRepository(folder)) as resident:
        assert counted.loaded == 1
        assert lanes_of(resident.latest) == ["m_0_0", "m_0_1", "more_0"]
        assert await product(resident.latest, toys) == 6
    assert (counted.loaded, counted.closed) == (1, 1)


async def test_a_footprint_is_never_less_than_the_file(tmp_path, write_repository_model):
    """The estimate is the file's size times the handler's factor; what is measured is at least the file's size."""
    folder = write_repository_model(tmp_path / "m", weights=4_000_000)
    size = (folder / "1" / "model.onnx").stat().st_size
    loader = ModelLoader(asyncio.get_running_loop(), {})
    prepared = loader.prepare("m", InRepository(folder), NEVER)
    assert prepared.estimate == Footprint(
        int(size * onnx.OnnxHandler.traits(prepared.directory.config, folder).estimate_factor)
    )
    assert prepared.download_ns == 0
    resident, footprint = loaded(loader, InRepository(folder))
    assert size <= footprint.host
    assert footprint.device == 0
    await asyncio.to_thread(resident.close)


@pytest.mark.parametrize(("placement", "alone"), [("inline", True), ("process", False)])
async def test_what_is_measured_by_this_process_is_loaded_alone(tmp_path, write_repository_model, placement, alone):
    """A model in a process of its own tells what it takes; others could not be told apart."""
    config = f'parameters {{ key: "MME_PLACEMENT" value {{ string_value: "{placement}" }} }}'
    folder = write_repository_model(tmp_path / "m", config)
    prepared = ModelLoader(asyncio.get_running_loop(), {}).prepare("m", InRepository(folder), NEVER)
    assert prepared.needs_exclusive_load is alone
    assert replace(prepared, lanes=[("m_0", Device("gpu", 0))]).needs_exclusive_load
    inline = replace(prepared, placement=Placement.INLINE)
    assert replace(prepared, members=(inline,)).needs_exclusive_load


@pytest.mark.parametrize("often", ["batch_size: 1 count: 100000", "batch_size: 65536"])
async def test_a_load_that_nobody_wants_any_more_stops_between_warm_up_executions(
    often, tmp_path, write_repository_model, counted
):
    """A model that takes for ever to warm up could never be loaded again, and kept a processor busy for good."""
    tensors = "".join(
        f'{what} {{ name: "{name}" data_type: TYPE_FP32 dims: [ -1, 2 ] }}\n'
        for what, name in (("input", "x"), ("output", "y"))
    )
    sample = f'{often} inputs {{ key: "x" value: {{ data_type: TYPE_FP32 dims: [ 1, 2 ] zero_data: true }} }}'
    folder = write_repository_model(tmp_path / "m", f'{tensors}model_warmup {{ name: "w" {sample} }}')
    loader = ModelLoader(asyncio.get_running_loop(), {})
    prepared = loader.prepare("m", InRepository(folder), NEVER)
    asked = itertools.count()
    with pytest.raises(MmeError) as caught:
        loader.load(prepared, CancelToken("model 'm'", lambda: next(asked) > 5))
    assert caught.value.kind is Kind.CANCELLED
    assert (counted.loaded, counted.closed) == (1, 1)


async def test_a_load_that_nobody_wants_any_more_stops_between_versions(tmp_path, write_repository_model, counted):
    """What was loaded by then is closed."""
    folder = write_repository_model(tmp_path / "m", "version_policy { all {} }", versions=(1, 2, 3))
    loader = ModelLoader(asyncio.get_running_loop(), {})
    prepared = loader.prepare("m", InRepository(folder), NEVER)
    with pytest.raises(MmeError) as caught:
        loader.load(prepared, CancelToken("model 'm'", lambda: counted.loaded == 2))
    assert caught.value.kind is Kind.CANCELLED
    assert (counted.loaded, counted.closed) == (2, 2)


async def test_what_was_measured_is_expected_next_time(tmp_path, write_repository_model):
    """The same files are expected to take what they took, wherever they lie; changed ones are strangers again."""
    folder = write_repository_model(tmp_path / "a" / "m", weights=2_000_000)
    loader = ModelLoader(asyncio.get_running_loop(), {})
    resident, footprint = loaded(loader, InRepository(folder))
    await asyncio.to_thread(resident.close)
    moved = folder.rename(tmp_path / "m")
    same = loader.prepare("m", InRepository(moved), NEVER)
    assert same.estimate == footprint
    assert loader.prepare("other", Unpacked(tmp_path / "m", "anything"), NEVER).estimate == footprint
    (moved / "config.pbtxt").write_text("max_batch_size: 0")
    assert loader.prepare("m", InRepository(moved), NEVER).identity != same.identity


async def test_the_same_archive_run_elsewhere_is_another_thing(tmp_path, write_repository_model):
    """What a model takes in one instance says nothing of two instances in processes of their own."""
    folder = write_repository_model(tmp_path / "m", "instance_group { count: 1 }")
    loader = ModelLoader(asyncio.get_running_loop(), {})
    one = loader.prepare("m", InRepository(folder), NEVER)
    (folder / "config.pbtxt").write_text("instance_group { count: 2 }")
    two = loader.prepare("m", InRepository(folder), NEVER)
    assert one.identity.split()[1:] == ["inline", "cpu"]
    assert two.identity.split()[1:] == ["inline", "cpu,cpu"]


@pytest.mark.parametrize(("text", "pinned"), [("", False), ("true", True), (" True", True), ("false", False)])
async def test_a_model_may_ask_to_stay_in_memory(tmp_path, write_repository_model, text, pinned, caplog):
    """The parameter MME_PIN of its configuration pins a model, and is not taken for one of the framework's."""
    config = f'parameters {{ key: "MME_PIN" value {{ string_value: "{text}" }} }}' if text else ""
    folder = write_repository_model(tmp_path / "m", config)
    loader = ModelLoader(asyncio.get_running_loop(), {})
    prepared = loader.prepare("m", InRepository(folder), NEVER)
    assert prepared.pinned is pinned
    resident, _ = loader.load(prepared)
    await asyncio.to_thread(resident.close)
    assert caplog.records == []


async def test_an_ensemble_may_ask_to_stay_in_memory(tmp_path, write_repository_model):
    """By its own configuration, as any other model."""
    write_repository_model(tmp_path / "part")
    whole = tmp_path / "whole"
    (whole / "1").mkdir(parents=True)
    x, y = (f'{{ name: "{name}" data_type: TYPE_FP32 dims: [ 2 ] }}' for name in "xy")
    maps = 'input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }'
    (whole / "config.pbtxt").write_text(
        f'platform: "ensemble" max_batch_size: 4 input {x} output {y} '
        f'ensemble_scheduling {{ step {{ model_name: "part" model_version: -1 {maps} }} }} '
        'parameters { key: "MME_PIN" value { string_value: "true" } }'
    )
    loader = ModelLoader(asyncio.get_running_loop(), {})
    assert loader.prepare("whole", InRepository(whole), NEVER).pinned


async def test_a_model_whose_parameters_or_configuration_are_called_otherwise_is_loaded(
    tmp_path, write_repository_model, caplog
):
    """The log tells what does not count, once."""
    mistyped = write_repository_model(
        tmp_path / "mistyped", 'parameters { key: "MME_PINN" value { string_value: "true" } }'
    )
    misnamed = write_repository_model(tmp_path / "misnamed")
    (misnamed / "config.pbtxt.txt").write_text("max_batch_size: 8")
    loader = ModelLoader(asyncio.get_running_loop(), {})
    for path in (mistyped, misnamed) * 2:
        assert not loader.prepare(path.name, InRepository(path), NEVER).pinned
    assert [record.getMessage() for record in caplog.records if record.name == "mme.load"] == [
        "parameter 'MME_PINN' means nothing to the server; did you mean MME_PIN?",
        "model 'misnamed': config.pbtxt.txt is not read: rename it to config.pbtxt",
    ]


async def test_a_pin_that_is_neither_true_nor_false_is_refused(tmp_path, write_repository_model):
    """The sentence names the model, the parameter and what it may be."""
    config = 'parameters { key: "MME_PIN" value { string_value: "yes" } }'
    source = InRepository(write_repository_model(tmp_path / "m", config))
    loader = ModelLoader(asyncio.get_running_loop(), {})
    with pytest.raises(MmeError, match="model 'm': parameter 'MME_PIN' must be 'true' or 'false', got 'yes'") as no:
        loader.prepare("m", source, NEVER)
    assert no.value.kind is Kind.INVALID_MODEL


async def test_what_loading_needs_for_a_while_is_not_the_models(tmp_path, write_repository_model, monkeypatch):
    """Memory that a load freed again, and that the allocator still holds, does not count as the model's."""
    load = onnx.OnnxHandler.load

    def wasteful(*args):
        blocks = [b"x" * (100_000 + index) for index in range(640)]
        handler = load(*args)
        handler.pin = blocks.pop()  # what lies below it is free, and still with the allocator
        return handler

    monkeypatch.setattr(onnx.OnnxHandler, "load", staticmethod(wasteful))
    source = InRepository(write_repository_model(tmp_path / "m"))
    loader = ModelLoader(asyncio.get_running_loop(), {})
    resident, footprint = await asyncio.to_thread(loaded, loader, source)
    assert footprint.host < 32_000_000
    await asyncio.to_thread(resident.close)


async def test_counters_outlive_the_model(toys, tmp_path, write_repository_model):
    """A model loaded anew goes on counting where it left."""
    source = InRepository(write_repository_model(tmp_path / "m"))
    stats = {}
    loader = ModelLoader(asyncio.get_running_loop(), stats)
    for round_ in (1, 2):
        resident, _ = loaded(loader, source)
        await product(resident.latest, toys)
        assert stats["m", 1].success.count == round_
        await asyncio.to_thread(resident.close)


async def test_a_version_that_fails_takes_the_loaded_ones_with_it(tmp_path, write_repository_model, counted):
    """If the second version does not load, the first is closed and the error is the second's own."""
    folder = write_repository_model(tmp_path / "m", "version_policy { all {} }", versions=(1, 2))
    (folder / "2" / "model.onnx").write_bytes(b"no graph")
    loader = ModelLoader(asyncio.get_running_loop(), {})
    prepared = loader.prepare("m", InRepository(folder), NEVER)
    with pytest.raises(MmeError, match="ONNX Runtime can't load model 'm'") as caught:
        loader.load(prepared)
    assert caught.value.kind is Kind.INVALID_MODEL
    assert (counted.loaded, counted.closed) == (1, 1)
    assert loader.scales.weigh(lambda: 1)[0] == 1  # nobody else holds them


async def test_what_can_not_be_measured_is_closed(tmp_path, write_repository_model, counted, monkeypatch):
    """A load that went well and whose memory can't be told ends with that error, and holds nothing."""
    taken = devices.device_memory_used

    def out_of_descriptors():
        if counted.loaded:
            raise OSError(errno.EMFILE, "Too many open files")
        return taken()

    monkeypatch.setattr(devices, "device_memory_used", out_of_descriptors)
    loader = ModelLoader(asyncio.get_running_loop(), {})
    prepared = loader.prepare("m", InRepository(write_repository_model(tmp_path / "m")), NEVER)
    with pytest.raises(OSError, match="Too many open files"):
        loader.load(prepared)
    assert (counted.loaded, counted.closed) == (1, 1)
    monkeypatch.undo()
    assert loader.scales.weigh(lambda: 1)[0] == 1  # nobody else holds them


async def test_a_handler_that_fails_in_its_warm_up_is_closed(tmp_path, write_repository_model, counted, monkeypatch):
    """What no handler should raise ends the load, and the memory that was taken by then is given back."""

    def fail(self, inputs, outputs):
        raise RuntimeError("no handler should")

    monkeypatch.setattr(onnx.OnnxHandler, "execute", fail)
    loader = ModelLoader(asyncio.get_running_loop(), {})
    prepared = loader.prepare("m", InRepository(write_repository_model(tmp_path / "m")), NEVER)
    with pytest.raises(RuntimeError, match="no handler should"):
        loader.load(prepared)
    assert (counted.loaded, counted.closed) == (1, 1)


async def test_a_model_that_refuses_zeros_is_served(toys, tmp_path, write_repository_model, monkeypatch):
    """A warm-up that fails is no reason to refuse the model."""
    execute = onnx.OnnxHandler.execute

    def picky(self, inputs, outputs):
        if not inputs["x"].any():
            raise MmeError(Kind.EXECUTION_FAILED, "zeros")
        return execute(self, inputs, outputs)

    monkeypatch.setattr(onnx.OnnxHandler, "execute", picky)
    async with serving(InRepository(write_repository_model(tmp_path / "m"))) as resident:
        assert await product(resident.latest, toys) == 6


async def test_the_handler_is_warm_before_its_first_request(toys, tmp_path, write_repository_model, monkeypatch):
    """Each device's handler executes zeros once for its load, and handlers of foreign code do not."""
    seen = []
    execute = onnx.OnnxHandler.execute

    def noting(self, inputs, outputs):
        seen.append(inputs["x"].tolist())
        return execute(self, inputs, outputs)

    monkeypatch.setattr(onnx.OnnxHandler, "execute", noting)
    source = InRepository(write_repository_model(tmp_path / "m"))
    async with serving(source):
        assert seen == [[[0, 0]]]
    monkeypatch.setattr(onnx.OnnxHandler, "traits", lambda _config, _file: Traits())
    async with serving(source):
        assert len(seen) == 1


async def test_closing_closes_every_version_though_one_raises(toys):
    """The error of one version's handler does not keep another version in memory."""

    class Broken(toys.Scripted):
        def close(self):
            super().close()
            raise OSError("stuck")

    handlers = [Broken(toys.config()), toys.Scripted(toys.config()), Broken(toys.config())]
    loop = asyncio.get_running_loop()
    versions = {
        number: Model("m", number, [(f"m_{number}", handler)], ModelStats(), loop)
        for number, handler in enumerate(handlers, 1)
    }
    resident = Target("m", versions)
    assert repr(resident) == "<Target m: versions [1, 2, 3]>"
    resident.start()
    with pytest.raises(OSError, match="stuck"):
        await asyncio.to_thread(resident.close)
    assert [handler.closed for handler in handlers] == [1, 1, 1]


@pytest.mark.parametrize("source", [InRepository, lambda path: Unpacked(path, str(path))], ids=["repository", "folder"])
async def test_a_model_for_another_backend_is_refused_before_memory_is_asked_for(tmp_path, source):
    """`prepare` says that it is none."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.plan").write_bytes(b"")
    (tmp_path / "m" / "config.pbtxt").write_text('platform: "no_such_thing"')
    with pytest.raises(MmeError) as caught:
        ModelLoader(asyncio.get_running_loop(), {}).prepare("m", source(tmp_path / "m"), NEVER)
    assert caught.value.kind is Kind.INVALID_MODEL


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority")
def test_threads_of_a_framework_get_their_priority_back_and_loaders_do_not():
    """After a load, what a framework started runs at full priority; another load thread that began meanwhile stays."""
    nice = {}
    lowered, go, ended = threading.Barrier(3), threading.Event(), threading.Barrier(3)

    def work(name):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        lowered.wait(60)
        go.wait(60)
        nice[name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        ended.wait(60)

    def load():
        loader.start()
        _thread.start_new_thread(work, ("framework",))  # as C++ starts its own: Python has no object for it
        lowered.wait(60)

    loader = threading.Thread(target=work, args=("loader",))
    measuring.Scales().weigh(load)
    go.set()
    ended.wait(60)
    loader.join()
    assert nice == {"loader": 10, "framework": 0}
