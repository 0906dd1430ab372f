"""Which models consist of which others, and what that means for loads and unloads."""

import asyncio
import json
import os
import shutil
from types import SimpleNamespace

import pytest

from model_handlers.config.model_config import InstanceGroup, InstanceKind
from model_handlers.errors import Kind, MmeError
from model_handlers.model_calls import Override
from serve.options import Control
from serve.registry import Dependents
from serve.sources.polling import Poller
from serve.state_file import life_of
from serve.statistics import CacheEvent, EventType
from tests.serve.engines import answered, ask, engine_of
from tests.serve.inside import evict
from tests.serve.integrity import check_integrity
from tests.waiting import until


class Models:
    """A cache of models that are in memory or were, with what each consists of; counts those that are looked at."""

    def __init__(self, **steps):
        self.entries = self
        self.looks = 0
        self.unwired = []
        self._entries = {name: self._entry(name, *parts) for name, parts in steps.items()}

    def _entry(self, name, *parts, pinned=False):
        resident = SimpleNamespace(unwire=lambda: self.unwired.append(name))
        return SimpleNamespace(name=name, steps=parts, resident=resident, pinned=pinned)

    def get(self, name):
        """One look."""
        self.looks += 1
        return self._entries.get(name)

    def __getitem__(self, name):
        """The same."""
        return self.get(name)

    def keep(self, entry, *, pinned):
        """Have it stay or not."""
        entry.pinned = pinned

    def load(self, dependents, name, *parts, pinned=False):
        """It is in memory, and consists of these."""
        self._entries[name] = self._entry(name, *parts, pinned=pinned)
        dependents.hear(CacheEvent(EventType.LOADED, name))

    def unload(self, dependents, name):
        """It left."""
        self._entries[name].resident, self._entries[name].steps, self._entries[name].pinned = None, (), False
        dependents.hear(CacheEvent(EventType.UNLOADED, name))


@pytest.fixture
def models():
    """A thousand models, some of which are ensembles."""
    return Models(**{f"m{number}": () for number in range(1000)})


@pytest.fixture
def dependents(models):
    """Of all those."""
    dependents = Dependents(models)
    models.load(dependents, "whole", "pre", "model", "pre")
    models.load(dependents, "other", "model")
    models.load(dependents, "outer", "whole", "post")
    return dependents


def test_what_a_model_is_made_of_and_what_of_it(dependents):
    """Ensembles in memory alone; a model that one has twice is one."""
    assert [dependents.wholes_of(name) for name in ("pre", "model", "whole", "m1")] == [
        ["whole"],
        ["whole", "other"],
        ["outer"],
        [],
    ]
    assert dependents.all_wholes_of("model") == ["whole", "other", "outer"]
    assert [dependents.parts(name) for name in ("whole", "other", "pre")] == [("pre", "model"), ("model",), ()]
    assert dependents.all_parts_of("outer") == ["whole", "post", "pre", "model"]
    assert repr(dependents) == "<Dependents of 3 ensembles>"


def test_what_has_left_or_changed_is_known(dependents, models):
    """Another model's ensembles are wired again, and hold nothing of it. One that left for others keeps its models."""
    models.load(dependents, "other", "m1")
    assert dependents.wholes_of("model") == ["whole"]
    models.load(dependents, "model")
    models.unload(dependents, "model")
    assert models.unwired == ["whole", "outer"]
    models.unload(dependents, "whole")
    assert (dependents.wholes_of("pre"), dependents.parts("whole")) == (["whole"], ("pre", "model"))
    dependents.note("whole", ())
    assert (dependents.wholes_of("pre"), dependents.parts("whole")) == ([], ())


