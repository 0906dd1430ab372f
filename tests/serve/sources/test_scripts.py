"""Directories with an inference script as models: which they are, and what is said of them."""

import io
import tarfile
from dataclasses import replace

import pytest

from model_handlers.config.model_config import InstanceGroup
from model_handlers.errors import Kind, MmeError
from model_handlers.scripts.default_script import FOLDER
from serve.sources.layout import list_models
from serve.sources.repository import open_model, open_target
from serve.sources.scripts import Scripts, fetched


@pytest.fixture
def tree(tmp_path):
    """A function that writes files by their paths and returns the folder above them."""

    def make(*paths, **contents):
        root = tmp_path / "root"
        for path in (*paths, *contents):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(contents.get(path, ""))
        return root

    return make


CODE, ROOT = "code/inference.py", "inference.py"


@pytest.mark.parametrize(
    ("paths", "inside", "script"),
    [
        ([CODE], "", CODE),
        ([ROOT], "", ROOT),
        ([CODE, ROOT], "", CODE),
        ([CODE, "model.joblib", "code/helper.py", "1_Pooling/config.json"], "", CODE),
        (["bert/" + CODE, "bert/model.pt"], "bert", CODE),
        (["bert/" + ROOT, "readme.md"], "bert", ROOT),
    ],
)
def test_a_directory_with_a_script_is_a_model(tree, paths, inside, script):
    """In `code/` or at the root of the archive, or in its one directory; the version is 1 and its directory the model's."""
    root = tree(*paths)
    model = open_target(root, "m.tar.gz")

    assert model.config.takes_raw_body
    assert model.name == model.config.name == "m.tar.gz"
    assert model.path == root / inside
    assert model.versions == {1: root / inside}
    assert model.config.default_model_filename == script
    assert model.model_file(1) == root / inside / script
    assert model.config.instance_group == (InstanceGroup("m.tar.gz"),)
    assert dict(model.config.parameters) == {}


@pytest.mark.parametrize(
    ("paths", "contents", "backend"),
    [
        ([CODE, "1/model.onnx"], {}, "onnxruntime"),
        ([ROOT, "1/model.py"], {"config.pbtxt": 'backend: "python"'}, "python"),
        ([CODE, "bert/1/model.onnx"], {}, "onnxruntime"),
        ([CODE, "1/weights.bin"], {}, "sagemaker"),
        ([CODE], {"config.pbtxt": ""}, "sagemaker"),
        ([CODE], {"config.pbtxt": 'backend: "sagemaker"'}, "sagemaker"),
        (["1/" + CODE], {"config.pbtxt": 'backend: "sagemaker"'}, "sagemaker"),
    ],
)
def test_a_model_of_triton_with_a_script_beside_it_stays_one(tree, paths, contents, backend):
    """What config.pbtxt says counts, then a model file in a version's directory, then the script."""
    assert open_target(tree(*paths, **contents), "m").config.backend == backend


def test_a_script_may_have_a_configuration(tree):
    """Its instances, parameters and the script's name are those of config.pbtxt; versions have scripts of their own."""
    config = """
        instance_group { count: 3 kind: KIND_CPU }
        default_model_filename: "own.py"
        parameters { key: "MME_EXECUTION_TIMEOUT" value { string_value: "5" } }
    """
    model = open_target(tree(CODE, "own.py", **{"config.pbtxt": config}), "m", Scripts(workers=2))
    assert model.config.instance_group[0].count == 3
    assert model.config.default_model_filename == "own.py"
    assert dict(model.config.parameters) == {"MME_EXECUTION_TIMEOUT": "5"}


def test_versions_may_have_scripts(tree):
    """With a backend named, each version's directory is a model with its script; the latest is served."""
    root = tree("1/" + CODE, "3/" + CODE, "4/nothing", **{"config.pbtxt": 'backend: "sagemaker"'})

    assert open_target(root, "m").versions == {3: root / "3"}


