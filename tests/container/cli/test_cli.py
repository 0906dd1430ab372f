"""The command line: what `serve` becomes, what a person sees, and what the other commands send and write."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from container.cli import main
from container.observe import logs
from container.process.master import Server
from container.settings import Mode
from container.ship.invoke import server_timing
from serve.cache.eviction import Policy
from serve.sources.archive import extract
from serve.sources.repository import open_model, open_target
from tests.http_server import Handler, answering

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    """No test sees settings of the machine, or leaves logging configured."""
    for name in list(os.environ):
        if name.startswith(("MME_", "SAGEMAKER_", "AWS_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(logs, "configure", lambda *_: None)


@pytest.fixture(name="became")
def _became(monkeypatch, tmp_path):
    """What `serve` becomes in place of running it: gunicorn's master with these settings."""
    seen = {}

    def run_server(server):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        seen.update(settings=server.settings, environ=dict(os.environ), blocked=blocked, collects=gc.isenabled())

    monkeypatch.setattr(Server, "run", run_server)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield seen
    gc.enable()


def run(*argv):
    """The exit code of `mme`, also where argparse exits by itself."""
    try:
        return main.main([str(word) for word in argv])
    except SystemExit as error:
        return error.code


def test_a_sigterm_is_kept_for_gunicorn(became):
    """From the first look at the settings until gunicorn has handlers; what only fails to start keeps nothing."""
    run("serve", "--model-store", ".")
    assert signal.SIGTERM in became["blocked"]

    assert run("serve", "--model-store", "./nowhere") == 2
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_no_garbage_is_collected_while_gunicorn_imports_what_it_needs(became):
    """What a start makes stays; gunicorn's configuration ends this before the first fork."""
    run("serve", "--model-store", ".")

    assert became["collects"] is False


def test_serve_becomes_gunicorn_with_the_settings_of_its_flags(became, tmp_path):
    """Every flag reaches gunicorn's master in the settings that it is given; the environment stays as it is."""
    store = tmp_path / "archives"
    store.mkdir()
    run("serve", "--model-store", "archives", "--host", "127.0.0.1", "--port", "9000", "--memory-budget", "80%",
        "--load-model", "a.tar.gz", "--load-model", "b.tar.gz", "--log-level", "debug", "--require-gpu",
        "--pin", "a*", "--pin", "b", "--eviction", "gdsf", "--min-residency", "5",
        "--allow-client-shm=true")  # fmt: skip

    settings = became["settings"]
    assert became["environ"] == os.environ
    assert settings.model_store == str(store)
    assert (settings.host, settings.port, settings.memory_budget) == ("127.0.0.1", 9000, 0.8)
    assert settings.load_models == ("a.tar.gz", "b.tar.gz")
    assert settings.require_gpu
    assert settings.allow_client_shm
    assert (settings.pins, settings.eviction, settings.min_residency) == (("a*", "b"), Policy.GDSF, 5.0)
    assert settings.log_level == "debug"


def test_repositories_and_their_control_mode_are_flags(became, tmp_path):
    """Several folders, each by a flag of its own; the folders are made absolute."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    run("serve", "--model-repository", "a", "--model-repository", str(tmp_path / "b"), "--model-control-mode", "poll",
        "--repository-poll-secs", "2.5", "--model-namespacing", "--model-config-name", "gpu")  # fmt: skip

    settings = became["settings"]
    assert (settings.model_repository, settings.more_repositories) == (tmp_path / "a", (tmp_path / "b",))
    assert (settings.model_control_mode.value, settings.poll_seconds) == ("poll", 2.5)
    assert (settings.model_namespacing, settings.model_config_name) == (True, "gpu")


def test_flags_of_tritonserver_start_it_too(became, tmp_path):
    """As its users write them: beside ours, with and without =; its port is the main one."""
    run("serve", f"--model-repository={tmp_path}", "--http-port", "8000", "--http-address=127.0.0.1", "--grpc-port", "0",
        "--exit-on-error", "false", "--log-verbose=1", "--strict-readiness=false", "--exit-timeout-secs", "5",
        "--trace-config", "rate=0", "--id", "triton")  # fmt: skip

    settings = became["settings"]
    assert (settings.model_repository, settings.host, settings.port) == (tmp_path, "127.0.0.1", 8000)
    assert (settings.grpc_port, settings.log_level, settings.ping_mode.value) == (0, "debug", "live")
    assert (settings.drain_seconds, settings.trace_rate, settings.server_id) == (5, 0, "triton")


def test_a_flag_wins_over_its_variable(became, monkeypatch):
    """A flag that sets the default back beats a variable that says otherwise."""
    monkeypatch.setenv("MME_PORT", "9000")
    monkeypatch.setenv("MME_MODEL_STORE", "s3://bucket/p")
    run("serve", "--port", "8080")

    assert became["settings"].port == 8080


def test_the_rest_of_the_environment_reaches_gunicorn(became, monkeypatch):
    """Variables that are none of ours (credentials, paths) are handed on untouched."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:5000")
    monkeypatch.setenv("SAGEMAKER_MULTI_MODEL", "true")
    run("serve")

    assert became["environ"]["AWS_ENDPOINT_URL"] == "http://localhost:5000"
    assert became["environ"]["SAGEMAKER_MULTI_MODEL"] == "true"


