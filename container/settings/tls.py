"""TLS of HTTP and of gRPC: which variables need each other, and whether what they name can be used together."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, NamedTuple

from container.settings.kinds import SettingsError
from container.settings.table import BY_NAME

if TYPE_CHECKING:
    from pathlib import Path

    from container.settings import Settings
    from container.settings.reading import Reading

_SWITCH, _MUTUAL = "MME_GRPC_USE_SSL", "MME_GRPC_USE_SSL_MUTUAL"
_GRPC = ("MME_GRPC_SERVER_CERT", "MME_GRPC_SERVER_KEY", "MME_GRPC_ROOT_CERT")
_HTTP = ("MME_TLS_CERT", "MME_TLS_KEY", "MME_TLS_CLIENT_CA")
_KEYS = "MME_KEY_FILE"


class Certificates(NamedTuple):
    """Files of a server's certificate and its key, and of who vouches for clients, where these have to show one.

    Attributes:
        mutual: whether clients have to show one.
        variables: that name the files, for sentences.
    """

    certificate: Path
    key: Path
    client_ca: Path | None
    mutual: bool
    variables: tuple[str, str, str]

    @property
    def paths(self) -> tuple[Path, ...]:
        """Those that are given."""
        return tuple(path for path in self[:3] if path is not None)


def http_certificates(settings: Settings) -> Certificates | None:
    """Those of HTTP, None where it is plain."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    ca = settings.tls_client_ca
    return Certificates(settings.tls_cert, settings.tls_key, ca, ca is not None, _HTTP)


def grpc_certificates(settings: Settings) -> Certificates | None:
    """Those of gRPC, None where it is plain."""
    cert, key, root = settings.grpc_server_cert, settings.grpc_server_key, settings.grpc_root_cert
    if not settings.grpc_use_ssl or cert is None or key is None:
        return None
    return Certificates(cert, key, root, settings.grpc_use_ssl_mutual, _GRPC)


def choose_tls(reading: Reading) -> None:
    """Clients that have to show a certificate are served by TLS, as in Triton; without TLS the files are not read.

    gRPC has HTTP's certificates where its own settings say nothing.
    """
    _check_http(reading)
    _check_platform(reading)
    cert, key, root = _GRPC
    if _HTTP[0] in reading.given and _SWITCH not in reading.given and _MUTUAL not in reading.given:
        reading.parsed[_MUTUAL if _HTTP[2] in reading.given else _SWITCH] = True
        reading.fields["grpc_use_ssl_mutual"] = _HTTP[2] in reading.given
    switch = _MUTUAL if reading.parsed.get(_MUTUAL) else _SWITCH
    if reading.parsed.get(switch):
        reading.fields["grpc_use_ssl"] = True
        _share(reading)
        for name in (cert, key, root) if switch == _MUTUAL else (cert, key):
            if switch in reading.given and name not in reading.given and BY_NAME[name].field not in reading.fields:
                reading.problems.append(f"{reading.label(switch)}: TLS needs {BY_NAME[name].label} as well")
        return
    for name in _GRPC:
        if name in reading.given:
            reading.notices.append(f"{reading.label(name)} has no effect: {BY_NAME[_SWITCH].label} switches TLS on")
    if _HTTP[0] in reading.given and reading.fields.get("grpc_port") is not None:
        reading.notices.append(f"gRPC is served without TLS, since {BY_NAME[_SWITCH].label} says so")


def _share(reading: Reading) -> None:
    """What gRPC lacks, it has from HTTP: a certificate and its key belong together."""
    pairs = [BY_NAME[name].field for name in _GRPC], [reading.fields.get(BY_NAME[name].field) for name in _HTTP]
    (cert, key, root), (http_cert, http_key, http_root) = pairs
    if cert not in reading.fields and key not in reading.fields and http_cert and http_key:
        reading.fields[cert], reading.fields[key] = http_cert, http_key
    if root not in reading.fields and http_root:
        reading.fields[root] = http_root


def _check_http(reading: Reading) -> None:
    cert, key, _ = _HTTP
    given = [name for name in _HTTP if name in reading.given]
    reading.problems.extend(
        f"{reading.label(given[0])}: TLS needs {BY_NAME[name].label} as well"
        for name in (cert, key)
        if given and name not in reading.given
    )
    if _KEYS in reading.given and not given:
        label = BY_NAME[cert].label
        reading.notices.append(f"keys arrive in plain text, since there is no {label}: let a proxy or a mesh have TLS")


def _check_platform(reading: Reading) -> None:
    """SageMaker asks over plain HTTP, and brings no key: such a server would never be healthy."""
    platform = [name for name in ("SAGEMAKER_MULTI_MODEL", "SAGEMAKER_BIND_TO_PORT") if reading.parsed.get(name)]
    reading.problems.extend(
        f"{reading.label(name)}: SageMaker speaks plain HTTP and brings no key, and {platform[0]} is set; unset one of "
        "them"
        for name in (*_HTTP, _KEYS)
        if platform and name in reading.given
    )


def load_certificates(context: ssl.SSLContext, files: Certificates) -> None:
    """Have a server's context show these certificates, and want such of clients.

    Raises:
        SettingsError: naming the variable and the file.
    """
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
