"""By which execution providers ONNX models compute.

No GPU is here: what is proven is what is asked of ONNX Runtime, and that a provider which does not start is an error.
"""

import _ctypes
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import TensorProto, helper, save

from model_handlers.base import CPU, Device
from model_handlers.config.model_config import Accelerator, ModelConfig
from model_handlers.config.validate import normalise
from model_handlers.errors import Kind, MmeError
from model_handlers.onnx import OnnxHandler, session
from model_handlers.onnx.session import (
    check_providers,
    create_session,
    onnx_runtime,
    providers,
    session_failure,
    translated,
    unloadable,
)
from model_handlers.system.threads import Threads
from model_handlers.tensorflow import check as check_tensorflow

TOO_OLD = """/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_execution_provider_info.cc:63 static \
onnxruntime::CUDAExecutionProviderInfo onnxruntime::CUDAExecutionProviderInfo::FromProviderOptions(const \
onnxruntime::ProviderOptions&) [ONNXRuntimeError] : 1 : FAIL : provider_options_utils.h:187 Parse Failed to parse provider \
option "device_id": CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version ; GPU=-1 ; hostname=vm ; \
file=/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_execution_provider_info.cc ; line=70 ; \
expr=cudaGetDeviceCount(&num_devices);
"""
GPU1 = Device("gpu", 1)
CUDA, TENSORRT, HOST = "CUDAExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"
DEFAULTS = {
    "device_id": "1",
    "arena_extend_strategy": "kSameAsRequested",
    "cudnn_conv_algo_search": "EXHAUSTIVE",
    "do_copy_in_default_stream": "1",
}


def gpu(*accelerators, **parameters):
    """The configuration of a model with these accelerators."""
    return ModelConfig("m", gpu_accelerators=accelerators, parameters=parameters)


@pytest.fixture
def doubler(tmp_path):
    """The file of a model that doubles `x`, and says how many rows there were."""
    nodes = [helper.make_node("Add", ["x", "x"], ["y"]), helper.make_node("Shape", ["x"], ["shape"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "xy")
    shape = helper.make_tensor_value_info("shape", TensorProto.INT64, [2])
    graph = helper.make_graph(nodes, "g", [x], [y, shape])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (gpu(), [(CUDA, DEFAULTS), (HOST, {})]),
        (
            gpu(gpu_mem_limit="1000000", arena_extend_strategy="0", cudnn_conv_algo_search="1"),
            [
                (
                    CUDA,
                    {
                        **DEFAULTS,
                        "gpu_mem_limit": "1000000",
                        "arena_extend_strategy": "kNextPowerOfTwo",
                        "cudnn_conv_algo_search": "HEURISTIC",
                    },
                ),
                (HOST, {}),
            ],
        ),
        (
            gpu(Accelerator("cuda", {"use_tf32": "0", "enable_cuda_graph": "0"}), Accelerator("gpu_io")),
            [(CUDA, {**DEFAULTS, "use_tf32": "0", "enable_cuda_graph": "0"}), (HOST, {})],
        ),
        (
            gpu(
                Accelerator(
                    "tensorrt",
                    {"precision_mode": "FP16", "max_workspace_size_bytes": "4096", "trt_engine_cache_enable": "1"},
                )
            ),
            [
                (
                    TENSORRT,
                    {
                        "device_id": "1",
                        "trt_fp16_enable": "1",
                        "trt_max_workspace_size": "4096",
                        "trt_engine_cache_enable": "1",
                    },
                ),
                (CUDA, DEFAULTS),
                (HOST, {}),
            ],
        ),
    ],
    ids=["plain", "parameters", "cuda", "tensorrt"],
)
def test_a_gpus_providers_and_their_options(config, expected):
    """CUDA behind what the configuration wants first, and the CPU behind both, with options by ONNX Runtime's names."""
    assert providers(config, GPU1) == expected


def test_accelerators_of_gpus_are_none_of_the_cpus():
    """An instance on the CPU has the CPU's provider, whatever its sisters on GPUs have."""
    assert providers(gpu(Accelerator("tensorrt")), CPU) == [(HOST, {})]


