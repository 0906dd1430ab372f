"""Forms on disk: found by the files that they were made from, shared, kept, and removed when nothing leads to them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from model_handlers.mapped import Span, Trial
from serve.weights.store import WeightStore, reference_to

BIG = os.urandom(200_000)
TRIAL = Trial(1000, 2000, 30, 20, ("a",), alike=True)
EVERYTHING = 0.0  # seconds that a form is new


@pytest.fixture
def store(tmp_path):
    """A store that nobody has used."""
    return WeightStore(tmp_path / "cache" / "weights")


@pytest.fixture
def model(tmp_path):
    """Makes a model's file; the whole of it is weights."""

    def model(name="model", content=BIG):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return model


def written(store, path, graph=b"graph", *, keep=True):
    """The form of a model, written and, unless told otherwise, kept."""
    assert store.open()
    with store.draft() as draft:
        source = draft.source(path)
        draft.put(Span(source, 0, source.size))
        form = store.add_written(draft, graph)
        reference = reference_to(draft, form.key)
    if keep:
        store.keep(form)
        store.refer(path, reference)
    return form


def refined(store, form, extra=b""):
    """The refined form of a written one, which has one more blob if told so."""
    with store.draft() as draft:
        for name in form.blobs:
            source = draft.source(form.path.parent / name)
            draft.put(Span(source, 0, source.size))
        if extra:
            (draft.folder / "extra").write_bytes(extra)
            source = draft.source(draft.folder / "extra")
            draft.put(Span(source, 0, source.size))
        made = store.add_refined(draft, b"better", form.key, "here")
    store.keep(replace(made, trial=TRIAL))
    store.drop_written(form.key)
    return store.form(form.key, "here")


def names(store, part):
    """What lies in a part of the store."""
    return sorted(path.name for path in (store.directory / part).iterdir())


def blobs(store):
    """The blobs that are there."""
    return [name for name in names(store, "files") if name.count("-") == 2]


def staging(store):
    """What is there that is no part of it."""
    return [path.name for path in store.directory.iterdir() if path.name not in {"files", "forms", "refs"}]


# -- looking up --------------------------------------------------------------------------------------------------------


def test_what_nobody_asked_for_is_not_made(store, model):
    """Looking up and sweeping make no directory; the first draft does, and nobody else can read it."""
    assert store.reference(model()) is None
    store.sweep()
    assert not store.directory.exists()

    written(store, model())

    assert store.directory.stat().st_mode & 0o777 == 0o700


def test_a_file_leads_to_its_form(store, model):
    """What was kept is found again, by another server too, with its blobs and their sizes."""
    form = written(store, path := model())
    other = WeightStore(store.directory)

    found = other.form(other.reference(path).key, "here")

    assert found == form
    assert found.trial is None
    assert found.path.read_bytes() == b"graph"
    assert list(found.blobs.values()) == [len(BIG)]
    assert found.blob_bytes == len(BIG)


def test_what_was_not_kept_is_not_found(store, model):
    """A form can be loaded as soon as it is written, but nothing leads to it before it is safe on the disk."""
    form = written(store, path := model(), keep=False)

    assert form.is_there()
    assert store.reference(path) is None
    assert store.form(form.key, "here") is None


@pytest.mark.parametrize("damage", ["graph", "blob", "length"])
def test_a_form_without_one_of_its_files_is_none(store, model, damage):
    """A graph or a blob that is gone, or a blob of another length: the model is taken apart again."""
    form = written(store, model())
    [blob] = form.blobs
    if damage == "graph":
        form.path.unlink()
    else:
        (store.directory / "files" / blob).unlink()
    if damage == "length":
        (store.directory / "files" / blob).write_bytes(b"short")

    assert store.form(form.key, "here") is None


