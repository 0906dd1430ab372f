"""Which functions of the product run for one inline request, one cold load, and one request of a Python model.

    python -m tests.core_trace [--functions]

A process of its own serves two archives over HTTP and is traced, with its threads and its models' processes. Prints how
many files and functions each deed runs, by layer, and their names. Comprehensions and lambdas are no functions here, and
busy polling is off: when it runs is a matter of time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from time import sleep

from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[1]
_TIMES = 3  # that a warm request is traced
_SETTLES = 0.1  # seconds
LAYERS = ("container", "serve", "model_handlers")
LOAD, REQUEST, PYTHON_LOAD, PYTHON_REQUEST = DEEDS = ("load", "request", "load of Python", "request of Python")

# Of every Python process of the trace, since `site` imports it: notes the functions that each deed calls, in a file of the
# process. All processes see in one byte which deed is under way, 0 for none.
_HOOK = """
import mmap, os, sys, threading

folder, root = os.environ["TRACE_FOLDER"], os.environ["TRACE_ROOT"] + os.sep
seen = set()
with open(os.path.join(folder, "deed"), "r+b") as file:
    deed = mmap.mmap(file.fileno(), 1)

def note(frame, event, _arg):
    if event == "call" and (number := deed[0]) and (number, frame.f_code) not in seen:
        code = frame.f_code
        seen.add((number, code))
        file, name = code.co_filename, code.co_qualname
        # a function: no body of a class or module, no comprehension
        if code.co_flags & 1 and file.startswith(root) and name.rsplit(".", 1)[-1][0] != "<":
            with open(os.path.join(folder, f"notes-{os.getpid()}"), "a") as notes:
                print(number, file[len(root):], name, sep="\\t", file=notes)

threading.setprofile(note)
sys.setprofile(note)
"""

_PYTHON = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "X") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", each.as_numpy())]) for each in inputs]
"""
_TENSORS = """
input { name: "X" data_type: TYPE_FP32 dims: 4 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 }
"""


def trace() -> dict[str, dict[str, set[str]]]:
    """Run all deeds; deed → file → functions that ran."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(_HOOK)
        Path(folder, "deed").write_bytes(b"\0")
        paths = os.pathsep.join([folder, str(ROOT)])
        environment = os.environ | {"PYTHONPATH": paths, "TRACE_FOLDER": folder, "TRACE_ROOT": str(ROOT)}
        command = [sys.executable, "-m", "tests.core_trace", "--serve", folder]
        subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=120)
        ran: dict[tuple[int, int], set[tuple[str, str]]] = {}  # deed and which time → file and function
        for file in Path(folder).glob("notes-*"):
            for line in file.read_text().splitlines():
                number, path, function = line.split("\t")
                if path.split("/")[0] in LAYERS:
                    ran.setdefault(divmod(int(number), _TIMES), set()).add((path, function))
    found: dict[str, dict[str, set[str]]] = {}
    for number, deed in enumerate(DEEDS, 1):
        always = set.intersection(*(each for (done, _), each in ran.items() if done == number))
        found[deed] = {path: {name for there, name in always if there == path} for path, _ in always}
    return found


def _serve(folder: Path) -> None:
    """Do what is traced: a cold request and a warm one, to either model."""
    from container.settings import Mode  # noqa: PLC0415 - of the process that is traced
    from tests.container.conftest import put_multiple, start_service  # noqa: PLC0415

    inline = put_multiple(folder / "models", "twice", 2.0)
    (inline / "config.pbtxt").write_text('backend: "onnxruntime"' + _TENSORS)
    python = folder / "models" / "same" / "1"
    python.mkdir(parents=True)
    (python / "model.py").write_text(_PYTHON)
    (python.parent / "config.pbtxt").write_text('backend: "python"' + _TENSORS)
    store = folder / "store"
    store.mkdir()
    for name in ("twice", "same"):
        subprocess.run(["tar", "-czf", store / f"{name}.tar.gz", "-C", folder / "models" / name, "."], check=True)
    running, stop = start_service(
        mode=Mode.STORE,
        model_store=str(store),
        busy_poll_microseconds=0,
        inline_microseconds=100_000,  # a trace makes executions slow
    )
    for name, cold, warm in (("twice", LOAD, REQUEST), ("same", PYTHON_LOAD, PYTHON_REQUEST)):
        _ask(running.port, name, 1, cold)
        for time in range(_TIMES):  # what runs now and then is no part of a request
            _ask(running.port, name, 20, warm, time)
    stop()


def _ask(port: int, model: str, count: int, deed: str, time: int = 0) -> None:
    """Ask a model so many times over one connection; the last time is a deed."""
    from sitecustomize import deed as under_way  # type: ignore[import-not-found]  # noqa: PLC0415 - of the hook above

    header = json.dumps(
        {
            "inputs": [{"name": "X", "shape": [4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}],
            "parameters": {"binary_data_output": True},
        }
    )
    body = header.encode() + bytes(16)
    head = (
        f"POST /v2/models/{model}.tar.gz/infer HTTP/1.1\r\nHost: trace\r\nContent-Type: application/octet-stream\r\n"
        f"Inference-Header-Content-Length: {len(header)}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = None
    for number in range(count):
        if number == count - 1:
            under_way[0] = (DEEDS.index(deed) + 1) * _TIMES + time
        connection = connection or socket.create_connection(("127.0.0.1", port), PATIENCE)
        connection.sendall(head.encode() + body)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        said = answer.read()
        assert answer.status == 200, said
    sleep(_SETTLES)  # what is done behind the answer is part of it
    under_way[0] = 0
    connection.close()


def main() -> None:
    """Trace, and print."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--functions", action="store_true", help="the functions of each file as well")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        _serve(arguments.serve)
        return
    for deed, files in trace().items():
        functions = sum(map(len, files.values()))
        shares = [f"{layer} {sum(path.startswith(layer + '/') for path in files)}" for layer in LAYERS]
        sys.stdout.write(f"{deed}: {len(files)} files ({', '.join(shares)}), {functions} functions\n")
        for path, names in sorted(files.items()):
            what = ", ".join(sorted(names)) if arguments.functions else len(names)
            sys.stdout.write(f"    {path:48} {what}\n")


if __name__ == "__main__":
    main()