def test_a_pinned_ensemble_keeps_what_it_consists_of(dependents, models):
    """And what that consists of, whichever came first; until the last of those that keep it has left."""
    for name in ("pre", "model", "post"):
        models.load(dependents, name)
    models.load(dependents, "outer", "whole", "post", pinned=True)
    assert [models[name].pinned for name in ("whole", "post", "pre", "model", "other")] == [True] * 4 + [False]
    models.load(dependents, "pre")
    assert models["pre"].pinned
    models.unload(dependents, "outer")
    dependents.note("outer", ())
    assert not any(models[name].pinned for name in ("whole", "post", "pre", "model"))


def test_only_wholes_and_parts_are_looked_at(dependents, models):
    """However many models there are."""
    models.looks = 0
    models.load(dependents, "other", "m1")
    assert dependents.wholes_of("m1") == ["other"]
    models.unload(dependents, "m2")
    assert models.looks < 20


ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
ensemble_scheduling {
  step { model_name: "a" input_map { key: "x" value: "x" } output_map { key: "y" value: "half" } }
  step { model_name: "b" input_map { key: "x" value: "half" } output_map { key: "y" value: "y" } }
}
"""


@pytest.fixture
def lay_out(tmp_path, write_repository_model):
    """Writes the models a and b into the repository `r`, and ensembles by their configurations."""

    def lay_out(**ensembles):
        for name in "ab":
            write_repository_model(tmp_path / "r" / name, "max_batch_size: 8")
        for name, config in ensembles.items():
            (tmp_path / "r" / name / "1").mkdir(parents=True)
            (tmp_path / "r" / name / "config.pbtxt").write_text(config)

    return lay_out


def on_request(tmp_path, life=""):
    """An engine over the repository `r`, of which only what is asked for is loaded."""
    return engine_of(tmp_path, repository=tmp_path / "r", control=Control.EXPLICIT, life=life)


@pytest.mark.parametrize("where", ["beside", "elsewhere"])
async def test_an_ensemble_changes_and_goes_with_its_parts(toys, tmp_path, write_repository_model, write_onnx, where):
    """A part that is loaded anew is new in the ensemble as well, and leaves with it if it is to; also over folders."""
    first, second = tmp_path / "r1", tmp_path / ("r1" if where == "beside" else "r2")
    for name in "ab":
        write_repository_model(first / name, "max_batch_size: 8")
    second.mkdir(exist_ok=True)
    (second / "e" / "1").mkdir(parents=True)
    (second / "e" / "config.pbtxt").write_text(ENSEMBLE)
    more = () if first == second else (second,)
    async with engine_of(tmp_path, repository=first, more_repositories=more) as engine:
        for name in ("a", "b", "e"):
            await engine.reload(name)
        assert await answered(engine, toys, "e") == 4
        write_onnx(first / "b" / "1" / "model.onnx", 5.0)
        await engine.reload("b")
        assert await answered(engine, toys, "e") == 10
        await engine.unload("e", dependents=True)
        assert engine.index.registered() == []
        await engine.reload("a")
        await engine.reload("e")
        await engine.unload("e")
        assert [name for name, _ in engine.index.registered()] == ["a", "b"]


@pytest.mark.parametrize("names", ["abef", "abfe"])
async def test_an_ensemble_of_ensembles_is_loaded_anew_once(toys, tmp_path, lay_out, write_onnx, names):
    """Though both of them consist of what changed."""
    lay_out(e=ENSEMBLE.replace('"b"', '"f"'), f=ENSEMBLE)
    async with engine_of(tmp_path, repository=tmp_path / "r") as engine:
        for name in names:
            await engine.reload(name)
        assert await answered(engine, toys, "e") == 8
        events, loaded = engine.cache.events, []
        events.listen(lambda event: loaded.append(event.name) if event.type is EventType.LOADED else None)
        write_onnx(tmp_path / "r" / "b" / "1" / "model.onnx", 5.0)
        await engine.reload("b")
        assert await answered(engine, toys, "e") == 20
        assert sorted(loaded) == ["b", "e", "f"]


async def test_an_ensemble_stays_as_a_client_loaded_it(toys, tmp_path, lay_out, write_onnx):
    """With another configuration, though a part of it is loaded anew; one that was unloaded meanwhile stays away."""
    lay_out(e=ENSEMBLE, f=ENSEMBLE)
    async with engine_of(tmp_path, repository=tmp_path / "r") as engine:
        for name in ("a", "b", "e", "f"):
            await engine.reload(name)
        tensor = {"data_type": "TYPE_FP32", "dims": [2]}
        step = {"model_name": "b", "input_map": {"x": "x"}, "output_map": {"y": "y"}}
        config = {
            "platform": "ensemble",
            "max_batch_size": 4,
            "input": [{"name": "x", **tensor}],
            "output": [{"name": "y", **tensor}],
            "ensemble_scheduling": {"step": [step]},
        }
        await engine.reload("e", Override(json.dumps(config), {}))
        assert await answered(engine, toys, "e") == 2
        write_onnx(tmp_path / "r" / "b" / "1" / "model.onnx", 5.0)
        engine.cache.events.listen(lambda event: gone.append(event.name) if event.type is EventType.LOADED else None)
        gone = []
        loading = asyncio.ensure_future(engine.reload("b"))
        while "b" not in gone:  # noqa: ASYNC110 - a load's doing
            await asyncio.sleep(0)
        await engine.unload("f")
        await loading
        assert await answered(engine, toys, "e") == 5
        assert engine.index.is_overridden("e")
        assert [name for name, _ in engine.index.registered()] == ["a", "b", "e"]


async def test_the_models_of_an_ensemble_may_be_asked_by_themselves(toys, tmp_path, lay_out, write_repository_model):
    """Where only what was loaded may be asked they are loaded with it, stay behind it, and count what it asks them."""
    lay_out(e=ENSEMBLE)
    write_repository_model(tmp_path / "r" / "c", "max_batch_size: 8")
    async with on_request(tmp_path) as engine:
        await engine.reload("e")
        assert [name for name, _ in engine.index.registered()] == ["a", "b", "e"]
        assert engine.cache.entries["e"].leases == 0
        for name in ("e", "a"):
            call = toys.Call(1)
            await engine.submit_cold(name, None, call.request)
            await call.answer()
        counted = {name: stats.success.count for (name, _), stats in engine.stats.items()}
        assert counted == {"a": 2, "b": 1, "e": 1}
        (group,) = engine.cache.entries["a"].resident.latest.config.instance_group
        assert group == InstanceGroup("a", InstanceKind.CPU)
        await engine.unload("e")
        assert [name for name, _ in engine.index.registered()] == ["a", "b"]
        with pytest.raises(MmeError, match="unknown model"):
            await engine.submit_cold("c", None, toys.Call(1).request)


@pytest.mark.parametrize(
    ("space", "answer"), [("", 4), ("r1", 4), ("r2", 10), ("{}/r2", 10), ("r3", "not available or ambiguous: b")]
)
async def test_an_ensemble_may_say_which_repository_it_means(
    toys, tmp_path, write_repository_model, write_onnx, space, answer
):
    """By its folder's name or its path; else its own repository comes first."""
    for name in ("r1/a", "r1/b", "r2/b"):
        write_repository_model(tmp_path / name, "max_batch_size: 8")
    write_onnx(tmp_path / "r2" / "b" / "1" / "model.onnx", 5.0)
    (tmp_path / "r1" / "e" / "1").mkdir(parents=True)
    meant = f'"b" model_namespace: "{space.format(tmp_path)}"' if space else '"b"'
    (tmp_path / "r1" / "e" / "config.pbtxt").write_text(ENSEMBLE.replace('"b"', meant))

    folders = {"repository": tmp_path / "r1", "more_repositories": (tmp_path / "r2",)}
    async with engine_of(tmp_path, namespaces=True, **folders) as engine:
        if isinstance(answer, str):
            with pytest.raises(MmeError, match=answer):
                await ask(engine, toys.Call(1), "e")
        else:
            assert await answered(engine, toys, "e") == answer


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (ENSEMBLE, "broken", "ensemble 'e' depends on 'b' which has no loaded version. Model 'b' loading failed with"),
        (
            ENSEMBLE.replace('"b"', '"b" model_version: 7'),
            "",
            "ensemble 'e' depends on 'b' whose required version 7 is not loaded",
        ),
        (
            ENSEMBLE.replace('"a"', '"x"').replace('"b"', '"y"'),
            "",
            "ensemble e contains models that are not available or ambiguous: x, y",
        ),
        (ENSEMBLE.replace('"b"', '"e"'), "", "circular dependency between ensembles: e -> e"),
        (ENSEMBLE.replace('"b"', '"f"'), "", "circular dependency between ensembles: e -> f -> e"),
    ],
)
async def test_an_ensemble_says_which_of_its_models_it_lacks(tmp_path, lay_out, config, change, words):
    """One that does not load, or not in the version that it wants; all that are not there; and one that is itself."""
    lay_out(e=config, f=ENSEMBLE.replace('"b"', '"e"'))
    if change:
        (tmp_path / "r" / "b" / "1" / "model.onnx").write_bytes(b"no model")
    async with engine_of(tmp_path, repository=tmp_path / "r") as engine:
        with pytest.raises(MmeError) as caught:
            await engine.reload("e")
        assert caught.value.kind is Kind.INVALID_MODEL
        assert words in caught.value.message