@pytest.mark.parametrize("file", ["graph", "blob"])
@pytest.mark.parametrize("restarted", [False, True], ids=["", "after a start"])
def test_a_form_whose_bytes_are_others_is_none(store, model, file, restarted):
    """A file of the same length with other bytes is removed, and written again with the next form."""
    form = written(store, path := model())
    assert store.form(form.key, "here") == form
    damaged = form.path if file == "graph" else store.directory / "files" / next(iter(form.blobs))
    before = damaged.read_bytes()
    damaged.chmod(0o600)
    damaged.write_bytes(bytes(len(before)))
    store = WeightStore(store.directory) if restarted else store

    assert store.form(form.key, "here") is None
    assert not damaged.exists()
    assert written(store, path) == form
    assert damaged.read_bytes() == before
    assert store.form(form.key, "here") == form


@pytest.mark.parametrize("change", ["content", "place", "time", "gone"])
def test_a_file_that_changed_leads_nowhere(store, model, change):
    """Another size, another file of that name, another time of change, or no file: the form is not its any more."""
    path = model()
    written(store, path)
    assert store.reference(path) is not None

    if change == "content":
        path.write_bytes(BIG + b"!")
    elif change == "place":
        model("new").rename(path)
    elif change == "time":
        os.utime(path, ns=(1, 1))
    else:
        path.unlink()

    assert store.reference(path) is None


def test_every_file_that_the_form_was_made_from_counts(store, model):
    """A model whose weights lie beside it leads nowhere once those change."""
    path, beside = model("model", b"graph"), model("weights")
    assert store.open()
    with store.draft() as draft:
        draft.source(path)
        source = draft.source(beside)
        draft.put(Span(source, 0, source.size))
        form = store.add_written(draft, b"graph")
        store.keep(form)
        store.refer(path, reference_to(draft, form.key))
    assert store.reference(path).key == form.key

    beside.write_bytes(BIG[::-1])

    assert store.reference(path) is None


def test_the_same_model_has_one_form(store, model):
    """Two files of the same content lead to one form, and a graph of its own makes one of its own; blobs are shared."""
    forms = [written(store, model("a")), written(store, model("b")), written(store, model("c"), b"another graph")]

    assert forms[0] == forms[1]
    assert len(names(store, "forms")) == 2
    assert len(names(store, "files")) == 3
    assert len(blobs(store)) == 1


def test_a_refined_form_takes_the_place_of_the_written_one(store, model):
    """It is found where it was refined; where it was not, nothing is, and the model is taken apart again."""
    path = model()
    form = refined(store, written(store, path))

    assert form.trial == TRIAL
    assert store.form(form.key, "here") == form
    assert store.form(form.key, "elsewhere") is None
    again = written(store, path)
    assert again.key == form.key
    assert store.form(form.key, "elsewhere") == again
    assert len(blobs(store)) == 1


@pytest.mark.parametrize("content", ["", "[]", '{"sources": 1, "key": "k"}', '{"key": "k"}', "\0"])
def test_a_broken_reference_leads_nowhere(store, model, content):
    """Whatever the file says, it is no error; a sweep removes it."""
    written(store, model())
    [name] = names(store, "refs")
    (store.directory / "refs" / name).write_text(content)

    assert store.reference(model()) is None
    store.sweep(EVERYTHING)
    assert names(store, "refs") == []


def test_a_broken_trial_is_no_form(store, model):
    """A refined form that does not say how it was tried is none."""
    form = refined(store, written(store, model()))
    (store.directory / "forms" / form.path.name).write_text('{"blobs": {}, "trial": {}}')

    assert store.form(form.key, "here") is None


# -- removing ----------------------------------------------------------------------------------------------------------


def test_forms_go_with_the_files_that_they_were_made_from(store, model):
    """A form is removed when the last file that leads to it is gone, its blobs when no form has them any more."""
    a, b, c = (model(name) for name in "abc")
    shared, own = written(store, a), written(store, b, b"another graph")
    written(store, c)  # as a
    refined(store, shared, extra=b"x" * 100)
    store.sweep(EVERYTHING)
    assert len(names(store, "refs")) == 3
    assert len(names(store, "forms")) == 2
    assert len(blobs(store)) == 2
    assert len(names(store, "files")) == 4

    a.unlink()
    store.sweep(EVERYTHING)
    assert store.form(shared.key, "here") is not None
    c.unlink()
    store.sweep(EVERYTHING)
    assert names(store, "forms") == [own.path.name]
    assert blobs(store) == list(own.blobs)
    b.unlink()
    store.sweep(EVERYTHING)
    assert [names(store, part) for part in ("refs", "forms", "files")] == [[], [], []]


