"""What settings name on the disk: folders, certificates, keys, scripts, and the model of a single-model endpoint."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from container.settings.parsers import Mode, SettingsError
from container.settings.schema import BY_NAME
from container.steps.access import Keys
from model_handlers.errors import MmeError
from model_handlers.system.importing import is_installed
from serve.sources.scripts import DEFAULT_SCRIPTS, Scripts
from serve.sources.store import read_credentials

if TYPE_CHECKING:
    from collections.abc import Sequence

    from container.settings.schema import Settings

TLS_OF_HTTP = ("MME_TLS_CERT", "MME_TLS_KEY", "MME_TLS_CLIENT_CA")
TLS_OF_GRPC = ("MME_GRPC_SERVER_CERT", "MME_GRPC_SERVER_KEY", "MME_GRPC_ROOT_CERT")
_SCRIPT_MODEL = "model"  # what Amazon's containers call it
_NOT_MODELS = frozenset({"__MACOSX", "lost+found"})


def check_places(settings: Settings) -> None:
    """Check that what the settings name is there: folders, certificates, keys, and the packages of extras."""
    _check_folders(settings)
    _check_script(settings)
    if settings.trace_url and not is_installed("opentelemetry.exporter.otlp.proto.http"):
        label = f"--trace-url/MME_TRACE_URL='{settings.trace_url}'"
        raise SettingsError(f"{label}: OpenTelemetry is not installed; pip install 'mme[otel]'")
    if settings.grpc_port is not None and not is_installed("hpack"):
        label = f"--grpc-port/MME_GRPC_PORT={settings.grpc_port}"
        raise SettingsError(f"{label}: hpack is not installed; pip install 'mme[grpc]'")
    of_grpc = grpc_certificates(settings) if settings.grpc_port is not None else None
    for certificates in (http_certificates(settings), of_grpc):
        if certificates is not None:
            load_certificates(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificates)
    if settings.key_file is not None:
        try:
            Keys(settings.key_file)
        except MmeError as error:
            raise SettingsError(error.message) from error


def _check_folders(settings: Settings) -> None:
    """Folders that models come from are there, and downloads find one to be unpacked in."""
    in_s3 = settings.mode is Mode.REPOSITORY and settings.repository_urls
    if settings.mode is Mode.STORE and not settings.model_store.startswith("s3://"):
        _check_folder("--model-store/MME_MODEL_STORE", Path(settings.model_store))
    if (in_s3 or settings.mode is Mode.STORE) and not _can_be_written(settings.cache_dir):
        raise SettingsError(
            f"--cache-dir/MME_CACHE_DIR='{settings.cache_dir}': models are unpacked there, and it can't be written; "
            "name a folder that can, or mount one there"
        )
    if settings.cloud_credentials is not None:
        try:
            read_credentials(settings.cloud_credentials)
        except MmeError as error:
            raise SettingsError(f"TRITON_CLOUD_CREDENTIAL_PATH: {error}") from None


def _check_script(settings: Settings) -> None:
    """What is in an archive shows when it is unpacked, for the first model that needs it."""
    script = settings.script_directory
    if script.startswith("/") and not Path(script, settings.script_program).is_file():
        raise SettingsError(f"SAGEMAKER_SUBMIT_DIRECTORY='{script}': there is no {settings.script_program} in it")
    archive = script.removeprefix("file://")
    if archive != script and not Path(archive).is_file():
        raise SettingsError(f"SAGEMAKER_SUBMIT_DIRECTORY='{archive}': there is no such archive; mount it there")
    for repository in settings.repositories if settings.mode is Mode.REPOSITORY else ():
        if isinstance(repository, Path):
            _check_folder("--model-repository/MME_MODEL_REPOSITORY", repository)


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


# -- TLS --------------------------------------------------------------------------------------------------------------


class Certificates(NamedTuple):
    """A server's certificate, its key and authorities for clients'; whether clients show one; the files' variables."""

    certificate: Path
    key: Path
    client_ca: Path | None
    mutual: bool
    variables: tuple[str, str, str]

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in self[:3] if path is not None)