@pytest.mark.parametrize(
    ("config", "device", "sentence"),
    [
        (gpu(Accelerator("tpu")), GPU1, "'gpu_execution_accelerator' names 'tpu', but the accelerators that there are"),
        (ModelConfig("m", cpu_accelerators=(Accelerator("mkl"),)), CPU, "'cpu_execution_accelerator' names 'mkl', but"),
        (gpu(Accelerator("tensorrt", {"precision_mode": "FP8"})), GPU1, "must be one of FP32, FP16, INT8, got 'FP8'"),
        (gpu(Accelerator("tensorrt", {"fast": "1"})), GPU1, "accelerator 'tensorrt' has no parameter 'fast'"),
        (
            gpu(Accelerator("cuda", {"enable_cuda_graph": "1"})),
            GPU1,
            "can't have 'enable_cuda_graph': a captured graph",
        ),
        (gpu(Accelerator("tensorrt", {"trt_cuda_graph_enable": "true"})), GPU1, "can't have 'trt_cuda_graph_enable'"),
        (gpu(Accelerator("cuda", {"user_compute_stream": "1"})), GPU1, "'user_compute_stream': it is about an address"),
        (gpu(Accelerator("cuda", {"device_id": "0"})), GPU1, "'device_id': which GPU is said by instance_group"),
        (gpu(gpu_mem_limit="much"), GPU1, "'gpu_mem_limit' must be an integer from 1 to"),
        (gpu(cudnn_conv_algo_search="5"), GPU1, "'cudnn_conv_algo_search' must be an integer from 0 to 2, got '5'"),
    ],
    ids=["gpu", "cpu", "precision", "tensorrt's", "graph", "tensorrt's graph", "address", "device", "memory", "search"],
)
def test_what_does_not_exist_is_refused_by_name(config, device, sentence):
    """An accelerator, a parameter of one, a value: INVALID_MODEL in one sentence."""
    with pytest.raises(MmeError) as caught:
        providers(config, device)

    assert caught.value.kind is Kind.INVALID_MODEL
    assert sentence in caught.value.message


def test_accelerators_are_onnx_runtimes_alone():
    """A model of another backend that names one is refused, since nothing would come of it."""
    openvino = ModelConfig("m", "openvino", cpu_accelerators=(Accelerator("openvino"),))
    tensorflow = ModelConfig("m", "tensorflow", gpu_accelerators=(Accelerator("tensorrt"), Accelerator("cuda")))
    for config in (openvino, tensorflow):
        sentence = rf"'optimization\.execution_accelerators' is not honoured for backend '{config.backend}'"
        with pytest.raises(MmeError, match=sentence):
            normalise(config)


def test_tensorflows_own_accelerators_are_taken_and_told_of(caplog):
    """Its models answer the same without, as Triton's do where there is no GPU."""
    names = ("tensorrt", "auto_mixed_precision", "gpu_io")
    config = normalise(ModelConfig("tf", "tensorflow", gpu_accelerators=tuple(map(Accelerator, names))))
    with caplog.at_level("WARNING", "mme.tensorflow"):
        check_tensorflow(config)
    assert "tensorrt, auto_mixed_precision, gpu_io changes nothing" in caplog.text


def test_openvino_as_an_accelerator_is_refused_with_the_way_to_have_it(doubler):
    """A build without that provider does not quietly compute by another: the sentence names the backend instead."""
    config = ModelConfig("m", "onnxruntime", cpu_accelerators=(Accelerator("openvino"),))
    with pytest.raises(MmeError, match="serve the model by backend 'openvino'") as caught:
        OnnxHandler.load(config, doubler, CPU)

    assert caught.value.kind is Kind.UNAVAILABLE


def test_a_provider_that_is_not_built_in_is_an_error(doubler):
    """A model for a GPU is not computed on the CPU by a build that knows no GPU."""
    if CUDA in onnx_runtime().get_available_providers():
        pytest.skip("the installed ONNX Runtime is built for GPUs")
    with pytest.raises(
        MmeError, match="asks for ONNX Runtime's CUDAExecutionProvider, which the installed build"
    ) as caught:
        OnnxHandler.load(ModelConfig("m", "onnxruntime"), doubler, GPU1)

    assert caught.value.kind is Kind.UNAVAILABLE


@pytest.mark.parametrize("accelerators", [(), (Accelerator("tensorrt"),)], ids=["cuda", "tensorrt"])
def test_a_provider_that_does_not_start_is_an_error(doubler, accelerators):
    """ONNX Runtime for GPUs on a machine without one falls back to the CPU in silence; the model is refused."""
    if CUDA not in onnx_runtime().get_available_providers():
        pytest.skip("the installed ONNX Runtime is not built for GPUs")
    with pytest.raises(MmeError, match=r"did not start|can't start a provider for model 'm'") as caught:
        OnnxHandler.load(gpu(*accelerators), doubler, Device("gpu", 63))

    assert caught.value.kind is Kind.UNAVAILABLE


@pytest.mark.parametrize(
    ("error", "others", "kind"),
    [
        (RuntimeError("Please install TensorRT libraries"), True, Kind.UNAVAILABLE),
        (RuntimeError("Please install TensorRT libraries"), False, Kind.INVALID_MODEL),
        (RuntimeError("CUDA failure 2: out of memory"), True, Kind.OUT_OF_MEMORY),
        (RuntimeError("CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0"), True, Kind.OUT_OF_MEMORY),
        (RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True, Kind.OUT_OF_MEMORY),
        (ValueError("no such operator"), True, Kind.INVALID_MODEL),
    ],
    ids=["provider", "CPU", "memory", "cuBLAS", "cuDNN", "model"],
)
def test_a_provider_that_says_why_it_does_not_start_is_no_fault_of_the_model(error, others, kind):
    """A driver or a library that does not fit is UNAVAILABLE, in ONNX Runtime's words."""
    failure = session_failure(error, "m", others=others)

    assert failure.kind is kind
    assert str(error) in failure.message


