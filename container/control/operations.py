"""What is told and changed beside inference, whatever the protocol: coroutines on the event loop.

Parameters and sentences of loads and unloads are Triton's, since clients look for them: `config`, the JSON of a
configuration, and `file:<path>`, a file (in base64 where it comes as JSON), for that one load; `unload_dependents`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import TYPE_CHECKING, Any

from container import installed_version
from container.inference.limits import by_thread
from container.settings import Mode
from model_handlers.config.convert import config_json
from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.model_calls import Override
from model_handlers.registry import platform_of
from serve.cache.entry import State
from serve.sources.override import FILE

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from container.process.service import Service
    from container.steps.shared_memory import Regions
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import TensorSpec

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
PAGE = 100  # models in one answer, what SageMaker's own containers send
_SHARED_MEMORY = "system_shared_memory"  # where clients may share memory
_FINDERS = 64  # threads that may list what there is; a bucket may take long
_SHOWN = 200  # characters of a key in a message
_TYPES = ((bool, "BOOL"), (int, "INT"), (float, "DOUBLE"), (str, "STRING"), (bytes, "BYTES"))
# What Triton calls an error; kinds that are not the model's fault keep their own sentence.
_CODES = {
    Kind.INVALID_MODEL: "Internal",  # of one version: its code raised, or its file can't be read
    Kind.UNSUPPORTED: "Unsupported",
    Kind.EXECUTION_FAILED: "Internal",
    Kind.INTERNAL: "Internal",
}


class Operations:
    """The operations over a service, by the names of the route table. Each raises MmeError to refuse."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._engine = service.engine
        self._finding = asyncio.Semaphore(_FINDERS)
        self.regions: dict[str, Regions] = {"system": service.regions, "cuda": service.cuda_regions}

    # -- KServe v2 and Triton's extensions -------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._service.ready

    async def server_metadata(self) -> dict[str, Any]:
        extensions = (*EXTENSIONS, _SHARED_MEMORY) if self._service.regions.allowed else EXTENSIONS
        name = self._service.settings.server_id
        return {"name": name, "version": installed_version() or "0", "extensions": extensions}

    async def model_metadata(self, name: str, version: int | None) -> dict[str, Any]:
        """The metadata document of a model, or of one version: shapes as a client sends them, a batch's first as -1."""
        canonical = self._canonical(name)
        async with self._engine.leased(canonical, version) as model:
            versions = [model.version] if version is not None else sorted(self._engine.index.versions(canonical))
            config = model.config
        return {
            "name": canonical,
            "versions": [str(number) for number in versions],
            "platform": config.platform or platform_of(config.backend),
            "inputs": [_tensor(spec, config) for spec in config.inputs],
            "outputs": [_tensor(spec, config) for spec in config.outputs],
        }

    async def model_config(self, name: str, version: int | None) -> dict[str, Any]:
        """The configuration of a model, which is loaded for it if need be."""
        async with self._engine.leased(self._canonical(name), version) as model:
            return config_json(model.config)

    async def model_ready(self, name: str, version: int | None) -> bool:
        """Whether a model is, by its own code where it has some for that."""
        return await self._engine.index.says_ready(self._canonical(name), version)

    async def model_statistics(self, name: str, version: int | None) -> list[dict[str, Any]]:
        return self._engine.index.statistics(name, version)

    async def index(self, *, ready: bool) -> list[dict[str, Any]]:
        """The rows of the repository index: of what is ready, or of everything that store or repository offers."""
        if ready:
            return [row for row in self._engine.index.rows() if row.get("state") == State.READY.shown]
        return self._engine.index.rows(await self._find_all())

    async def load(self, name: str, override: Override | None) -> None:
        """Load a model, or load it again, as a client asks; under an override, if there is one."""
        self.check_control()
        check_name(name)
        try:
            await self._engine.reload(self._canonical(name), override)
        except MmeError as error:
            raise load_error(name, error) from None

    def override(self, parameters: Mapping[str, Any]) -> Override | None:
        """See `load_override`; on any thread."""
        return load_override(parameters, allowed=self._service.settings.allow_load_overrides)

    async def unload(self, name: str, parameters: Mapping[str, Any]) -> None:
        self.check_control()
        dependents = unload_dependents(parameters)
        try:
            await self._engine.unload(self._canonical(name), dependents=dependents)
        except MmeError as error:
            if error.kind is not Kind.UNKNOWN_MODEL:  # Triton unloads what it does not know without a word
                raise

    async def trace_setting(self, name: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """What is traced of a model, or of "" of all without settings of their own, once that is as wanted."""
        offered: Collection[str] = await self._find_all() if name else ()  # some were not asked for yet
        model = self._canonical(name) if name else ""
        if model and model not in self._engine.cache.entries and model not in offered:
            raise invalid_argument(f"Request for unknown model : {name}")
        if wanted:
            self._service.traces.change(model, wanted)
        return self._service.traces.of(model).as_document()

    async def log_settings(self, wanted: Mapping[str, Any] | None) -> dict[str, Any]:
        if wanted is not None:
            self._service.logs.change(wanted)
        return self._service.logs.document()

    # -- SageMaker's contract --------------------------------------------------------------------------------------

    async def list_models(self, token: str) -> dict[str, Any]:
        posted = {name: alias for alias, name in self._engine.registry.aliases.items()}
        return page(sorted((posted.get(name, name), url) for name, url in self._engine.index.registered()), token)

    def check_control(self) -> None:
        """Refuse clients that have no say in which models are loaded."""
        self._engine.options.control.check()

    async def load_model(self, document: Mapping[str, Any], target: str) -> dict[str, str]:
        """Load a folder under the name that the platform gave; clients call it by `target`, if there is one."""
        settings = self._service.settings  # what lies in a folder, as in /tmp, may be code of any user
        if settings.mode is not Mode.PLATFORM and not settings.allow_load_overrides:
            raise _forbidden(
                "POST /models is not allowed: without SAGEMAKER_MULTI_MODEL=true models come from the server's store "
                "or repository, and a folder that a client names is code",
                "load by POST /v2/repository/models/NAME/load, or ",
            )
        name, url = _text(document, "model_name"), _text(document, "url")
        await (self._engine.load(target, url, name) if target else self._engine.load(name, url))
        return described(name, url)

    async def get_model(self, name: str) -> dict[str, str]:
        return described(name, self._engine.index.url(self._canonical(name)))

    async def unload_model(self, name: str, target: str) -> None:
        """Unload one; done when the memory was given back."""
        self.check_control()
        if target:
            self._engine.registry.check_alias(name, target)
        await self._engine.unload(self._canonical(name))

    async def execution_parameters(self) -> dict[str, Any]:
        settings = self._service.settings
        return {
            "MaxConcurrentTransforms": settings.max_concurrent_transforms,
            "BatchStrategy": settings.batch_strategy,
            "MaxPayloadInMB": settings.max_payload_in_mb,
        }

    def _canonical(self, name: str) -> str:
        return self._engine.registry.canonical(name)

    async def _find_all(self) -> list[str]:
        """Every name that store or repository offers; a thread waits for disk or network."""
        async with self._finding:
            return await by_thread(self._engine.origins.find_all)


def _tensor(spec: TensorSpec, config: ModelConfig) -> dict[str, Any]:
    shape = list(spec.shape(config.max_batch_size))
    return {"name": spec.name, "datatype": spec.data_type.name, "shape": shape}


def page(models: list[tuple[str, str]], token: str) -> dict[str, Any]:
    """The models behind those that `token` stands for, "" for none: at most `PAGE`, and a token if there are more.

    The token carries the last name shown, so that models which come and go between two pages shift nothing.
    """
    after = _token_name(token)
    rest = [(name, url) for name, url in models if name > after]
    document: dict[str, Any] = {"models": [described(name, url) for name, url in rest[:PAGE]]}
    if len(rest) > PAGE:
        document["nextPageToken"] = base64.urlsafe_b64encode(rest[PAGE - 1][0].encode()).decode()
    return document


def _token_name(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except ValueError:  # no base64, no ASCII, no UTF-8
        raise invalid_argument(
            f"next_page_token '{token[:100]}' is none that this server gave out; start without one"
        ) from None


def described(name: str, url: str) -> dict[str, str]:
    return {"modelName": name, "modelUrl": url}


def _text(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not value:
        raise invalid_argument(
            f'the body must name \'{key}\', as in {{"model_name": "bert", "url": "/opt/ml/models/bert/model"}}'
        )
    return value


def _forbidden(what: str, instead: str = "") -> MmeError:
    """The refusal of something of a client's that a model would be loaded with."""
    return MmeError(
        Kind.FORBIDDEN,
        f"{what} that the server runs; {instead}start the server with "
        "--allow-load-overrides/MME_ALLOW_LOAD_OVERRIDES=true if all of its clients may do that",
    )


def check_name(name: str) -> None:
    if any(part in {"", ".", ".."} for part in name.split("/")) or "\0" in name:
        raise invalid_argument(f"Model name cannot be empty or a way to another directory, got '{name[:_SHOWN]}'")


def repository_error() -> MmeError:
    return MmeError(Kind.UNSUPPORTED, "'repository_name' specification is not supported")


def load_override(parameters: Mapping[str, Any], *, allowed: bool) -> Override | None:
    """Return what a load request has a model loaded with; None for what the model has itself."""
    if not allowed and (named := next((key for key in parameters if key == "config" or key.startswith(FILE)), "")):
        raise _forbidden(f"load parameter '{named[:_SHOWN]}' is not allowed: what clients send with a load is code")
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key.startswith(FILE):
            files[key] = _decoded(key, value)
        elif key != "config" or not isinstance(value, str):
            raise invalid_argument(f"Unrecognized load parameter '{key[:_SHOWN]}' with type '{_type_of(value)}'")
    config = parameters.get("config")
    if config == "":
        raise invalid_argument("load parameter 'config' is empty: leave it out for the model's own configuration")
    return Override(config or "", files) if config or files else None


def unload_dependents(parameters: Mapping[str, Any]) -> bool:
    """Whether an unload request means the models too that the model consists of."""
    for key, value in parameters.items():
        if key != "unload_dependents" or not isinstance(value, bool):
            raise invalid_argument(
                f"Unable to parse '{key[:_SHOWN]}': an unload has one parameter, unload_dependents, true or false"
            )
    return bool(parameters.get("unload_dependents", False))


def load_error(name: str, error: MmeError) -> MmeError:
    """How Triton tells that a model could not be loaded: with the version, where it is one that is at fault."""
    if error.kind is Kind.UNKNOWN_MODEL:
        return MmeError(Kind.INTERNAL, f"failed to load '{name}', failed to poll from model repository")
    code = _CODES.get(error.kind)
    if code is None:
        return error
    why = error.message
    if error.version is not None:
        why = f"version {error.version} is at UNAVAILABLE state: {code}: {why};"
    return MmeError(Kind.INVALID_MODEL, f"load failed for model '{name}': {why}")


def _decoded(key: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    # Triton's C++ client sends lines of 72 characters.
    text = value.replace("\n", "").replace("\r", "") if isinstance(value, str) else value
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise invalid_argument(f"file parameter '{key[:_SHOWN]}' must be the file in base64") from None


def _type_of(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), type(value).__name__)