async def test_parts_that_somebody_loaded_by_name_stay(tmp_path, lay_out):
    """Before the ensemble or after it, until somebody unloads them; those that came with it alone go with it, also of its parts."""
    lay_out(e=ENSEMBLE, f=ENSEMBLE.replace('"b"', '"e"'))

    async def left(ensemble="e"):
        await engine.unload(ensemble, dependents=True)
        return sorted(name for name, _ in engine.index.registered())

    async with on_request(tmp_path) as engine:
        await engine.reload("a")
        await engine.reload("e")
        assert await left() == ["a"]
        await engine.unload("a")
        await engine.reload("e")
        assert await left() == []
        await engine.reload("e")
        await engine.reload("a")
        with pytest.raises(MmeError, match="already loaded"):  # as a server says that has it on its list
            await engine.load("b")
        assert await left() == ["a", "b"]
        await engine.unload("b")
        await engine.reload("f")
        assert sorted(name for name, _ in engine.index.registered()) == ["a", "b", "e", "f"]
        assert await left("f") == ["a"]


async def test_an_ensemble_leaves_with_a_part_and_comes_back_with_it(toys, tmp_path, lay_out):
    """Where only what was loaded may be asked, unless somebody unloaded the ensemble itself meanwhile."""
    lay_out(e=ENSEMBLE)

    def there():
        return sorted(name for name, _ in engine.index.registered())

    async with on_request(tmp_path) as engine:
        await engine.reload("e")
        await engine.unload("a")
        assert there() == ["b"]
        await engine.unload("b")
        await engine.reload("a")
        assert there() == ["a"]
        await engine.reload("b")
        assert there() == ["a", "b", "e"]
        assert await answered(engine, toys, "e") == 4
        await engine.unload("b")
        with pytest.raises(MmeError, match="not found"):
            await engine.unload("e")
        await engine.reload("b")
        assert there() == ["a", "b"]