def test_what_is_set_for_all_scripts_is_said_to_each(tree):
    """The number of processes, the file name, and the type of answers that nobody chose."""
    scripts = Scripts("serve_it.py", workers=2, default_accept="text/csv")
    config = open_target(tree("code/serve_it.py"), "m", scripts).config

    assert config.default_model_filename == "code/serve_it.py"
    assert config.instance_group == (InstanceGroup("m", count=2),)
    assert dict(config.parameters) == {"SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "text/csv"}


def test_another_file_name_is_no_script(tree):
    """The sentence says what was found, and what a script would be called."""
    with pytest.raises(MmeError) as caught:
        open_target(tree("code/serve_it.py"), "m")

    assert caught.value.kind is Kind.INVALID_MODEL
    assert "found code/serve_it.py" in caught.value.message
    assert "code/inference.py" in caught.value.message


def test_two_scripts_in_one_archive_are_refused(tree):
    """Nobody could say which of them requests are for."""
    with pytest.raises(MmeError, match="'a', 'b'"):
        open_target(tree("a/" + CODE, "b/" + CODE), "m")


@pytest.mark.parametrize(
    ("paths", "script", "parameters"),
    [
        (["xgboost-model"], "booster.py", {"SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "text/csv"}),
        (["xgboost-model-0", "xgboost-model-1"], "booster.py", {"SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "text/csv"}),
        (["config.json", "model.safetensors", "1_Pooling/config.json"], "pipeline.py", {}),
        (["config.json", "pytorch_model-00001-of-00002.bin"], "pipeline.py", {}),
        (["config.json", "tf_model.h5", "saved_model/1/saved_model.pb"], "pipeline.py", {}),
        (["1/saved_model.pb", "2/saved_model.pb"], "saved_model.py", {}),
        (["00000123/saved_model.pb"], "saved_model.py", {}),
        (["export/Servo/1589/saved_model.pb"], "saved_model.py", {}),
        (["a/1/saved_model.pb", "b/1/saved_model.pb"], "saved_model.py", {}),
    ],
)
def test_a_model_that_needs_no_script_gets_one(tree, paths, script, parameters):
    """XGBoost's file, what Hugging Face's libraries save, and versions of SavedModels are models by themselves."""
    root = tree(*paths)
    model = open_target(root, "m")

    assert model.config.default_model_filename == script
    assert dict(model.config.parameters) == {"SAGEMAKER_SUBMIT_DIRECTORY": str(FOLDER), **parameters}
    assert (FOLDER / script).is_file()
    assert model.versions == {1: root}


def test_a_script_of_its_own_or_a_shared_one_comes_before_a_built_in_one(tree, tmp_path):
    """A built-in one is for models that have no other."""
    (tmp_path / ROOT).touch()
    bare = open_target(tree("xgboost-model"), "m", Scripts(shared=str(tmp_path)))
    assert dict(bare.config.parameters) == {"SAGEMAKER_SUBMIT_DIRECTORY": str(tmp_path)}
    assert bare.config.default_model_filename == ROOT
    own = open_target(tree(CODE), "m")
    assert (own.config.default_model_filename, dict(own.config.parameters)) == (CODE, {})


@pytest.mark.parametrize("paths", [("xgboost-model",), ("xgboost-model-0", "xgboost-model-1")])
def test_a_pickle_is_loaded_where_that_is_allowed(tree, paths, tmp_path):
    """It may run any code when it is loaded: by a built-in script or a shared one, which the archive's author wrote neither."""
    (tmp_path / ROOT).touch()
    root = tree(*paths)
    (root / paths[-1]).write_bytes(b"\x80\x05.")
    for scripts in (Scripts(), Scripts(shared=str(tmp_path))):
        with pytest.raises(MmeError, match=r"xgboost-model\S* is a pickle, .+ MME_ALLOW_PICKLE=true") as refused:
            open_target(root, "m", scripts)
        assert refused.value.kind is Kind.INVALID_MODEL
        assert open_target(root, "m", replace(scripts, allow_pickle=True)).versions == {1: root}


def test_an_archive_that_brings_code_may_bring_a_pickle(tree):
    """Its author runs code anyway."""
    root = tree("xgboost-model", CODE)
    (root / "xgboost-model").write_bytes(b"\x80\x05.")
    assert open_target(root, "m").config.default_model_filename == CODE


def test_what_is_set_for_models_without_scripts_is_said_to_them(tree):
    """The type of answers, whether they are put together by lines, the task, and which of several models is meant."""
    scripts = Scripts(booster_accept="application/json", lines=True, task="fill-mask")
    booster = open_target(tree("xgboost-model"), "m", scripts)
    said = {"SAGEMAKER_BATCH": "true", "HF_TASK": "fill-mask", "SAGEMAKER_SUBMIT_DIRECTORY": str(FOLDER)}
    assert dict(booster.config.parameters) == said
    own = open_target(tree(CODE), "m", scripts)
    assert dict(own.config.parameters) == {"HF_TASK": "fill-mask"}
    of_tensorflow = open_target(tree("a/1/saved_model.pb", "b/1/saved_model.pb", CODE), "m", Scripts(saved_model="b"))
    assert dict(of_tensorflow.config.parameters) == {"SAGEMAKER_TFS_DEFAULT_MODEL_NAME": "b"}


def test_a_script_beside_a_folder_of_saved_models_is_theirs(tree):
    """As TensorFlow's container has it: the archive is one model."""
    root = tree("half/1/saved_model.pb", CODE)
    model = open_target(root, "m")

    assert (model.path, model.config.default_model_filename) == (root, CODE)


@pytest.mark.parametrize(
    ("paths", "file"),
    [
        (["m/1/model.savedmodel/saved_model.pb"], "model.savedmodel"),
        (["m/1/model.py", "m/1/saved_model.pb"], "model.py"),
        (["m/1/model.py", "m/1/3/saved_model.pb"], "model.py"),
    ],
)
def test_saved_models_of_triton_are_no_scripts(tree, paths, file):
    """One in its own directory, and one that a Python model reads."""
    assert open_target(tree(*paths), "m").config.default_model_filename == file


@pytest.mark.parametrize(
    "paths",
    [
        ["xgboost-model", "m/1/model.onnx"],
        ["config.json", "model.safetensors", "m/config.pbtxt", "m/1/model.py"],
        ["m/1/model.py", "shared/encoder/1/saved_model.pb"],
    ],
)
def test_what_lies_beside_a_model_of_triton_is_for_its_code(tree, paths):
    """The model is what is served, and not what it reads."""
    root = tree(*paths)
    assert open_target(root, "m").path == root / "m"


@pytest.mark.parametrize("paths", [["config.json"], ["model.safetensors"], ["config.json", "optimizer.pt"]])
def test_half_of_a_saved_model_is_none(tree, paths):
    """There have to be both, its description and weights."""
    with pytest.raises(MmeError, match="no model found in 'm'"):
        open_target(tree(*paths), "m")


def test_a_named_backend_without_a_script_is_refused(tree):
    """The missing file is named."""
    with pytest.raises(MmeError, match=r"has no file 'inference\.py' in version 1, which backend 'sagemaker' loads"):
        open_target(tree("1/model.joblib", **{"config.pbtxt": 'backend: "sagemaker"'}), "m")


def test_a_repository_lists_scripts(tree):
    """Beside Triton's models; a directory without either is none."""
    root = tree("a/" + CODE, "b/" + ROOT, "c/1/model.onnx", "d/notes.txt")

    assert list_models(root) == ["a", "b", "c"]
    assert open_model(root / "a", "a").config.takes_raw_body
    with pytest.raises(MmeError, match="no model found in 'd'"):
        open_model(root / "d", "d")


def test_a_shared_script_serves_models_that_bring_none(tree, tmp_path):
    """A model's own script comes first; without one the folder of the shared one is said."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / ROOT).touch()
    scripts = Scripts(shared=str(shared))

    bare = open_target(tree("model.joblib"), "m", scripts)
    assert bare.config.default_model_filename == ROOT
    assert dict(bare.config.parameters) == {"SAGEMAKER_SUBMIT_DIRECTORY": str(shared)}
    assert bare.versions == {1: bare.path}
    own = open_target(tree(CODE), "m", scripts)
    assert dict(own.config.parameters) == {}


def test_a_shared_script_that_is_not_there_is_named(tree, tmp_path):
    """Where the archive of scripts holds none of that name."""
    with pytest.raises(MmeError, match=r"has no file 'inference\.py' in version 1"):
        open_target(tree("model.joblib"), "m", Scripts(shared=str(tmp_path)))


def archive_of(path, **files):
    """A .tar.gz of these files."""
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))


def test_a_shared_archive_is_fetched_once(tmp_path):
    """It is unpacked below the cache folder; what it becomes later does not matter to this process."""
    store, cache = tmp_path / "store", tmp_path / "cache"
    store.mkdir()
    archive_of(store / "sourcedir.tar.gz", **{"inference.py": "first"})
    script = fetched(Scripts("x.py", f"file://{store}/sourcedir.tar.gz", 3), cache)

    first = script()
    archive_of(store / "sourcedir.tar.gz", **{"inference.py": "second"})

    assert (cache / "scripts") in (tmp_path / first.shared).parents
    assert (tmp_path / first.shared / "inference.py").read_text() == "first"
    assert (first.program, first.workers) == ("x.py", 3)
    assert script() is first


def test_a_shared_archive_that_cannot_be_had_is_asked_for_again(tmp_path):
    """The error names it, and once it is there it is fetched."""
    (tmp_path / "store").mkdir()
    script = fetched(Scripts(shared=f"file://{tmp_path}/store/sourcedir.tar.gz"), tmp_path / "cache")
    with pytest.raises(MmeError, match=r"sourcedir\.tar\.gz"):
        script()

    archive_of(tmp_path / "store" / "sourcedir.tar.gz", **{"inference.py": ""})
    assert script().shared.startswith(str(tmp_path / "cache"))


@pytest.mark.parametrize("shared", ["", "/opt/shared"])
def test_what_is_on_this_machine_is_not_fetched(tmp_path, shared):
    """A folder is used where it is, and nothing is made for it."""
    assert fetched(Scripts(shared=shared), tmp_path / "cache")() == Scripts(shared=shared)
    assert not (tmp_path / "cache").exists()