def test_serve_command_is_the_same_without_flags(became, monkeypatch):
    """`serve`, as SageMaker calls it, starts from the environment alone."""
    monkeypatch.setenv("SAGEMAKER_MULTI_MODEL", "true")
    main.serve_command([])

    assert became["settings"].mode is Mode.PLATFORM


def test_the_only_model_of_a_single_endpoint_is_named_for_the_server(became, monkeypatch, tmp_path):
    """Without a default model name, the only directory is chosen before the server starts."""
    (tmp_path / "model" / "resnet").mkdir(parents=True)
    monkeypatch.setenv("MME_MODEL_DIR", str(tmp_path / "model"))
    main.serve_command([])

    assert became["settings"].default_model_name == "resnet"


def test_bad_settings_are_a_line_each_and_exit_code_two(became, monkeypatch, capsys):
    """Every problem is a line on standard error; nothing is started."""
    monkeypatch.setenv("MME_PROT", "1")
    code = run("serve", "--model-store", "s3://bucket", "--port", "http", "--load-timeout", "0")

    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert len(lines) == 3
    assert lines[0].startswith("serve: MME_PROT: there is no such variable; did you mean MME_PORT?")
    assert any("--port/MME_PORT='http'" in line for line in lines)
    assert not became


def test_serve_becomes_gunicorn_in_its_process_and_is_not_fooled_by_the_working_directory(tmp_path):
    """The process that was started is gunicorn's own, where it was started; a container/ there hides nothing of ours."""
    home, script = tmp_path / "home", tmp_path / "bin" / "serve"
    for folder in (home / "archives", home / "container", script.parent):
        folder.mkdir(parents=True)
    (home / "container" / "__init__.py").write_text("raise SystemExit('the wrong container')\n")
    script.write_text(
        "import json, os, sys\n"
        "from container.cli.main import serve_command\n"
        "from container.process.master import Server\n"
        "def run(server):\n"
        "    print(json.dumps([os.getpid(), os.getcwd(), sys.path, server.settings.model_store]))\n"
        "Server.run = run\n"
        "sys.exit(serve_command())\n"
    )

    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MME_MODEL_STORE": "archives"}
    process = subprocess.Popen([sys.executable, script], cwd=home, env=environ, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=60)

    pid, directory, path, store = json.loads(output)
    assert (pid, directory, store) == (process.pid, str(home), str(home / "archives"))
    assert path[0] == str(ROOT)
    assert not {str(home), str(script.parent), ""} & set(path)


def test_pack_says_that_there_is_no_folder_for_the_archive(capsys, tmp_path):
    """By the names that were given, and before the model is looked at."""
    output = tmp_path / "nowhere" / "m.tar.gz"
    (tmp_path / "model.onnx").write_bytes(b"")
    assert main.main(["pack", str(tmp_path / "model.onnx"), "-o", str(output)]) == 2
    told = capsys.readouterr().err
    assert told == f"pack: -o '{output}' lies in no folder that there is: make '{output.parent}' first\n"


def test_json_on_the_command_line_may_be_of_any_kind(capsys):
    """What begins like an array is one, and no file's name: the server says what is wrong with it."""
    assert main.main(["invoke", "--url", "http://127.0.0.1:9", "--json", "[1]"]) == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_without_a_command_the_way_from_a_file_to_an_endpoint_is_shown(words, capsys):
    """Its commands are those that there are; to have named none is a mistake."""
    assert run(*words) == (0 if words else 2)
    written = "".join(capsys.readouterr())
    named = re.findall(r"^  mme (\S+) ", written, re.MULTILINE)
    assert named == ["pack", "serve", "invoke", "models", "push", "deploy"]
    assert all(re.search(rf"^    {name} ", written, re.MULTILINE) for name in named)


