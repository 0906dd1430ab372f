"""Weights once, in a real engine: mapped at the first load, shared, refined, packed while hot, given back when not."""

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError
from model_handlers.system.threads import NEVER
from serve.cache.entry import State
from serve.options import Weights
from serve.weights import refining, store
from serve.weights.forms import Tier
from tests.serve.inside import changes_nothing, idle_for_long, loader_of, ticks_of, turn, watched_by, weights_of
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def expected(write, answer):
    """What a model that is there answers."""
    write()
    return answer


def parameter(text):
    """A configuration that says how weights are held."""
    return f'parameters {{ key: "MME_WEIGHTS" value: {{ string_value: "{text}" }} }}'


def mapped_files():
    """How many mappings of blobs this process has."""
    return sum("/weights/files/" in line for line in Path("/proc/self/maps").read_text().splitlines())


def kept(tmp_path):
    """The names of the forms that can be found."""
    return sorted(path.name for path in (tmp_path / "cache/weights/forms").iterdir())


# -- loading -----------------------------------------------------------------------------------------------------------


async def test_a_model_is_mapped_at_its_first_load(serving, write, expected, settings):
    """It answers as if it were loaded plainly, hardly anything of it is private, and its file is left as it was."""
    path = write() / "1" / "model.onnx"
    before = path.read_bytes(), path.stat().st_mtime_ns
    async with serving() as served:
        np.testing.assert_allclose(await served.ask(), expected, rtol=1e-4, atol=1e-4)
        assert served.tier() is Tier.MAPPED
        assert mapped_files() >= 2
        assert settings.backbone <= served.charges()["m"] < 2 * settings.backbone
    assert mapped_files() == 0
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


async def test_models_that_share_weights_are_charged_once(serving, write, settings, monkeypatch):
    """Copies under other names, and heads of their own over one backbone: each costs what nobody has yet."""

    def fail(*_args):  # who goes over to a refined form comes anew
        raise MmeError(Kind.UNAVAILABLE, "no process to be had")

    monkeypatch.setattr(refining.Refiner, "refine", fail)
    for name in ("a", "b"):
        write(name)
    write("c", head=7)
    async with serving() as served:
        for name in "abc":
            await served.ask(name)
        own = {name: charge - settings.backbone * (name == "a") for name, charge in served.charges().items()}
        assert own["b"] < settings.backbone
        assert settings.head <= own["c"] < settings.head + settings.backbone
        assert served.cache.residents.shared.charge(served.cache.entries["b"].residency) == 0

        await served.evict("a")  # the next that came is charged
        assert served.cache.residents.shared.charge(served.cache.entries["b"].residency) == settings.backbone
        assert served.charges()["b"] >= settings.backbone
        await served.ask("a")
        assert served.cache.residents.shared.charge(served.cache.entries["a"]) == 0


async def test_models_that_share_weights_fit_where_one_does(serving, write, settings):
    """Six copies are in memory together in a budget for four."""
    names = [f"m{number}" for number in range(6)]
    for name in names:
        write(name)
    async with serving(Footprint(int(4.6 * settings.backbone))) as served:
        for name in names:
            await served.ask(name)
        assert len(served.charges()) == 6
        assert sum(served.charges().values()) < 4 * settings.backbone
        assert [entry.stats.loads for entry in served.cache.entries.values()] == [1] * 6


async def test_a_reload_finds_what_was_refined(serving, write, expected, tmp_path, settings):
    """Once settled, the model is loaded from its refined form: by the next load, and by the next server."""
    async with serving() as served:
        await served.ask()
        await served.settled()
        assert served.watched().forms.refined
        assert mapped_files() == 2  # the first session is gone
        np.testing.assert_allclose(await served.ask(), expected, rtol=1e-4, atol=1e-4)
        await served.evict()
        await served.ask()
        assert served.watched().forms.refined
        assert served.charges()["m"] < 2 * settings.backbone
    [name] = kept(tmp_path)
    assert "-" in name
    async with serving() as served:
        estimates = loader_of(served.cache).prepare("m", served.engine.origins.find("m"), NEVER).estimate
        assert sum(estimates.shared.values()) == settings.backbone
        assert estimates.host < settings.backbone
        np.testing.assert_allclose(await served.ask(), expected, rtol=1e-4, atol=1e-4)


