"""A directory is one model with its versions and files, or is refused with what was found and what was expected."""

import os

import pytest

from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from serve.sources.layout import list_models
from serve.sources.repository import ModelDirectory, open_model, open_target, parts_beside
from serve.sources.scripts import Scripts

ONNX = 'backend: "onnxruntime"\n'


@pytest.fixture
def tree(tmp_path):
    """Make a directory `m` of name -> text; names that end with a slash are directories."""

    def make(files):
        root = tmp_path / "m"
        root.mkdir(exist_ok=True)
        for name, text in files.items():
            path = root / name
            if name.endswith("/"):
                path.mkdir(parents=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return root

    return make


def refused(path, name="target.tar.gz", opened=open_target, **options):
    """The kind and the sentence with which it is refused; the sentence names the model."""
    with pytest.raises(MmeError) as caught:
        opened(path, name, **options)
    assert name in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value.kind, caught.value.message


@pytest.mark.parametrize(
    "files",
    [
        {"config.pbtxt": ONNX, "1/model.onnx": "x"},
        {"1/model.onnx": "x"},
        {"bert/config.pbtxt": ONNX, "bert/1/model.onnx": "x"},
        {"bert/1/model.onnx": "x"},
        {"bert/1/model.onnx": "x", "readme.md": "", "docs/x": "", ".hidden/1/model.onnx": ""},
        {"config.pbtxt": 'platform: "onnxruntime_onnx"', "1/model.onnx": "x"},
        {"config.pbtxt": 'name: "what_its_author_called_it"', "1/model.onnx": "x"},
        {"config.pbtxt": "", "1/model.onnx/model.onnx": "x"},
        {"opt/ml/model/1/model.onnx": "x", "opt/.hidden": ""},
        {"opt/ml/model/bert/config.pbtxt": ONNX, "opt/ml/model/bert/1/model.onnx": "x"},
    ],
)
def test_layouts(files, tree):
    """A model at the root, in one directory, or in one of all that is there, with a configuration or without, is served under the target's name."""
    model = open_target(tree(files), "target.tar.gz")

    assert model.name == model.config.name == "target.tar.gz"
    assert (model.config.backend, model.config.platform) == ("onnxruntime", "onnxruntime_onnx")
    assert list(model.versions) == [1]
    assert model.model_file(1).name == "model.onnx"
    assert model.model_file(1).exists()


def test_configuration_is_read(tree):
    """What config.pbtxt says is what the model has."""
    config = ONNX + 'max_batch_size: 8 parameters { key: "k" value { string_value: "v" } }'
    model = open_target(tree({"config.pbtxt": config, "1/model.onnx": ""}), "m")

    assert (model.config.max_batch_size, dict(model.config.parameters)) == (8, {"k": "v"})


def test_named_model_file(tree):
    """default_model_filename names the file, in a directory below the version's if it says so."""
    config = ONNX + 'default_model_filename: "weights/net.onnx"'
    model = open_target(tree({"config.pbtxt": config, "3/weights/net.onnx": "x"}), "m")

    assert model.model_file(3) == model.path / "3" / "weights" / "net.onnx"


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", [10]),
        ("version_policy { latest { num_versions: 2 } }", [2, 10]),
        ("version_policy { all {} }", [0, 1, 2, 10]),
        ("version_policy { specific { versions: [1, 7, 0] } }", [0, 1]),
    ],
)
def test_versions(policy, served, tree):
    """Directories are versions by Triton's rules, numbers in the order of numbers, chosen by the policy."""
    versions = ("0", "1", "2", "10", "02", "3x", "-4", "²", "warmup", "initial_state", "configs", ".5")
    model = open_target(
        tree({"config.pbtxt": ONNX + policy, "6": "a file", **{f"{v}/model.onnx": "x" for v in versions}}), "m"
    )

    assert list(model.versions) == served
    assert [model.versions[version].name for version in served] == [str(version) for version in served]


