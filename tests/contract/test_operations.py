"""What goes wrong around a server: S3, STS, credentials and workers that end. Each has its sentence, and an end."""

from __future__ import annotations

import http.client
import os
import re
import signal
import struct
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from model_handlers.errors import Kind, MmeError
from serve.sources.artifacts import Artifacts, key_of
from serve.sources.s3 import S3Store
from serve.sources.store import UnreachableError, UntoldError
from tests.cgroups import few_tasks
from tests.contract import models
from tests.contract.server import SCRIPTS, clean_environment, eventually, kill
from tests.contract.test_ensembles import PYTHON, python_model
from tests.processes import is_over
from tests.waiting import PATIENCE

_LONG = pytest.mark.long
LOOPBACK = {"MME_HOST": "127.0.0.1", "MME_PORT": "0"}
STORE = {"MME_MODEL_STORE": "s3://bucket/models", "AWS_DEFAULT_REGION": "us-east-1"}
CONTAINER = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:1/"}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"AWS_ENDPOINT_URL_S3": "minio:9000"}, "Invalid endpoint: minio:9000"),
        pytest.param({**CONTAINER, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "/no/token"}, "/no/token", marks=_LONG),
        pytest.param(
            {**CONTAINER, "AWS_CONTAINER_AUTHORIZATION_TOKEN": "t\n"},
            "Auth token value is not a legal header value",
            marks=_LONG,
        ),
        pytest.param(
            {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://example.org/"},
            "Unsupported host 'example.org'",
            marks=_LONG,
        ),
        ({"AWS_PROFILE": "nobody"}, "nobody"),
    ],
)
def test_a_start_that_can_not_succeed_ends_with_one_sentence(environ, words, tmp_path):
    """What boto3 refuses to be told it would refuse again: exit status 3, and no traceback."""
    ended = subprocess.run(
        [SCRIPTS / "serve"],
        env=clean_environment(tmp_path, **LOOPBACK, MME_CACHE_DIR=str(tmp_path / "cache"), **STORE, **environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    log = ended.stdout + ended.stderr
    assert ended.returncode == 3, log
    assert "Traceback" not in log
    assert sum(words in line for line in log.splitlines()) == 1, log


def test_a_start_without_room_for_its_threads_ends_with_one_sentence(tmp_path):
    """The limit is named that is to be raised; another worker would not have more room."""
    with few_tasks(4) as group:
        ended = subprocess.run(
            [SCRIPTS / "serve"],
            env=clean_environment(
                tmp_path, **LOOPBACK, MME_CACHE_DIR=str(tmp_path / "cache"), MME_MODEL_STORE=str(tmp_path)
            ),
            preexec_fn=lambda: (group / "cgroup.procs").write_text("0"),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert ended.returncode == 3
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("can't be started: raise the limit of processes and threads (ulimit -u") == 1


def test_clocks_that_jump_change_no_answer(serve, tmp_path):
    """By a day and by years, ahead and back: what is in memory answers, other models come, the worker is the same."""
    models.pack(models.lay_out(tmp_path / "a", models.plus(1)), tmp_path / "store" / "a.tar.gz")
    jump, patched = tmp_path / "jump", tmp_path / "patched"
    patched.mkdir()
    (patched / "sitecustomize.py").write_text(
        f"import pathlib, time\nreal, jump = time.time, pathlib.Path({str(jump)!r})\n"
        "time.time = lambda: real() + float(jump.read_text())\n"
        "time.time_ns = lambda: int(time.time() * 1e9)\n"
    )
    jump.write_text("0")
    server = serve({"MME_MODEL_STORE": str(tmp_path / "store"), "PYTHONPATH": str(patched)})
    worker = server.worker
    for number, seconds in enumerate((0, 86_400, -86_400, 3e8, 0)):
        jump.write_text(str(seconds))
        (tmp_path / "store" / f"{number}.tar.gz").hardlink_to(tmp_path / "store" / "a.tar.gz")
        for name in ("a", str(number)):
            asked = server.ask("POST", "/invocations", models.ONE, X_Amzn_SageMaker_Target_Model=f"{name}.tar.gz")
            assert asked.status == 200
        assert server.ask("GET", "/ping").status == 200
    assert server.worker == worker


def test_five_workers_that_never_served_end_the_server(tmp_path):
    """Each is killed as soon as it is there: the sixth is not started, and the log says why."""
    log = tmp_path / "log"
    environ = clean_environment(
        tmp_path, **LOOPBACK, MME_CACHE_DIR=str(tmp_path / "cache"), MME_MODEL_STORE=str(tmp_path)
    )
    with log.open("wb") as out:
        process = subprocess.Popen([SCRIPTS / "serve"], env=environ, stdout=out, stderr=subprocess.STDOUT)
    for number in range(5):
        workers = eventually(lambda count=number: _booted(log)[count:], "another worker")
        os.kill(workers[0], signal.SIGKILL)

    assert process.wait(60) == 3
    assert len(_booted(log)) == 5
    assert log.read_text().count("5 worker processes in a row ended before /ping was answered 200") == 1


def _booted(log):
    return [int(pid) for pid in re.findall(r"Booting worker with pid: (\d+)", log.read_text())]


def test_a_model_whose_loads_end_workers_is_left_out(serve, tmp_path):
    """Two workers end in the middle of its load, before they served: the next one does not bring it back, once."""
    begun, held = tmp_path / "begun", tmp_path / "held"
    source = PYTHON.replace(
        "    def execute",
        f"    def initialize(self, args):\n        open({str(begun)!r}, 'w').close()\n"
        f"        while os.path.exists({str(held)!r}):\n            time.sleep(0.02)\n\n    def execute",
        1,
    ).replace("import numpy", "import os, time\nimport numpy")
    python_model(tmp_path / "models/a", source)
    python_model(tmp_path / "models/b", PYTHON)
    server = serve({"MME_MODEL_REPOSITORY": str(tmp_path / "models"), "MME_PING_MODE": "live"})
    eventually(lambda: server.ask("GET", "/v2/models/a/ready").status == 200, "the model")
    eventually(lambda: server.ask("GET", "/v2/models/b/ready").status == 200, "the other model")
    held.touch()
    begun.unlink()
    before = server.worker
    before.kill()
    for _ in range(2):
        eventually(begun.exists, "the load of another worker")
        eventually(lambda: server.ask("GET", "/v2/models/b/ready").status == 200, "the other model")
        begun.unlink()
        before = server.worker
        before.kill()
    eventually(lambda: server.ask("GET", "/v2/models/b/ready").status == 200, "the other model")

    assert is_over(before)
    assert not begun.exists()
    said = "not brought back, since two workers ended while they loaded them: 'a'; mend them, then load them by name"
    eventually(lambda: said in [line["message"] for line in server.lines], "a line in the log")
    held.unlink()
    assert server.ask("POST", "/v2/repository/models/a/load", {}).status == 200


def test_a_worker_that_served_is_followed_by_another(serve, tmp_path):
    """Whatever ended it."""
    server = serve({"MME_MODEL_STORE": str(tmp_path)})
    for _ in range(3):
        kill(server)
    assert server.process.poll() is None


# -- who refuses, and why ----------------------------------------------------------------------------------------------


class Fake:
    """AWS's services on loopback, which answer what they are told to; a context manager."""

    def __init__(self, answers):
        self.asked = []
        self.paths = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fake.asked.append(self.command)
                fake.paths.append(self.path)
                status, body = answers(self.command)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body if self.command != "HEAD" else b"")

            do_HEAD = do_GET = do_POST = do_CONNECT = answer  # noqa: N815 - its base's names

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def plain(monkeypatch, tmp_path):
    """An environment in which boto3 finds nothing of this machine."""
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return monkeypatch


def key(patch):
    """Give boto3 one."""
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")


ARN = "User: arn:aws:sts::1:assumed-role/r/s is not authorized to perform"


@pytest.mark.parametrize(
    ("status", "code", "said", "words"),
    [
        (
            403,
            "AccessDenied",
            f"{ARN}: kms:Decrypt on the resource associated with this ciphertext",
            "allow kms:Decrypt",
        ),
        (403, "AccessDenied", f"{ARN}: s3:GetObject with an explicit deny in a resource-based policy", "explicitly"),
        (403, "AccessDenied", "Bucket is requester pays bucket", "does not: copy the models"),
        (403, "AccessDenied", "Access Denied", "allow s3:GetObject and s3:ListBucket"),
        (400, "KMS.DisabledException", "arn:aws:kms:eu-west-1:1:key/k is disabled.", "can't be used"),
        (400, "ExpiredToken", "The provided token has expired.", "S3 does not accept the AWS credentials"),
    ],
)
def test_what_s3_says_is_told(status, code, said, words, plain):
    """HEAD's refusal has no body: one GET brings the code and the message, and the sentence names who is to act."""
    key(plain)
    body = f"<Error><Code>{code}</Code><Message>{said}</Message></Error>".encode()
    with Fake(lambda _: (status, body)) as s3:
        store = S3Store("bucket", "models", endpoint=s3.url, attempts=1)
        with pytest.raises(UntoldError) as caught:
            store.stat("a.tar.gz")

    assert words in caught.value.message
    assert f"S3 says '{said}'" in caught.value.message
    assert s3.asked.count("GET") == 1


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        ("AccessDenied", "Not authorized to perform sts:AssumeRoleWithWebIdentity", "the role's trust policy"),
        ("ExpiredTokenException", "Token expired: current date/time must be before", "since it has expired"),
        ("InvalidIdentityToken", "No OpenIDConnect provider found in your account", "an identity provider"),
    ],
)
def test_what_sts_refuses_is_told_as_its(code, said, words, plain, tmp_path):
    """S3 is not asked, and not blamed."""
    (tmp_path / "token").write_text("a token")
    plain.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/models")
    plain.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    body = f"<ErrorResponse><Error><Code>{code}</Code><Message>{said}</Message></Error></ErrorResponse>".encode()
    with Fake(lambda _: (403, body)) as sts, Fake(lambda _: (200, b"")) as s3:
        plain.setenv("AWS_ENDPOINT_URL_STS", sts.url)
        store = S3Store("bucket", endpoint=s3.url, attempts=1)
        with pytest.raises(UntoldError) as caught:
            store.stat("a.tar.gz")

    assert caught.value.message.startswith("STS does not ")
    assert words in caught.value.message
    assert f"STS says '{said}'" in caught.value.message
    assert s3.asked == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("AWS_PROFILE", "nobody", "is in no configuration file: The config profile (nobody) could not be found"),
        (
            "AWS_ACCESS_KEY_ID",
            "test",
            "half a key for s3://bucket/: Partial credentials found in env, missing: AWS_SEC",
        ),
        ("AWS_CA_BUNDLE", "/no/bundle", "the CA bundle '/no/bundle' is not there"),
    ],
)
def test_each_wrong_setting_has_its_own_sentence(name, value, words, plain):
    """At the start, before S3 is asked."""
    plain.setenv(name, value)
    with pytest.raises(MmeError) as caught:
        S3Store("bucket")
    assert words in caught.value.message


