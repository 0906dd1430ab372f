"""PyTorch models: TorchScript, exported programs, AOTInductor packages and code with weights, on CPU or GPU.

PyTorch holds the GIL while it loads, and exported programs hold it between their operators, so each instance has a
process of its own, forked from one that has imported PyTorch; on a GPU all models share one, and its CUDA context. With
`MME_PLACEMENT: inline` all instances on a device share one model in the serving process, which halts during a load.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from model_handlers.base import Device, Handler, Placement, Runtime, Traits
from model_handlers.config.autocomplete import SignatureTensor, complete, given_to
from model_handlers.config.model_config import ModelConfig, all_outputs, integer, switch, warn_of_unknown
from model_handlers.config.validate import normalise
from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.pytorch.programs import (
    Code,
    Format,
    Slot,
    TorchProgram,
    bound,
    check_declared,
    check_given,
    load_program,
    position,
    recognise,
    shared_program,
    weights_of,
)
from model_handlers.pytorch.runtime import (
    PRELOAD,
    built_for_cuda,
    cuda_device,
    from_result,
    give_back,
    lost,
    on_device,
    pytorch,
    to_strings,
    to_tensor,
    translated,
)
from model_handlers.system.threads import default_threads
from model_handlers.tensor import BYTES, Array, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def completed(config: ModelConfig, program: TorchProgram) -> ModelConfig:
    """The configuration with what the program tells of inputs and outputs, which must agree with it."""
    if program.tensors is None:
        if not (config.inputs and config.outputs):
            raise _incomplete(config, program)
        return normalise(config)
    inputs, outputs = program.tensors
    return complete(
        config,
        _as_declared("input", given_to(config), program.arguments or (), inputs, config.name),
        _as_declared("output", all_outputs(config), program.results or (), outputs, config.name),
    )


def _as_declared(
    what: str, specs: Sequence[TensorSpec], slots: Sequence[Slot], tensors: list[SignatureTensor], model: str
) -> list[SignatureTensor]:
    names = {place: spec.name for place, spec in zip(bound(what, specs, slots, model), specs, strict=True)}
    return [(names.get(place, name), kind, shape) for place, (name, kind, shape) in enumerate(tensors)]


def _incomplete(config: ModelConfig, program: TorchProgram) -> Exception:
    inputs = program.arguments if program.arguments is not None else ()
    outputs = program.results if program.results is not None else ()
    takes = ", ".join(slot.name for slot in inputs) or "a dictionary"
    gives = ", ".join(slot.name for slot in outputs) or "what only an execution tells"
    lacks = " and ".join(field for field, specs in (("input", config.inputs), ("output", config.outputs)) if not specs)
    return invalid_model(
        f"model '{config.name}' keeps names alone, neither types nor shapes (it takes {takes} and returns {gives}), "
        f"and its configuration has no {lacks}: write into config.pbtxt, for each of them, "
        f'input [ {{ name: "{inputs[0].name if inputs else "INPUT__0"}" data_type: TYPE_FP32 dims: [ -1 ] }} ] and '
        f'output [ {{ name: "{outputs[0].name if outputs else "OUTPUT__0"}" data_type: TYPE_FP32 dims: [ -1 ] }} ]'
    )


def arguments(config: ModelConfig, program: TorchProgram) -> list[tuple[TensorSpec, str]]:
    slots, specs = program.arguments, given_to(config)
    if slots is None:
        return [(spec, spec.name) for spec in specs]
    found = bound("input", specs, slots, config.name)
    check_given(specs, found, slots, config.name)
    chosen = [slots[place] for place in found]
    _check_strings("input", specs, chosen, config.name)
    return [(spec, slot.name) for spec, slot in zip(specs, chosen, strict=True)]


def places(config: ModelConfig, program: TorchProgram) -> dict[str, int]:
    slots, specs = program.results, all_outputs(config)
    if slots is None:
        return {spec.name: position(spec.name, index) for index, spec in enumerate(specs)}
    found = bound("output", specs, slots, config.name)
    _check_strings("output", specs, [slots[place] for place in found], config.name)
    return {spec.name: place for spec, place in zip(specs, found, strict=True)}


def _check_strings(what: str, specs: Sequence[TensorSpec], slots: Sequence[Slot], model: str) -> None:
    for spec, slot in zip(specs, slots, strict=True):
        if slot.strings is not None and slot.strings != (spec.data_type is BYTES):
            kind = "a list of strings, TYPE_STRING" if slot.strings else "a tensor, which TYPE_STRING can't be"
            raise invalid_model(
                f"unable to load model '{model}', configuration expects datatype {spec.data_type.config_name} for "
                f"{what} '{spec.name}', model provides {kind}"
            )


_KNOWN = (
    "DISABLE_OPTIMIZED_EXECUTION",
    "INFERENCE_MODE",
    "DISABLE_CUDNN",
    "ENABLE_CACHE_CLEANING",
    "ENABLE_WEIGHT_SHARING",
    "ENABLE_JIT_EXECUTOR",
    "ENABLE_JIT_PROFILING",
    "ENABLE_TENSOR_FUSER",
    "INTRA_OP_THREAD_COUNT",
    "INTER_OP_THREAD_COUNT",
    "NUM_THREADS",
    "NUM_INTEROP_THREADS",
)
_WITHOUT_EFFECT = {
    "TORCH_COMPILE_OPTIONAL_PARAMETERS": "nothing is compiled while models are served; an AOTInductor package is"
}
_THREADS = range(1025)
# Private to PyTorch, and all that there is: what Triton's backend calls by its C++ names.
_JIT_SWITCHES = {
    "ENABLE_JIT_EXECUTOR": "_jit_set_profiling_executor",
    "ENABLE_JIT_PROFILING": "_jit_set_profiling_mode",
    "ENABLE_TENSOR_FUSER": "_jit_set_texpr_fuser_enabled",
}


_THREADS_BETWEEN = ("INTER_OP_THREAD_COUNT", "NUM_INTEROP_THREADS")


@dataclass(frozen=True, slots=True)
class Options:
    """What an execution is surrounded with."""

    inference_mode: bool = True  # whether tensors are made that no gradient can ever be asked of; no_grad otherwise
    optimized: bool = True  # whether TorchScript may specialise and fuse
    cudnn: bool = True  # whether cuDNN may be used
    clean: bool = False  # whether the device's unused memory is given back after every execution
    share: bool = False  # whether instances in one process and on one device share the model

    @classmethod
    def of(cls, config: ModelConfig) -> Options:
        warn_of_unknown(config, _KNOWN, "PyTorch models", "mme.pytorch", _WITHOUT_EFFECT)
        return cls(
            switch(config, "INFERENCE_MODE", default=True),
            not switch(config, "DISABLE_OPTIMIZED_EXECUTION", default=False),
            not switch(config, "DISABLE_CUDNN", default=False),
            switch(config, "ENABLE_CACHE_CLEANING", default=False),
            switch(config, "ENABLE_WEIGHT_SHARING", default=False),
        )

    def around(self, torch: Any) -> contextlib.ExitStack:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if self.inference_mode else torch.no_grad())
            if not self.optimized:
                stack.enter_context(torch.jit.optimized_execution(should_optimize=False))
            if not self.cudnn:
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            return stack.pop_all()


def sets_process(config: ModelConfig) -> bool:
    """Whether a configuration sets what all models of a process have in common."""
    return (
        switch(config, "DISABLE_CUDNN", default=False)
        or any(integer(config, key, 0, _THREADS) for key in _THREADS_BETWEEN)
        or any(key in config.parameters for key in _JIT_SWITCHES)
    )


def set_up_process(torch: Any, config: ModelConfig, model_file: Path) -> None:
    within = integer(config, "INTRA_OP_THREAD_COUNT", 0, _THREADS) or integer(config, "NUM_THREADS", 0, _THREADS)
    between = next((count for key in _THREADS_BETWEEN if (count := integer(config, key, 0, _THREADS))), 0)
    torch.set_num_threads(within or default_threads(model_file))
    if between:
        with contextlib.suppress(RuntimeError):  # it can be set once a process, which is one model's unless inline
            torch.set_num_interop_threads(between)
    for key, function in _JIT_SWITCHES.items():
        if key in config.parameters:
            getattr(torch._C, function)(switch(config, key, default=True))  # noqa: SLF001 - see above


def shares_process(config: ModelConfig, model_file: Path) -> bool:
    """Unless its parameters change what its neighbours would execute with, or it is code.

    What that imports from beside itself belongs to the whole process, where another model's is called the same. One
    that can't be loaded shares none.
    """
    try:
        return not sets_process(config) and recognise(model_file, config.name) is not Format.CODE
    except MmeError:
        return False


class TorchHandler(Handler):
    """One PyTorch model on one device."""

    backend: ClassVar[str] = "pytorch"
    default_filename: ClassVar[str] = "model.pt"

    def __init__(self, program: TorchProgram, config: ModelConfig, device: Any, options: Options) -> None:
        super().__init__(completed(config, program))
        self._program: TorchProgram | None = program
        self._device = device
        self._options = options
        self._inputs = arguments(self.config, program)
        self._outputs = {spec.name: spec for spec in all_outputs(self.config)}
        self._places = places(self.config, program)

    @classmethod
    def traits(cls, config: ModelConfig, model_file: Path) -> Traits:
        runtime = Runtime(packages=("torch",), provide=pytorch, gpu_capable=built_for_cuda)
        shared = shares_process(config, model_file)
        return Traits(placement=Placement.PROCESS, runtime=runtime, preload=PRELOAD, gpu_shared=shared)

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        """Inputs and outputs of an exported program; TorchScript and packages keep no types."""
        form = recognise(model_file, config.name)
        if form is Format.CODE:
            check_declared(config)
            return normalise(config)
        return completed(config, load_program(model_file, form, None, config.name))

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str = "") -> TorchHandler:  # noqa: ARG003 - its process is its own
        form = recognise(model_file, config.name)
        if form is Format.CODE:
            check_declared(config)
        torch = pytorch()
        options = Options.of(config)
        set_up_process(torch, config, (weights_of(model_file) if form is Format.CODE else None) or model_file)
        on = cuda_device(device.index, config.name) if device.kind == "gpu" else None
        load = shared_program if options.share else load_program
        try:
            with on_device(on):
                return cls(load(model_file, form, on, config.name), config, on, options)
        except MmeError as error:
            if on is None:
                raise
            refusal = MmeError(error.kind, error.message)  # what was loaded hangs on the other one's traceback
        gc.collect()
        give_back(on)  # the process goes on, with other models
        raise lost(refusal, on)

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        torch, model = pytorch(), self.config.name
        program = self._program
        assert program is not None  # noqa: S101 - it is not closed
        try:
            with on_device(self._device):
                values = self._values(torch, inputs)
                with self._options.around(torch):
                    return self._taken(torch, program.call(values), inputs, outputs)
        except MmeError:
            raise
        except Exception as error:  # PyTorch raises RuntimeError, its guards AssertionError, TorchScript what it likes
            failure = translated(error, model, loading=False, given=self._given(inputs))
            raise (failure if self._device is None else lost(failure, self._device)) from error
        finally:
            if self._options.clean and self._device is not None:
                give_back(self._device)

    def close(self) -> None:
        if isinstance(self._program, Code):
            self._program.forget()
        is_graph = self._program is not None and self._program.tensors is not None
        self._program = None
        if is_graph:
            gc.collect()  # exported programs are full of circles
        if self._device is not None:
            give_back(self._device)

    def _values(self, torch: Any, inputs: Mapping[str, Array]) -> dict[str, Any]:
        return {
            argument: to_strings(inputs[spec.name], spec, self.config.name)
            if spec.data_type is BYTES
            else to_tensor(torch, inputs[spec.name], spec, self._device)
            for spec, argument in self._inputs
            if spec.name in inputs
        }

    def _given(self, inputs: Mapping[str, Array]) -> str:
        # Neither TorchScript nor the error tells what the model can take.
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
        first = "the first of them the batch" if self.config.max_batch_size else "none of them added for a batch"
        return f"; it was given {shapes}, whose dimensions are those of config.pbtxt, {first}"

    def _taken(self, torch: Any, result: Any, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        rows = next((len(array) for array in inputs.values()), None) if self.config.max_batch_size > 0 else None
        named = dict(enumerate(result)) if isinstance(result, list) else result
        arrays = []
        for name in outputs:
            place = self._places[name] if isinstance(result, list) else name
            if place not in named:
                raise MmeError(
                    Kind.EXECUTION_FAILED,
                    f"model '{self.config.name}' returned {len(named)} results ({', '.join(map(str, named))}), none of "
                    f"which is output '{name}'",
                )
            arrays.append(from_result(torch, named[place], self._outputs[name], rows, self.config.name))
        return arrays


class Pt2Handler(TorchHandler):
    """The same, from the file that torch.export and AOTInductor write; what it is the file itself tells."""

    default_filename: ClassVar[str] = "model.pt2"


class CodeHandler(TorchHandler):
    """The same, from the code of a module, with its weights beside it or without any."""

    default_filename: ClassVar[str] = "model.py"