@pytest.mark.parametrize(
    "files",
    [
        {"config.pbtxt": ONNX},
        {"config.pbtxt": ONNX, "01/model.onnx": "x"},
        {"config.pbtxt": ONNX + "version_policy { specific { versions: [7] } }", "1/model.onnx": "x"},
        {"config.pbtxt": ONNX + "version_policy { latest { num_versions: 0 } }", "1/model.onnx": "x"},
    ],
)
def test_no_version_left(files, tree):
    """A model of which no version may be served is refused in Triton's words."""
    kind, message = refused(tree(files))

    assert kind is Kind.INVALID_MODEL
    if "num_versions" not in files["config.pbtxt"]:
        assert "at least one version must be available under the version policy of model 'target.tar.gz'" in message


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, "nothing"),
        ({"model.onnx": "x"}, "model.onnx"),
        ({"1/weights.bin": "x", "readme": ""}, "readme, 1/weights.bin"),
        ({"bert/": "", "a/b/c": ""}, "a/b/c, bert/"),
        ({"config.pbtxt": "max_batch_size: 1", "1/net.onnx": "x"}, "config.pbtxt, 1/net.onnx"),
        ({f"{number:02}.bin": "" for number in range(99)}, "09.bin, 10.bin, 11.bin and more"),
    ],
)
def test_no_model(files, found, tree):
    """Without configuration and known file, the sentence shows what was found, bounded, and what was expected."""
    kind, message = refused(tree(files))

    assert kind is Kind.INVALID_MODEL
    assert f"{found}; expected config.pbtxt and 1/model.onnx" in message
    assert len(message) < 400


def test_two_models(tree):
    """Two models and no ensemble are refused by their names."""
    kind, message = refused(tree({"a/1/model.onnx": "", "b/config.pbtxt": '# platform: "ensemble"\n' + ONNX}))

    assert kind is Kind.INVALID_MODEL
    assert "two models" in message
    assert "'a', 'b'" in message


ENSEMBLE = """platform: "ensemble"
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
ensemble_scheduling { step { model_name: "%s" input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } }"""


@pytest.mark.parametrize("version", ["e/1/", "e/labels.txt"], ids=["with its version", "without"])
def test_an_ensemble_is_asked_for_its_parts(version, tree):
    """Beside its parts, whatever they are called; an archive that lost its empty version directory will do."""
    model = open_target(tree({"e/config.pbtxt": ENSEMBLE % "a", version: "", "a/1/model.onnx": ""}), "m")

    assert (model.config.platform, list(model.versions)) == ("ensemble", [1])
    assert [member.name for member in model.members] == ["m:a"]
    assert [member.config.local_name(member.name) for member in model.members] == ["a"]


def test_an_ensemble_of_ensembles_is_the_outermost(tree):
    """The one that is no part of another."""
    files = {"a/config.pbtxt": ENSEMBLE % "b", "b/config.pbtxt": ENSEMBLE % "c", "c/1/model.onnx": ""}
    model = open_target(tree(files), "m")

    assert model.path.name == "a"
    assert sorted(member.name for member in model.members) == ["m:b", "m:c"]


def test_an_archive_is_a_namespace_of_its_own(tree):
    """A step of its ensemble that names a repository is refused by its place."""
    config = (ENSEMBLE % "b").replace("model_name:", 'model_namespace: "r" model_name:')
    with pytest.raises(MmeError, match="model_namespace 'r' in step 0 of ensemble 'm'"):
        open_target(tree({"a/config.pbtxt": config, "b/1/model.onnx": ""}), "m")


def test_an_ensemble_in_a_repository_takes_what_lies_beside_it(tree):
    """For a command that packs it: its parts and theirs, and nothing else."""
    files = {"a/config.pbtxt": ENSEMBLE % "b", "b/config.pbtxt": ENSEMBLE % "c", "c/1/model.onnx": ""}
    root = tree({**files, "other/1/model.onnx": ""})
    model = open_model(root / "a", "a")

    assert (model.members, model.steps) == ((), ("b",))
    assert parts_beside(model) == [root / "b", root / "c"]


@pytest.mark.parametrize("filename", ["../../secret", "/etc/passwd", "a/../../b", "."])
def test_model_file_outside(filename, tree):
    """A model file outside of its version directory is refused, though it exists."""
    root = tree({"config.pbtxt": ONNX + f'default_model_filename: "{filename}"', "1/model.onnx": "x", "b": ""})
    (root.parent / "secret").touch()
    kind, message = refused(root)

    assert kind is Kind.INVALID_MODEL
    assert "default_model_filename" in message


def test_missing_model_file(tree):
    """Each selected version must have the file; the sentence names it, the version, and what is there."""
    config = ONNX + "version_policy { all {} }"
    kind, message = refused(tree({"config.pbtxt": config, "1/model.onnx": "x", "2/net.onnx": "x"}))

    assert kind is Kind.INVALID_MODEL
    assert "no file 'model.onnx' in version 2" in message
    assert "found net.onnx" in message


def test_unselected_version_may_be_broken(tree):
    """A version that is not served need not have its file."""
    assert list(open_target(tree({"config.pbtxt": ONNX, "1/": "", "2/model.onnx": ""}), "m").versions) == [2]