def test_a_token_file_that_is_not_there_is_an_outage(plain, tmp_path):
    """Its path is told, and a store that can't be asked is what it counts as: copies on disk are served."""
    plain.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/models")
    plain.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    with Fake(lambda _: (200, b"")) as s3:
        artifacts = Artifacts(S3Store("bucket", endpoint=s3.url, attempts=1), tmp_path / "cache")
        with pytest.raises(UnreachableError) as caught:
            artifacts.fetch("a.tar.gz")
        copy = tmp_path / "cache" / f"{key_of('s3://' + s3.url + '/bucket/', 'a.tar.gz')}-{'0' * 16}"
        copy.mkdir()
        artifact = Artifacts(S3Store("bucket", endpoint=s3.url, attempts=1), tmp_path / "cache").fetch("a.tar.gz")
        artifact.hold.release()

    assert caught.value.kind is Kind.UNAVAILABLE
    assert str(tmp_path / "token") in caught.value.message
    assert artifact.path == copy
    assert s3.asked == []


def test_a_redirect_without_an_end_is_named(plain):
    """An S3 that sends every request elsewhere, and tells no region."""
    key(plain)
    body = b"<Error><Code>TemporaryRedirect</Code><Message>m</Message></Error>"
    with Fake(lambda _: (307, body)) as s3, pytest.raises(UntoldError, match="S3 sends the requests for"):
        S3Store("bucket", endpoint=s3.url, attempts=1).stat("a.tar.gz")


