# ruff: noqa: ARG002, ARG003, ARG005, T201, PTH115, PTH208, PTH110, NPY002 - models do as models do
"""Models to put into processes: each does one thing, good or bad. Imported by the children as `isolated_models`."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from model_handlers.base import Footprint, Handler, Placement
from model_handlers.errors import Kind, LostProcessError, MmeError
from model_handlers.requests import ModelResponse
from model_handlers.tensor import BYTES, FP32, TensorSpec


class Model(Handler):
    """Loads whatever the file says: nothing."""

    backend = "test"
    default_filename = "model.txt"
    preload = ""

    @classmethod
    def traits(cls, config, model_file):
        """In a process that is forked from what the class says."""
        return replace(super().traits(config, model_file), placement=Placement.PROCESS, preload=cls.preload)

    def __init__(self, config, model_file):
        super().__init__(replace(config, outputs=(TensorSpec("y", FP32, (-1,)),)))
        self.file = model_file

    @classmethod
    def autocomplete(cls, config, model_file):
        return config

    @classmethod
    def load(cls, config, model_file, device, lane):
        return cls(config, model_file)

    def close(self):
        if self.file.parent.is_dir():
            (self.file.parent / "closed").touch()


class Echo(Model):
    """Returns its inputs: `y` is `x`, `copy` a copy of it."""

    def execute(self, inputs, outputs):
        return [inputs["x"] if name == "y" else np.array(inputs["x"]) for name in outputs]


class LoadsAside(Model):
    """Returns the priorities of its load, and of a thread and of a process that its load started."""

    @classmethod
    def load(cls, config, model_file, device, lane):
        model = super().load(config, model_file, device, lane)
        model.done = threading.Event()
        model.thread = threading.Thread(target=model.done.wait, daemon=True)
        model.thread.start()
        model.process = subprocess.Popen(["sleep", "60"])
        model.loaded_at = model.priorities()
        return model

    def priorities(self):
        """Its own, and those of what it started."""
        return [os.getpriority(os.PRIO_PROCESS, each) for each in (0, self.thread.native_id, self.process.pid)]

    def execute(self, inputs, outputs):
        return [np.array([self.loaded_at, self.priorities()])]

    def close(self):
        self.done.set()
        self.process.kill()
        self.process.wait()


class Refuses(Echo):
    """Can't be loaded."""

    @classmethod
    def load(cls, config, model_file, device, lane):
        raise MmeError(Kind.INVALID_MODEL, "no such model")


class Misbehaves(Model):
    """Does what its input `do` says, by the name of a function below."""

    def execute(self, inputs, outputs):
        result = DEEDS[inputs["do"].item().decode()](self, inputs)
        return [inputs.get("x", np.zeros(1, "f4"))] if result is None else result


class RefusesForGood(Echo):
    """Can't be loaded, and neither can any other in the same process."""

    @classmethod
    def load(cls, config, model_file, device, lane):
        raise LostProcessError(Kind.UNAVAILABLE, "the GPU has gone")


def _lose(model, inputs):
    raise LostProcessError(Kind.EXECUTION_FAILED, "the GPU has gone")


def _spam(model, inputs):
    for i in range(20000):
        print("line", i)
    print("x" * 100_000)


def _wait(model, inputs):
    """Until there is a file beside the model."""
    (model.file.parent / "waits").touch()
    while not (model.file.parent / "go").exists():
        time.sleep(0.005)


def _junk(model, inputs):
    os.write(1, bytes(range(256)) * 100)
    os.write(2, b"\x1b[2J\xff\xfe no end of line")


def _fork(model, inputs):
    """The copy goes back into what called us, as a careless one does, and answers first."""
    if (pid := os.fork()) != 0:
        for _ in range(200):
            if os.waitpid(pid, os.WNOHANG)[0]:
                break
            time.sleep(0.005)
    return [np.array([os.getpid()], "i8")]


def _leave_behind(model, inputs):
    """A process with a session of its own that holds every descriptor of ours."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.pause()
    (model.file.parent / "left").write_text(str(pid))


def _daemon(model, inputs):
    """The same, its parent gone: an orphan while we live."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if (pid := os.fork()) == 0:
            signal.pause()
        os.write(write, str(pid).encode())
        os._exit(0)
    (model.file.parent / "left").write_text(os.read(read, 20).decode())


def _daemons(model, inputs):
    """Orphans that end at once; the model sees that each has ended."""
    read, write = os.pipe()
    for _ in range(5):
        if (pid := os.fork()) == 0:
            if os.fork() == 0:
                os.write(write, f"{os.getpid()} ".encode())
            os._exit(0)
        os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read) as told:
        (model.file.parent / "left").write_text(told.read())


def _close_all(model, inputs):
    os.closerange(3, 1000)
    signal.pause()


def _keep(model, inputs):
    model.kept = [*getattr(model, "kept", []), inputs["x"][1:]]
    return [np.concatenate([[kept[0]] for kept in model.kept]).astype("f4")]


def _nonsense(model, inputs):
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(int(fd), b"\xff\xff\xff\x7f")
        except OSError:
            continue
    time.sleep(5)