def http_certificates(settings: Settings) -> Certificates | None:
    """Those of HTTP, None where it is plain."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    ca = settings.tls_client_ca
    return Certificates(settings.tls_cert, settings.tls_key, ca, ca is not None, TLS_OF_HTTP)


def grpc_certificates(settings: Settings) -> Certificates | None:
    """Those of gRPC, None where it is plain."""
    cert, key, root = settings.grpc_server_cert, settings.grpc_server_key, settings.grpc_root_cert
    if not settings.grpc_use_ssl or cert is None or key is None:
        return None
    return Certificates(cert, key, root, settings.grpc_use_ssl_mutual, TLS_OF_GRPC)


def load_certificates(context: ssl.SSLContext, files: Certificates) -> None:
    """Have a server's context show these certificates, and want such of clients."""
    cert, key, root = (BY_NAME[name].label for name in files.variables)
    for label, path in ((cert, files.certificate), (key, files.key), (root, files.client_ca)):
        if path is not None and not path.is_file():
            raise SettingsError(f"{label}='{path}': there is no such file")
    try:
        context.load_cert_chain(files.certificate, files.key, password="")
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{cert}='{files.certificate}' and {key}='{files.key}' are no certificate in PEM and its key "
            f"without a password: {error}"
        ) from error
    try:
        if files.client_ca is not None:
            context.load_verify_locations(files.client_ca)
    except OSError as error:
        raise SettingsError(f"{root}='{files.client_ca}' holds no certificates in PEM: {error}") from error
    if files.mutual:
        context.verify_mode = ssl.CERT_REQUIRED
        context.options |= ssl.OP_NO_TICKET  # a ticket would be good for clients that nothing vouches for any more
        context.num_tickets = 0


# -- where models lie --------------------------------------------------------------------------------------------------


def repository_in(folder: Path) -> Path:
    """The folder itself if it holds models, else the one down the only way that does, else the folder."""
    from serve.sources.layout import list_models  # noqa: PLC0415 - NumPy comes with it, which a start elsewhere waits for

    inner = folder
    while not list_models(inner):
        below = [Path(entry) for entry in os.scandir(inner) if entry.is_dir() and not entry.name.startswith(".")]
        if len(below) != 1:
            return folder
        inner = below[0]
    return inner


class SingleModel(NamedTuple):
    """The model of a single-model endpoint: the name it is served under, its files, a warning to log or ""."""

    name: str
    folder: Path
    warning: str = ""


def choose_single_model(model_dir: Path, default_name: str, scripts: Scripts = DEFAULT_SCRIPTS) -> SingleModel:
    """The model of a single-model endpoint: an inference script's, else by Triton's rules."""
    if model_dir.is_dir() and scripts.serves(model_dir):
        return SingleModel(default_name or _SCRIPT_MODEL, model_dir)
    found = _model_directories(model_dir)
    if default_name:
        if default_name not in found:
            raise SettingsError(
                f"ERROR: Directory with provided SAGEMAKER_TRITON_DEFAULT_MODEL_NAME {default_name} does not exist "
                f"in {model_dir}, which holds {_listing(found)}"
            )
        return SingleModel(default_name, model_dir / default_name)
    if len(found) > 1:
        raise SettingsError(
            "ERROR: More than 1 model directory found in model repository. Either provide a single directory or "
            f"set SAGEMAKER_TRITON_DEFAULT_MODEL_NAME to the one to serve: {model_dir} holds {_listing(found)}"
        )
    if not found:
        from serve.sources.layout import advice  # noqa: PLC0415 - it needs the table of backends, and that numpy

        raise SettingsError(
            f"ERROR: No model found in model repository: {model_dir} holds no directory of a model with its versions, "
            f"and no code/{scripts.program}{advice(model_dir, '<model name>/')}"
        )
    warning = (
        "WARNING: No SAGEMAKER_TRITON_DEFAULT_MODEL_NAME provided. "
        f"Starting with the only existing model directory {found[0]}"
    )
    return SingleModel(found[0], model_dir / found[0], warning)


def _model_directories(model_dir: Path) -> list[str]:
    """The names of the directories in `model_dir` that can be models, sorted."""
    if not model_dir.is_dir():
        raise SettingsError(
            f"ERROR: No model found in model repository: {model_dir} is not a directory; give --model-store, "
            "--model-repository or --model-dir (`mme serve --help` has examples)"
        )
    entries = [entry for entry in model_dir.iterdir() if entry.is_dir()]
    misplaced = _without_a_model(model_dir, entries)
    if misplaced:
        raise SettingsError(
            "ERROR: Incorrect directory structure. Model directory needs to contain the top level folder: "
            f"move {model_dir}/{misplaced} to {model_dir}/<model name>/"
        )
    return sorted(e.name for e in entries if not e.name.startswith(".") and e.name not in _NOT_MODELS)


def _without_a_model(model_dir: Path, directories: Sequence[Path]) -> str:
    """What of a model lies in `model_dir` itself, "" where nothing does."""
    if (model_dir / "config.pbtxt").is_file():
        return "config.pbtxt and its versions"
    numbered = [each for each in directories if each.name.isdecimal()]
    if not numbered:
        return ""
    from serve.sources.layout import is_version  # noqa: PLC0415 - as above

    return next((each.name for each in numbered if is_version(each)), "")


def _listing(names: list[str]) -> str:
    return ", ".join(names) if names else "no directories"