async def test_an_ensemble_that_did_not_load_for_want_of_a_part_comes_with_it(tmp_path, lay_out):
    """As one that somebody changes in the repository while the part is away."""
    lay_out(e=ENSEMBLE)
    async with on_request(tmp_path) as engine:
        await engine.reload("e")
        await engine.unload("a")
        (tmp_path / "r" / "a").rename(tmp_path / "a")
        with pytest.raises(MmeError):
            await engine.reload("e")
        (tmp_path / "a").rename(tmp_path / "r" / "a")
        await engine.reload("a")
        assert engine.index.is_ready("e")


async def test_an_ensemble_that_comes_back_is_as_it_was_loaded(tmp_path, lay_out):
    """One that came with another ensemble still goes with that; one that somebody loaded by name stays."""
    lay_out(e=ENSEMBLE, f=ENSEMBLE.replace('"b"', '"e"'))
    async with on_request(tmp_path) as engine:
        for loaded, stays in (["f"], False), (["f", "e"], True):
            for name in loaded:
                await engine.reload(name)
            await engine.unload("a")
            assert [engine.index.is_ready(name) for name in "ef"] == [False, False]
            await engine.reload("a")
            assert [engine.index.is_ready(name) for name in "ef"] == [True, True]
            await engine.unload("f", dependents=True)
            assert engine.index.is_ready("e") is stays


