"""The one reader of the environment: every setting of the server, checked before anything starts.

`Settings.from_environ` takes a mapping and never looks at `os.environ` by itself; flags of `mme serve` become variables
of that mapping first. A variable that is unknown, or a value that cannot be honoured, refuses to start, and all
of them are named at once. `to_environ` writes settings back for gunicorn, whose master and worker read them again;
immutable after.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from container.control.routes import InferenceType
from container.settings.address import LOOPBACK
from container.settings.arguments import expand_arguments
from container.settings.kinds import (
    DEFAULT_MAX_BODY,
    DEFAULT_PORT,
    BatchSize,
    GrpcCompression,
    LogFormat,
    Mode,
    PingMode,
    RateLimit,
    ResourceLimit,
    SettingsError,
    to_text,
)
from container.settings.reading import Reading
from container.settings.sagemaker import (
    ALL_MODELS,
    SAGEMAKER_MODEL_DIR,
    SingleModel,
    apply_rules,
    choose_single_model,
)
from container.settings.table import VARIABLES
from container.settings.tls import grpc_certificates, http_certificates, load_certificates
from container.steps.access import Keys
from model_handlers.errors import MmeError
from model_handlers.scripts.default_script import LITERAL
from model_handlers.system.importing import is_installed
from serve.cache.eviction import Policy
from serve.control import DEFAULT_LATENCIES, BatchGuess, Control, Latencies, Weights
from serve.sizes import MemoryBudget
from serve.sources.scripts import Scripts
from serve.sources.store import read_credentials

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from container.steps.restrictions import Restriction

__all__ = [
    "ALL_MODELS",
    "GrpcCompression",
    "LogFormat",
    "MemoryBudget",
    "Mode",
    "PingMode",
    "RateLimit",
    "Settings",
    "SettingsError",
    "SingleModel",
    "choose_single_model",
    "settings_table",
]

# Which variable says a mode; the others of its row belong to another mode and are not written.
_MODE_FIELDS = {Mode.STORE: "model_store", Mode.REPOSITORY: "model_repository", Mode.SINGLE: "model_dir"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set: what each field does is what `table` says of its variable, times are seconds.

    Attributes:
        mode: where models come from; one of `model_dir` (SINGLE), `model_store` (STORE: an s3:// URL or an absolute
            path) and `model_repository` (REPOSITORY) goes with it.
        more_repositories: further repositories.
        repository_urls: s3:// URLs in place of both, () where they are folders.
        load_models: models to load at start; in a repository () means all, and so does ("*",).
        default_batch_sizes: () for their backends' own.
        default_model_name: the model of /invocations without a target model, "" where none was named.
        grpc_address, metrics_address: "" for `host`.
        grpc_port, metrics_port: None for nowhere.
        memory_budget, gpu_memory_budget, disk_budget: bytes (int), a share of what there is (float), a share less a
            reserve (`Share`), or None for as much as the host, each GPU or the file system leaves.
        framework_threads: None for what processors, and the limit of processes, allow.
        request_memory, max_connections: None for what the memory budget and the limit of open files leave.
        rate_limit_resources: () for as much as the neediest instance wants.
        response_cache_bytes: 0 for none.
        cloud_credentials: None for what boto3 finds.
        booster_accept: `default_accept` of models that are a file of SageMaker's XGBoost and no script.
        script_output: what answers of such a model hold for each row, () for its prediction.
        script_directory: a folder, an archive's URL, or "".
        trace_url, trace_file: one of them, or neither.
        trace_count: -1 for all.
        grpc_keepalive: as `time=7200000`.
        notices: sentences to log once at start; no part of equality.
    """

    mode: Mode = Mode.SINGLE
    model_dir: Path = SAGEMAKER_MODEL_DIR
    model_store: str = ""
    model_repository: Path | None = None
    more_repositories: tuple[Path, ...] = ()
    repository_urls: tuple[str, ...] = ()
    load_models: tuple[str, ...] = ()
    model_control_mode: Control = Control.DEMAND
    poll_seconds: float = 15.0
    model_namespacing: bool = False
    model_config_name: str = ""
    strict_config: bool = False
    default_batch_sizes: tuple[BatchSize, ...] = ()
    batch_guess: BatchGuess = BatchGuess.PROVE
    default_model_name: str = ""
    host: str = LOOPBACK
    allowed_hosts: tuple[str, ...] = ()
    port: int = DEFAULT_PORT
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    key_file: Path | None = None
    grpc_address: str = ""
    grpc_port: int | None = None
    grpc_use_ssl: bool = False
    grpc_use_ssl_mutual: bool = False
    grpc_server_cert: Path | None = None
    grpc_server_key: Path | None = None
    grpc_root_cert: Path | None = None
    grpc_compression: GrpcCompression = GrpcCompression.NONE
    memory_budget: MemoryBudget = None
    gpu_memory_budget: MemoryBudget = None
    eviction: Policy = Policy.LRU
    pins: tuple[str, ...] = ()
    min_residency: float = 0.0
    require_gpu: bool = False
    weights: Weights = Weights.AUTO
    rate_limit: RateLimit = RateLimit.OFF
    rate_limit_resources: tuple[ResourceLimit, ...] = ()
    response_cache_bytes: int = 64 << 20
    cache_dir: Path = field(default_factory=lambda: _user_cache_dir({}))
    cloud_credentials: Path | None = None
    disk_budget: MemoryBudget = None
    max_archive_files: int = 20_000
    load_threads: int = 2
    framework_threads: int | None = None
    load_timeout: float = 350.0
    max_body_bytes: int = DEFAULT_MAX_BODY
    request_memory: int | None = None
    max_connections: int | None = None
    allow_client_shm: bool = False
    allow_load_overrides: bool = False
    request_timeout: float = 60.0
    idle_timeout: float = 75.0
    header_timeout: float = 15.0
    body_timeout: float = 60.0
    sessions: bool = True
    session_seconds: float = 1200.0
    drain_seconds: float = 25.0
    inline_microseconds: int = 200
    busy_poll_microseconds: int = 400
    ping_mode: PingMode = PingMode.READY
    default_accept: str = "application/json"
    json_nonfinite: str = "null"
    booster_accept: str = "text/csv"
    allow_pickle: bool = False
    script_program: str = "inference.py"
    script_directory: str = ""
    script_workers: int = 1
    script_task: str = ""
    script_saved_model: str = ""
    script_output: tuple[str, ...] = ()
    inference_type: InferenceType = InferenceType.INFER
    shared_memory_bytes: int = 64 << 10
    shared_memory_growth_bytes: int = 0
    batch_transform: bool = False
    max_concurrent_transforms: int = 8
    batch_strategy: str = "SINGLE_RECORD"
    max_payload_in_mb: int = 6
    log_level: str = "info"
    log_format: LogFormat = LogFormat.AUTO
    metrics_models: int = 10_000
    emf: bool = False
    emf_namespace: str = "mme"
    emf_period: float = 60.0
    emf_top_models: int = 0
    endpoint_name: str = "unknown"
    variant_name: str = "AllTraffic"
    trace_url: str = ""
    trace_rate: int = 1000
    trace_count: int = -1
    trace_level: tuple[str, ...] = ("TIMESTAMPS",)
    trace_file: Path | None = None
    trace_log_frequency: int = 0
    dashboard: bool = True
    server_id: str = "mme"
    http_restrictions: tuple[Restriction, ...] = ()
    grpc_restrictions: tuple[Restriction, ...] = ()
    http_header_pattern: str = ""
    grpc_header_pattern: str = ""
    grpc_keepalive: tuple[str, ...] = ()
    metrics_address: str = ""
    metrics_port: int | None = None
    latencies: Latencies = DEFAULT_LATENCIES
    notices: tuple[str, ...] = field(default=(), compare=False)

    @property
    def literal_json(self) -> bool:
        """Whether JSON says NaN and Infinity in place of null."""
        return self.json_nonfinite == LITERAL

    @property
    def scripts(self) -> Scripts:
        """What is the same for all inference scripts."""
        return Scripts(
            self.script_program,
            self.script_directory,
            self.script_workers,
            self.default_accept,
            self.model_config_name,
            self.strict_config,
            tuple((each.backend, each.size) for each in self.default_batch_sizes),
            self.booster_accept,
            self.batch_transform,
            self.script_task,
            self.script_saved_model,
            self.allow_pickle,
            self.literal_json,
            self.script_output,
        )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], arguments: Sequence[str] = (), host: str = LOOPBACK) -> Settings:
        """Read and check the settings.

        Args:
            environ: the variables.
            arguments: flags of tritonserver with their values, as if they stood in its variable.
            host: where to listen if `environ` does not say; see `address`.

        Raises:
            SettingsError: with one sentence for every variable that is unknown, malformed or in conflict.
        """
        reading = Reading()
        reading.collect(environ)
        expand_arguments(reading, arguments)
        reading.parse()
        apply_rules(reading)
        if reading.problems:
            raise SettingsError(*reading.problems)
        values = reading.fields
        values.setdefault("host", host)
        values.setdefault("cache_dir", _user_cache_dir(environ))
        values.setdefault("ping_mode", PingMode.READY if values["mode"] is Mode.SINGLE else PingMode.LIVE)
        return cls(**values, notices=tuple(reading.notices))

    def to_environ(self) -> dict[str, str]:
        """The variables that read back as these settings, on top of any environment that they were read from.

        MME_ variables are written even where they hold the default, because the environment below may say otherwise.
        """
        written: dict[str, str] = {}
        defaults = Settings()
        seen = set(_MODE_FIELDS.values()) - {_MODE_FIELDS.get(self.mode)}
        for variable in VARIABLES:
            if variable.field in seen or not variable.field:
                continue
            seen.add(variable.field)
            value = getattr(self, variable.field)
            if variable.field == "model_repository":
                value = self.repositories
            ours = variable.name.startswith("MME_")
            if value not in (None, "", ()) and (ours or value != getattr(defaults, variable.field)):
                written[variable.name] = to_text(value)
        if self.mode is Mode.PLATFORM:
            written["SAGEMAKER_MULTI_MODEL"] = "true"
        return written

    @property
    def repositories(self) -> tuple[Path | str, ...]:
        """Every model repository, whether a folder or a URL."""
        if self.repository_urls:
            return self.repository_urls
        return () if self.model_repository is None else (self.model_repository, *self.more_repositories)

    def check_paths(self) -> None:
        """Check that the folders which models come from are there, and that downloads find one to be unpacked in.

        Raises:
            SettingsError: naming the variable and the folder.
        """
        local_store = self.mode is Mode.STORE and not self.model_store.startswith("s3://")
        store = Path(self.model_store) if local_store else None
        if store:
            _check_folder("--model-store/MME_MODEL_STORE", store)
        in_s3 = self.mode is Mode.REPOSITORY and self.repository_urls
        if (in_s3 or self.mode is Mode.STORE) and not _can_be_written(self.cache_dir):
            raise SettingsError(
                f"--cache-dir/MME_CACHE_DIR='{self.cache_dir}': models are unpacked there, and it can't be written; "
                "name a folder that can, or mount one there"
            )
        if self.cloud_credentials is not None:
            try:
                read_credentials(self.cloud_credentials)
            except MmeError as error:
                raise SettingsError(f"TRITON_CLOUD_CREDENTIAL_PATH: {error}") from None
        self._check_script()
        for repository in self.repositories if self.mode is Mode.REPOSITORY else ():
            if isinstance(repository, Path):
                _check_folder("--model-repository/MME_MODEL_REPOSITORY", repository)

    def _check_script(self) -> None:
        """What is in an archive shows when it is unpacked, for the first model that needs it."""
        script = self.script_directory
        if script.startswith("/") and not Path(script, self.script_program).is_file():
            raise SettingsError(f"SAGEMAKER_SUBMIT_DIRECTORY='{script}': there is no {self.script_program} in it")
        archive = script.removeprefix("file://")
        if archive != script and not Path(archive).is_file():
            raise SettingsError(f"SAGEMAKER_SUBMIT_DIRECTORY='{archive}': there is no such archive; mount it there")

    def check_tracing(self) -> None:
        """Check that what sends traces is installed, if any are to be sent.

        Raises:
            SettingsError: naming the variable and the extra to install.
        """
        if self.trace_url and not is_installed("opentelemetry.exporter.otlp.proto.http"):
            label = f"--trace-url/MME_TRACE_URL='{self.trace_url}'"
            raise SettingsError(f"{label}: OpenTelemetry is not installed; pip install 'mme[otel]'")

    def check_grpc(self) -> None:
        """Check that what serves gRPC is installed, if it is to be served.

        Raises:
            SettingsError: naming the variable, and the extra to install.
        """
        if self.grpc_port is not None and not is_installed("hpack"):
            label = f"--grpc-port/MME_GRPC_PORT={self.grpc_port}"
            raise SettingsError(f"{label}: hpack is not installed; pip install 'mme[grpc]'")

    def check_access(self) -> None:
        """Check that certificates and keys can be used.

        Raises:
            SettingsError: naming the variable and the file.
        """
        of_grpc = grpc_certificates(self) if self.grpc_port is not None else None
        for certificates in (http_certificates(self), of_grpc):
            if certificates is not None:
                load_certificates(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificates)
        if self.key_file is not None:
            try:
                Keys(self.key_file)
            except MmeError as error:
                raise SettingsError(error.message) from error