def test_settings_command_prints_every_variable(capsys):
    """`mme settings` lists all variables, as text or as a table whose rows have five cells."""
    assert run("settings") == 0
    text = capsys.readouterr().out
    assert run("settings", "--format", "markdown") == 0
    rows = capsys.readouterr().out.splitlines()

    assert "SAGEMAKER_TRITON_ADDITIONAL_ARGS" in text
    assert {row.count(" | ") for row in rows if "---" not in row} == {4}


def test_version_is_printed(capsys):
    """`mme --version` says a name and a version."""
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("mme ")


def test_an_unexpected_error_is_a_sentence_and_a_traceback_only_on_request(monkeypatch, capsys):
    """A bug of ours does not throw its traceback at a person, unless --debug asks for it."""
    monkeypatch.setattr("container.settings.settings_table", lambda: 1 // 0)

    assert run("settings") == 1
    assert capsys.readouterr().err.splitlines() == [
        "settings: unexpected ZeroDivisionError: integer division or modulo by zero; --debug shows where it comes from"
    ]
    assert run("settings", "--debug") == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "spared"),
    [
        ("container.cli.main", {"boto3", "numpy", "onnxruntime"}),
        ("container.process.worker", {"boto3", "botocore", "grpc", "onnxruntime", "opentelemetry", "rich", "urllib3"}),
    ],
)
def test_what_not_every_server_needs_is_not_imported_by_its_start(module, spared):
    """A command checks its words without numpy; a server of a folder answers without S3's client, a framework, or colours."""
    code = f"import {module}, sys; print(*{spared} & sys.modules.keys())"
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True).stdout

    assert output.strip() == ""


# ---- pack


def write_onnx(path):
    """A model that adds 1: input X, output Y, FP32 [batch, 2]."""
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    graph = helper.make_graph(
        [helper.make_node("Add", ["X", "one"], ["Y"])],
        "plus",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["batch", 2])],
        [one],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@pytest.fixture(name="model")
def _model(tmp_path):
    """A Triton model directory called plus."""
    write_onnx(tmp_path / "repository" / "plus" / "1" / "model.onnx")
    (tmp_path / "repository" / "plus" / "config.pbtxt").write_text(
        'name: "plus" backend: "onnxruntime" max_batch_size: 8'
    )
    return tmp_path / "repository" / "plus"


def members(archive):
    """The names in an archive."""
    with tarfile.open(archive) as tar:
        return sorted(tar.getnames())


def test_packed_directory_loads_as_one_of_many_and_as_the_only_one(model, tmp_path, capsys):
    """The archive holds the model under its name, so that multi-model and single-model endpoints both take it."""
    archive = tmp_path / "plus.tar.gz"

    assert run("pack", model, "-o", archive) == 0
    assert members(archive) == ["plus", "plus/1", "plus/1/model.onnx", "plus/config.pbtxt"]
    with archive.open("rb") as stream:
        extract(stream, tmp_path / "unpacked", name="plus.tar.gz")
    assert open_target(tmp_path / "unpacked", "anything").config.max_batch_size == 8
    assert open_model(tmp_path / "unpacked" / "plus", "plus").config.max_batch_size == 8
    output = capsys.readouterr().out
    assert "1/model.onnx" in output
    assert "max_batch_size: 8" in output
    assert 'name: "X"' in output


@pytest.mark.parametrize("script", ["code/inference.py", "inference.py"])
def test_a_script_and_its_model_are_packed_as_sagemakers_containers_want_them(tmp_path, capsys, script):
    """The script and its files lie at the root of the archive, and nobody runs them."""
    folder = tmp_path / "iris"
    (folder / script).parent.mkdir(parents=True)
    (folder / script).write_text("raise SystemExit('nobody runs this')")
    (folder / "model.joblib").write_bytes(b"weights")
    archive = tmp_path / "iris.tar.gz"

    assert run("pack", folder, "-o", archive) == 0
    folders = ["code"] if "/" in script else []
    assert members(archive) == sorted([*folders, script, "model.joblib"])
    with archive.open("rb") as stream:
        extract(stream, tmp_path / "unpacked", name="iris.tar.gz")
    assert open_target(tmp_path / "unpacked", "iris.tar.gz").config.default_model_filename == script
    output = capsys.readouterr().out
    assert "model.joblib" in output
    assert 'backend: "sagemaker"' in output