@pytest.mark.parametrize("meanwhile", ["unloaded and removed", "loaded"])
async def test_an_ensemble_does_not_leave_with_a_part_if_somebody_decided_otherwise_meanwhile(
    tmp_path, lay_out, meanwhile
):
    """While the part still answers; nor does the unload of the part fail for it."""
    lay_out(e=ENSEMBLE)
    async with on_request(tmp_path) as engine:
        await engine.reload("e")
        part = engine.cache.ready.lease("a")
        unloading = asyncio.ensure_future(engine.unload("a"))
        while not part.entry.unloaded:  # noqa: ASYNC110 - an unload's doing
            await asyncio.sleep(0)
        if meanwhile == "loaded":
            loading = asyncio.ensure_future(engine.reload("e"))
            await until(lambda: engine.cache.entries["a"].load is not None)
        else:
            shutil.rmtree(tmp_path / "r" / "e")
            await engine.unload("e")
            assert "e" not in engine.cache.entries
        part.release()
        await unloading
        if meanwhile == "loaded":
            await loading
        assert engine.index.is_ready("e") == (meanwhile == "loaded")


@pytest.mark.parametrize("fault", ["missing", "no configuration", "no model"])
async def test_an_ensemble_that_did_not_load_for_a_part_is_loaded_with_it(
    toys, tmp_path, lay_out, write_repository_model, fault
):
    """Where only what was loaded may be asked: whatever was wrong with the part, and whatever the ensemble did before."""
    lay_out(e=ENSEMBLE)
    part = tmp_path / "r" / "b"

    def spoil():
        if fault == "missing":
            shutil.rmtree(part)
        elif fault == "no configuration":
            (part / "config.pbtxt").write_text("{")
        else:
            (part / "1" / "model.onnx").write_bytes(b"no model")

    def mend():
        shutil.rmtree(part, ignore_errors=True)
        write_repository_model(part, "max_batch_size: 8")

    async def fails(*names):
        for name in names:
            with pytest.raises(MmeError):
                await engine.reload(name)

    async with on_request(tmp_path) as engine:
        await engine.reload("a")
        spoil()
        await fails("e", "b")
        mend()
        await engine.reload("b")
        assert await answered(engine, toys, "e") == 4
        await engine.unload("b")
        spoil()
        await fails("b", "e")
        mend()
        await engine.reload("b")
        assert await answered(engine, toys, "e") == 4
        await engine.unload("e")
        await engine.unload("b")
        spoil()
        await fails("b", "e")
        await engine.unload("e")
        mend()
        await engine.reload("b")
        assert not engine.index.is_ready("e")


@pytest.mark.parametrize("part", ["a", "b"])
async def test_a_part_that_is_unloaded_while_its_ensemble_is_loaded_keeps_nobody_waiting(toys, tmp_path, lay_out, part):
    """The load brings the part along, and with that the ensemble back, which left with the part."""
    lay_out(e=ENSEMBLE)
    unloading = []

    def hear(event):
        if (event.type, event.name) == (EventType.LOADED, "e") and not unloading:
            unloading.append(asyncio.create_task(engine.unload(part)))

    async with on_request(tmp_path) as engine:
        await engine.reload("a")
        await engine.reload("b")
        engine.cache.events.listen(hear)
        async with asyncio.timeout(60):
            await engine.reload("e")
            await unloading[0]
        await engine.reload(part)
        assert await answered(engine, toys, "e") == 4
        check_integrity(engine.cache)


