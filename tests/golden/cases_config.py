"""Models that `mme config check` is asked about: each by what is wrong with it, with its files; the first names the model.

Rows of `CONFIGS` are configurations of one ONNX model, X [N, 4] → Y [N, 4].
"""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

from tests.contract import models

if TYPE_CHECKING:
    from collections.abc import Mapping

PLUS = models.plus(1)
X = 'name: "X" data_type: TYPE_FP32 dims: [ 4 ]'
Y = 'name: "Y" data_type: TYPE_FP32 dims: [ 4 ]'
BOTH = f"input {{ {X} }} output {{ {Y} }}\n"
PYTHON = f'backend: "python"\n{BOTH}'
SEQUENCE = "sequence_batching { %s }\n"
START = 'control_input { name: "S" control { kind: CONTROL_SEQUENCE_START %s } }'
STATE = 'state { input_name: "I" output_name: "O" data_type: TYPE_FP32 dims: [ 1 ] %s }'


def warm(inside: str, more: str = "") -> str:
    """A sample of warm-up."""
    return f'model_warmup {{ name: "w" {more} inputs {{ key: "X" value {{ {inside} }} }} }}'


CONFIGS: Mapping[str, str] = {
    "good: batches": "max_batch_size: 8\ndynamic_batching { preferred_batch_size: [ 4, 2 ] max_queue_delay_microseconds: 100 }",
    "good: says everything": f'name: "m"\nplatform: "onnxruntime_onnx"\nmax_batch_size: 4\n{BOTH}'
    "instance_group { count: 2 kind: KIND_CPU } version_policy { all { } }",
    "good: harmless fields": 'optimization { priority: PRIORITY_MAX } instance_group { host_policy: "h" }',
    "good: version that is not there": "version_policy { specific { versions: [ 1, 7 ] } }",
    "good: unknown parameter of ours": 'parameters { key: "MME_NOTHING" value { string_value: "1" } }',
    "unknown field": "max_batchsize: 4",
    "unknown field inside": "dynamic_batching { max_queue_delay: 1 }",
    "two problems": "max_batchsize: 1\nmax_batch_size: -1",
    "unknown enum": 'input { name: "X" data_type: FP32 dims: [ 4 ] }',
    "enum by a wrong number": "instance_group { kind: 99 }",
    "wrong type": 'max_batch_size: "four"',
    "no text": "{ json: true }",
    "unclosed": 'input { name: "X"',
    "escape": 'default_model_filename: "a\\model.onnx"',
    "no UTF-8": "max_batch_size: 1 # \udcff",
    "other name": 'name: "other"',
    "unknown backend": 'backend: "nonesuch"',
    "unknown platform": 'platform: "nonesuch"',
    "backend of another file": f'backend: "python"\n{BOTH}',
    "backend and platform": 'backend: "onnxruntime" platform: "tensorrt_plan"',
    "runtime": 'backend: "onnxruntime" runtime: "libother.so"',
    "runtime with a path": 'backend: "onnxruntime" runtime: "../libtriton_onnxruntime.so"',
    "refused field": "instance_group { passive: true }",
    "refused field of a tensor": f"input {{ {X} is_shape_tensor: true }}",
    "secondary devices": "instance_group { secondary_devices { kind: KIND_NVDLA } }",
    "negative batch": "max_batch_size: -1",
    "input without a name": "input { data_type: TYPE_FP32 dims: [ 4 ] }",
    "input without a type": 'input { name: "X" dims: [ 4 ] }',
    "input without dims": 'input { name: "X" data_type: TYPE_FP32 }',
    "input twice": f"input [ {{ {X} }}, {{ {X} }} ]",
    "dimension zero": 'input { name: "X" data_type: TYPE_FP32 dims: [ 0 ] }',
    "rank": f'input {{ name: "X" data_type: TYPE_FP32 dims: [ {", ".join(["1"] * 70)} ] }}',
    "no such input": 'input { name: "Z" data_type: TYPE_FP32 dims: [ 4 ] }',
    "type of the file": 'input { name: "X" data_type: TYPE_INT32 dims: [ 4 ] }',
    "dims of the file": 'input { name: "X" data_type: TYPE_FP32 dims: [ 5 ] }',
    "output of the file": 'output { name: "Z" data_type: TYPE_FP32 dims: [ 4 ] }',
    "format": f"input {{ {X} format: FORMAT_NHWC }}",
    "reshape size": f"input {{ {X} reshape {{ shape: [ 3 ] }} }}",
    "reshape variable": f"input {{ {X} reshape {{ shape: [ -1 ] }} }}",
    "reshape zero": f"input {{ {X} reshape {{ shape: [ 0 ] }} }}",
    "label file": f'output {{ {Y} label_filename: "labels.txt" }}',
    "label file outside": f'output {{ {Y} label_filename: "../labels.txt" }}',
    "model file": 'default_model_filename: "other.onnx"',
    "model file outside": 'default_model_filename: "/etc/model.onnx"',
    "cc model file outside": 'cc_model_filenames { key: "7.5" value: "../m" }',
    "accelerators of another backend": f'{PYTHON}optimization {{ execution_accelerators {{ gpu_execution_accelerator {{ name: "tensorrt" }} }} }}',
    "unknown accelerator": 'optimization { execution_accelerators { cpu_execution_accelerator { name: "nonesuch" } } }',
    "batch strategy": 'parameters { key: "TRITON_BATCH_STRATEGY_PATH" value { string_value: "/x" } }',
    "cache and decoupled": f"{PYTHON}response_cache {{ enable: true }} model_transaction_policy {{ decoupled: true }}",
    "cache and sequences": f"response_cache {{ enable: true }} {SEQUENCE % ''}",
    "decoupled of a framework": "model_transaction_policy { decoupled: true }",
    "tag": 'metric_tags { key: "a-b" value: "c" }',
    "agent": 'model_repository_agents { agents { name: "decrypt" } }',
    "agent's parameter": 'model_repository_agents { agents { name: "checksum" parameters { key: "SHA:f" value: "0" } } }',
    "checksum": 'model_repository_agents { agents { name: "checksum" parameters { key: "MD5:1/model.onnx" value: "0" } } }',
    "histogram without a family": "model_metrics { metric_control { metric_identifier { } histogram_options { buckets: 1 } } }",
    "histogram without options": 'model_metrics { metric_control { metric_identifier { family: "f" } } }',
    "histogram without buckets": 'model_metrics { metric_control { metric_identifier { family: "f" } histogram_options { } } }',
    "histogram descending": 'model_metrics { metric_control { metric_identifier { family: "nv_inference_first_response_histogram_ms" } histogram_options { buckets: [ 2, 1 ] } } }',
    "CPU with GPUs": "instance_group { kind: KIND_CPU gpus: [ 0 ] }",
    "count": "instance_group { count: -1 }",
    "profile": 'platform: "onnxruntime_onnx" instance_group { profile: "0" }',
    "GPU below zero": "instance_group { kind: KIND_GPU gpus: [ -1 ] }",
    "preferred below one": "max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 0 ] }",
    "preferred too large": "max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 8 ] }",
    "default priority": "max_batch_size: 4 dynamic_batching { priority_levels: 2 }",
    "priority's policy": "max_batch_size: 4 dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 value { } } }",
    "too many priorities": "max_batch_size: 4 dynamic_batching { priority_levels: 2000 default_priority_level: 1 }",
    "order and priorities": "max_batch_size: 4 dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
    "order and delay": "max_batch_size: 4 dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 } }",
    "no version": "version_policy { specific { } }",
    "warm-up: no data": warm("data_type: TYPE_FP32 dims: [ 4 ]"),
    "warm-up: no type": warm("dims: [ 4 ] zero_data: true"),
    "warm-up: variable": warm("data_type: TYPE_FP32 dims: [ -1 ] zero_data: true"),
    "warm-up: batch": "max_batch_size: 2 " + warm("data_type: TYPE_FP32 dims: [ 4 ] zero_data: true", "batch_size: 4"),
    "warm-up: file": warm('data_type: TYPE_FP32 dims: [ 1, 4 ] input_data_file: "none"'),
    "warm-up: file outside": warm('data_type: TYPE_FP32 dims: [ 1, 4 ] input_data_file: "../none"'),
    "warm-up: wrong input": 'model_warmup { name: "w" inputs { key: "Z" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } }',
    "warm-up: wrong type": warm("data_type: TYPE_INT32 dims: [ 1, 4 ] zero_data: true"),
    "ragged without batching": f"input {{ {X} allow_ragged_batch: true }}",
    "batch input: type": 'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "C" data_type: TYPE_INT8 source_input: "X" }',
    "batch input: source": 'max_batch_size: 4 batch_input { kind: BATCH_ELEMENT_COUNT target_name: "C" data_type: TYPE_FP32 source_input: "Z" }',
    "batch input: no target": 'max_batch_size: 4 batch_input { kind: BATCH_ELEMENT_COUNT data_type: TYPE_FP32 source_input: "X" }',
    "batch input: no source": 'max_batch_size: 4 batch_input { kind: BATCH_ELEMENT_COUNT target_name: "C" data_type: TYPE_FP32 }',
    "batch input: not of the file": 'max_batch_size: 4 batch_input { kind: BATCH_ELEMENT_COUNT target_name: "C" data_type: TYPE_FP32 source_input: "X" }',
    "batch output: target": f'max_batch_size: 4 {BOTH} batch_output {{ target_name: "Z" source_input: "X" }}',
    "sequences and batching": f"max_batch_size: 4 dynamic_batching {{ }} {SEQUENCE % ''}",
    "sequences: utilization": SEQUENCE % "direct { minimum_slot_utilization: 2 }",
    "sequences: preferred": "max_batch_size: 4 " + SEQUENCE % "oldest { preferred_batch_size: [ 8 ] }",
    "sequences: preferred below one": "max_batch_size: 4 " + SEQUENCE % "oldest { preferred_batch_size: [ 0 ] }",
    "sequences: candidates": SEQUENCE % "oldest { max_candidate_sequences: -1 }",
    "sequences: control without a name": SEQUENCE % "control_input { }",
    "sequences: control without a kind": SEQUENCE % 'control_input { name: "S" }',
    "sequences: control of two kinds": SEQUENCE % (START % "int32_false_true: [ 0, 1 ]" + START % "int32_false_true: [ 0, 1 ]"),
    "sequences: two controls of a kind": SEQUENCE
    % (START % "int32_false_true: [ 0, 1 ]" + (START % "int32_false_true: [ 0, 1 ]").replace('"S"', '"T"')),
    "sequences: no values": SEQUENCE % (START % ""),
    "sequences: two kinds of values": SEQUENCE % (START % "int32_false_true: [ 0, 1 ] fp32_false_true: [ 0, 1 ]"),
    "sequences: one value": SEQUENCE % (START % "int32_false_true: [ 0 ]"),
    "sequences: type of a boolean": SEQUENCE % (START % "int32_false_true: [ 0, 1 ] data_type: TYPE_FP32"),
    "sequences: id": SEQUENCE % 'control_input { name: "S" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } }',
    "sequences: id with values": SEQUENCE % 'control_input { name: "S" control { kind: CONTROL_SEQUENCE_CORRID int32_false_true: [ 0, 1 ] } }',
    "sequences: control is an input": f'{BOTH}{SEQUENCE % (START.replace(chr(34) + "S", chr(34) + "X") % "int32_false_true: [ 0, 1 ]")}',
    "state: no name": SEQUENCE % 'state { output_name: "O" data_type: TYPE_FP32 dims: [ 1 ] }',
    "state: no type": SEQUENCE % 'state { input_name: "I" output_name: "O" dims: [ 1 ] }',
    "state: no dims": SEQUENCE % 'state { input_name: "I" output_name: "O" data_type: TYPE_FP32 }',
    "state: twice": SEQUENCE % (STATE % "" + (STATE % "").replace('"I"', '"J"')),
    "state: growable": SEQUENCE % (STATE % "use_growable_memory: true"),
    "state: two beginnings": SEQUENCE % (STATE % ('initial_state { name: "a" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true }' * 2)),
    "state: beginning without a name": SEQUENCE % (STATE % "initial_state { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true }"),
    "state: beginning of another type": SEQUENCE % (STATE % 'initial_state { name: "a" data_type: TYPE_INT32 dims: [ 1 ] zero_data: true }'),
    "state: beginning of another rank": SEQUENCE % (STATE % 'initial_state { name: "a" data_type: TYPE_FP32 dims: [ 1, 1 ] zero_data: true }'),
    "state: beginning of another size": SEQUENCE % (STATE % 'initial_state { name: "a" data_type: TYPE_FP32 dims: [ 2 ] zero_data: true }'),
    "state: beginning of nothing": SEQUENCE % (STATE % 'initial_state { name: "a" data_type: TYPE_FP32 dims: [ 1 ] }'),
    "state: beginning outside": SEQUENCE % (STATE % 'initial_state { name: "a" data_type: TYPE_FP32 dims: [ 1 ] data_file: "../a" }'),
    "state: beginning without a file": SEQUENCE % (STATE % 'initial_state { name: "a" data_type: TYPE_FP32 dims: [ 1 ] data_file: "a" }'),
    "ensemble of another platform": 'ensemble_scheduling { step { model_name: "a" } }',
}  # fmt: skip