@pytest.mark.parametrize("status", [407, 403])
def test_a_proxy_that_refuses_is_named(status, plain):
    """It, and not S3, with what it answered; its password is told to nobody."""
    key(plain)
    with Fake(lambda _: (status, b"")) as proxy:
        plain.setenv("HTTPS_PROXY", proxy.url.replace("//", "//user:sesame@"))
        with pytest.raises(UnreachableError) as caught:
            S3Store("bucket", attempts=1).stat("a.tar.gz")

    assert caught.value.message.startswith(
        "the proxy for s3://bucket/ does not let it be reached, check HTTPS_PROXY and"
    )
    assert f"Tunnel connection failed: {status}" in caught.value.message
    assert "sesame" not in caught.value.message
    assert proxy.paths == ["bucket.s3.amazonaws.com:443"]


@pytest.mark.parametrize(
    ("status", "words"),
    [(407, "wants to know who asks"), (403, "no x-amz-request-id: a proxy may have given it")],
)
def test_a_proxys_answer_in_place_of_s3s_is_told_as_such(status, words, plain):
    """Without TLS a proxy answers itself; what it is can be told by its status, or by what it lacks."""
    key(plain)
    with Fake(lambda _: (status, b"")) as proxy:
        plain.setenv("HTTP_PROXY", proxy.url)
        with pytest.raises(UntoldError, match=words):
            S3Store("bucket", endpoint="http://s3.internal:9000", attempts=1).stat("a.tar.gz")

    assert proxy.paths[0] == "http://s3.internal:9000/bucket/a.tar.gz"