async def test_the_next_worker_knows_who_waits_for_its_parts(toys, tmp_path, lay_out):
    """An ensemble that left with a part comes back with it, whichever worker is there by then."""
    lay_out(e=ENSEMBLE)
    life = life_of(os.getppid())
    async with on_request(tmp_path, life) as before:
        await before.reload("e")
        await before.unload("a")
        assert not before.index.is_ready("e")
    async with on_request(tmp_path, life) as engine:
        assert not engine.index.is_ready("e")
        await engine.reload("a")
        assert await answered(engine, toys, "e") == 4


async def test_an_ensemble_without_a_step_is_shown_as_unloaded_until_that_is_back(toys, tmp_path, lay_out):
    """It stays in memory meanwhile, so that it serves at once, as it was; another name that is made of it, too."""
    lay_out(e=ENSEMBLE, f=ENSEMBLE.replace('"b"', '"e"'))

    def shown(*names):
        rows = {row["name"]: (row["version"], row["state"], row.get("reason", "")) for row in engine.index.rows()}
        return {rows[name] for name in names}

    async with on_request(tmp_path) as engine:
        await engine.reload("f")
        assert await answered(engine, toys, "f") == 8
        loaded = []
        engine.cache.events.listen(lambda event: loaded.append(event.name) if event.type is EventType.LOADED else None)
        await engine.unload("b")
        assert shown("b", "e", "f") == {("1", "UNAVAILABLE", "unloaded")}
        assert [row["name"] for row in engine.index.statistics()] == ["a"]
        assert not engine.submit("f", None, toys.Call(1).request)
        for version, kind in ((None, Kind.UNKNOWN_VERSION), (1, Kind.UNAVAILABLE)):
            with pytest.raises(MmeError) as caught:
                await engine.submit_cold("f", version, toys.Call(1).request)
            assert (caught.value.kind, "'f'" in caught.value.message) == (kind, True)
        with pytest.raises(MmeError):
            engine.index.url("e")
        await engine.reload("b")
        assert loaded == ["b"]
        assert shown("a", "b", "e", "f") == {("1", "READY", "")}
        assert await answered(engine, toys, "f") == 8


async def test_an_ensemble_without_a_step_can_be_loaded_with_it(toys, tmp_path, lay_out):
    """By either load by name: the step is loaded again, since the ensemble consists of it."""
    lay_out(e=ENSEMBLE)
    async with on_request(tmp_path) as engine:
        await engine.load("e")
        for load in (engine.load, engine.reload):
            await engine.unload("a")
            await load("e")
            assert await answered(engine, toys, "e") == 4
        with pytest.raises(MmeError, match="already loaded"):
            await engine.load("e")


async def test_a_step_that_is_posted_brings_its_ensemble_back(toys, tmp_path, lay_out):
    """Whichever way it is loaded: also one whose ensemble did not load so far."""
    lay_out(e=ENSEMBLE)
    (tmp_path / "r" / "b").rename(tmp_path / "b")
    async with on_request(tmp_path) as engine:
        await engine.load("a")
        with pytest.raises(MmeError):
            await engine.load("e")
        (tmp_path / "b").rename(tmp_path / "r" / "b")
        await engine.load("b")
        assert await answered(engine, toys, "e") == 4


async def test_a_step_that_can_not_come_back_takes_its_ensemble_along(tmp_path, lay_out):
    """It was evicted, and did not load by name."""
    lay_out(e=ENSEMBLE)
    async with on_request(tmp_path) as engine:
        await engine.reload("e")
        await evict(engine.cache, "b")
        assert engine.index.is_ready("e")
        (tmp_path / "r" / "b" / "1" / "model.onnx").write_bytes(b"no model")
        with pytest.raises(MmeError):
            await engine.reload("b")
        assert not engine.index.is_ready("e")


