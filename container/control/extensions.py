"""What KServe v2 and Triton's extensions tell and change beside inference, whatever the protocol. On the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from container.control.load_parameters import check_name, load_error, unload_dependents
from container.version import installed_version
from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.registry import platform_of
from serve.cache.entry import State
from serve.threads import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from container.traces.settings import TraceControl
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.model_calls import Override
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
    "logging",
)
_SHARED_MEMORY = "system_shared_memory"  # where clients may share memory
_FINDERS = ThreadPool("find", most=64)  # a bucket may take long to list


def server_metadata(name: str, *, shared_memory: bool) -> dict[str, Any]:
    """The metadata document of a server that calls itself so; and whether clients may share memory with it."""
    extensions = (*EXTENSIONS, _SHARED_MEMORY) if shared_memory else EXTENSIONS
    return {"name": name, "version": installed_version() or "0", "extensions": extensions}


async def configured(engine: Engine, name: str, number: int | None) -> tuple[str, ModelConfig, list[int]]:
    """A model's registered name, its configuration and its versions, or the one that is asked for; loads it if need be.

    Raises:
        MmeError: there is no such model or version, or why it can't be loaded.
    """
    canonical = engine.registry.canonical(name)
    async with engine.leased(canonical, number) as model:
        versions = [model.version] if number is not None else sorted(engine.index.versions(canonical))
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


def ready_index(engine: Engine) -> list[dict[str, Any]]:
    """The rows of the repository index whose models are ready; for the others `Engine.find_all` is needed as well."""
    return [row for row in engine.index.rows() if row.get("state") == State.READY.value]


async def find_all(engine: Engine) -> list[str]:
    """Return every name that store or repository offers; a thread waits for disk or network."""
    return await asyncio.wrap_future(_FINDERS.submit(engine.origins.find_all))


async def load(engine: Engine, name: str, override: Override | None) -> None:
    """Load a model, or load it anew, as a client asks; under an override, if there is one.

    Raises:
        MmeError: clients have no say, or why it can't be loaded, as Triton tells it.
    """
    engine.options.control.check()
    check_name(name)
    try:
        await engine.reload(engine.registry.canonical(name), override)
    except MmeError as error:
        raise load_error(name, error) from None


async def unload(engine: Engine, name: str, parameters: Mapping[str, Any]) -> None:
    """Unload a model, as a client asks.

    Raises:
        MmeError: clients have no say, a parameter is wrong, or it still executes after a long time.
    """
    engine.options.control.check()
    dependents = unload_dependents(parameters)
    try:
        await engine.unload(engine.registry.canonical(name), dependents=dependents)
    except MmeError as error:
        if error.kind is not Kind.UNKNOWN_MODEL:  # Triton unloads what it does not know without a word
            raise


def trace_settings(
    engine: Engine, traces: TraceControl, name: str, wanted: Mapping[str, Any], offered: Collection[str] = ()
) -> dict[str, Any]:
    """What is traced of a model, or with "" of every model without settings of its own, once that is changed as wanted.

    Args:
        engine: whose models these are.
        traces: what is traced.
        name: the model's.
        wanted: setting → what is wanted of it.
        offered: what `Engine.find_all` has found, for models that were not asked for yet.

    Raises:
        MmeError: UNSUPPORTED where traces go nowhere; INVALID_ARGUMENT, here for a model that there is not as well.
    """
    model = engine.registry.canonical(name) if name else ""
    if model and model not in engine.cache.entries and model not in offered:
        raise invalid_argument(f"Request for unknown model : {name}")
    if wanted:
        traces.change(model, wanted)
    return traces.of(model).as_document()