def whole(head: str, steps: str, outputs: str = Y) -> str:
    """An ensemble."""
    return f'platform: "ensemble"\n{head}\ninput {{ {X} }} output {{ {outputs} }}\nensemble_scheduling {{ {steps} }}'


def step(name: str, read: str, written: str) -> str:
    """A step of it."""
    return (
        f'step {{ model_name: "{name}" model_version: -1 input_map {{ key: "X" value: "{read}" }} '
        f'output_map {{ key: "Y" value: "{written}" }} }}'
    )


ENSEMBLES: Mapping[str, str] = {
    "good: ensemble": whole("", step("m", "X", "between") + step("m", "between", "Y")),
    "ensemble with a backend": whole('backend: "python"', step("m", "X", "Y")),
    "ensemble with instances": whole("instance_group { }", step("m", "X", "Y")),
    "ensemble with optimization": whole("optimization { graph { level: 1 } }", step("m", "X", "Y")),
    "ensemble with warm-up": whole(warm("data_type: TYPE_FP32 dims: [ 4 ] zero_data: true"), step("m", "X", "Y")),
    "ensemble without steps": whole("", ""),
    "ensemble: step of nothing": whole("", "step { }"),
    "ensemble: unused input": whole("", step("m", "Z", "Y")),
    "ensemble: unwritten output": whole("", step("m", "X", "Z")),
    "ensemble: not connected": whole("", step("m", "X", "a") + step("m", "b", "Y")),
    "ensemble: unused tensor": whole("", step("m", "X", "Y") + step("m", "X", "a")),
    "ensemble: written twice": whole("", step("m", "X", "Y") + step("m", "X", "Y")),
    "ensemble: unknown model": whole("", step("nobody", "X", "Y")),
    "ensemble: batches more": whole("max_batch_size: 64", step("m", "X", "Y")),
    "ensemble: another type": whole("", step("m", "X", "Y"), 'name: "Y" data_type: TYPE_INT32 dims: [ 4 ]'),
    "ensemble: another shape": whole("", step("m", "X", "Y"), 'name: "Y" data_type: TYPE_FP32 dims: [ 5 ]'),
    "ensemble: of itself": whole("", step("e", "X", "Y")),
    "ensemble: wrong tensor": whole("", step("m", "X", "Y").replace('key: "X"', 'key: "Z"')),
}