def test_a_script_of_broken_syntax_is_not_packed(tmp_path, capsys):
    """The line is named by the place that the file comes from."""
    folder = tmp_path / "iris"
    (folder / "code").mkdir(parents=True)
    (folder / "code/inference.py").write_text("def model_fn(:")

    assert run("pack", folder, "-o", tmp_path / "iris.tar.gz") == 1
    assert f"{folder}/code/inference.py line 1" in capsys.readouterr().err
    assert not (tmp_path / "iris.tar.gz").exists()


def test_bare_onnx_file_becomes_a_model(tmp_path, monkeypatch, capsys):
    """An .onnx file is packed as version 1, with the configuration that the server would complete, in writing."""
    write_onnx(tmp_path / "plus.onnx")
    monkeypatch.chdir(tmp_path)

    assert run("pack", "plus.onnx", "--name", "adder") == 0
    assert members("adder.tar.gz") == ["adder", "adder/1", "adder/1/model.onnx", "adder/config.pbtxt"]
    assert 'name: "X"' in capsys.readouterr().out


def test_weights_beside_an_onnx_file_come_along(tmp_path, capsys):
    """External data that an exporter wrote beside the file is packed under the name the file refers to."""
    weights = helper.make_tensor("w", TensorProto.FLOAT, [512], np.ones(512, np.float32).tobytes(), raw=True)
    graph = helper.make_graph(
        [helper.make_node("Add", ["X", "w"], ["Y"])],
        "big",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [512])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [512])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "big.onnx", save_as_external_data=True, location="big.onnx.data", size_threshold=0)

    assert run("pack", tmp_path / "big.onnx", "-o", tmp_path / "big.tar.gz") == 0
    assert members(tmp_path / "big.tar.gz") == [
        "big",
        "big/1",
        "big/1/big.onnx.data",
        "big/1/model.onnx",
        "big/config.pbtxt",
    ]


def test_repository_of_one_model_is_packed_as_that_model(model, tmp_path):
    """The folder around a model may be named too; the archive gets the model's files, not another level."""
    assert run("pack", model.parent, "--name", "plus", "-o", tmp_path / "out.tar.gz") == 0
    assert "plus/config.pbtxt" in members(tmp_path / "out.tar.gz")


@pytest.fixture(name="several")
def _several(model):
    """A folder of the model plus and of a Python model that calls it."""
    (model.parent / "caller" / "1").mkdir(parents=True)
    (model.parent / "caller" / "1" / "model.py").write_text("class TritonPythonModel:\n    execute = print\n")
    tensors = 'input { name: "X" data_type: TYPE_FP32 dims: 2 } output { name: "Y" data_type: TYPE_FP32 dims: 2 }'
    (model.parent / "caller" / "config.pbtxt").write_text(f'backend: "python" max_batch_size: 2 {tensors}')
    return model.parent


def add_entry(folder):
    """Have a model's configuration say that requests are for it."""
    with (folder / "config.pbtxt").open("a") as config:
        config.write(' parameters { key: "MME_ENTRY" value: { string_value: "true" } }')


def test_several_models_are_packed_under_their_names(several, tmp_path, capsys):
    """All of them, and the archive opens as the one that requests are for, with the others as its members."""
    add_entry(several / "caller")

    assert run("pack", several, "-o", tmp_path / "search.tar.gz") == 0
    assert [name for name in members(tmp_path / "search.tar.gz") if "/" not in name] == ["caller", "plus"]
    with (tmp_path / "search.tar.gz").open("rb") as stream:
        extract(stream, tmp_path / "unpacked", name="search.tar.gz")
    opened = open_target(tmp_path / "unpacked", "search.tar.gz")
    assert (opened.path.name, [member.path.name for member in opened.members]) == ("caller", ["plus"])
    output = capsys.readouterr().out
    assert 'name: "search"' in output
    assert 'name: "search:plus"' in output
    assert sorted(path.name for path in several.iterdir()) == ["caller", "plus"]


