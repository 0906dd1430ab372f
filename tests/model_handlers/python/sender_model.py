"""A model that does with each request what its id says. Read as text by the tests, and loaded as a model.py."""

# ruff: noqa: BLE001, F401 - each is told by its name

import asyncio
import gc
import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def out(*numbers, **parameters):
    """A response of one row."""
    tensors = [pb_utils.Tensor("OUT", np.array([numbers], np.float32))]
    return pb_utils.InferenceResponse(tensors, parameters=parameters or None)


def text(words):
    """A response of words."""
    return pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([[words]], object))])


def attempt(sender, *arguments, **keywords):
    """What sending raises."""
    try:
        sender.send(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "sent"


def nothing(model, request):
    request.get_response_sender().send(flags=FINAL)


def one(model, request):
    request.get_response_sender().send(out(1), FINAL)


def some(model, request):
    sender = request.get_response_sender()
    for number in range(5):
        sender.send(out(number, index=number))
    sender.send(flags=FINAL)


def aside(model, request):
    """All of them when execute has long returned."""
    model.gate.clear()

    def send(sender):
        model.gate.wait()
        for number in range(5 if model.decoupled else 1):
            sender.send(out(number))
        sender.send(flags=FINAL)

    threading.Thread(target=send, args=(request.get_response_sender(),), daemon=True).start()


def open_gate(model, request):
    model.gate.set()
    one(model, request)


def silent(model, request):
    """Lets go of it without a word."""


def dropped(model, request):
    """Sends, and lets go of the sender without saying that this was all."""
    request.get_response_sender().send(out(1))
    request.get_response_sender().send(out(2))


def cycle(model, request):
    """Lets go of the sender in a cycle, which only a collection finds."""
    holder = {"sender": request.get_response_sender()}
    holder["self"] = holder
    holder["sender"].send(out(1))


def collect(model, request):
    gc.collect()
    one(model, request)


def kept(model, request):
    """Lets go of everything in finalize."""
    model.kept.append(request)


def after_final(model, request):
    """What may be sent behind the last response: nothing."""
    sender = request.get_response_sender()
    sender.send(out(1), FINAL)
    model.told.append([attempt(sender, out(2)), attempt(sender, flags=FINAL), attempt(sender, out(2), FINAL)])


def told(model, request):
    """What the last such model was told."""
    words = json.dumps(model.told.pop())
    model.answer(request, text(words))


def wrong(model, request):
    """What can't be sent at all."""
    sender = request.get_response_sender()
    model.told.append(
        [attempt(sender), attempt(sender, None, 0), attempt(sender, out(1), 7), attempt(sender, 3, FINAL)]
    )
    sender.send(out(1), FINAL)


def same(model, request):
    """There is one sender, however often it is asked for."""
    assert request.get_response_sender() is request.get_response_sender()
    one(model, request)


def fails(model, request):
    """An error, and then more."""
    sender = request.get_response_sender()
    sender.send(out(1))
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("not today", pb_utils.TritonError.UNAVAILABLE)))
    sender.send(out(2))
    sender.send(flags=FINAL)


def unknown_output(model, request):
    tensor = pb_utils.Tensor("OTHER", np.zeros((1, 1), np.float32))
    request.get_response_sender().send(pb_utils.InferenceResponse([tensor]), FINAL)


def wrong_type(model, request):
    tensor = pb_utils.Tensor("OUT", np.array([["many"]], object))
    request.get_response_sender().send(pb_utils.InferenceResponse([tensor]), FINAL)


def raises(model, request):
    """After two responses."""
    sender = request.get_response_sender()
    sender.send(out(0))
    sender.send(out(1))
    raise ValueError("no third")


def exits(model, request):
    raise SystemExit(3)


def returns(model, request):
    """What execute returns, when it is asked to."""
    model.returned = [None]


def many(model, request):
    """Many threads send many responses each."""
    sender, left = request.get_response_sender(), list(range(8))

    def send(number):
        for i in range(50):
            sender.send(out(1000 * number + i))
        left.pop()
        if not left:
            sender.send(flags=FINAL)

    for number in range(8):
        threading.Thread(target=send, args=(number,), daemon=True).start()


def large(model, request):
    sender = request.get_response_sender()
    for number in range(3):
        sender.send(out(*np.full(500_000, number)))
    sender.send(flags=FINAL)


def facts(model, request):
    told = {
        "id": request.request_id(),
        "correlation_id": request.correlation_id(),
        "flags": request.flags(),
        "timeout": request.timeout(),
        "parameters": json.loads(request.parameters()),
        "outputs": sorted(request.requested_output_names()),
        "cancelled": [request.is_cancelled(), request.get_response_sender().is_cancelled()],
    }
    model.answer(request, text(json.dumps(told)))


def until_cancelled(model, request):
    """Sends until the client has left, and a little longer."""

    def send(sender):
        while not request.is_cancelled():
            sender.send(out(1))
        assert sender.is_cancelled()
        for _ in range(3):
            sender.send(out(2))
        sender.send(out(3), FINAL)

    threading.Thread(target=send, args=(request.get_response_sender(),), daemon=True).start()


def then_final(model, request):
    sender = request.get_response_sender()
    sender.send(out(1))
    sender.send(flags=FINAL)
    model.told.append([attempt(sender, flags=FINAL)])


def facts_plainly(model, request):
    model.returned = out(5)


def twice(model, request):
    """More than a model may that is not decoupled."""
    sender = request.get_response_sender()
    early = attempt(sender, flags=FINAL)
    sender.send(out(1))
    model.told.append([early, attempt(sender, out(2)), attempt(sender, flags=FINAL), attempt(sender, out(3))])
    model.told[-1].append(attempt(sender, flags=FINAL))


def both(model, request):
    """By a sender, and by what execute returns."""
    request.get_response_sender().send(out(1))
    model.returned = out(2)


def taken_and_returned(model, request):
    """Asks for a sender, and answers by what execute returns."""
    model.sender = request.get_response_sender()
    model.returned = out(2)


def use_taken(model, request):
    model.told.append([attempt(model.sender, out(3))])
    model.returned = out(1)


def let_go_later(model, request):
    model.gate.clear()
    threading.Thread(target=lambda _: model.gate.wait(), args=(request.get_response_sender(),), daemon=True).start()


def asks_and_returns(model, request):
    """Asks for a sender, and lets go of it before execute returns a response."""
    request.get_response_sender().is_cancelled()
    model.returned = out(2)


def sent_and_raised(model, request):
    request.get_response_sender().send(out(1))
    raise ValueError("too late")


def let_go(model, request):
    request.get_response_sender()


class TritonPythonModel:
    def initialize(self, args):
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self.gate = threading.Event()
        self.kept, self.told, self.returned = [], [], None

    def answer(self, request, response):
        """In whatever way the model answers."""
        if self.decoupled:
            request.get_response_sender().send(response, FINAL)
        else:
            self.returned = response

    def do(self, request):
        self.returned = None
        globals()[request.request_id()](self, request)
        return self.returned

    def execute(self, requests):
        answers = []
        while requests:
            answers.append(self.do(requests.pop(0)))
        if self.decoupled:
            return answers[0]
        return answers

    def finalize(self):
        for request in self.kept:
            request.get_response_sender().send(out(9))
        self.kept.clear()
