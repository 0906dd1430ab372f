"""What to do about a problem of a configuration, by the field that it is about. PURE: a table and a look-up.

For problems whose own sentence does not say, as those in Triton's words.
"""

from __future__ import annotations

import re

from model_handlers.registry import served_backends

_TENSOR = (
    "name it as the model does, with data_type (TYPE_FP32, …) and dims: the shape without the batch dimension, -1 "
    "where it varies"
)
_ENSEMBLE = (
    "every tensor that a step reads is an input of the ensemble or another step's output, and all that is written is "
    "read or is an output"
)
_MENDS = (
    (r"max_batch_size", "0 for a model whose tensors have no batch dimension, else the largest batch it takes"),
    (r"(input|output)\[\d+\]\.label_filename", "put the file beside config.pbtxt, one label a line"),
    (r"(input|output)(\[\d+\].*)?", _TENSOR),
    (
        r"data_type",
        "one of TYPE_BOOL, TYPE_UINT8 … TYPE_INT64, TYPE_FP16, TYPE_FP32, TYPE_FP64, TYPE_BF16, TYPE_STRING",
    ),
    (r"instance_group.*", "a count of 1 or more; gpus only with KIND_GPU or KIND_AUTO"),
    (r"dynamic_batching.*", "sizes between 1 and max_batch_size, priorities between 1 and priority_levels"),
    (r"sequence_batching.*", "direct or oldest, controls with false and true values, states as the model names them"),
    (
        r"version_policy.*",
        "latest { num_versions: 1 }, all { } or specific { versions: [ 1 ] }, of directories that exist",
    ),
    (r"default_model_filename", "the name of the model file in each version directory"),
    (r"model_warmup.*", "each input with data_type, dims without -1, and zero_data, random_data or input_data_file"),
    (r"(batch_input|batch_output).*", "one source_input of the model's inputs, and targets that the model has"),
    (r"ensemble_scheduling.*", _ENSEMBLE),
    (r"(backend|platform)", f"name one of: {', '.join(dict.fromkeys(served_backends()))}"),
    (r"response_cache", "only for models that answer every request once, and by its inputs alone"),
)


def mend_for(field: str) -> str:
    """What to do about that field, "" where nobody knows."""
    return next((text for pattern, text in _MENDS if re.fullmatch(pattern, field)), "")