def test_the_archives_name_says_which_of_several_models_is_asked(several, tmp_path, capsys):
    """As on the server; an archive of which nothing says it is refused, and is not written."""
    assert run("pack", several, "-o", tmp_path / "caller.tar.gz") == 0
    assert run("pack", several, "--name", "caller", "-o", tmp_path / "search.tar.gz") == 1
    assert "MME_ENTRY" in capsys.readouterr().err
    assert not (tmp_path / "search.tar.gz").exists()


def test_each_of_several_models_is_held_against_its_file(several, tmp_path, capsys):
    """Also those that only another model calls, by the place that their owner knows."""
    add_entry(several / "caller")
    (several / "plus" / "1" / "model.onnx").write_bytes(b"none")

    assert run("pack", several, "-o", tmp_path / "search.tar.gz") == 1
    assert str(several / "plus" / "1" / "model.onnx") in capsys.readouterr().err


@pytest.fixture(name="ensemble")
def _ensemble(model):
    """An ensemble beside the model plus, which it consists of."""
    (model.parent / "twice" / "1").mkdir(parents=True)
    (model.parent / "twice" / "config.pbtxt").write_text("""
        platform: "ensemble" max_batch_size: 8
        input { name: "IN" data_type: TYPE_FP32 dims: 2 } output { name: "OUT" data_type: TYPE_FP32 dims: 2 }
        ensemble_scheduling {
          step { model_name: "plus" input_map { key: "X" value: "IN" } output_map { key: "Y" value: "once" } }
          step { model_name: "plus" input_map { key: "X" value: "once" } output_map { key: "Y" value: "OUT" } }
        }
    """)
    return model.parent / "twice"


@pytest.mark.parametrize("folder", ["twice", "."])
def test_an_ensemble_is_packed_with_its_models(ensemble, folder, tmp_path):
    """Named itself, or by the folder around all of them."""
    assert run("pack", ensemble.parent / folder, "-o", tmp_path / "out.tar.gz") == 0
    with (tmp_path / "out.tar.gz").open("rb") as stream:
        extract(stream, tmp_path / "unpacked", name="out.tar.gz")
    opened = open_target(tmp_path / "unpacked", "out.tar.gz")
    assert (opened.path.name, [member.path.name for member in opened.members]) == ("twice", ["plus"])


def test_an_ensemble_without_its_models_is_refused(ensemble, tmp_path, capsys):
    """By the name of the one that is missing."""
    (ensemble.parent / "plus").rename(tmp_path / "elsewhere")

    assert run("pack", ensemble, "-o", tmp_path / "out.tar.gz") == 1
    assert "a step of model 'plus'" in capsys.readouterr().err


def test_a_bad_configuration_is_refused_by_field_and_writes_nothing(model, tmp_path, capsys):
    """What the server would refuse is refused before packing, and no archive and no staging folder is left."""
    (model / "config.pbtxt").write_text('name: "plus" backend: "onnxruntime" max_batch_size: -3')

    assert run("pack", model, "-o", tmp_path / "plus.tar.gz") == 1
    assert "max_batch_size" in capsys.readouterr().err
    assert not (tmp_path / "plus.tar.gz").exists()
    assert sorted(path.name for path in model.parent.iterdir()) == ["plus"]


def test_a_configuration_that_the_file_contradicts_is_refused(model, tmp_path, capsys):
    """The model file itself is held against the configuration."""
    (model / "config.pbtxt").write_text(
        'backend: "onnxruntime" max_batch_size: 8 input { name: "Z" data_type: TYPE_FP32 dims: 2 }'
    )

    assert run("pack", model, "-o", tmp_path / "plus.tar.gz") == 1
    assert "Z" in capsys.readouterr().err


def test_a_link_is_refused_by_the_name_its_owner_knows(model, tmp_path, capsys):
    """SageMaker takes no links; the message shows the path in the model directory."""
    (model / "labels.txt").symlink_to("config.pbtxt")

    assert run("pack", model, "-o", tmp_path / "plus.tar.gz") == 1
    assert str(model / "labels.txt") in capsys.readouterr().err


