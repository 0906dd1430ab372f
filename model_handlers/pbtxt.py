"""config.pbtxt into a `ModelConfig`, and a `ModelConfig` back into text.

The text is read by protobuf's own parser against the published message, so that whatever Triton accepts is accepted
here letter by letter. Which fields count is the business of `pbtxt_fields.py`, which values are right that of
`config_checks.py`; this module only translates. Runs on load threads and in `mme pack`; holds no state.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format, text_format

from model_handlers.config import (
    EnsembleStep,
    InstanceGroup,
    InstanceKind,
    ModelConfig,
    NamedTensor,
    RepositoryAgent,
    Resource,
    VersionPolicy,
)
from model_handlers.config_checks import normalise
from model_handlers.config_json import config_json
from model_handlers.errors import MmeError, invalid_model
from model_handlers.pbtxt_batching import dynamic_batching
from model_handlers.pbtxt_fields import check_fields
from model_handlers.pbtxt_optimization import cpu_accelerators, gpu_accelerators
from model_handlers.pbtxt_ragged import batch_inputs, batch_outputs
from model_handlers.pbtxt_warmup import warmup_samples
from model_handlers.proto import model_config_pb2 as pb
from model_handlers.sequence_pbtxt import sequence_batching
from model_handlers.tensor import BY_NUMBER, DataType, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMENT_OR_STRING = re.compile(r"""#.*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""")
_ESCAPE = re.compile(r"\\([4-7][0-7]{2}|.)")  # the first alternative is no byte
_LATEST = (-1, 0)  # 0 is what the message has where no version is given
_ESCAPES = frozenset("abfnrtv\\'\"01234567xuU")


def parse_config(text: str, *, model: str, strict_name: bool = False) -> ModelConfig:
    """Read a config.pbtxt.

    Args:
        text: the file's contents.
        model: the name that the model is served under; errors name it, and the result carries it.
        strict_name: refuse a `name` in the text that differs from `model`, as a repository on disk does. Otherwise
            `name` is only what the author called the model.

    Returns:
        the configuration with defaults filled in; inputs, outputs, backend and batch size may still be missing.

    Raises:
        MmeError: INVALID_MODEL for text that is no ModelConfig (with line and field) or breaks a rule; UNSUPPORTED for
            a field that is not honoured here, by its full path.
    """
    return config_of(_parse_text(text, model), model=model, strict_name=strict_name)


def config_of(message: pb.ModelConfig, *, model: str, strict_name: bool = False) -> ModelConfig:
    """What the message says. Arguments, result and errors are those of `parse_config`."""
    check_fields(message, model)
    if strict_name and message.name and message.name != model:
        raise invalid_model(
            f"unexpected directory name '{model}' for model '{message.name}', directory name must equal model name: "
            f'write name: "{model}", or leave the field out'
        )
    return normalise(translated(message, model))


def translated(message: pb.ModelConfig, model: str) -> ModelConfig:
    """The message as a configuration, whose rules nobody has looked at yet.

    Raises:
        MmeError: INVALID_MODEL for what a configuration has no place for.
    """
    return ModelConfig(
        name=model,
        backend=message.backend,
        platform=message.platform,
        max_batch_size=message.max_batch_size,
        inputs=tuple(_input(tensor, model) for tensor in message.input if not is_named_only(tensor, message)),
        outputs=tuple(_output(tensor, model) for tensor in message.output if not is_named_only(tensor, message)),
        named_inputs=_named(message.input, message),
        named_outputs=_named(message.output, message),
        version_policy=_version_policy(message, model),
        instance_groups=tuple(_instance_group(group) for group in message.instance_group),
        dynamic_batching=dynamic_batching(message, model),
        default_model_filename=message.default_model_filename,
        optimization_level=message.optimization.graph.level,
        parameters=MappingProxyType({key: value.string_value for key, value in message.parameters.items()}),
        metric_tags=MappingProxyType(dict(message.metric_tags)),
        decoupled=message.model_transaction_policy.decoupled,
        not_decoupled=_says_not_decoupled(message),
        ensemble=tuple(_step(step) for step in message.ensemble_scheduling.step),
        max_inflight=message.ensemble_scheduling.max_inflight_requests,
        batch_inputs=batch_inputs(message),
        batch_outputs=batch_outputs(message),
        warmup=warmup_samples(message, model),
        response_cache=message.response_cache.enable,
        runtime=message.runtime,
        histograms=MappingProxyType(dict(_histogram(control) for control in message.model_metrics.metric_control)),
        op_libraries=tuple(message.model_operations.op_library_filename),
        agents=tuple(
            RepositoryAgent(agent.name, MappingProxyType(dict(agent.parameters)))
            for agent in message.model_repository_agents.agents
        ),
        sequence_batching=sequence_batching(message, model),
        cc_filenames=MappingProxyType(dict(message.cc_model_filenames)),
        gpu_accelerators=gpu_accelerators(message),
        cpu_accelerators=cpu_accelerators(message),
    )


def config_message(config: ModelConfig) -> pb.ModelConfig:
    """The published message that says what `config` says."""
    message = json_format.ParseDict(config_json(config, filled_in=False), pb.ModelConfig())
    for named in config.named_inputs:
        message.input.insert(named.place, pb.ModelInput(optional=named.optional, **_named_fields(named)))
    for named in config.named_outputs:
        message.output.insert(named.place, pb.ModelOutput(**_named_fields(named)))
    return message


def _named_fields(named: NamedTensor) -> dict[str, Any]:
    return {"name": named.name, "data_type": pb.DataType.Value(named.data_type), "dims": named.dims}