def _forge(model, inputs):
    """An answer of our own making, whose form is right and whose tensor lies nowhere."""
    fields = {
        "ran": 1,
        "end": 0,
        "size": 65536,
        "kept": False,
        "answers": [{"outputs": {"y": ["FP32", 1 << 20, 8, [2]]}}],
    }
    body = json.dumps({**fields, "answers": [{**fields["answers"][0], "parameters": {}}]}).encode()
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(int(fd), len(body).to_bytes(4, "little") + body)
        except OSError:
            continue
    time.sleep(5)


def _raise_memory(model, inputs):
    raise MemoryError("no more room")


def _raise_typed(model, inputs):
    raise MmeError(Kind.OUT_OF_MEMORY, "the card is full")


def _raise(model, inputs):
    raise ZeroDivisionError("of a strange kind")


def _write_into_input(model, inputs):
    inputs["x"][0] = 1


def _note(model, inputs):
    with (model.file.parent / "noted").open("a") as file:
        print(os.getpid(), file=file)


def _exit_after_words(model, inputs):
    print("first words", file=sys.stderr)
    print("last words", file=sys.stderr)
    os._exit(3)


DEEDS = {
    "nothing": lambda model, inputs: None,
    "lose": _lose,
    "segfault": lambda model, inputs: ctypes.string_at(0),
    "os._exit": _exit_after_words,
    "exit 137": lambda model, inputs: os._exit(137),
    "sigkill": lambda model, inputs: os.kill(os.getpid(), signal.SIGKILL),
    "sys.exit": lambda model, inputs: sys.exit("enough"),
    "hang": lambda model, inputs: signal.pause(),
    "nap": lambda model, inputs: time.sleep(0.2),
    "spin": lambda model, inputs: ctypes.CDLL(None).pause(),
    "wait": _wait,
    "spam": _spam,
    "junk": _junk,
    "fork": _fork,
    "leave behind": _leave_behind,
    "daemon": _daemon,
    "daemons": _daemons,
    "close all": _close_all,
    "keep": _keep,
    "nonsense": _nonsense,
    "forge": _forge,
    "memory": _raise_memory,
    "typed": _raise_typed,
    "raise": _raise,
    "write": _write_into_input,
    "note": _note,
    "complex": lambda model, inputs: [np.zeros(2, "c16")],
    "list": lambda model, inputs: [[1.0]],
    "none": lambda model, inputs: [],
    "no result": lambda model, inputs: 7,
    "where": lambda model, inputs: [
        np.array([os.getpid(), os.getppid(), os.getpriority(os.PRIO_PROCESS, 0), os.stat(0).st_rdev], "i8")
    ],
    "stdin": lambda model, inputs: [np.array([sys.stdin.read() if sys.stdin else ""], object)],
    "random": lambda model, inputs: [np.random.random(4)],
    "main": lambda model, inputs: [np.array([str(getattr(sys.modules["__main__"], "__file__", None))], object)],
    "interrupt": lambda model, inputs: os.kill(os.getpid(), signal.SIGINT),
    "descriptors": lambda model, inputs: [
        np.array(
            sorted(
                os.readlink(f"/proc/self/fd/{fd}")
                for fd in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{fd}")
            ),
            object,
        )
    ],
    "segments": lambda model, inputs: [np.array([Path("/proc/self/maps").read_text().count("mme-segment")], "i8")],
    "grab": lambda model, inputs: setattr(model, "grabbed", np.ones(32 << 20, "u1")),
    "fragment": lambda model, inputs: setattr(model, "last", [bytearray(b"1") * 100_000 for _ in range(400)][-1]),
    "thread": lambda model, inputs: threading.Thread(target=signal.pause).start() or None,
    "subprocess": lambda model, inputs: [
        np.array([subprocess.run(["/bin/cat"], capture_output=True, check=True).stdout], object)
    ],
    "swap": lambda model, inputs: [inputs["x"].astype(">f4")],
    "strided": lambda model, inputs: [inputs["x"][::2]],
    "text": lambda model, inputs: [np.array(["ä", "b"])],
    "grow": lambda model, inputs: [np.arange(int(inputs["x"][0]), dtype="u1")],
}


class Requests(Model):
    """Sees requests: tells what it saw, and fails the request whose id is `bad`."""

    def execute_requests(self, requests):
        return [self._one(request) for request in requests]

    def _one(self, request):
        if request.id == "bad":
            return MmeError(Kind.INVALID_ARGUMENT, "this one is bad")
        if request.id == "complex":
            return ModelResponse({"y": np.zeros(1, "c8")})
        seen = f"{request.id} {sorted(request.parameters.items())} {request.timeout_us} {','.join(request.outputs)}"
        return ModelResponse({"y": request.inputs["x"] * 2, "seen": np.array([seen.encode()], object)})


class RequestsMisbehave(Requests):
    """Does first what the first request's id says, where that names a function above."""

    def execute_requests(self, requests):
        DEEDS.get(requests[0].id, DEEDS["nothing"])(self, requests[0].inputs)
        return super().execute_requests(requests)


