# ruff: noqa: FBT002, T201 - models do as models do
"""Models that answer of their own accord, well and badly. Imported by the children as `unasked_models`.

What a request's id says is done with it, see `DEEDS`: "stream 3" calls the deed "stream" with "3".
"""

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace

import numpy as np
from isolated_models import Model

from model_handlers.errors import Kind, MmeError
from model_handlers.metrics import METRICS, MetricKind
from model_handlers.model_calls import ModelCall, Override
from model_handlers.requests import ModelResponse
from model_handlers.tensor import FP32


class Unasked(Model):
    """Sees requests, and is decoupled. Whatever a deed returns is the request's answer."""

    decoupled = True

    def __init__(self, config, model_file):
        super().__init__(replace(config, decoupled=self.decoupled), model_file)
        self.held = []

    def execute_requests(self, requests):
        return [self._do(request) for request in requests]

    def _do(self, request):
        deed, _, argument = request.id.partition(" ")
        return DEEDS[deed](self, request, argument)


class Once(Unasked):
    """The same, not decoupled."""

    decoupled = False


def response(number, size=1):
    """A response that can be told from others."""
    return ModelResponse({"y": np.full(size, number, "f4")}, {"n": number})


def aside(work, *args):
    """Do it on another thread, after the answer to the batch or before, as it comes."""
    threading.Thread(target=work, args=args, daemon=True).start()


def channel_of(request):
    """The socket, which is none of a model's business."""
    return request.responder._events._end


def say(request, message, fds=()):
    """A frame of one's own making."""
    body = json.dumps(message).encode()
    socket.send_fds(channel_of(request), [len(body).to_bytes(4, "little") + body], list(fds))


def _answer(model, request, argument):
    return response(float(argument or 0))


def _stream(model, request, argument):
    """`argument` responses, all of them before the batch is answered."""
    for number in range(int(argument)):
        request.responder.send(response(number), final=False)
    request.responder.send(None, final=True)


def _drip(model, request, argument):
    """The same, slowly."""
    for number in range(int(argument)):
        time.sleep(0.1)
        request.responder.send(response(number), final=False)
    request.responder.send(None, final=True)


def _large(model, request, argument):
    """Responses of as many elements."""
    for number in range(5):
        request.responder.send(response(number, int(argument)), final=number == 4)


def _later(model, request, argument):
    """The same from a thread, which the batch does not wait for."""
    aside(_stream, model, request, argument)


def _hold(model, request, argument):
    """Answered when another request asks for it."""
    model.held.append(request)


def _release(model, request, argument):
    while model.held:
        _stream(model, model.held.pop(0), argument or "1")
    _stream(model, request, "0")


def _threads(model, request, argument):
    """Many threads answer one request; the last to finish says so."""
    left = list(range(8))

    def work(number):
        for i in range(int(argument)):
            request.responder.send(response(1000 * number + i), final=False)
        left.pop()
        if not left:
            request.responder.send(None, final=True)

    for number in range(8):
        aside(work, number)


def _partial(model, request, argument):
    request.responder.send(response(0), final=False)
    request.responder.send(response(1), final=False)
    raise MmeError(Kind.OUT_OF_MEMORY, "no room for a third")


def _count(model, request, argument):
    """Counts one more, and answers with so many characters beside the tensors."""
    METRICS.metric(METRICS.family("t_asked", "So many.", MetricKind.COUNTER), {}).add(1)
    return ModelResponse({"y": np.zeros(1, "f4")}, {"text": "x" * int(argument)})


def _raise(model, request, argument):
    raise MmeError(Kind.UNSUPPORTED, "not this one")


def _twice(model, request, argument):
    """Answered of its own accord, and then by the batch as well."""
    request.responder.send(response(1), final=True)
    return response(2)


def _unsendable(model, request, argument):
    request.responder.send(response(0), final=False)
    request.responder.send(ModelResponse({"y": np.zeros(1, "c8")}), final=False)
    request.responder.send(response(2), final=False)


def _exit(model, request, argument):
    print("last words", file=sys.stderr, flush=True)
    os._exit(int(argument))


def _stream_exit(model, request, argument):
    request.responder.send(response(0), final=False)
    os._exit(int(argument))


def _unknown(model, request, argument):
    """Answers requests that nobody made, in many forms."""
    for number in (0, 12345 << 20, -1, 2**60, "7", 1.5, None, True):
        say(request, {"respond": number, "final": True})
        say(request, {"respond": number, "final": False, "outputs": {}, "parameters": {}})
    _stream(model, request, "2")


def _say(model, request, argument):
    """A frame that is JSON, whatever it says."""
    say(request, json.loads(argument))


def _bytes(model, request, argument):
    """Bytes that are no frame."""
    channel_of(request).sendall(bytes.fromhex(argument))


def _descriptors(model, request, argument):
    """More descriptors than frames."""
    with open("/dev/null") as null, contextlib.suppress(OSError):  # noqa: PTH123 - the other side has hung up
        for _ in range(int(argument)):
            say(request, {"drop": 0}, [null.fileno()])