def test_unreadable_configuration(tree):
    """Text that is no UTF-8, no configuration, or far too long is refused as a broken model."""
    root = tree({"1/model.onnx": "x"})
    for data in (b"\xff\xfe\x00", b"max_batch_size: lots", b"#" * (2 << 20)):
        (root / "config.pbtxt").write_bytes(data)
        kind, message = refused(root)
        assert kind is Kind.INVALID_MODEL
        assert "config.pbtxt" in message or "max_batch_size" in message


def test_unknown_backend(tree):
    """A backend that nobody serves is refused by its name."""
    kind, message = refused(tree({"config.pbtxt": 'backend: "abacus"', "1/model.onnx": "x"}))

    assert kind is Kind.INVALID_MODEL
    assert "abacus" in message


def test_size_is_that_of_the_selected_versions(tree):
    """Only the versions that will be loaded count, with everything beside the model file."""
    root = tree({"1/model.onnx": "x" * 1000, "2/model.onnx": "x" * 10, "2/model.onnx.data": "y" * 5, "warmup/z": "z"})

    assert open_target(root, "m").size() == 15


def test_target_that_is_not_there(tmp_path):
    """A directory that is missing is the caller's mistake."""
    assert refused(tmp_path / "nope")[0] is Kind.INVALID_ARGUMENT


def test_list_models(tree):
    """A repository lists the directories that hold a model, by name, and nothing else."""
    files = {"b/1/model.onnx": "", "a/config.pbtxt": "", ".c/1/model.onnx": "", "docs/readme": "", "d": ""}

    assert list_models(tree(files)) == ["a", "b"]
    with pytest.raises(MmeError) as caught:
        list_models(tree({}) / "d")
    assert caught.value.kind is Kind.INVALID_ARGUMENT


def test_open_model(tree):
    """A model of a repository is named after its directory, and its configuration must agree."""
    files = {
        "a/config.pbtxt": 'name: "a"\n' + ONNX,
        "a/1/model.onnx": "",
        "b/config.pbtxt": 'name: "a"\n' + ONNX,
        "b/1/model.onnx": "",
        "c/1/model.onnx": "",
        "d/e/1/model.onnx": "",
    }
    root = tree(files)

    assert open_model(root / "a", "a").name == "a"
    assert open_model(root / "c", "c").config.name == "c"
    assert open_model(root / "b", "b", strict_name=False).config.name == "b"
    assert "directory name must equal model name" in refused(root / "b", "b", open_model)[1]
    assert refused(root / "d", "d", open_model)[0] is Kind.INVALID_MODEL
    assert refused(root / "x", "x", open_model)[0] is Kind.UNKNOWN_MODEL


def test_a_fingerprint_is_of_what_the_files_are(tmp_path):
    """The same files have the same one wherever they lie; a size, a time, a name or the configuration changes it.

    What Python keeps of code that it has read does not: what a model took when it was loaded first is known the next time.
    """

    def lay_out(name, config="max_batch_size: 1", weights=b"1234", file="model.onnx", seconds=7):
        folder = tmp_path / name
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(config)
        (folder / "1" / file).write_bytes(weights)
        for path in (folder / "config.pbtxt", folder / "1" / file):
            os.utime(path, (seconds, seconds))
        return ModelDirectory("m", folder, ModelConfig("m"), {1: folder / "1"}).fingerprint()

    first = lay_out("first")
    assert lay_out("elsewhere") == first
    (tmp_path / "elsewhere" / "1" / "__pycache__").mkdir()
    (tmp_path / "elsewhere" / "1" / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"read once")
    (tmp_path / "elsewhere" / "1" / "gone").symlink_to("nowhere")
    assert ModelDirectory("m", tmp_path / "elsewhere", ModelConfig("m"), {}).fingerprint() == first
    others = [
        lay_out("size", weights=b"12345"),
        lay_out("time", seconds=8),
        lay_out("name", file="model.ONNX"),
        lay_out("configuration", config="max_batch_size: 2"),
        lay_out("bytes", file=os.fsdecode(b"\xff")),
    ]
    assert len({first, *others}) == 6


def test_directories_that_are_almost_versions_are_told(tree, caplog):
    """One with leading zeros, and one that only begins with a number; others are nobody's business."""
    open_model(tree({"config.pbtxt": ONNX, "1/model.onnx": "x", "02/": "", "3_old/": "", "docs/": ""}), "m")

    assert caplog.messages == [
        "ignore version directory '02' which contains leading zeros in its directory name",
        "ignore version directory '3_old' which is no number",
    ]