def test_another_name_than_the_configurations_is_mentioned(model, tmp_path, capsys):
    """An archive whose directory is not the configured name works with many models, and the note says where not."""
    assert run("pack", model, "--name", "other", "-o", tmp_path / "other.tar.gz") == 0
    assert "unexpected directory name 'other' for model 'plus'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none",), "does not exist"),
        (("notes.txt",), "is no model that is known here"),
        (("plus.onnx", "-o", "plus.zip"), "must end in .tar.gz"),
        (("plus.onnx", "--name", "a/b"), "is not the name of a directory"),
        (("plus.onnx", "--level", "9"), "compression level 9"),
    ],
)
def test_wrong_arguments_of_pack_are_one_sentence(arguments, message, tmp_path, monkeypatch, capsys):
    """Each mistake in the command is exit code 2 and one sentence."""
    write_onnx(tmp_path / "plus.onnx")
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)

    assert run("pack", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


# ---- invoke

ANSWER = {"model_name": "plus", "outputs": [{"name": "Y", "datatype": "FP32", "shape": [1], "data": [2.0]}]}
TIMING = 'cache;desc=miss, download;dur=12.3, load;dur=88.1, infer;dur=5.2, evict;desc="bert-1.tar.gz"'


class Recorder(Handler):
    """Answers as a model does, and remembers what it was asked."""

    def do_POST(self):
        """An inference; the model called gone does not exist."""
        self.server.asked.append((self.path, dict(self.headers), self.body()))
        target = self.headers.get("X-Amzn-SageMaker-Target-Model")
        if target == "gone":
            self.answer(404, {"error": "there is no model 'gone'"}, Server_Timing=TIMING)
        elif target == "failing":
            wrapped = {"OriginalStatusCode": 400, "OriginalMessage": '{"error": "input X is missing"}'}
            self.answer(424, {"Message": "wrapped", **wrapped}, Server_Timing=TIMING, x_amzn_errortype="ModelError")
        else:
            self.answer(200, ANSWER, Server_Timing=TIMING)


@pytest.fixture(name="server")
def _server():
    """A listening server; `asked` holds path, headers and body of each request, `url` its address."""
    with answering(Recorder, asked=[]) as server:
        yield server


def test_invoke_sends_json_and_shows_answer_and_times(server, tmp_path, capsys):
    """The request goes out as it is, the answer comes to standard output, the times to standard error."""
    (tmp_path / "request.json").write_text('{"inputs": []}')

    assert run("invoke", "--url", server.url, "--target", "plus.tar.gz", "--json", tmp_path / "request.json") == 0
    ((path, headers, body),) = server.asked
    assert (path, body) == ("/invocations", b'{"inputs": []}')
    assert headers["X-Amzn-Sagemaker-Target-Model"] == "plus.tar.gz"
    assert headers["Content-Type"] == "application/json"
    captured = capsys.readouterr()
    assert json.loads(captured.out) == ANSWER
    assert "cache miss · download 12.3 ms · load 88.1 ms · infer 5.2 ms · evict bert-1.tar.gz" in captured.err


def test_invoke_takes_json_from_the_command_line_and_from_standard_input(server, monkeypatch):
    """A request may be written out, or piped in."""
    read, write = os.pipe()
    os.write(write, b'{"id": "2"}')
    os.close(write)
    with os.fdopen(read, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run("invoke", "--url", server.url, "--json", "-") == 0
    assert run("invoke", "--url", server.url, "--json", '{"id": "1"}') == 0

    assert [body for _, _, body in server.asked] == [b'{"id": "2"}', b'{"id": "1"}']


def test_invoke_sends_npy_files_as_binary_tensors(server, tmp_path):
    """Arrays become inputs in order, little-endian and row-major, with the header's length in the content type."""
    numbers = np.arange(6, dtype=">f4").reshape(2, 3).T
    np.save(tmp_path / "x.npy", numbers)
    np.save(tmp_path / "s.npy", np.array(["ab", "c"]))

    code = run("invoke", "--url", server.url, "--npy", f"X={tmp_path}/x.npy", "--npy", f"S={tmp_path}/s.npy")
    assert code == 0
    ((_, headers, body),) = server.asked
    prefix, _, size = headers["Content-Type"].rpartition("=")
    header, data = json.loads(body[: int(size)]), body[int(size) :]
    assert prefix == "application/vnd.sagemaker-triton.binary+json;json-header-size"
    assert header["inputs"] == [
        {"name": "X", "shape": [3, 2], "datatype": "FP32", "parameters": {"binary_data_size": 24}},
        {"name": "S", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 11}},
    ]
    assert data == numbers.astype("<f4").tobytes(order="C") + b"\2\0\0\0ab\1\0\0\0c"


def test_invoke_through_boto3_needs_no_credentials_for_a_local_server(server, monkeypatch, tmp_path, capsys):
    """With --endpoint the request is the SageMaker Runtime's, here against --url and with no AWS account at all."""
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    code = run("invoke", "--url", server.url, "--endpoint", "mine", "--target", "plus.tar.gz", "--inference-id", "7",
               "--json", "{}")  # fmt: skip
    assert code == 0
    ((path, headers, _),) = server.asked
    assert path == "/endpoints/mine/invocations"
    assert headers["X-Amzn-SageMaker-Inference-Id"] == "7"
    captured = capsys.readouterr()
    assert json.loads(captured.out) == ANSWER
    assert "load 88.1 ms" in captured.err


def test_the_models_own_sentence_comes_out_of_a_boto3_error(server, monkeypatch, capsys):
    """What SageMaker wraps in a ModelError is unwrapped for the reader."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")

    assert run("invoke", "--url", server.url, "--endpoint", "mine", "--target", "failing", "--json", "{}") == 1
    assert capsys.readouterr().err == "invoke: ModelError: input X is missing\n"


def test_a_servers_error_is_its_own_sentence(server, capsys):
    """Status and sentence of the server, exit code 1, no traceback."""
    assert run("invoke", "--url", server.url, "--target", "gone", "--json", "{}") == 1
    assert capsys.readouterr().err == "invoke: 404 Not Found: there is no model 'gone'\n"


def test_output_file_gets_the_answer_as_it_came(server, tmp_path, capsys):
    """--output writes the bytes of the answer, and nothing to standard output."""
    assert run("invoke", "--url", server.url, "--json", "{}", "--output", tmp_path / "answer") == 0
    assert json.loads((tmp_path / "answer").read_bytes()) == ANSWER
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--json", "{}", "--url", "localhost:8080"), 2, "--url 'localhost:8080' is not an address"),
        (("--json", "{}", "--local", "localhost:8080"), 2, "--local 'localhost:8080' is not an address"),
        (("e", "--json", "{}", "--region", "mars-1", "--url", "http://127.0.0.1:9"), 2, "Could not connect"),
        (("--npy", "X"), 2, "is not INPUT=FILE"),
        (("--npy", "X=text.npy"), 2, "is no .npy file"),
        (("--npy", "X=empty.npy"), 2, "is no .npy file"),
        (("--npy", "X=several.npz"), 2, "several.npz holds arrays by name ('a', 'b'): np.save the one that is meant"),
        (("--npy", "X=complex.npy"), 2, "no data type for complex128"),
        (("--npy", "X=none.npy"), 1, "No such file or directory: none.npy"),
        (("--json", "none.json"), 1, "No such file or directory: none.json"),
    ],
)
def test_wrong_arguments_of_invoke_are_one_sentence(arguments, code, message, tmp_path, monkeypatch, capsys):
    """Each mistake in the command is one sentence and nothing is sent."""
    (tmp_path / "text.npy").write_text("not an array")
    (tmp_path / "empty.npy").write_bytes(b"")
    np.savez(tmp_path / "several.npz", a=np.ones(1), b=np.ones(1))
    np.save(tmp_path / "complex.npy", np.ones(1, np.complex128))
    monkeypatch.chdir(tmp_path)

    assert run("invoke", *arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_invoke_needs_exactly_one_request(capsys):
    """Neither --json nor --npy is a usage error."""
    assert run("invoke", "--target", "a") == 2
    assert "--json" in capsys.readouterr().err


def test_nobody_listening_is_said(capsys):
    """A refused connection leads to the question whether the server is up."""
    assert run("models", "--url", "http://127.0.0.1:9") == 1
    assert "is the server up?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("header", "entries"),
    [
        ("", []),
        (TIMING, [("cache", "miss"), ("download", "12.3 ms"), ("load", "88.1 ms"), ("infer", "5.2 ms"),
                  ("evict", "bert-1.tar.gz")]),
        ('evict;desc="a, b;dur=1"', [("evict", "a, b;dur=1")]),
        ("x", [("x", "")]),
    ],
)  # fmt: skip
def test_server_timing_is_read_with_its_quotes(header, entries):
    """Metrics keep their order; commas and semicolons between quotes separate nothing."""
    assert server_timing(header) == entries