class OneArray(RequestsMisbehave):
    """Has one array that all its answers are written into."""

    def __init__(self, config, model_file):
        super().__init__(config, model_file)
        self.answer = np.zeros(4, "f4")

    def _one(self, request):
        np.add(self.answer, request.inputs["x"], out=self.answer)
        return ModelResponse({"y": self.answer})


class Table(Requests):
    """Answers with all that it has, at once."""

    def __init__(self, config, model_file):
        super().__init__(config, model_file)
        self.rows = np.zeros(1 << 18, "f4")

    def _one(self, request):
        return ModelResponse({"y": self.rows})


class Texts(Requests):
    """Answers with as many strings as its input says."""

    def __init__(self, config, model_file):
        super().__init__(config, model_file)
        self.config = replace(self.config, outputs=(TensorSpec("y", BYTES, (-1,)),))

    def _one(self, request):
        return ModelResponse({"y": np.full(int(request.inputs["x"][0]), b"text", object)})


class TooFewAnswers(Requests):
    def execute_requests(self, requests):
        return []


class HoldsMemory(Model):
    """Takes 64 MiB."""

    def __init__(self, config, model_file):
        super().__init__(config, model_file)
        self.held = np.ones(64 << 20, "u1")

    def memory(self):
        return Footprint(1)

    def execute(self, inputs, outputs):
        return [np.zeros(1, "f4")]


class LoadRaises(Model):
    @classmethod
    def load(cls, config, model_file, device, lane):
        raise RuntimeError("no such weights")


class LoadRefuses(Model):
    @classmethod
    def load(cls, config, model_file, device, lane):
        raise MmeError(Kind.UNSUPPORTED, "not this kind of model")


class LoadExits(Model):
    @classmethod
    def load(cls, config, model_file, device, lane):
        sys.exit(4)


class LoadDies(Model):
    @classmethod
    def load(cls, config, model_file, device, lane):
        print("about to fall", file=sys.stderr)
        ctypes.string_at(0)


class LoadIsKilled(Model):
    @classmethod
    def load(cls, config, model_file, device, lane):
        os.kill(os.getpid(), signal.SIGKILL)


class LoadEndsAll(Model):
    """Has its fork server die, unless its file forbids it."""

    @classmethod
    def load(cls, config, model_file, device, lane):
        if not model_file.exists():
            model_file.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        return cls(config, model_file)


class LoadHangs(Model):
    @classmethod
    def load(cls, config, model_file, device, lane):
        signal.pause()


class LoadsOnce(Echo):
    """Can't be loaded a second time."""

    @classmethod
    def load(cls, config, model_file, device, lane):
        if (model_file.parent / "loaded").exists():
            raise RuntimeError("the weights went away")
        (model_file.parent / "loaded").touch()
        return cls(config, model_file)

    def execute(self, inputs, outputs):
        os._exit(1)


class CloseHangs(Echo):
    def close(self):
        signal.pause()


class CloseRaises(Echo):
    def close(self):
        raise RuntimeError("can't let go")


class Tried(Model):
    """On trial it does what its file says."""

    @classmethod
    def try_load(cls, config, model_file):
        deed = model_file.read_text()
        if deed == "tell":
            oom = Path("/proc/self/oom_score_adj").read_text().strip()
            told = f"{os.getpid()} {os.getpriority(os.PRIO_PROCESS, 0)} {oom}"
            (model_file.parent / "told").write_text(told)
        elif deed == "segfault":
            ctypes.string_at(8)
        elif deed == "abort":
            os.abort()
        elif deed == "exit":
            os._exit(3)
        elif deed == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif deed == "end all":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        elif deed == "refuse":
            raise MmeError(Kind.INVALID_MODEL, "no such model")
        elif deed == "raise":
            raise ValueError("a bad number")
        elif deed == "devour":
            np.ones(1 << 30)
        elif deed == "hang":
            time.sleep(600)


def end_the_process():
    """As a broken library does when it is imported."""
    os._exit(3)


TAKEN = []


def take_memory():
    """As importing a framework does."""
    TAKEN.append(np.ones(4 << 20))


class Preloaded(Echo):
    """Its processes begin with 32 MiB."""

    preload = "isolated_models:take_memory"

    @classmethod
    def load(cls, config, model_file, device, lane):
        """Only where they did."""
        assert TAKEN
        return super().load(config, model_file, device, lane)


def end_this_process():
    """The same, for others."""
    os._exit(4)


def import_for_ever():
    """As a large framework does on a slow disk, for as long as a test lasts."""
    time.sleep(600)


def wait_at_the_gate():
    """As a large framework does, until the test goes on."""
    gate = Path(os.environ["PRELOAD_GATE"])
    (gate / "waits").touch()
    while not (gate / "open").exists():
        time.sleep(0.01)


class PreloadTakesLong(Echo):
    """What its processes are to be forked with takes long to import."""

    preload = "isolated_models:import_for_ever"


class PreloadEnds(Echo):
    """What its processes are to be forked with can't be imported."""

    preload = "isolated_models:end_the_process"


class RequestsPreloadEnds(Requests):
    """The same for one that sees requests."""

    preload = "isolated_models:end_this_process"