def _unsealed(model, request, argument):
    """A descriptor of memory that could shrink."""
    fd = os.memfd_create("open")
    os.ftruncate(fd, 1 << 20)
    place = ["FP32", 0, 1 << 20, [1 << 18]]
    message = {"respond": 0, "final": False, "outputs": {"y": place}, "parameters": {}, "segment": 1 << 20}
    say(request, message, [fd])
    os.close(fd)


def _stuck(model, request, argument):
    """Says nonsense, and does not answer its batch either."""
    say(request, {})
    signal.pause()


def _hang_up(model, request, argument):
    """Closes the channel and nothing else, and answers the batch."""
    channel_of(request).shutdown(socket.SHUT_RDWR)
    if argument:
        return response(0)
    return None


def _flood(model, request, argument):
    """Responses until the client leaves."""
    sent = 0
    while not request.responder.is_cancelled():
        request.responder.send(response(sent), final=False)
        sent += 1
    request.responder.send(None, final=True)


def _watch(model, request, argument):
    """Says when the client left, without looking."""
    request.responder.when_cancelled(lambda: request.responder.send(response(7), final=True))


def _cancelled(model, request, argument):
    """Whether the client had left when it first asked."""
    return response(float(request.responder.is_cancelled()))


def _counts(model, request, argument):
    """What the channel keeps of requests that are over: nothing, after this one."""
    return response(request.responder._events.kept - 1)


def _fork(model, request, argument):
    """A copy of the process answers too, asks, and drops what it has."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            request.responder.send(response(666), final=True)
            assert not request.responder.is_cancelled()
            inbox = Inbox()
            model.outside.infer(call("other"), inbox)
            [error] = inbox.got
            code = 0 if "forked" in error.message else 1
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    request.responder.send(response(status), final=True)


def _threads_running(model, request, argument):
    return response(sum(thread.name == "mme events" for thread in threading.enumerate()))


class Careless:
    """Answers when it is collected, as senders do; part of a cycle, so that only a collection finds it."""

    def __init__(self, request):
        self.request = request
        self.cycle = self

    def __del__(self):
        self.request.responder.send(None, final=True)


def _collect(model, request, argument):
    """Collections that send, in the middle of sending: whatever is allocated there may set one off."""
    gc.set_threshold(1)
    try:
        for number in range(300):
            Careless(request)
            request.responder.send(response(number), final=False)
    finally:
        gc.set_threshold(700)
        gc.collect()


# -- calls -------------------------------------------------------------------------------------------------------------


class Inbox:
    """Takes what is answered to a call."""

    def __init__(self):
        self.got = []
        self.over = threading.Event()
        self.tell = []

    def send(self, answer, *, final):
        self.got.append(answer)
        if final:
            self.over.set()

    def is_cancelled(self):
        return False

    def when_cancelled(self, tell):
        self.tell.append(tell)


def call(model, decoupled=False, **fields):
    """A call of `model` with one input."""
    return ModelCall(model, None, (("x", FP32, np.arange(3, dtype="f4")),), decoupled=decoupled, **fields)


def _told(answer):
    if isinstance(answer, MmeError):
        return f"{answer.kind.name}: {answer.message}"
    return "end" if answer is None else answer.outputs["y"].tolist()


def _call(model, request, argument):
    """Calls, waits, and tells what came."""
    inbox = Inbox()
    name, _, decoupled = argument.partition(" ")
    model.outside.infer(call(name, decoupled=bool(decoupled)), inbox)
    inbox.over.wait()
    return ModelResponse({"told": np.array([json.dumps([_told(answer) for answer in inbox.got])], object)})


def _call_drop(model, request, argument):
    """Calls, and waits for nothing after the first response."""
    inbox = Inbox()
    model.outside.infer(call(argument, decoupled=True), inbox)
    while not inbox.got:
        time.sleep(0.001)
    for tell in inbox.tell:
        tell()
    return response(request.responder._events.kept - 1)


def _call_exit(model, request, argument):
    """Dies of the wait."""
    model.outside.infer(call(argument), Inbox())
    os._exit(9)


def _call_many(model, request, argument):
    """Many calls from many threads at once."""
    inboxes = [Inbox() for _ in range(int(argument))]
    for inbox in inboxes:
        aside(model.outside.infer, call("other"), inbox)
    for inbox in inboxes:
        inbox.over.wait()
    return response(sum(len(inbox.got) for inbox in inboxes))


def _ask(model, request, argument):
    """A question."""
    answered = []
    done = threading.Event()

    def tell(answer):
        answered.append(answer)
        done.set()

    what, name = argument.split()
    if what == "ready":
        model.outside.is_ready(name, None, tell)
    elif what == "unload":
        model.outside.unload(name, True, (), tell)
    else:
        files = {"file:small": b"", "file:large": bytes(100_000)}
        model.outside.load(name, Override("{}", files) if what == "override" else None, (), tell)
    done.wait()
    [answer] = answered
    told = f"{answer.kind.name}: {answer.message}" if isinstance(answer, MmeError) else str(answer)
    return ModelResponse({"told": np.array([told], object)})


DEEDS = {
    name.removeprefix("_").replace("_", "-"): function
    for name, function in list(globals().items())
    if name.startswith("_") and not name.startswith("__") and callable(function) and name != "_told"
}