async def test_a_model_that_changed_is_taken_apart_anew(serving, write):
    """A file that was replaced answers with its own weights, not with those that were kept."""
    write()
    async with serving() as served:
        first = await served.ask()
        await served.settled()
        await served.evict()
        write(seed=20)
        second = await served.ask()
        await served.settled()
        assert not np.allclose(first, second)
        await served.evict()
        np.testing.assert_allclose(await served.ask(), second, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("setting", list(Weights))
@pytest.mark.parametrize("by_model", [False, True], ids=["server", "model"])
async def test_operator_and_author_choose(serving, write, expected, tmp_path, setting, by_model):
    """The setting holds for every model, the parameter for its own; plain leaves nothing on disk."""
    write(config=parameter(setting.value) if by_model else "")
    tier = {Weights.PLAIN: Tier.PLAIN, Weights.PACKED: Tier.PACKED}.get(setting, Tier.MAPPED)
    async with serving(weights=Weights.AUTO if by_model else setting) as served:
        np.testing.assert_allclose(await served.ask(), expected, rtol=1e-4, atol=1e-4)
        assert served.tier() is tier
        if tier is not Tier.PLAIN:
            await served.settled()
        assert served.tier() is tier
    assert (tmp_path / "cache" / "weights").exists() is (tier is not Tier.PLAIN)


async def test_a_choice_that_does_not_exist_is_refused(serving, write):
    """The sentence names the parameter and what it may be."""
    write(config=parameter("sometimes"))
    async with serving() as served:
        with pytest.raises(MmeError) as caught:
            await served.ask()
        assert caught.value.kind is Kind.INVALID_MODEL
        assert (
            "parameter 'MME_WEIGHTS' must be one of 'auto', 'mapped', 'packed', 'plain', got 'sometimes'"
            in caught.value.message
        )


async def test_a_version_that_is_too_small_is_no_matter_of_forms(serving, write, write_onnx):
    """Where one version is loaded plainly, the target as a whole is neither refined nor packed."""
    folder = write(config="version_policy { all {} }")
    write_onnx(folder / "2" / "model.onnx")
    async with serving() as served:
        await served.engine.load("m")
        assert served.tier() is Tier.PLAIN
        assert watched_by(served.tiering) == []


async def test_a_model_in_a_process_of_its_own_is_loaded_plainly(serving, write, tmp_path):
    """Its process reads the model's own file; nothing is kept on disk."""
    write(config='parameters { key: "MME_PLACEMENT" value: { string_value: "process" } }')
    async with serving() as served:
        prepared = loader_of(served.cache).prepare("m", served.engine.origins.find("m"), NEVER)
        assert prepared.forms is None
    assert not (tmp_path / "cache" / "weights").exists()


async def test_every_version_is_mapped(serving, write, settings):
    """Two versions of one model share what they have in common, and settle together."""
    folder = write(config="version_policy { all {} }")
    (folder / "2").mkdir()
    shutil.copy(folder / "1" / "model.onnx", folder / "2" / "model.onnx")
    async with serving() as served:
        first = await served.ask()
        assert served.charges()["m"] < 2 * settings.backbone
        await served.settled()
        assert sorted(served.cache.entries["m"].resident.versions) == [1, 2]
        np.testing.assert_allclose(await served.ask(), first, rtol=1e-4, atol=1e-4)


PIPELINE = """
platform: "ensemble"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 1024 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 512 ] }
ensemble_scheduling { step {
  model_name: "encoder" input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }
} }
"""


async def test_members_of_an_archive_are_mapped_and_packed_one_by_one(
    serving, write, expected, quick, worth_it, tmp_path, settings
):
    """The model that an ensemble calls shares its weights with others, settles, and is packed while it is hot."""
    write("m")
    encoder = write("encoder")
    archive = tmp_path / "archive"
    (archive / "pipeline" / "1").mkdir(parents=True)
    (archive / "pipeline" / "config.pbtxt").write_text(PIPELINE)
    shutil.move(encoder, archive / "encoder")
    async with serving() as served:
        await served.ask()
        await served.engine.load("both", str(archive))
        np.testing.assert_allclose(await served.ask("both"), expected, rtol=1e-4, atol=1e-4)
        assert served.charges()["both"] < settings.backbone
        [member] = [watched for watched in watched_by(served.tiering) if watched.root.name == "both"]
        await until(lambda: member.settled)
        while member.forms.tier is not Tier.PACKED:
            await served.ask("both", 4)
            await asyncio.sleep(0)
        await until(lambda: changes_nothing(served.tiering))
        np.testing.assert_allclose(await served.ask("both"), expected, rtol=1e-4, atol=1e-4)
        assert served.charges()["both"] >= settings.backbone / 2
        assert served.cache.entries["both"].footprint.host == member.target.footprint.host


# -- what goes wrong ---------------------------------------------------------------------------------------------------


async def test_a_full_disk_costs_the_form_and_not_the_load(serving, write, expected, monkeypatch, caplog):
    """Models are loaded plainly, and one warning says why, for all of them."""
    write("other", seed=3)
    usage = shutil.disk_usage("/")
    usage = type(usage)(usage.total, usage.used, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    async with serving() as served:
        np.testing.assert_allclose(await served.ask(), expected, rtol=1e-5, atol=1e-5)
        await served.ask("other")
        assert served.tier() is served.tier("other") is Tier.PLAIN
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "0 MB are left on the disk" in warnings[0]


async def test_a_disk_that_fails_on_the_way_costs_the_form_too(serving, write, expected, monkeypatch, caplog, tmp_path):
    """A write that fails in the middle of a form leaves nothing but a warning."""

    def full(_fd, _data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("serve.weights.store._write", full)
    async with serving() as served:
        np.testing.assert_allclose(await served.ask(), expected, rtol=1e-5, atol=1e-5)
        assert served.tier() is Tier.PLAIN
    assert "No space left on device" in caplog.text
    assert list((tmp_path / "cache/weights/files").iterdir()) == []


async def test_a_form_that_vanished_is_written_again(serving, write, expected, tmp_path):
    """Somebody empties the store between two loads: the next load takes the model apart again."""
    async with serving() as served:
        await served.ask()
        await served.settled()
        await served.evict()
        for path in (tmp_path / "cache/weights/files").iterdir():
            path.unlink()
        np.testing.assert_allclose(await served.ask(), expected, rtol=1e-4, atol=1e-4)
        assert served.tier() is Tier.MAPPED


async def test_a_model_that_answers_differently_is_loaded_plainly_for_good(
    serving, write, expected, monkeypatch, caplog
):
    """What a trial finds is remembered, by the next server too."""
    monkeypatch.setattr(refining.Refiner, "refine", lambda *_args: False)
    caplog.set_level(logging.INFO)
    async with serving() as served:
        await served.ask()
        await until(lambda: served.cache.entries["m"].stats.loads == 2)
        np.testing.assert_allclose(await served.ask(), expected, rtol=1e-5, atol=1e-5)
        assert served.tier() is Tier.PLAIN
    async with serving() as served:
        await served.ask()
        assert served.tier() is Tier.PLAIN
    assert "its weights can't be mapped" in caplog.text


async def test_a_refinement_that_fails_leaves_the_model_as_it_is(serving, write, expected, monkeypatch):
    """Without a refined form the model goes on serving from the written one, and is not packed."""
    failed = []

    def fail(*_args):
        failed.append(True)
        raise MmeError(Kind.UNAVAILABLE, "no process to be had")

    monkeypatch.setattr(refining.Refiner, "refine", fail)
    async with serving() as served:
        await served.ask()
        await until(lambda: failed and changes_nothing(served.tiering))
        np.testing.assert_allclose(await served.ask(), expected, rtol=1e-4, atol=1e-4)
        assert served.tier() is Tier.MAPPED
        assert not served.watched().settled


async def test_too_many_mappings_are_not_made(serving, write, monkeypatch):
    """Where the kernel would soon refuse mappings to the whole process, models are loaded plainly."""
    write()
    write("other", seed=3)
    monkeypatch.setattr(store, "_mapping_limit", lambda: 3)
    async with serving() as served:
        await served.ask()
        await served.ask("other")
        assert (served.tier(), served.tier("other")) == (Tier.MAPPED, Tier.PLAIN)


# -- packing -----------------------------------------------------------------------------------------------------------


async def heat(served, until_tier, name="m"):
    """Ask again and again until the model holds its weights in another way; the answers."""
    answers = [await served.ask(name, 4)]
    while served.tier(name) is not until_tier:
        answers.append(await served.ask(name, 4))
        await asyncio.sleep(0)
    answers += [await served.ask(name, 4) for _ in range(3)]
    return answers


@pytest.fixture
def worth_it(monkeypatch):
    """Packing makes every model twice as quick, whatever this machine's other users make of its trial."""
    monkeypatch.setattr("serve.weights.forms.TargetForms.gain", property(lambda self: 2.0 if self.refined else 1.0))


async def test_a_hot_model_is_packed_without_a_pause(serving, write, quick, worth_it):
    """Every request is answered, and alike; the packed weights are counted, the mapped session is gone."""
    write()
    async with serving() as served:
        await served.ask()
        await served.settled()
        mapped = served.charges()["m"]
        answers = await heat(served, Tier.PACKED)
        for answer in answers:
            np.testing.assert_allclose(answer, answers[0], rtol=1e-4, atol=1e-4)
        await until(lambda: changes_nothing(served.tiering))
        assert mapped_files() == 0  # all of it is packed
        assert served.charges()["m"] != mapped
        assert served.cache.room.reserved == Footprint()
        await served.evict()
        await served.ask()
        assert served.tier() is Tier.MAPPED


async def test_nobody_is_evicted_for_packing(serving, write, quick, worth_it, settings, caplog):
    """A hot model stays mapped while memory is taken, is packed when it comes free, and the log says so once."""
    write()
    caplog.set_level(logging.DEBUG, "mme.weights")
    async with serving() as served:
        await served.ask()
        await served.settled()
        room = served.cache.room
        taken = room.budget - room.used() - Footprint(settings.backbone // 2)
        room.reserved += taken
        while "not packed" not in caplog.text:
            await served.ask("m", 4)
            await asyncio.sleep(0.01)
        ticks = ticks_of(served.tiering)
        while ticks_of(served.tiering) < ticks + 4:
            await served.ask("m", 4)
            await asyncio.sleep(0.01)
        assert served.tier() is Tier.MAPPED
        assert caplog.text.count("not packed") == 1
        room.reserved -= taken
        await heat(served, Tier.PACKED)


async def test_a_cold_model_gives_memory_back_when_it_is_short(serving, write, quick, worth_it, settings):
    """A packed model that nobody asks any more is mapped again as soon as most of the budget is taken, and not before."""
    write()
    write("other", seed=3)
    async with serving(Footprint(int(3 * settings.backbone))) as served:
        await served.ask()
        await served.settled()
        await heat(served, Tier.PACKED)
        await until(lambda: served.watched().heat.is_cold)
        await asyncio.sleep(0.2)
        assert served.tier() is Tier.PACKED
        served.cache.room.reserved += Footprint(int(1.9 * settings.backbone))
        await until(lambda: served.tier() is Tier.MAPPED)
        served.cache.room.reserved -= Footprint(int(1.9 * settings.backbone))
        await until(lambda: changes_nothing(served.tiering))
        np.testing.assert_allclose(await served.ask(), await served.ask(), rtol=1e-5)


@pytest.mark.parametrize("weights", [Weights.MAPPED, Weights.AUTO], ids=["as told", "no gain"])
async def test_what_gains_nothing_is_not_packed(serving, write, quick, monkeypatch, weights):
    """A model that is told to stay mapped does, however hot; and so does one that would be no quicker."""
    write()
    monkeypatch.setattr(
        "serve.weights.forms.TargetForms.gain", property(lambda _self: 2.0 if weights is Weights.MAPPED else 1.0)
    )
    async with serving(weights=weights) as served:
        await served.ask()
        await served.settled()
        while not served.watched().heat.is_hot:
            await served.ask("m", 4)
        for _ in range(20):
            await served.ask("m", 4)
            await asyncio.sleep(0.01)
        assert served.tier() is Tier.MAPPED


async def test_what_is_far_slower_mapped_is_packed_at_once(serving, write, monkeypatch):
    """Kernels that can't do with weights as they are: the next load packs them, whoever asks."""
    write()
    async with serving() as served:
        await served.ask()
        await served.settled()
        await served.evict()
        monkeypatch.setattr("serve.weights.forms.TargetForms.gain", property(lambda _self: 5000.0))
        await served.ask()
        assert served.tier() is Tier.PACKED
        assert not served.watched().could_be_mapped


async def test_executions_that_had_begun_end_on_the_old_session(serving, write, quick, worth_it):
    """A model that is packed under a stream of requests from many clients loses none and answers all alike."""
    write()
    async with serving() as served:
        first = await served.ask("m", 4)
        await served.settled()
        going = True

        async def client():
            while going:
                np.testing.assert_allclose(await served.ask("m", 4), first, rtol=1e-4, atol=1e-4)

        clients = [asyncio.create_task(client()) for _ in range(8)]
        await until(lambda: served.tier() is Tier.PACKED or any(task.done() for task in clients))
        await until(lambda: changes_nothing(served.tiering))
        going = False
        await asyncio.gather(*clients)


# -- coming and going --------------------------------------------------------------------------------------------------


async def test_a_model_that_leaves_while_it_settles_is_left_alone(serving, write, monkeypatch):
    """Evicted in the middle: nothing comes back into memory, and the next load goes on where it was."""
    write()
    async with serving() as served:
        await served.ask()
        await served.evict()
        await until(lambda: changes_nothing(served.tiering))
        assert served.charges() == {}
        assert mapped_files() == 0
        await served.ask()
        await served.settled()


async def test_a_model_that_leaves_before_it_is_found_to_differ_stays_out(serving, write, monkeypatch):
    """Put out of memory while it is tried: nobody asked for it, so it is not loaded plainly before somebody does."""
    write()
    begun, go = threading.Event(), threading.Event()
    monkeypatch.setattr(refining.Refiner, "refine", lambda *_args: begun.set() or not go.wait(60))
    async with serving() as served:
        await served.ask()
        await until(begun.is_set)
        await served.evict()
        go.set()
        await until(lambda: changes_nothing(served.tiering))
        assert served.charges() == {}
        assert served.cache.entries["m"].stats.loads == 1
        await served.ask()
        assert served.tier() is Tier.PLAIN


async def test_a_model_that_leaves_while_it_changes_over_leaves_nothing(serving, write, monkeypatch):
    """Put out of memory while a second session is being made: that one is closed too."""
    write()
    async with serving() as served:
        await served.ask()
        await served.settled()
        watched = served.watched()
        change = asyncio.create_task(turn(served.tiering, watched, Tier.PACKED))
        await asyncio.sleep(0)
        await served.evict()
        await change
        assert served.charges() == {}
        assert mapped_files() == 0
        assert not any(handler.mappings for handler in weights_of(served.engine).handlers)


async def test_closing_ends_what_is_being_refined(serving, write, monkeypatch):
    """An engine that is closed in the middle of everything ends it, and waits for nothing to be finished."""
    write()
    popen = subprocess.Popen
    begun = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: begun.append(popen(*args, **kwargs)) or begun[-1])
    async with serving() as served:
        await served.ask()
        await until(lambda: begun)
    assert [process.returncode for process in begun] == [-signal.SIGKILL]


@pytest.fixture
def processes(monkeypatch):
    """Those that were started to refine, in order."""
    popen, begun = subprocess.Popen, []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: begun.append(popen(*args, **kwargs)) or begun[-1])
    return begun


async def test_one_process_refines_many_and_ends_when_there_are_no_more(serving, write, monkeypatch, processes):
    """The start of a process is most of what a small model takes."""
    monkeypatch.setattr(refining, "_IDLE_SECONDS", 3600)
    names = [f"m{number}" for number in range(3)]
    for number, name in enumerate(names):
        write(name, seed=number)
    async with serving() as served:
        await asyncio.gather(*map(served.ask, names))
        await served.settled(*names)
        assert [served.watched(name).forms.refined for name in names] == [True] * 3
        assert [process.returncode for process in processes] == [None]
        idle_for_long(served.tiering)
        await until(lambda: [process.returncode for process in processes] == [-signal.SIGKILL])


@pytest.mark.long
async def test_a_process_refines_so_many_and_no_more(serving, write, monkeypatch, processes):
    """What a framework keeps of each adds up."""
    monkeypatch.setattr(refining, "_MOST_TASKS", 2)
    for number in range(3):
        write(f"m{number}", seed=number)
    async with serving() as served:
        for number in range(3):
            await served.ask(f"m{number}")
            await served.settled(f"m{number}")
        assert [process.returncode for process in processes] == [-signal.SIGKILL, None]


async def test_a_process_that_dies_takes_one_refinement_with_it(serving, write, monkeypatch, processes, caplog):
    """The next model has another process."""
    write("a")
    write("b", seed=3)
    ask = refining._Process.ask

    def dies(process, task):
        if len(processes) == 1:
            process.kill()
        return ask(process, task)

    monkeypatch.setattr(refining._Process, "ask", dies)
    caplog.set_level("DEBUG", "mme.weights")
    async with serving() as served:
        await served.ask("a")
        await until(lambda: "refining ended with -9" in caplog.text)
        await served.ask("b")
        await served.settled("b")
        assert served.watched("b").forms.refined
        assert not served.watched("a").forms.refined


async def test_a_process_that_dies_while_it_is_idle_takes_none_with_it(serving, write, monkeypatch, processes):
    """It is the first that the kernel ends; the next model has another one."""
    monkeypatch.setattr(refining, "_IDLE_SECONDS", 600)
    write("a")
    write("b", seed=3)
    async with serving() as served:
        await served.ask("a")
        await served.settled("a")
        [idle] = processes
        os.kill(idle.pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PID, idle.pid, os.WEXITED | os.WNOWAIT)
        await served.ask("b")
        await served.settled("b")
        assert served.watched("b").forms.refined
        assert [process.returncode for process in processes] == [-signal.SIGKILL, None]


async def test_models_in_memory_are_swept_without_harm(serving, write, expected, tmp_path):
    """Its archive is removed while it is in memory: its form goes, and the model goes on answering."""
    folder = write()
    async with serving() as served:
        await served.ask()
        await served.settled()
        shutil.rmtree(folder)
        weights_of(served.engine).sweep(0.0)
        assert list((tmp_path / "cache/weights/files").iterdir()) == []
        np.testing.assert_allclose(await served.ask(), expected, rtol=1e-4, atol=1e-4)


async def test_two_servers_share_a_store(serving, write, expected, settings):
    """Both load the same model at once; both answer, and there is one form of it."""
    write()
    async with serving() as one, serving() as other:
        answers = await asyncio.gather(one.ask(), other.ask())
        await one.settled()
        await other.settled()
        answers += [await one.ask(), await other.ask()]
        for answer in answers:
            np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-4)
        assert one.cache.entries["m"].state is other.cache.entries["m"].state is State.READY
