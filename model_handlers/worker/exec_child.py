"""How a model's process begins on the interpreter of an environment of its own.

Executed by its path, `python -I exec_child.py LANE VERSION SOCKET…` (the version is the server's), never imported. The
server's packages are not for the model, so nothing of ours is on `sys.path`: our one package is put among the modules
by hand, and needs only numpy and the standard library. What comes before that import is written for old Pythons too,
for them to be refused by a sentence.
"""

import contextlib
import faulthandler
import importlib.util
import json
import os
import socket
import sys
import traceback

_OLDEST = (3, 10)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - pathlib costs 10 ms


def main() -> int:
    """Serve one model as `main.run` does; returns the exit code."""
    lane, server, *sockets = sys.argv[1:]
    del sys.argv[1:]
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:  # noqa: PTH123
        comm.write(lane[:15])
    faulthandler.enable()  # a crash in native code leaves the Python stack on standard error
    ends = [socket.socket(fileno=int(fd)) for fd in sockets]
    lack = _lack(server)
    if lack:
        _refuse(ends[0], lack)
        return 0
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    _import_package()
    from model_handlers.worker.main import run  # noqa: PLC0415 - it can be imported from here on

    return run(*ends)


def _lack(server: str) -> str:
    """What the environment has that won't do, "" when it will."""
    if sys.version_info < _OLDEST:
        ours, oldest = ".".join(map(str, sys.version_info[:3])), ".".join(map(str, _OLDEST))
        return f"has Python {ours}; models run on Python {oldest} or newer, and this server on {server}"
    try:
        import numpy  # noqa: F401, ICN001, PLC0415 - to see whether it can be
    except ImportError as error:
        return f"has no numpy, which models get their tensors in: install it there ({error})"
    return ""


def _refuse(control: socket.socket, lack: str) -> None:
    length = int.from_bytes(control.recv(4, socket.MSG_WAITALL), "little")
    message = json.loads(control.recv(length, socket.MSG_WAITALL).decode() or '{"do": "close"}')
    if message["do"] != "load":
        return
    sentence = f"model '{message['config']['name']}': its environment {sys.prefix} {lack}"
    body = json.dumps({"error": {"kind": "INVALID_MODEL", "message": sentence}}).encode()
    control.sendall(len(body).to_bytes(4, "little") + body)


def _import_package() -> None:
    """Make `import model_handlers` find ours, whatever the environment has by that name, and nothing beside it."""
    spec = importlib.util.spec_from_file_location(
        "model_handlers",
        f"{_PACKAGE}/__init__.py",
        submodule_search_locations=[_PACKAGE],
    )
    assert spec is not None  # noqa: S101 - it is a Python file
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    sys.modules["model_handlers"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    except BaseException:  # noqa: BLE001 - as in the fork server: what threads are left must not keep us
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
