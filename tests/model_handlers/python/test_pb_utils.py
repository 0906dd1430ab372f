"""The names that models import, outside of any model."""

import ctypes
import json
import struct
import sys

import numpy as np
import pytest

from model_handlers.metrics import METRICS
from model_handlers.python import pb_responses, pb_utils
from model_handlers.python.pb_responses import ReceivedTensor
from model_handlers.tensor import BF16, BOOL, DATA_TYPES, FP32


@pytest.fixture(name="imported")
def _imported(monkeypatch):
    """The module as models get it."""
    names = ("triton_python_backend_utils", "c_python_backend_utils")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    pb_utils.install()
    yield sys.modules["triton_python_backend_utils"]
    for name in names:
        sys.modules.pop(name, None)


def refused(call, *args, **kwargs):
    """The words of the exception that models know."""
    with pytest.raises(pb_utils.TritonModelException) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def mistyped(call, *args, **kwargs):
    """The words for an argument of another type."""
    with pytest.raises(TypeError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_models_import_it_by_tritons_name(imported):
    """Every public name is there, and is documented where it can be; also under the name of Triton's inner module."""
    import c_python_backend_utils as inner  # noqa: PLC0415 - they exist after install alone
    import triton_python_backend_utils as by_name  # noqa: PLC0415

    assert by_name is inner is imported
    for name in pb_utils.__all__:
        value = getattr(by_name, name)
        assert not callable(value) or value.__doc__


# -- tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [row for row in DATA_TYPES if row is not BF16], ids=repr)
def test_each_dtype_has_its_number(row):
    """The number of a tensor's type, and the way from names and numbers to numpy and back, agree."""
    tensor = pb_utils.Tensor("T", np.zeros((2, 3), row.dtype))
    scalar = pb_utils.triton_to_numpy_type(row.number)
    assert (tensor.triton_dtype(), tensor.shape(), tensor.is_cpu()) == (row.number, [2, 3], True)
    assert np.dtype(scalar) == row.dtype
    assert pb_utils.numpy_to_triton_type(scalar) == pb_utils.numpy_to_triton_type(row.dtype) == row.number
    assert pb_utils.triton_string_to_numpy(row.config_name) is (bool if row is BOOL else scalar)


def test_what_numpy_does_not_have_has_no_numpy_type():
    """BF16 and unknown types give None, or KeyError by name, as in Triton."""
    assert pb_utils.triton_to_numpy_type(14) is None
    assert pb_utils.triton_to_numpy_type(0) is None
    assert pb_utils.numpy_to_triton_type(np.complex64) is None
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13
    assert [pb_utils.numpy_to_triton_type(strange) for strange in (None, "nonsense", 5)] == [None] * 3
    with pytest.raises(KeyError):
        pb_utils.triton_string_to_numpy("FP32")


@pytest.mark.parametrize("array", [np.array([b"a", b"bc"]), np.array(["a", "bc"])])
def test_numpys_own_strings_become_objects(array):
    """Fixed-width strings of either kind are tensors of strings."""
    tensor = pb_utils.Tensor("T", array)
    assert tensor.triton_dtype() == 13
    assert tensor.as_numpy().dtype == object
    assert tensor.as_numpy().tolist() == array.tolist()


def test_big_endian_numbers_become_the_protocols():
    """Values stay, bytes turn."""
    tensor = pb_utils.Tensor("T", np.array([1, 2], ">i4"))
    assert tensor.triton_dtype() == 8
    assert tensor.as_numpy().tolist() == [1, 2]
    assert tensor.as_numpy().dtype == np.dtype("<i4")


def test_what_is_no_tensor_is_refused():
    """An empty name, an unknown dtype, a list."""
    assert refused(pb_utils.Tensor, "", np.zeros(1)) == "Tensor name cannot be an empty string."
    words = refused(pb_utils.Tensor, "T", np.zeros(1, np.complex64))
    assert words == "NumPy dtype is not supported. Tensor 'T' has dtype complex64"
    assert "must be made from a numpy array, got <class 'list'>" in mistyped(pb_utils.Tensor, "T", [1])
    assert "must be text, got <class 'NoneType'>" in mistyped(pb_utils.Tensor, None, np.zeros(1))


def test_texts_may_be_bytes():
    """Which is what a model finds in a tensor of strings: names and sentences, where they are UTF-8."""
    [name] = pb_utils.Tensor("T", np.array(["grün"], object)).as_numpy()
    encoded = name.encode()
    request = pb_utils.InferenceRequest(encoded, model_name=encoded, requested_output_names=[encoded])
    assert (request.request_id(), request.model_name, request.wanted_outputs()) == (name, name, (name,))
    assert pb_utils.Tensor(encoded, np.zeros(1)).name() == name
    assert pb_utils.Tensor.from_dlpack(encoded, np.zeros(1)).name() == name
    assert pb_utils.TritonError(encoded).message() == name
    assert "no UTF-8: b'\\xff'" in mistyped(pb_utils.Tensor, b"\xff", np.zeros(1))
    assert "must be a list" in mistyped(pb_utils.InferenceRequest, requested_output_names=b"OUT")


def test_dlpack_shares_memory_both_ways():
    """No element is copied between a tensor and another framework's."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = pb_utils.Tensor("T", array)
    seen = np.from_dlpack(tensor)
    back = pb_utils.Tensor.from_dlpack("B", tensor)
    capsule = pb_utils.Tensor.from_dlpack("C", tensor.to_dlpack())
    array[0, 0] = 9
    for other in (seen, back.as_numpy(), capsule.as_numpy()):
        assert other.tolist() == [[9, 1, 2], [3, 4, 5]]
    back.as_numpy()[0, 1] = 8
    assert array[0, 1] == 8
    assert (back.name(), back.triton_dtype(), tensor.__dlpack_device__()) == ("B", 11, (1, 0))


def test_a_tensor_is_read_in_order():
    """Made from memory in another one, which frameworks would refuse to take from `as_numpy`."""
    tensor = pb_utils.Tensor("T", np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1])
    array = tensor.as_numpy()
    assert array.tolist() == [[2, 1, 0], [5, 4, 3]]
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert tensor.as_numpy() is array


def test_dlpack_takes_what_is_stored_in_order_only():
    """Transposed memory is refused with Triton's words, strings too, and so is what speaks no DLPack."""
    transposed = np.zeros((2, 3), np.float32).T
    assert refused(pb_utils.Tensor.from_dlpack, "T", transposed) == (
        "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
    )
    inner = pb_utils.Tensor("T", transposed)
    assert pb_utils.Tensor.from_dlpack("U", inner).shape() == [3, 2]
    assert pb_utils.Tensor.from_dlpack("U", pb_utils.Tensor("T", np.array(5.0))).shape() == []
    strings = pb_utils.Tensor("T", np.array([b"x"], object))
    assert refused(strings.to_dlpack) == "DLPack does not have support for string tensors."
    assert refused(pb_utils.Tensor.from_dlpack, "", np.zeros(1)) == "Tensor name cannot be an empty string."
    assert refused(pb_utils.Tensor.from_dlpack, "T", [1]).startswith(
        "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__` and `__dlpack_device__` "
        "attributes"
    )
    assert "complex64" in refused(pb_utils.Tensor.from_dlpack, "T", np.zeros(1, np.complex64))


def test_dlpack_takes_hosts_and_gpus_of_one_maker():
    """Memory of another device is refused with Triton's words."""
    capsule = np.zeros(2, np.float32).__dlpack__()
    address = pb_responses.capsule_pointer(capsule, b"dltensor")
    ctypes.c_int32.from_address(address + 8).value = 14
    assert refused(pb_utils.Tensor.from_dlpack, "T", capsule) == "DLDevice type 14 is not support by Python backend."
    ctypes.c_int32.from_address(address + 8).value = 1


def test_dlpack_has_a_stream_by_place_and_by_name():
    """As frameworks call it; on the host it means nothing."""
    tensor = pb_utils.Tensor("T", np.zeros(2, np.float32))
    for capsule in (tensor.__dlpack__(None), tensor.__dlpack__(stream=None)):
        assert pb_utils.Tensor.from_dlpack("U", capsule).shape() == [2]


def test_a_capsule_is_taken_once():
    """A second look at a capsule is an error, not somebody else's memory."""
    capsule = pb_utils.Tensor("T", np.zeros(2)).to_dlpack()
    pb_utils.Tensor.from_dlpack("A", capsule)
    assert "a capsule can be taken once" in refused(pb_utils.Tensor.from_dlpack, "B", capsule)


def test_a_read_only_input_goes_over_dlpack_as_a_copy():
    """DLPack cannot say read-only: nobody can write into a request that way."""
    body = np.arange(4, dtype=np.float32).tobytes()
    tensor = ReceivedTensor("T", np.frombuffer(body, np.float32), FP32)
    seen = np.from_dlpack(tensor)
    assert seen.tolist() == [0, 1, 2, 3]
    assert not np.shares_memory(seen, np.frombuffer(body, np.float32))
    made = pb_utils.Tensor("T", np.frombuffer(body, np.float32))
    assert np.from_dlpack(made).tolist() == [0, 1, 2, 3]


def test_bf16_keeps_its_type_over_dlpack():
    """The type code in the capsule is BF16's, which numpy refuses to read and from_dlpack knows."""
    tensor = ReceivedTensor("T", np.array([0x3F80, 0x4000], np.uint16), BF16)
    with pytest.raises((RuntimeError, BufferError)):
        np.from_dlpack(tensor)
    taken = pb_utils.Tensor.from_dlpack("B", tensor)
    assert taken.triton_dtype() == 14
    assert refused(taken.as_numpy) == (
        "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
    )
    assert taken.carried()[1].tolist() == [0x3F80, 0x4000]


class OnGpu:
    """A stand-in for a torch tensor on a GPU: its memory is the host's, its device says otherwise."""

    def __init__(self, array, dtype):
        self.array, self.dtype, self.shape = array, dtype, array.shape

    def __dlpack_device__(self):
        return (2, 1)

    def __dlpack__(self, *, stream=None):
        return self.array.__dlpack__()

    def detach(self):
        """Itself."""
        return self

    def cpu(self):
        """What lies on the host."""
        return self.array


class Host(np.ndarray):
    """An array with torch's method."""

    def contiguous(self):
        """Itself."""
        return self


def test_a_tensor_on_a_gpu_stays_there_until_it_is_sent():
    """It cannot be numpy's; its framework copies it to the host when the response is made."""
    array = np.array([[1, 2]], np.float32).view(Host)
    tensor = pb_utils.Tensor.from_dlpack("T", OnGpu(array, "torch.float32"))
    assert (tensor.is_cpu(), tensor.shape(), tensor.triton_dtype()) == (False, [1, 2], 11)
    assert tensor.__dlpack_device__() == (2, 1)
    assert refused(tensor.as_numpy) == "Tensor is stored in GPU and cannot be converted to NumPy."
    data_type, elements = tensor.carried()
    assert (data_type, elements.tolist()) == (FP32, [[1, 2]])


# -- requests, responses, errors ---------------------------------------------------------------------------------------


def test_a_request_takes_every_keyword():
    """The constructor that models use to call others, word by word."""
    tensor = pb_utils.Tensor("A", np.zeros(1))
    request = pb_utils.InferenceRequest(
        request_id="id",
        correlation_id="seq",
        inputs=[tensor],
        requested_output_names=["O"],
        model_name="other",
        model_version=2,
        flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
        timeout=5,
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 1),
        trace=pb_utils.InferenceTrace(),
        parameters={"a": 1},
    )
    request.set_flags(request.flags() | pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
    assert (request.request_id(), request.correlation_id(), request.flags(), request.timeout()) == ("id", "seq", 3, 5)
    assert (request.model_name, request.model_version, request.requested_output_names()) == ("other", 2, {"O"})
    assert json.loads(request.parameters()) == {"a": 1}
    assert request.preferred_memory().preferred_device_id == 1
    assert pb_utils.get_input_tensor_by_name(request, "A") is tensor
    assert pb_utils.get_input_tensor_by_name(request, "B") is None
    assert pb_utils.InferenceRequest(parameters='{"b": 2}').parameters() == '{"b": 2}'
    assert pb_utils.InferenceRequest().parameters() == "{}"


WHOSE = "for request with id 'r' and model name 'm' should not be empty."


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"inputs": [None]}, f"Input tensor {WHOSE}"),
        ({"requested_output_names": ["O", ""]}, f"Requested output name {WHOSE}"),
        ({"correlation_id": None}, "Correlation ID must be integer or string"),
        ({"correlation_id": 1.5}, "Correlation ID must be integer or string"),
        ({"parameters": [1]}, "Expect dict, got <class 'list'>"),
        ({"parameters": {1: "a"}}, "Expect parameters keys to have type str, found type <class 'int'>"),
        ({"parameters": {"a": [1]}}, "Expect parameters values to have type bool/int/str, found type <class 'list'>"),
    ],
)
def test_a_request_that_nobody_could_send_is_refused_when_it_is_made(arguments, words):
    """With Triton's words."""
    assert words in refused(pb_utils.InferenceRequest, **{"request_id": "r", "model_name": "m", **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        {"inputs": None},
        {"inputs": [3]},
        {"inputs": pb_utils.Tensor("A", np.zeros(1))},
        {"requested_output_names": None},
        {"requested_output_names": [None]},
        {"requested_output_names": "OUT"},
        {"request_id": None},
        {"model_name": None},
        {"model_version": "1"},
        {"flags": None},
        {"timeout": 0.5},
    ],
    ids=repr,
)
def test_a_request_has_arguments_of_their_types(arguments):
    """Others are TypeErrors, when it is made."""
    mistyped(pb_utils.InferenceRequest, **{"model_name": "m", **arguments})


