"""Whom files are charged to that several models map."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_handlers.base import Footprint, Tally
from serve.cache.residents import SharedBytes

BACKBONE = {"b1": 100, "b2": 50}
HEAD = {"h": 7}


def test_the_first_pays_and_the_others_do_not():
    """Files that somebody maps already cost a model nothing, whatever it maps beside them."""
    shared = SharedBytes()

    assert shared.beyond(BACKBONE) == 150
    assert shared.map("a", BACKBONE) == 150
    assert shared.beyond({**BACKBONE, **HEAD}) == 7
    assert shared.map("b", {**BACKBONE, **HEAD}) == 7
    assert (shared.charge("a"), shared.charge("b"), shared.charge("nobody")) == (150, 7, 0)


def test_who_came_next_inherits():
    """When the one that is charged goes, the charge goes to the next that came, file by file; the last takes it along."""
    shared = SharedBytes()
    shared.map("a", BACKBONE)
    shared.map("b", {"b1": 100})
    shared.map("c", BACKBONE)

    assert shared.unmap("a") == {"b": 100, "c": 50}
    assert shared.unmap("b") == {"c": 100}
    assert shared.unmap("c") == {}
    assert shared.beyond(BACKBONE) == 150


def test_nobody_inherits_from_one_that_was_not_charged():
    """A model that mapped what others pay for goes without a trace; one that mapped nothing too."""
    shared = SharedBytes()
    shared.map("a", BACKBONE)
    shared.map("b", BACKBONE)
    shared.map("c", {})

    assert shared.unmap("b") == {}
    assert shared.unmap("c") == {}
    assert shared.charge("a") == 150
    assert repr(shared) == "<SharedBytes 1 models map 0.0 MB>"


@pytest.mark.parametrize("seed", range(20))
def test_charges_add_up_to_what_is_mapped(seed):
    """However models come and go, all charges together are every mapped file once."""
    rng = random.Random(seed)
    sizes = {f"f{number}": rng.randrange(1, 100) for number in range(8)}
    shared, here, charges = SharedBytes(), {}, {}
    for step in range(300):
        name = f"m{rng.randrange(6)}"
        if name in here:
            del here[name], charges[name]
            for heir, size in shared.unmap(name).items():
                charges[heir] += size
        else:
            here[name] = {file: sizes[file] for file in rng.sample(sorted(sizes), rng.randrange(6))}
            charges[name] = shared.map(name, here[name])
        mapped = {file for files in here.values() for file in files}
        assert sum(charges.values()) == sum(sizes[file] for file in mapped), step
        assert charges == {name: shared.charge(name) for name in here}
        users = {file: [name for name in here if file in here[name]] for file in mapped}
        for name, files in here.items():
            assert shared.files(name) == files
            assert shared.part(name) == sum(sizes[file] // len(users[file]) for file in files)
            assert shared.beside(name) == {user for file in files for user in users[file]}


def test_what_they_would_pay_alike():
    """Copies have a hundred tensors in common, and none of them seems to be larger than the others."""
    shared = SharedBytes()
    for name in "abc":
        shared.map(name, BACKBONE)
    shared.map("d", {**HEAD, "b2": 60})

    assert shared.files("d") == {"h": 7, "b2": 50}
    assert (shared.charge("a"), shared.part("a"), shared.part("d")) == (150, 100 // 3 + 50 // 4, 7 + 50 // 4)
    assert shared.beside("d") == set("abcd")
    shared.unmap("d")
    assert shared.part("b") == 100 // 3 + 50 // 3
    assert (shared.part("nobody"), shared.beside("nobody")) == (0, set())


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.sampled_from("abcd")), st.integers(0, 9)), max_size=40))
def test_a_tally_is_what_they_take_together(steps):
    """However models come and go: each one's own, and every file once."""
    tally, here = Tally(), {}
    for name, files, size in steps:
        if name in here:
            tally.remove(*here.pop(name))
        else:
            here[name] = (Footprint(size, (0, size)), {file: ord(file) for file in files})
            tally.add(*here[name])
        mapped = {file for _, files in here.values() for file in files}
        own = sum((own for own, _ in here.values()), Footprint())
        assert (tally.count, tally.total) == (len(here), own + Footprint(sum(map(ord, mapped))))
        assert tally.users.keys() == mapped