def test_hosts_of_no_proxy_are_asked_without_one(plain):
    """By the variable that every other program heeds."""
    key(plain)
    plain.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    plain.setenv("NO_PROXY", "127.0.0.1")
    with Fake(lambda _: (404, b"")) as s3, pytest.raises(MmeError) as caught:
        S3Store("bucket", endpoint=s3.url, attempts=1).stat("a.tar.gz")

    assert "does not exist" in caught.value.message
    assert s3.asked != []


@pytest.mark.parametrize(
    ("bucket", "style", "host"),
    [
        ("bucket", "auto", "bucket.s3.amazonaws.com"),
        ("bucket", "path", "s3.amazonaws.com"),
        ("my.bucket.name", "auto", "s3.amazonaws.com"),  # whose certificate names no such host
        ("my.bucket.name", "virtual", "s3.amazonaws.com"),
        ("models--use1-az4--x-s3", "auto", "models--use1-az4--x-s3.s3express-use1-az4.us-east-1.amazonaws.com"),
    ],
)
def test_each_bucket_is_asked_where_it_is(bucket, style, host, plain, tmp_path):
    """As boto3 finds it: by a host of its own, by a path where its name has dots, by its zone for S3 Express."""
    key(plain)
    (tmp_path / "config").write_text(f"[default]\ns3 =\n  addressing_style = {style}\n")
    with Fake(lambda _: (502, b"")) as proxy:
        plain.setenv("HTTPS_PROXY", proxy.url)
        with pytest.raises(UnreachableError):
            S3Store(bucket, attempts=1).stat("a.tar.gz")

    assert proxy.paths == [f"{host}:443"]


def test_s3_express_opens_a_session(plain):
    """Which it may be denied: that is another action than those of other buckets."""
    key(plain)
    said = (
        b"<Error><Code>AccessDenied</Code><Message>not authorized to perform: s3express:CreateSession</Message></Error>"
    )
    with (
        Fake(lambda _: (403, said)) as s3,
        pytest.raises(UntoldError, match="allow s3express:CreateSession on the dire"),
    ):
        S3Store("models--use1-az4--x-s3", endpoint=s3.url, attempts=1).stat("a.tar.gz")

    assert s3.paths == ["/models--use1-az4--x-s3?session"]


# -- downloads that stall ----------------------------------------------------------------------------------------------