def test_a_response_holds_outputs_or_an_error():
    """And refuses what is neither."""
    tensor = pb_utils.Tensor("O", np.zeros(1))
    response = pb_utils.InferenceResponse(output_tensors=[tensor], parameters={"k": True})
    assert (response.has_error(), response.error(), response.parameters()) == (False, None, '{"k": true}')
    assert pb_utils.get_output_tensor_by_name(response, "O") is tensor
    assert pb_utils.get_output_tensor_by_name(response, "P") is None
    failed = pb_utils.InferenceResponse(error=pb_utils.TritonError("why", pb_utils.TritonError.UNAVAILABLE))
    assert failed.has_error()
    assert (failed.error().message(), failed.error().code(), str(failed.error())) == ("why", 4, "why")
    assert "must be a TritonError" in mistyped(pb_utils.InferenceResponse, error="why")
    assert "must be Tensors" in mistyped(pb_utils.InferenceResponse, [np.zeros(1)])
    assert refused(pb_utils.InferenceResponse, [None]) == "Output tensor for inference response should not be empty."
    assert refused(pb_utils.InferenceResponse, parameters=[1]) == "Expect dict, got <class 'list'>"
    assert "bool/int/str, found type <class 'NoneType'>" in refused(pb_utils.InferenceResponse, parameters={"a": None})