def config_text(config: ModelConfig) -> str:
    """The configuration as the text of a config.pbtxt; `parse_config` reads it back into an equal one."""
    return text_format.MessageToString(config_message(config), as_utf8=True)


def _parse_text(text: str, model: str) -> pb.ModelConfig:
    check_escapes(text, model)
    try:
        return text_format.Parse(text, pb.ModelConfig())
    except text_format.ParseError as error:
        raise syntax_error(error, model) from None


def syntax_error(error: text_format.ParseError, model: str) -> MmeError:
    """What the parser says, with line and column."""
    line, column = error.GetLine(), error.GetColumn()
    # The parser quotes the line, which may be the whole file and may hold what no response can carry.
    what = str(error).removeprefix(f"{line}:{column} : ").replace('"mme.', '"')[:300]
    what = what.encode(errors="replace").decode()
    return invalid_model(f"model '{model}': config.pbtxt line {line}, column {column}: {what}")


def check_escapes(text: str, model: str) -> None:
    r"""Refuse `\m` and its like in strings: the parser keeps them as they are, with one of Python's own warnings."""
    for token in _COMMENT_OR_STRING.finditer(text):
        for escape in () if token[0].startswith("#") else _ESCAPE.finditer(token[0]):
            if escape[1] not in _ESCAPES:
                line = text.count("\n", 0, token.start()) + 1
                raise invalid_model(
                    f"model '{model}': config.pbtxt line {line}: {escape[0]!a} in a string is no escape sequence; "
                    "write a backslash twice"
                )


def _says_not_decoupled(message: pb.ModelConfig) -> bool:
    return message.HasField("model_transaction_policy") and not message.model_transaction_policy.decoupled


def is_named_only(tensor: pb.ModelInput | pb.ModelOutput, message: pb.ModelConfig) -> bool:
    """Whether a tensor lacks its type or its dims, which a Python model may give it in `auto_complete_config`."""
    whole = tensor.data_type in BY_NUMBER and tensor.dims
    return message.backend == "python" and bool(tensor.name) and not whole


def _named(tensors: Sequence[pb.ModelInput | pb.ModelOutput], message: pb.ModelConfig) -> tuple[NamedTensor, ...]:
    return tuple(
        NamedTensor(
            tensor.name,
            place,
            pb.DataType.Name(tensor.data_type),
            tuple(tensor.dims),
            isinstance(tensor, pb.ModelInput) and tensor.optional,
        )
        for place, tensor in enumerate(tensors)
        if is_named_only(tensor, message)
    )


def _input(tensor: pb.ModelInput, model: str) -> TensorSpec:
    return TensorSpec(
        name=_name(tensor, "input", model),
        data_type=_data_type(tensor, "input", model),
        dims=tuple(tensor.dims),
        reshape=_reshape(tensor),
        optional=tensor.optional,
        ragged=tensor.allow_ragged_batch,
        format=pb.ModelInput.Format.Name(tensor.format),
    )


def _output(tensor: pb.ModelOutput, model: str) -> TensorSpec:
    return TensorSpec(
        name=_name(tensor, "output", model),
        data_type=_data_type(tensor, "output", model),
        dims=tuple(tensor.dims),
        reshape=_reshape(tensor),
        labels=tensor.label_filename,
    )


def _name(tensor: pb.ModelInput | pb.ModelOutput, what: str, model: str) -> str:
    if not tensor.name:
        raise invalid_model(f"model {what} must specify 'name' for {model}")
    return tensor.name


def _data_type(tensor: pb.ModelInput | pb.ModelOutput, what: str, model: str) -> DataType:
    if tensor.data_type not in BY_NUMBER:
        raise invalid_model(f"model {what} '{tensor.name}' must specify 'data_type' for {model}")
    return BY_NUMBER[tensor.data_type]


def _reshape(tensor: pb.ModelInput | pb.ModelOutput) -> tuple[int, ...] | None:
    return tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None


def _version_policy(message: pb.ModelConfig, model: str) -> VersionPolicy:
    policy = message.version_policy
    match policy.WhichOneof("policy_choice"):
        case "latest":
            return VersionPolicy(latest=policy.latest.num_versions)
        case "all":
            return VersionPolicy(all=True)
        case "specific":
            if not policy.specific.versions:
                raise invalid_model(
                    f"at least one version must be available under the version policy of model '{model}': "
                    "name one in 'version_policy.specific.versions'"
                )
            return VersionPolicy(specific=tuple(policy.specific.versions))
        case _:
            return VersionPolicy()


def _instance_group(group: pb.ModelInstanceGroup) -> InstanceGroup:
    # 0 is how the message says that no count is given; a negative one is left for the checks to refuse.
    limiter = group.rate_limiter
    resources = tuple(Resource(needed.name, needed.count, getattr(needed, "global")) for needed in limiter.resources)
    return InstanceGroup(
        group.name,
        InstanceKind(group.kind),
        group.count or 1,
        tuple(group.gpus),
        resources,
        limiter.priority or 1,
        tuple(group.profile),
    )


def _histogram(control: pb.ModelMetrics.MetricControl) -> tuple[str, tuple[float, ...]]:
    for field in ("metric_identifier", "histogram_options"):
        if not control.HasField(field):
            raise invalid_model(f"metric control must specify '{field}'")
    return control.metric_identifier.family, tuple(control.histogram_options.buckets)


def _step(step: pb.ModelEnsembling.Step) -> EnsembleStep:
    version = None if step.model_version in _LATEST else step.model_version
    return EnsembleStep(
        step.model_name,
        version,
        MappingProxyType(dict(step.input_map)),
        MappingProxyType(dict(step.output_map)),
        step.model_namespace,
    )
