"""ONNX models by ONNX Runtime, on CPU or by its CUDA provider.

`session.run` releases the GIL while it computes, and so does creating a session, so these models live in the serving
process. One session serves all instances on a device, and the weights are held once. Threads of a session never spin:
with hundreds of sessions they would fight for the cores with those that have work.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from model_handlers.base import Device, Runtime, Traits
from model_handlers.config.autocomplete import complete
from model_handlers.config.model_config import ModelConfig, all_inputs, all_outputs
from model_handlers.errors import MmeError, invalid_argument
from model_handlers.mapped import FormDraft, MappedHandler, Trial
from model_handlers.onnx import weights
from model_handlers.onnx.session import (
    CUDA_PROVIDER,
    GPU_LIMIT,
    TENSORRT_PROVIDER,
    check_available,
    check_providers,
    create_session,
    firsts,
    onnx_runtime,
    preload_cuda,
    preload_tensorrt,
    providers,
    register_operations,
    run_options,
    session_options,
    session_threads,
    share_arena,
    signature,
    translated,
    trim_arena,
    unloadable,
)
from model_handlers.onnx.weights import externalise_initialisers
from model_handlers.system.devices import lost
from model_handlers.system.threads import Threads, default_threads, processors
from model_handlers.tensor import BYTES, Array

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


def _has_cuda() -> bool:  # it may still fail to start
    return CUDA_PROVIDER in onnx_runtime().get_available_providers()


RUNTIME = Runtime(
    packages=("onnxruntime", "onnxruntime-gpu"),
    provide=onnx_runtime,
    gpu_capable=_has_cuda,
    share=share_arena,
    trim=trim_arena,
)


class OnnxHandler(MappedHandler):
    """One ONNX Runtime session on one device, `gpu` where that is one.

    Nothing is bound (`io_binding`): that copies inputs and outputs while it holds the GIL. A plain execution makes
    the same copies, all inputs before the first operator begins, without it.
    """

    backend: ClassVar[str] = "onnxruntime"
    default_filename: ClassVar[str] = "model.onnx"

    def __init__(self, session: Any, config: ModelConfig, threads: Threads, gpu: int | None = None) -> None:
        self._threads = threads
        self._gpu = gpu
        super().__init__(complete(config, *signature(session, config.name), firsts=firsts(session)))
        self._session = session
        # where it is given none, each execution makes options of its own, which takes a microsecond
        self._run: Callable[..., list[Array]] = functools.partial(session.run, run_options=run_options(config))
        self._limited = GPU_LIMIT in config.parameters or any(
            GPU_LIMIT in each.parameters for each in config.gpu_accelerators
        )
        self._texts = [spec.name for spec in all_inputs(self.config) if spec.data_type is BYTES]
        self._answers_text = any(spec.data_type is BYTES for spec in all_outputs(self.config))

    @classmethod
    def traits(cls, config: ModelConfig, model_file: Path) -> Traits:  # noqa: ARG003 - of all models
        return Traits(inline=True, memory_only=True, custom_ops=True, estimate_factor=1.3, runtime=RUNTIME)

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        session_options(config, 1)  # it refuses parameters
        session = _signature_session(model_file, config)
        return complete(config, *signature(session, config.name), firsts=firsts(session))

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str = "") -> OnnxHandler:  # noqa: ARG003 - shared by lanes
        """Create the session; parameters are named as Triton's ONNX Runtime backend names them."""
        threads = session_threads(config, default_threads(model_file))
        try:
            return cls._loaded(config, model_file, device, threads)
        except BaseException:
            threads.give_back()
            raise

    @classmethod
    def _loaded(cls, config: ModelConfig, model_file: Path, device: Device, threads: Threads) -> OnnxHandler:
        options = session_options(config, threads.count)
        register_operations(options, config, model_file)
        wanted = providers(config, device)
        runtime = onnx_runtime()
        check_available(wanted, runtime.get_available_providers(), config.name)
        if device.kind == "gpu":
            preload_cuda(runtime)
        if TENSORRT_PROVIDER in dict(wanted):
            preload_tensorrt()
        try:
            session = create_session(_onnx_path(model_file), options, config.name, wanted)
        except MmeError as error:
            raise (error if device.kind == "cpu" else lost(error, device.index)) from error.__cause__
        check_providers(wanted, session.get_providers(), config.name, device, unloadable)
        return cls(session, config, threads, None if device.kind == "cpu" else device.index)

    @classmethod
    def refinement(cls, config: ModelConfig) -> str:
        return weights.refinement(config)

    @classmethod
    def write_form(cls, config: ModelConfig, model_file: Path, draft: FormDraft) -> bytes:  # noqa: ARG003 - of the model alone
        return externalise_initialisers(_onnx_path(model_file), draft)

    @classmethod
    def refine_form(cls, config: ModelConfig, form: Path, draft: FormDraft) -> bytes:
        return weights.refine(config, form, draft)

    @classmethod
    def try_form(cls, config: ModelConfig, form: Path) -> Trial:
        return weights.try_out(config, form)

    @classmethod
    def load_form(cls, config: ModelConfig, form: Path, *, refined: bool, packed: bool) -> OnnxHandler:
        threads = session_threads(config, processors())
        try:
            return cls(weights.load(config, form, threads.count, refined=refined, packed=packed), config, threads)
        except BaseException:
            threads.give_back()
            raise

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Run the session once. Elements of BYTES must be UTF-8, as strings in ONNX are."""
        if self._texts:
            inputs = {**inputs, **{n: _text(inputs[n], n, self.config.name) for n in self._texts if n in inputs}}
        try:
            result = self._run(outputs, inputs)
        except Exception as error:  # of any of a dozen classes
            failure = translated(error, self.config.name, loading=False, limited=self._limited)
            raise (failure if self._gpu is None else lost(failure, self._gpu)) from error
        return (
            [_bytes(array) if array.dtype == np.object_ else array for array in result]
            if self._answers_text
            else result
        )

    def close(self) -> None:
        del self._run
        del self._session
        self._threads.give_back()
        self.mappings = 0


def _text(array: Array, name: str, model: str) -> Array:
    # Of `bytes` ONNX Runtime would take the printed form, b'' and all.
    text = np.empty(array.shape, dtype=np.object_)
    try:
        text.ravel()[:] = [element.decode() for element in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise invalid_argument(
            f"input '{name}' for model '{model}' must hold UTF-8 text, as strings in ONNX are: {error}"
        ) from None
    return text


def _bytes(array: Array) -> Array:
    encoded = np.empty(array.shape, dtype=np.object_)
    encoded.ravel()[:] = [element.encode() for element in array.ravel().tolist()]
    return encoded


def _onnx_path(model_file: Path) -> Path:
    # A model with external data may be a directory that holds model.onnx beside its data.
    return model_file / "model.onnx" if model_file.is_dir() else model_file


def _signature_session(model_file: Path, config: ModelConfig) -> Any:
    # It only tells inputs and outputs: no weight is transformed, few are touched.
    runtime = onnx_runtime()
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_prepacking", "1")
    register_operations(options, config, model_file)
    return create_session(_onnx_path(model_file), options, config.name)