def test_an_error_has_one_of_the_codes():
    """INTERNAL unless it says so; a number that is no code is refused. Its text has its name."""
    assert pb_utils.TritonError("x").code() == pb_utils.TritonError.INTERNAL
    code = pb_utils.TritonError("x", 4).code()
    assert (code.name, code.value, int(code), json.dumps([code])) == ("UNAVAILABLE", 4, 4, "[4]")
    assert (str(code), f"{code}", f"{code:d}") == ("__ErrorCode.UNAVAILABLE", "__ErrorCode.UNAVAILABLE", "4")
    assert "no code 99" in refused(pb_utils.TritonError, "x", 99)


def test_a_model_may_change_the_list_of_tensors_that_it_got():
    """Who adds a tensor to what `inputs()` or `output_tensors()` gave, to ask another model, changes neither of them."""
    tensor, another = pb_utils.Tensor("X", np.zeros(1)), pb_utils.Tensor("Y", np.ones(1))
    request = pb_utils.InferenceRequest(model_name="m", requested_output_names=["Z"], inputs=[tensor])
    response = pb_utils.InferenceResponse([tensor])

    request.inputs().append(another)
    response.output_tensors().append(another)

    assert request.inputs() == response.output_tensors() == [tensor]


def test_a_request_that_a_model_made_has_no_sender():
    """Nobody waits for responses to it, and nobody leaves."""
    request = pb_utils.InferenceRequest()

    assert "only requests that execute was given" in refused(request.get_response_sender)
    assert request.is_cancelled() is False