def test_what_is_new_may_wait_to_be_kept(store, model):
    """A sweep leaves what was just written, though nothing leads to it yet, and removes it when nobody kept it."""
    form = written(store, path := model())
    path.unlink()

    store.sweep()
    assert store.form(form.key, "here") == form
    os.utime(store.directory / "forms" / form.path.name, (1, 1))
    store.sweep()
    assert store.form(form.key, "here") is None
    assert form.is_there()
    for name in names(store, "files"):
        os.utime(store.directory / "files" / name, (1, 1))
    store.sweep()
    assert names(store, "files") == []


def test_a_form_that_is_written_again_is_as_good_as_new(store, model):
    """Whoever comes to a form that is about to be swept has as much time to keep it as if it were new."""
    form = written(store, model(), keep=False)
    for name in names(store, "files"):
        os.utime(store.directory / "files" / name, (1, 1))

    again = written(store, model("other"), keep=False)
    store.sweep()

    assert again == form
    assert form.is_there()


def test_what_is_mapped_outlives_its_file(store, model):
    """Removing a form takes nothing from somebody who has its blob open."""
    path = model()
    form = written(store, path)
    [name] = form.blobs
    with (store.directory / "files" / name).open("rb") as blob:
        path.unlink()
        store.sweep(EVERYTHING)
        assert names(store, "files") == []
        assert blob.read() == BIG


def test_a_draft_that_nobody_adds_leaves_nothing(store, model):
    """A model that turns out to be none leaves no form, and its blobs go with a sweep."""
    assert store.open()
    with contextlib.suppress(RuntimeError), store.draft() as draft:
        source = draft.source(model())
        draft.put(Span(source, 0, source.size))
        raise RuntimeError

    store.sweep(EVERYTHING)
    assert [names(store, part) for part in ("forms", "files")] == [[], []]
    assert staging(store) == []


_WRITES = """
import os, signal, sys
from pathlib import Path
from model_handlers.mapped import Span
from serve.weights import store
step, calls = int(sys.argv[3]), 0
def counted(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
for name in ("link", "write", "fsync", "open", "preadv"):
    setattr(os, name, counted(getattr(os, name)))
Path.rename = counted(Path.rename)
weights, path = store.WeightStore(Path(sys.argv[1])), Path(sys.argv[2])
assert weights.open()
with weights.draft() as made:
    source = made.source(path)
    made.put(Span(source, 0, source.size))
    form = weights.add_written(made, b"graph")
    reference = store.reference_to(made, form.key)
weights.keep(form)
weights.refer(path, reference)
print(calls)
"""


def _write(store, path, step):
    command = [sys.executable, "-c", _WRITES, str(store.directory), str(path), str(step)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])


@pytest.mark.long
def test_a_process_that_is_killed_at_any_step_leaves_nothing_wrong(store, model):
    """Killed before any write, link, rename or flush: what is found is whole, and what is not found is swept."""
    path = model()
    whole = _write(store, path, 0)
    steps = int(whole.stdout)
    assert steps > 12
    for step in range(1, steps + 1):
        path = model()  # to be written anew
        store.sweep(EVERYTHING)
        assert _write(store, path, step).returncode == -signal.SIGKILL
        after = WeightStore(store.directory)
        reference = after.reference(path)
        forms = [written(after, path)]
        if reference is not None:
            forms.append(after.form(reference.key, "here"))
        for form in forms:
            assert [(form.path.parent / name).read_bytes() for name in form.blobs] == [BIG]
            assert form.path.read_bytes() == b"graph"
        path.unlink()
        after.sweep(EVERYTHING)
        assert [names(after, part) for part in ("refs", "forms", "files")] == [[], [], []]
        assert staging(after) == []


