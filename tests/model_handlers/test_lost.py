"""Whether a GPU still answers: what the driver's library is asked, a stand-in of it, and what becomes of its answer."""

import inspect

import numpy as np
import pytest

from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, LostProcessError, MmeError
from model_handlers.onnx import OnnxHandler
from model_handlers.system import devices
from model_handlers.system.threads import Threads

ILLEGAL_ADDRESS, OUT_OF_MEMORY, IN_CAPTURE = 700, 2, 900


class FakeDriver:
    """The driver's library, of a machine with two GPUs. `error` is what the second one answers, by which function."""

    def __init__(self, error=0, *, active=True, by="cuCtxSynchronize"):
        self.error, self.active, self.by = error, active, by
        self.current = self.held = 0

    def cuDeviceGet(self, device, number):
        device._obj.value = number
        return 0 if number < 2 else 101

    def cuDevicePrimaryCtxGetState(self, device, _flags, active):
        error = self.told(device.value)
        active._obj.value = self.active and not error
        return error

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 1000 + device.value
        self.held += not (error := self.told(device.value))
        return error

    def cuCtxPushCurrent_v2(self, context):
        error = self.told(context.value - 1000)
        self.current = 0 if error else context.value
        return error

    def cuCtxSynchronize(self):
        return self.told(self.current - 1000) if self.current else 201

    def told(self, gpu):
        """What the function that called this one answers."""
        return self.error if gpu == 1 and inspect.stack()[1].function == self.by else 0

    def cuCtxPopCurrent_v2(self, _context):
        self.current = 0
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, _device):
        self.held -= 1
        return 0

    def cuGetErrorString(self, error, words):
        words._obj.value = b"an illegal memory access was encountered" if error == ILLEGAL_ADDRESS else None
        return 0


@pytest.fixture(autouse=True)
def _unheard(monkeypatch):
    """What this process has lost is nobody else's business."""
    monkeypatch.setattr(devices, "_reasons", [])


@pytest.fixture
def driver(monkeypatch):
    """Puts a stand-in into the library's place."""

    def driver(*args, **options):
        made = FakeDriver(*args, **options)
        monkeypatch.setattr(devices, "driver", lambda: made)
        return made

    return driver


def asked(kind=Kind.EXECUTION_FAILED, gpu=1):
    """What is raised where this went wrong on a GPU."""
    return devices.lost(MmeError(kind, "it failed"), gpu)


@pytest.mark.parametrize(
    "by", ["cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuCtxSynchronize"]
)
def test_a_gpu_that_answers_nothing_but_errors_is_lost(driver, by):
    """Whichever function says so. Its driver's words are in the sentence; the model's file may be as good as any."""
    made = driver(ILLEGAL_ADDRESS, by=by)
    words = (
        "it failed; in this process the GPU answers nothing but errors now (CUDA error 700, an illegal memory access"
    )

    for kind, told in ((Kind.EXECUTION_FAILED, Kind.EXECUTION_FAILED), (Kind.INVALID_MODEL, Kind.UNAVAILABLE)):
        error = asked(kind)
        assert (type(error), error.kind) == (LostProcessError, told)
        assert error.message.startswith(words)
    assert devices.first_reason() == error.message
    assert (made.held, made.current) == (0, 0)


@pytest.mark.parametrize(
    ("options", "gpu", "kind"),
    [
        ({"error": 0}, 1, Kind.EXECUTION_FAILED),
        ({"error": OUT_OF_MEMORY}, 1, Kind.OUT_OF_MEMORY),
        ({"error": IN_CAPTURE}, 1, Kind.EXECUTION_FAILED),
        ({"error": ILLEGAL_ADDRESS, "active": False}, 1, Kind.UNAVAILABLE),
        ({"error": ILLEGAL_ADDRESS}, 0, Kind.EXECUTION_FAILED),
        ({"error": ILLEGAL_ADDRESS}, 7, Kind.EXECUTION_FAILED),
        ({"error": ILLEGAL_ADDRESS}, 1, Kind.INVALID_ARGUMENT),
    ],
    ids=["answers", "full", "busy with a capture", "never used", "another GPU", "no such GPU", "the client's mistake"],
)
def test_what_passes_is_no_loss(driver, options, gpu, kind):
    """An ordinary failure stays what it is, and this process has lost nothing."""
    made = driver(**options)
    error = asked(kind, gpu)

    assert (type(error), error.kind, error.message) == (MmeError, kind, "it failed")
    assert devices.first_reason() == ""
    assert made.held == 0


@pytest.mark.skipif(devices.driver() is not None, reason="this machine has a driver")
def test_without_a_driver_nothing_is_lost():
    """By the loader that is there."""
    assert type(asked()) is MmeError


def test_an_onnx_model_asks_after_each_failure(driver):
    """The process is lost with the GPU that its session is on, and not with another's."""

    class Session:
        def run(self, *_, **__):
            raise RuntimeError("CUDA failure 700: an illegal memory access was encountered")

        def get_inputs(self):
            return ()

        get_outputs = get_inputs

    driver(ILLEGAL_ADDRESS)
    for gpu, kind in ((1, LostProcessError), (0, MmeError)):
        with pytest.raises(MmeError, match="failed while running model 'm': CUDA failure 700") as caught:
            OnnxHandler(Session(), ModelConfig("m"), Threads(1), gpu).execute({"x": np.ones(1)}, ["y"])
        assert type(caught.value) is kind