def _can_be_written(directory: Path) -> bool:
    """Whether files can come to lie in a folder, which need not be there yet."""
    try:
        there = next(path for path in (directory, *directory.parents) if path.exists())
    except PermissionError:
        return False
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _check_folder(name: str, folder: Path) -> None:
    """Refuse what is none, or can't be read, under the name of the setting."""
    try:
        there = folder.is_dir()
    except PermissionError:
        there = True
    if not there:
        raise SettingsError(f"{name}='{folder}': {_why_none(folder)}")
    if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
        raise SettingsError(
            f"{name}='{folder}': user {os.geteuid()}, as whom the server runs, may not read it: let it, or be another"
        )


def _why_none(folder: Path) -> str:
    if folder.is_file():
        return "it is a file: name the folder that it is in"
    scheme = next((part for part in folder.parts if part.lower() in {"s3:", "gs:", "as:", "http:", "https:"}), "")
    return f"there is no such folder{f'; a URL begins with {scheme}//' if scheme else ''}"


def settings_table() -> list[tuple[str, str, str, str, str]]:
    """Every variable as (name, flag, default, allowed, help), for people."""
    settings, told, rows = Settings(), set[str](), []
    for row in VARIABLES:
        default = row.default
        if row.field and row.field not in told:  # the field's other variables have no default of their own
            value = getattr(settings, row.field)
            default = default or (f"{value:g}" if isinstance(value, float) else to_text(value))
        told.add(row.field)
        rows.append((row.name, row.flag, default, row.allowed, row.help))
    return rows


def _user_cache_dir(environ: Mapping[str, str]) -> Path:
    """A folder of this user's: $XDG_CACHE_HOME/mme, else in the temporary directory (on SageMaker the larger disk)."""
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "mme"
    try:
        temporary = environ.get("TMPDIR") or tempfile.gettempdir()
    except FileNotFoundError:  # a container that may write nothing; MME_CACHE_DIR may say otherwise, or nobody need it
        temporary = "/tmp"  # noqa: S108 - a name, which nobody can make a folder of
    return Path(temporary) / f"mme-{os.getuid()}"