# -- configuration, strings, metrics -----------------------------------------------------------------------------------


def test_a_configuration_is_searched_by_name():
    """The helpers give the entry or None, also where the configuration has no tensors."""
    config = {"input": [{"name": "A"}], "output": [{"name": "B", "dims": [1]}]}
    assert pb_utils.get_input_config_by_name(config, "A") == {"name": "A"}
    assert pb_utils.get_output_config_by_name(config, "B") == {"name": "B", "dims": [1]}
    assert pb_utils.get_input_config_by_name(config, "B") is None
    assert pb_utils.get_output_config_by_name({}, "B") is None
    assert pb_utils.using_decoupled_model_transaction_policy({}) is False
    assert pb_utils.using_decoupled_model_transaction_policy({"model_transaction_policy": {"decoupled": True}})


def test_strings_survive_their_wire_form():
    """Bytes, text, empty strings and zeros inside, in order of rows."""
    array = np.array([[b"a\0b", "ü"], [b"", b"z"]], object)
    encoded = pb_utils.serialize_byte_tensor(array)
    assert encoded[:7] == b"\3\0\0\0a\0b"
    expected = [b"a\0b", "ü".encode(), b"", b"z"]
    assert pb_utils.deserialize_bytes_tensor(encoded).tolist() == expected
    assert pb_utils.deserialize_bytes_tensor(np.frombuffer(encoded, np.uint8)).tolist() == expected
    assert pb_utils.deserialize_bytes_tensor(b"").tolist() == []
    assert pb_utils.serialize_byte_tensor(np.array([], object)) == ()
    with pytest.raises(struct.error):
        pb_utils.deserialize_bytes_tensor(encoded[:-1])
    assert pb_utils.serialize_byte_tensor(np.zeros(3)) is None


