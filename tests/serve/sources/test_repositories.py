"""Names over several repositories, and what the files of a model look like."""

import os
import shutil

import pytest

from model_handlers.errors import Kind, MmeError
from serve.sources.catalog import Repositories, print_of
from serve.sources.scripts import DEFAULT_SCRIPTS
from serve.sources.source import InRepository


@pytest.fixture
def repositories(tmp_path):
    """A function that makes repositories of folders: name → models."""

    def make(*, namespaces=False, **folders):
        for folder, models in folders.items():
            (tmp_path / folder).mkdir(exist_ok=True)
            for model in models:
                (tmp_path / folder / model / "1").mkdir(parents=True)
        paths = tuple(tmp_path / folder for folder in folders)
        return Repositories(paths, lambda: DEFAULT_SCRIPTS, namespaces=namespaces)

    return make


def test_names_of_several_repositories(repositories, tmp_path):
    """All in order, each where it is; an ensemble is told of the other folders."""
    both = repositories(one="ac", two="b")
    assert both.names() == ["a", "b", "c"]
    assert both.find("b") == InRepository(tmp_path / "two" / "b", (tmp_path / "one",))
    for nobody in ("d", "", ".", "..", "one/a", "../one/a", "a\0", "x" * 300):
        assert both.find(nobody) is None
    assert both.canonical("one/a") == "one/a"


def test_a_name_that_two_repositories_have_is_refused(repositories):
    """The others are served; the sentence names both folders and what to do."""
    both = repositories(one="ab", two="b")
    assert both.names() == ["a", "b"]
    assert list(both.refused) == ["b"]
    with pytest.raises(MmeError, match=r"model 'b' is in 2 repositories, .*one and .*two: rename one") as caught:
        both.find("b")
    assert caught.value.kind is Kind.INVALID_MODEL
    assert both.scan()["b"] == both.refused["b"]
    assert both.scan()["a"] != ""


@pytest.mark.parametrize("namespaces", [False, True])
def test_a_folder_that_is_no_model_yet_keeps_no_other_model_from_being_seen(repositories, tmp_path, namespaces):
    """It makes a name ambiguous that another repository has, as it will when it is one; of that name alone."""
    both = repositories(one="ab", two="c", namespaces=namespaces)
    (tmp_path / "two" / "b").mkdir()
    found = both.scan()
    assert list(found) == (["a", "c", "one/b"] if namespaces else ["a", "b", "c"])
    assert found == both.scan()
    assert list(both.refused) == ([] if namespaces else ["b"])
    (tmp_path / "two" / "b").rmdir()
    assert list(both.scan()) == ["a", "b", "c"]
    assert both.refused == {}


def test_namespaces_tell_models_of_one_name_apart(repositories, tmp_path):
    """By their repository's folder; the bare name says that it is not enough, and a name of one's own means itself."""
    both = repositories(one="ab", two="b", namespaces=True)
    assert both.names() == ["a", "one/b", "two/b"]
    assert both.refused == {}
    assert both.find("two/b") == InRepository(tmp_path / "two" / "b", (tmp_path / "one",))
    assert both.find("a").path == tmp_path / "one" / "a"
    assert [both.find(name) for name in ("three/b", "one/nobody", "one/", "/b", "one/../b", "one/two/b")] == [None] * 6
    assert [both.canonical(name) for name in ("one/a", "two/a", "one/b", "a")] == ["a", "two/a", "one/b", "a"]
    with pytest.raises(MmeError, match="There are 2 identifiers of model 'b' in global map") as caught:
        both.find("b")
    assert caught.value.kind is Kind.INVALID_ARGUMENT
    assert "'one/b' or 'two/b'" in caught.value.message


def test_prints_tell_every_change(tmp_path):
    """A file written anew, added, removed or replaced, and an empty version; not a look at it, nor the same configuration again."""
    model = tmp_path / "m"
    (model / "1").mkdir(parents=True)
    file = model / "1" / "model.onnx"
    file.write_bytes(b"model")
    prints = [print_of(model)]

    def changed():
        prints.append(print_of(model))
        return prints[-1] not in prints[:-1]

    file.read_bytes()
    assert not changed()
    file.write_bytes(b"other model")
    assert changed()
    (model / "config.pbtxt").write_text("")
    assert changed()
    os.utime(model / "config.pbtxt", ns=(1, 1))
    (model / "1" / "__pycache__").mkdir()
    (model / "1" / "__pycache__" / "model.cpython-312.pyc").write_text("")
    assert not changed()
    (model / "2").mkdir()
    assert changed()
    os.utime(file, ns=(1, 1))
    assert changed()
    shutil.copy(file, tmp_path / "copy")
    os.utime(tmp_path / "copy", ns=(1, 1))
    (tmp_path / "copy").rename(file)
    assert changed()
    (model / "link").symlink_to("nowhere")
    assert changed()
    (model / "itself").symlink_to("itself")
    assert changed()
    file.unlink()
    assert changed()


def test_prints_tell_what_links_lead_to(tmp_path):
    """A version that is a link is another model's files once it leads elsewhere; circles are walked through once."""
    model, store = tmp_path / "m", tmp_path / "store"
    model.mkdir()
    for name in ("old", "new"):
        (store / name).mkdir(parents=True)
        (store / name / "model.onnx").write_bytes(b"model")
    prints = [print_of(model)]

    def changed():
        prints.append(print_of(model))
        assert print_of(model) == prints[-1]
        return prints[-1] not in prints[:-1]

    (model / "1").symlink_to(store / "old")
    assert changed()
    (model / "1").unlink()
    (model / "1").symlink_to(store / "new")
    assert changed()
    (store / "new" / "model.onnx").write_bytes(b"other model")
    assert changed()
    (model / "2").symlink_to(store / "new")
    assert changed()
    (model / "3").symlink_to(model)
    assert changed()
    (model / "3").unlink()
    (model / "3").symlink_to(store / "new")
    assert changed()
