"""What KServe v2 and Triton's extensions tell and change beside inference, whatever the protocol. On the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from container.load_parameters import check_name, load_error, unload_dependents
from container.trace_settings import TraceSettings
from container.version import installed_version
from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.registry import platform_of
from serve.lifecycle import State

if TYPE_CHECKING:
    from collections.abc import Mapping

    from container.tracing import Tracer
    from model_handlers.config import ModelConfig
    from model_handlers.outside import Override
    from model_handlers.tensor import TensorSpec
    from serve.engine import Engine

# Of Triton's extensions, by Triton's names, those that are served.
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "generate",
    "trace",
)


def server_metadata() -> dict[str, Any]:
    """The server's metadata document."""
    return {"name": "mme", "version": installed_version() or "0", "extensions": EXTENSIONS}


async def configured(engine: Engine, name: str, number: int | None) -> tuple[str, ModelConfig, list[int]]:
    """A model's registered name, its configuration and its versions, or the one that is asked for; loads it if need be.

    Raises:
        MmeError: there is no such model or version, or why it can't be loaded.
    """
    canonical = engine.canonical(name)
    async with engine.leased(canonical, number) as model:
        versions = [model.version] if number is not None else sorted(engine.versions(canonical))
        return canonical, model.config, versions


def model_metadata(name: str, config: ModelConfig, versions: list[int]) -> dict[str, Any]:
    """The metadata document: shapes as a client sends them, the batch dimension first as -1."""

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        shape = list(spec.shape(config.max_batch_size))
        return {"name": spec.name, "datatype": spec.data_type.name, "shape": shape}

    return {
        "name": name,
        "versions": [str(number) for number in versions],
        "platform": config.platform or platform_of(config.backend),
        "inputs": [tensor(spec) for spec in config.inputs],
        "outputs": [tensor(spec) for spec in config.outputs],
    }


def statistics(engine: Engine, name: str, number: int | None) -> list[dict[str, Any]]:
    """Of one model, or with "" of all that were ever in memory.

    Raises:
        MmeError: INVALID_ARGUMENT for a model or a version of which nothing was counted.
    """
    wanted = engine.canonical(name) if name else ""
    rows = [
        stats.as_dict(model, str(version))
        for (model, version), stats in sorted(engine.stats.items())
        if (not wanted or model == wanted) and (number is None or version == number)
    ]
    if wanted and not rows:
        known = any(model == wanted for model, _ in engine.stats)
        raise invalid_argument(
            f"requested model version is not available for model '{name}'"
            if known
            else f"requested model '{name}' is not available"
        )
    return rows


def ready_index(engine: Engine) -> list[dict[str, Any]]:
    """The rows of the repository index whose models are ready; for the others `Engine.find_all` is needed as well."""
    return [row for row in engine.index() if row.get("state") == State.READY.value]


async def load(engine: Engine, name: str, override: Override | None) -> None:
    """Load a model, or load it anew, as a client asks; under an override, if there is one.

    Raises:
        MmeError: clients have no say, or why it can't be loaded, as Triton tells it.
    """
    engine.check_control()
    check_name(name)
    try:
        await engine.reload(engine.canonical(name), override)
    except MmeError as error:
        raise load_error(name, error) from None


async def unload(engine: Engine, name: str, parameters: Mapping[str, Any]) -> None:
    """Unload a model, as a client asks.

    Raises:
        MmeError: clients have no say, a parameter is wrong, or it still executes after a long time.
    """
    engine.check_control()
    dependents = unload_dependents(parameters)
    try:
        await engine.unload(engine.canonical(name), dependents=dependents)
    except MmeError as error:
        if error.kind is not Kind.UNKNOWN_MODEL:  # Triton unloads what it does not know without a word
            raise


def trace_settings(tracer: Tracer | None) -> dict[str, Any]:
    """What is traced, of every model: without a tracer nothing."""
    return (TraceSettings() if tracer is None else tracer.settings).as_document()


def change_traces(tracer: Tracer | None, name: str, wanted: Mapping[str, Any]) -> None:
    """Trace something else from now on; `name` is "" for the server.

    Raises:
        MmeError: UNSUPPORTED for one model, and where traces go nowhere; INVALID_ARGUMENT.
    """
    if name:
        sentence = f"model '{name}' has no trace settings of its own: change the server's, at /v2/trace/setting"
        raise MmeError(Kind.UNSUPPORTED, sentence)
    if tracer is None:
        raise MmeError(Kind.UNSUPPORTED, "traces go nowhere: start the server with MME_TRACE_URL")
    tracer.change(wanted)