def test_stalled_downloads_keep_no_cold_model_waiting(serve, gate, aws, s3, bucket, tmp_path):
    """Nine of which no byte comes, one more than there are turns: a healthy model is loaded nevertheless."""
    archive = models.pack(models.lay_out(tmp_path / "a", models.plus(1)), tmp_path / "a.tar.gz")
    stalled = [f"stalled/{number}.tar.gz" for number in range(9)]
    for name in (*stalled, "stalled/healthy.tar.gz"):
        s3.upload_file(str(archive), bucket, name)
    server = serve({"MME_MODEL_STORE": f"s3://{bucket}/stalled", **aws(gate.url)})

    def ask(name):
        target = name.rpartition("/")[2]
        return server.ask("POST", "/invocations", models.ONE, X_Amzn_SageMaker_Target_Model=target).status

    with gate.held(*stalled), ThreadPoolExecutor(9) as clients:
        asked = [clients.submit(ask, name) for name in stalled]
        gate.wait_for(stalled, 8)
        assert ask("healthy.tar.gz") == 200
        assert not any(each.done() for each in asked)
        for name in stalled:
            gate.release(name)
        assert [each.result() for each in asked] == [200] * 9


# -- copies on disk that are damaged -----------------------------------------------------------------------------------


def truncated(file, content):
    """Half of it is there."""
    file.write_bytes(content[: len(content) // 2])


def zeroed(file, content):
    """As long as it was, and zeros."""
    file.write_bytes(bytes(len(content)))


def another_number(file, content):
    """A model that loads, and answers something else."""
    file.write_bytes(content.replace(struct.pack("<f", 12345.0), struct.pack("<f", 54321.0)))


def test_a_damaged_copy_on_disk_is_downloaded_again(serve, gate, aws, s3, bucket, tmp_path):
    """Whatever happened to the files between two workers, the next requests are answered right, after one download."""
    archive = models.pack(models.lay_out(tmp_path / "a", models.plus(12345.0)), tmp_path / "a.tar.gz")
    damages = {"truncated": truncated, "zeroed": zeroed, "other": another_number, "whole": lambda *_: None}
    server = serve({"MME_MODEL_STORE": f"s3://{bucket}/copies", **aws(gate.url)})

    def ask(name):
        answer = server.ask("POST", "/invocations", models.ONE, X_Amzn_SageMaker_Target_Model=name)
        return answer.status, answer.json["outputs"][0]["data"][0]

    def downloads():
        return {name: gate.downloads.count(f"copies/{name}.tar.gz") for name in damages}

    copies = {}
    for name in damages:
        s3.upload_file(str(archive), bucket, f"copies/{name}.tar.gz")
        right = ask(name)
        (copies[name],) = set(server.cache.rglob("model.onnx")) - set(copies.values())
    for name, damage in damages.items():
        damage(copies[name], copies[name].read_bytes())
    before = downloads()
    kill(server)

    assert right[0] == 200
    assert [ask(name) for name in damages] == [right] * 4
    assert {name: times - before[name] for name, times in downloads().items()} == dict.fromkeys(damages, 1) | {
        "whole": 0
    }


# -- a log that nothing reads ------------------------------------------------------------------------------------------


def test_a_full_log_pipe_stops_no_request(tmp_path):
    """Whatever collects the log stands still: requests are answered, what was dropped is counted, and told in the log."""
    environ = clean_environment(
        tmp_path, **LOOPBACK, MME_CACHE_DIR=str(tmp_path / "cache"), MME_MODEL_STORE=str(tmp_path)
    )
    process = subprocess.Popen([SCRIPTS / "serve"], env=environ, stderr=subprocess.PIPE)
    try:
        port = next(
            found[1] for line in process.stderr if (found := re.search(rb"Listening at: http://[^ ]+:(\d+)", line))
        )
        server = http.client.HTTPConnection("127.0.0.1", int(port), timeout=PATIENCE)
        eventually(lambda: answer(server, "GET", "/ping")[0] == 200, "a healthy ping")
        path = f"/v2/repository/models/{'x' * 1000}/load"
        assert {answer(server, "POST", path)[0] for _ in range(550)} == {500}  # as Triton has it
        status, metrics = answer(server, "GET", "/metrics")
        (dropped,) = re.findall(r"^mme_log_lines_dropped_total (\S+)", metrics, re.MULTILINE)
        assert status == 200
        assert float(dropped) > 0
        server.close()
        process.terminate()
        log = process.stderr.read().decode()
    finally:
        process.kill()
        process.stderr.close()
    assert process.wait() == 0
    told = re.findall(r"(\d+) lines of the log were dropped here, since nothing read it", log)
    assert sum(map(int, told)) == float(dropped)


def answer(connection, method, path):
    """Status and body."""
    connection.request(method, path, b"{}" if method == "POST" else None)
    response = connection.getresponse()
    return response.status, response.read().decode()