def archive(*members: tuple[str, bytes]) -> bytes:
    """A .tar.gz."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


_ONE = ("a/1/model.onnx", PLUS)
_SCRIPT = "raise SystemExit('it was run')"
MODELS: Mapping[str, Mapping[str, bytes | str]] = {
    **{
        name: {"m/config.pbtxt": text.encode(errors="surrogateescape"), "m/1/model.onnx": PLUS}
        for name, text in CONFIGS.items()
    },
    **{
        name: {"e/config.pbtxt": text, "e/1/.keep": "", "m/config.pbtxt": "max_batch_size: 8", "m/1/model.onnx": PLUS}
        for name, text in ENSEMBLES.items()
    },
    "good: nothing but a file": {"m/1/model.onnx": PLUS},
    "good: Python": {"m/config.pbtxt": PYTHON, "m/1/model.py": "raise SystemExit('it was run')"},
    "good: a script": {"m/code/inference.py": _SCRIPT},
    "good: archive": {"a.tar.gz": archive(_ONE, ("a/config.pbtxt", b"max_batch_size: 2"))},
    "good: archive of a script": {"a.tar.gz": archive(("code/inference.py", _SCRIPT.encode()))},
    "Python that names a tensor only": {"m/config.pbtxt": 'backend: "onnxruntime" input { name: "X" }', "m/1/model.onnx": PLUS},
    "Python without an environment": {
        "m/config.pbtxt": f'{PYTHON}parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" }} }}',
        "m/1/model.py": "",
    },
    "damaged file": {"m/1/model.onnx": b"no model"},
    "no version": {"m/config.pbtxt": "max_batch_size: 1", "m/model.onnx": PLUS},
    "version with zeros": {"m/config.pbtxt": "max_batch_size: 1", "m/1/model.onnx": PLUS, "m/02/model.onnx": PLUS},
    "misnamed config": {"m/config.pbtx": "max_batch_size: 1", "m/1/model.onnx": PLUS},
    "no model": {"m/readme.txt": "nothing"},
    "script of another name": {"m/code/main.py": ""},
    "a file": {"model.onnx": PLUS},
    "archives in a folder": {"r/a.tar.gz": archive(_ONE)},
    "archive: two models": {"a.tar.gz": archive(_ONE, ("b/1/model.onnx", PLUS))},
    "archive: member outside": {"a.tar.gz": archive(("../a/1/model.onnx", PLUS))},
    "archive: absolute": {"a.tar.gz": archive(("/a/1/model.onnx", PLUS))},
    "archive: twice": {"a.tar.gz": archive(_ONE, _ONE)},
    "archive: nothing": {"a.tar.gz": archive()},
    "archive: bad configuration": {"a.tar.gz": archive(_ONE, ("a/config.pbtxt", b"max_batchsize: 2"))},
    "archive: cut": {"a.tar.gz": archive(_ONE)[:60]},
    "archive: none": {"a.tar.gz": b"no archive"},
}  # fmt: skip