@pytest.mark.parametrize("gone", ["unloaded before", "unloaded", "left out"])
async def test_the_next_worker_knows_what_an_ensemble_consists_of(toys, tmp_path, lay_out, gone):
    """It serves none that lacks a step, does not load one at its start, and has it back with the step."""
    lay_out(e=ENSEMBLE)
    life = life_of(os.getppid())
    async with on_request(tmp_path, life) as before:
        await before.reload("e")
        if gone == "unloaded before":
            await before.unload("b")
    left_out = frozenset({"b"} if gone == "left out" else ())
    folders = {"repository": tmp_path / "r", "control": Control.EXPLICIT, "life": life, "left_out": left_out}
    async with engine_of(tmp_path, **folders) as engine:
        if gone == "unloaded":
            assert engine.index.is_ready("e")
            await engine.unload("b")
        assert not engine.index.is_ready("e")
        assert engine.registry.unloaded == {"b", "e"}
        with pytest.raises(MmeError) as caught:
            await engine.submit_cold("e", None, toys.Call(1).request)
        assert caught.value.kind is Kind.UNKNOWN_VERSION
        await engine.reload("b")
        assert await answered(engine, toys, "e") == 4


async def test_a_step_that_came_with_a_load_that_failed_brings_other_ensembles(toys, tmp_path, lay_out):
    """The ensemble that it came with lacks another step still; the other one has all that it waited for."""
    lay_out(e=ENSEMBLE.replace('"b"', '"c"'), f=ENSEMBLE)
    shutil.copytree(tmp_path / "r" / "b", tmp_path / "r" / "c")
    (tmp_path / "r" / "c" / "1" / "model.onnx").write_bytes(b"no model")
    model = tmp_path / "r" / "a" / "1" / "model.onnx"
    good = model.read_bytes()
    async with on_request(tmp_path) as engine:
        await engine.reload("b")
        model.write_bytes(b"no model")
        with pytest.raises(MmeError):
            await engine.reload("f")
        model.write_bytes(good)
        with pytest.raises(MmeError, match="Model 'c' loading failed"):
            await engine.reload("e")
        assert await answered(engine, toys, "f") == 4


async def test_a_step_that_appears_in_a_repository_brings_its_ensemble(toys, tmp_path, lay_out):
    """At the look that finds it; one that is removed takes the ensemble along, until it is there again."""
    lay_out(e=ENSEMBLE)

    def scan():
        return {path.name: "as it is" for path in (tmp_path / "r").iterdir()}

    async with engine_of(tmp_path, repository=tmp_path / "r", control=Control.POLL) as engine:
        poller = Poller(engine, scan, 3600)
        for _ in range(2):
            (tmp_path / "r" / "b").rename(tmp_path / "b")
            await poller.look()
            assert not engine.index.is_ready("e")
            (tmp_path / "b").rename(tmp_path / "r" / "b")
            assert await poller.look()
            assert await answered(engine, toys, "e") == 4


async def test_an_ensemble_that_serves_is_loaded_with_the_step_that_it_is_to_have(toys, tmp_path, lay_out):
    """It goes on as it was until then."""
    lay_out(e=ENSEMBLE)
    async with on_request(tmp_path) as engine:
        await engine.reload("e")
        (tmp_path / "r" / "e" / "config.pbtxt").write_text(ENSEMBLE.replace('"b"', '"c"'))
        with pytest.raises(MmeError, match="not available or ambiguous: c"):
            await engine.reload("e")
        assert await answered(engine, toys, "e") == 4
        shutil.copytree(tmp_path / "r" / "b", tmp_path / "r" / "c")
        await engine.reload("c")
        await engine.unload("b")
        assert await answered(engine, toys, "e") == 4