def test_what_a_session_has_is_compared_with_what_it_was_to_have():
    """Each provider that is missing counts, the first in the list or not."""
    wanted = providers(gpu(Accelerator("tensorrt")), GPU1)

    check_providers(wanted, [TENSORRT, CUDA, HOST], "m", GPU1, str)
    for got, missing in (([HOST], TENSORRT), ([CUDA, HOST], TENSORRT), ([TENSORRT, HOST], CUDA)):
        sentence = f"model 'm' was to run on gpu:1, but ONNX Runtime's {missing} did not start"
        with pytest.raises(MmeError, match=rf"{sentence} \({missing} is torn\); check"):
            check_providers(wanted, got, "m", GPU1, "{} is torn".format)
        with pytest.raises(MmeError, match=f"{sentence}; check"):
            check_providers(wanted, got, "m", GPU1, lambda _: "")


def test_what_keeps_a_provider_from_being_loaded_is_told(tmp_path, monkeypatch):
    """In the loader's words, of a library that is not there and of one that is no library; one that loads has none."""
    (tmp_path / "capi").mkdir()
    library = tmp_path / "capi" / "libonnxruntime_providers_cuda.so"
    monkeypatch.setattr(session, "onnx_runtime", lambda: SimpleNamespace(__file__=str(tmp_path / "__init__.py")))

    assert unloadable(CUDA) == f"{library}: cannot open shared object file: No such file or directory"
    library.write_text("torn")
    assert unloadable(CUDA) == f"{library}: file too short"
    library.unlink()
    library.symlink_to(_ctypes.__file__)
    assert unloadable(CUDA) == ""


def test_of_what_cuda_says_the_sentence_has_no_more_than_that():
    """As ONNX Runtime 1.31 has it from a driver that is too old: neither the machine's name nor places in sources."""
    failure = session_failure(RuntimeError(TOO_OLD), "m", others=True)

    assert failure.message.startswith(
        "ONNX Runtime can't start a provider for model 'm' (CUDA failure 35: CUDA driver version is insufficient for CUDA "
        "runtime version); check its options, and that the driver"
    )


@pytest.mark.parametrize("loading", [True, False])
def test_no_error_names_the_machine(loading):
    """Its clients are told what CUDA met and where in ONNX Runtime."""
    failure = translated(RuntimeError(TOO_OLD), "m", loading=loading)

    assert "hostname" not in failure.message
    assert "CUDA runtime version ; GPU=-1 ; file=/onnxruntime_src" in failure.message


LIMITED = """
import sys
import numpy as np
import onnxruntime
from model_handlers.onnx.session import translated
memory = onnxruntime.OrtMemoryInfo("Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT)
onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg(1 << 20, 1, -1, -1))
options = onnxruntime.SessionOptions()
options.add_session_config_entry("session.use_env_allocators", "1")
options.log_severity_level = 4
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
try:
    session.run(["y"], {"x": np.ones((1 << 20, 2), np.float32)})
except Exception as error:
    told = translated(error, "m", loading=False, limited=True)
    print(told.kind.name, told.message)
"""


def test_a_models_own_limit_is_no_want_of_memory(doubler):
    """Nobody is evicted for it: EXECUTION_FAILED, and what to do. Of the CPU's arena, which says what the GPU's does."""
    run = [sys.executable, "-c", LIMITED, str(doubler)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)

    assert done.stdout.startswith("EXECUTION_FAILED "), done.stderr
    assert "is smaller than requested bytes of 8388608; the model's own limit, gpu_mem_limit, leaves" in done.stdout


def test_a_session_on_a_gpu_has_its_thread_wait(doubler):
    """It answers what was asked for, in that order. On the CPU."""
    handler = OnnxHandler(
        create_session(doubler, onnx_runtime().SessionOptions(), "m"), ModelConfig("m"), Threads(1), 1
    )
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)

    shape, doubled = handler.execute({"x": rows}, ["shape", "y"])
    np.testing.assert_array_equal(doubled, rows * 2)
    assert shape.tolist() == [3, 2]
    handler.close()


def test_arenas_are_shrunk_where_the_parameter_says(doubler):
    """`memory.enable_memory_arena_shrinkage` goes with every execution; an arena that is not there is an error of ONNX's."""
    shrinking = ModelConfig("m", parameters={"memory.enable_memory_arena_shrinkage": "cpu:0"})
    handler = OnnxHandler.load(shrinking, doubler, CPU)
    rows = np.ones((1, 2), np.float32)

    np.testing.assert_array_equal(handler.execute({"x": rows}, ["y"])[0], rows * 2)
    handler.close()
    wrong = OnnxHandler.load(
        ModelConfig("m", parameters={"memory.enable_memory_arena_shrinkage": "gpu:7"}), doubler, CPU
    )
    with pytest.raises(MmeError):
        wrong.execute({"x": rows}, ["y"])
    wrong.close()