def test_a_directory_may_name_the_backend(tree):
    """Where neither its configuration nor its files do: it is what stands behind the first dot."""
    root = tree({"same.identity/1/": "", "same.nobody/1/": "", "plain.identity/1/model.onnx": "x"})

    assert open_model(root / "same.identity", "same.identity").config.backend == "identity"
    assert open_model(root / "plain.identity", "plain.identity").config.backend == "onnxruntime"
    _, message = refused(root / "same.nobody", "same.nobody", open_model)
    assert message.startswith("no model found in 'same.nobody'")


def test_a_server_may_want_configurations_that_say_everything(tree):
    """Then a model has to have one; an inference script needs none."""
    strict = Scripts(strict=True)
    kind, message = refused(tree({"bare/1/model.onnx": "x"}) / "bare", "bare", open_model, scripts=strict)
    assert kind is Kind.INVALID_MODEL
    assert "has no config.pbtxt, and nothing is taken from model files here" in message

    root = tree({"full/config.pbtxt": ONNX, "full/1/model.onnx": "x", "script/code/inference.py": ""})
    assert open_model(root / "full", "full", strict).config.strict
    assert open_model(root / "script", "script", strict).config.backend == "sagemaker"


@pytest.mark.parametrize(("backend", "size"), [("onnxruntime", 8), ("openvino", 2)])
def test_a_server_may_say_how_large_batches_are(backend, size, tree):
    """Of one backend, and of all others."""
    root = tree({"config.pbtxt": f'backend: "{backend}" default_model_filename: "m"', "1/m": "x"})

    model = open_model(root, "m", Scripts(batch_sizes=(("", 2), ("onnxruntime", 8))))
    assert model.config.default_max_batch_size == size


@pytest.mark.parametrize(
    ("step", "others", "name"),
    [
        ('"p"', (), "p"),
        ('"p"', ("other",), "m/p"),
        ('"p" model_namespace: "other"', ("other",), "other/p"),
        ('"p" model_namespace: "third"', ("other",), "third/p"),
        ('"../p"', (), "../p"),
        ('"sent"', ("other",), "sent"),
    ],
)
def test_the_models_of_an_ensemble_are_those_that_clients_know(tree, tmp_path, step, others, name):
    """By their names, which two repositories may make longer; a client may have sent the files of one."""
    step = f'step {{ model_name: {step} input_map {{ key: "x" value: "X" }} output_map {{ key: "y" value: "Y" }} }}'
    tensors = (
        'input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }'
    )
    config = f'platform: "ensemble" {tensors} ensemble_scheduling {{ {step} }}'
    root = tree({"e/config.pbtxt": config, "e/1/": "", "p/1/model.onnx": "x"})
    (tmp_path / "other" / "p").mkdir(parents=True)

    assert open_model(root / "e", "e", others=tuple(tmp_path / each for each in others)).steps == (name,)


NO_TEXT = os.fsdecode(b"m\xff")


def test_a_model_whose_directory_has_no_name_in_text_is_left_out(tree, caplog):
    """No answer, index or metric could name it; the others are served, and it is told once."""
    root = tree({"good/1/model.onnx": "", f"{NO_TEXT}/1/model.onnx": ""})
    for _ in range(2):
        assert list_models(root) == ["good"]
    assert [record.getMessage() for record in caplog.records] == [
        f"ignore model directory '{root}/m\\udcff', whose name is not UTF-8: rename it"
    ]


def test_an_archive_with_such_a_directory_is_refused(tree):
    """Its models are counted by the names of their directories."""
    root = tree({"good/config.pbtxt": ONNX, "good/1/model.onnx": "", f"{NO_TEXT}/1/model.onnx": ""})
    kind, sentence = refused(root)
    assert kind is Kind.INVALID_MODEL
    assert "a model directory whose name is not UTF-8, 'm\\udcff': rename it" in sentence


def test_a_model_that_can_not_be_read_is_one_that_does_not_load(tmp_path):
    """The others of its repository are listed, and whoever loads it hears why; here its path is longer than any may be."""
    repository = tmp_path
    while (room := 4060 - len(str(repository)) - 1) > 0:
        repository /= "d" * min(room, 200)
    (repository / "good" / "1").mkdir(parents=True)
    unreadable = "model_with_a_name_of_some_length"
    (repository / unreadable).mkdir()

    assert list_models(repository) == ["good", unreadable]
    with pytest.raises(MmeError, match=f"model '{unreadable}' cannot be read") as caught:
        open_model(repository / unreadable, unreadable)
    assert caught.value.kind is Kind.INTERNAL