@pytest.mark.usefixtures("imported")
def test_everything_can_be_imported_at_once():
    """`import *` brings what Triton's brings, the modules that it is made with, too."""
    names = {}
    exec("from triton_python_backend_utils import *", names)  # noqa: S102 - a star is for modules alone
    assert (names["np"], names["json"], names["struct"], names["Tensor"]) == (np, json, struct, pb_utils.Tensor)


def test_levels_of_the_log_have_a_class():
    """`Logger.LogLevel.INFO` is `Logger.INFO`."""
    levels = {level.name: level for level in pb_utils.Logger.LogLevel}
    assert levels == {name: getattr(pb_utils.Logger, name) for name in ("INFO", "WARNING", "ERROR", "VERBOSE")}


def test_metrics_are_kept():
    """Counters grow, gauges move, histograms count; equal labels are one metric."""
    calls = pb_utils.MetricFamily(name="t_calls", description="calls", kind=pb_utils.MetricFamily.COUNTER)
    calls.Metric(labels={"a": "1", "b": "2"}).increment(2)
    calls.Metric(labels={"b": "2", "a": "1"}).increment(0.5)
    assert calls.Metric({"a": "1", "b": "2"}).value() == 2.5
    assert calls.Metric().value() == 0
    assert pb_utils.MetricFamily("t_calls", "the same").Metric({"a": "1", "b": "2"}).value() == 2.5
    level = pb_utils.MetricFamily("t_level", "level", pb_utils.MetricFamily.GAUGE).Metric()
    level.set(5)
    level.increment(-2)
    assert level.value() == 3
    times = pb_utils.MetricFamily("t_times", "times", pb_utils.MetricFamily.HISTOGRAM).Metric(buckets=[1, 10])
    for value in (0.5, 1, 5, 50):
        times.observe(value)
    (counted,) = next(rows for family, rows in METRICS.read() if family.name == "t_times")
    assert counted.counts == (2, 1, 1)


def test_metrics_refuse_what_they_are_not():
    """A counter never falls, a histogram has buckets, a name has one kind."""
    counter = pb_utils.MetricFamily("t_one", "one").Metric()
    kind = "TRITONSERVER_METRIC_KIND_"
    assert refused(counter.increment, -1).startswith(
        f"Failed to increment metric value: {kind}COUNTER can only be incremented monotonically by non-negative values."
    )
    assert refused(counter.set, 1) == f"Failed to set metric value: {kind}COUNTER does not support Set"
    assert refused(counter.observe, 1) == f"Failed to observe metric value: {kind}COUNTER does not support Observe"
    family = pb_utils.MetricFamily("t_two", "two", pb_utils.MetricFamily.HISTOGRAM)
    failed = "Failed to create metric. "
    assert refused(family.Metric) == f"{failed}Missing required buckets."
    assert refused(family.Metric, buckets="12") == f"{failed}Buckets must be a list."
    assert refused(family.Metric, labels=["a"], buckets=[1]) == f"{failed}Labels must be a dictionary."
    assert "must ascend" in refused(family.Metric, buckets=[2, 1])
    histogram = family.Metric(buckets=[1])
    assert refused(histogram.value) == f"Failed to get metric value: {kind}HISTOGRAM does not support Value"
    assert refused(histogram.increment, 1).endswith(f"{kind}HISTOGRAM does not support Increment")
    assert refused(histogram.set, 1).endswith(f"{kind}HISTOGRAM does not support Set")
    gauge = pb_utils.MetricFamily("t_four", "four", pb_utils.MetricFamily.GAUGE)
    assert refused(gauge.Metric().observe, 1).endswith(f"{kind}GAUGE does not support Observe")
    assert refused(gauge.Metric, buckets=[1]) == f"{failed}Unexpected buckets found."
    assert "is a counter already" in refused(pb_utils.MetricFamily, "t_one", "one", pb_utils.MetricFamily.GAUGE)
    assert "has kind 7" in refused(pb_utils.MetricFamily, "t_three", "three", 7)