def test_a_sweep_does_not_mind_loads_beside_it(store, model, monkeypatch):
    """A form that is found or written while a sweep goes on is no error of either."""
    form = written(store, path := model())

    class LoadsMeanwhile(str):
        """The name of a blob; comparing it takes so long that another form is written."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            written(store, model("other", os.urandom(100)), os.urandom(9))
            return str.__eq__(self, other)

    monkeypatch.setattr("serve.weights.store._blobs", lambda _: [LoadsMeanwhile(name) for name in form.blobs])
    store.sweep()

    assert store.form(store.reference(path).key, "here") == form


def test_a_directory_that_is_removed_by_hand_is_made_again(store, model):
    """What was in it is known no more; the next model that is loaded is written as if it were the first."""
    form = written(store, path := model())
    shutil.rmtree(store.directory)

    assert store.reference(path) is None
    store.sweep()
    assert not store.directory.exists()
    assert written(store, path) == form
    assert store.reference(path).key == form.key
    assert store.taken == len(BIG) + len(b"graph")


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_made_is_told_once(tmp_path, caplog):
    """The store can't be used, says why in one warning, and nothing is raised."""
    (tmp_path / "cache").write_text("a file")
    store = WeightStore(tmp_path / "cache" / "weights")

    assert [store.open(), store.open()] == [False, False]
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "weights are not mapped, models are loaded plainly" in record.getMessage()


def test_a_source_that_changed_under_the_reader_is_not_remembered(store, model):
    """What was read while somebody wrote may be a mixture: nothing leads to it."""
    path = model()
    assert store.open()
    with store.draft() as draft:
        source = draft.source(path)
        draft.put(Span(source, 0, source.size))
        path.write_bytes(BIG + b"more")
        with pytest.raises(Exception, match="written to while it was read"):
            reference_to(draft, "key")


def test_mappings_are_limited(store, monkeypatch):
    """A process may map only so many files: what its handlers map counts, until they are gone."""

    class Loaded:
        mappings = 0

    monkeypatch.setattr("serve.weights.store._mapping_limit", lambda: 100)
    one, other = Loaded(), Loaded()
    one.mappings, other.mappings = 60, 30
    store.handlers.update((one, other))

    assert store.can_map(10)
    assert not store.can_map(11)
    one.mappings = 0  # it was closed
    assert store.can_map(70)
    del other
    assert store.can_map(100)


def test_the_store_knows_what_it_takes(store, model, tmp_path):
    """Each blob once, graphs too; a store that finds files counts them, and a sweep counts anew."""
    assert store.taken == 0
    written(store, model("a"))
    assert store.taken == len(BIG) + len(b"graph")
    written(store, model("b"), b"another")
    assert store.taken == len(BIG) + len(b"graph") + len(b"another")
    assert WeightStore(store.directory).taken == store.taken

    (tmp_path / "a").unlink()
    store.sweep(EVERYTHING)
    assert store.taken == len(BIG) + len(b"another")
    (tmp_path / "b").unlink()
    store.shrink()
    assert store.taken == len(BIG) + len(b"another")  # it is new
    for name in names(store, "files") + names(store, "forms"):
        for part in ("files", "forms"):
            with contextlib.suppress(FileNotFoundError):
                os.utime(store.directory / part / name, (0, 0))
    store.shrink()
    assert store.taken == 0


@pytest.mark.parametrize("room", [True, False])
def test_whoever_keeps_the_disk_is_asked(tmp_path, caplog, room):
    """Whether there is room for a form; if not, that is said once."""
    asked = []
    store = WeightStore(tmp_path / "weights", lambda size: asked.append(size) or room)
    store.open()
    assert [store.has_room(1000), store.has_room(2000)] == [room, room]
    assert asked == [1000, 2000]
    assert len([record for record in caplog.records if "MME_DISK_BUDGET" in record.message]) == (not room)
