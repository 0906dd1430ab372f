"""TLS of gRPC: which variables need each other, and whether what they name can be used together."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from container.settings.kinds import SettingsError
from container.settings.table import BY_NAME

if TYPE_CHECKING:
    from pathlib import Path

    from container.settings.reading import Reading

_SWITCH, _MUTUAL = "MME_GRPC_USE_SSL", "MME_GRPC_USE_SSL_MUTUAL"
_CERT, _KEY, _ROOT = "MME_GRPC_SERVER_CERT", "MME_GRPC_SERVER_KEY", "MME_GRPC_ROOT_CERT"


def choose_tls(reading: Reading) -> None:
    """Clients that have to show a certificate are served by TLS, as in Triton; without TLS nobody reads the files."""
    switch = _MUTUAL if reading.parsed.get(_MUTUAL) else _SWITCH
    if reading.parsed.get(switch):
        reading.fields["grpc_use_ssl"] = True
        needed = (_CERT, _KEY, _ROOT) if switch == _MUTUAL else (_CERT, _KEY)
        for name in needed:
            if name not in reading.given:
                reading.problems.append(f"{reading.label(switch)}: TLS needs {BY_NAME[name].label} as well")
        return
    for name in (_CERT, _KEY, _ROOT):
        if name in reading.given:
            reading.notices.append(f"{reading.label(name)} has no effect: {BY_NAME[_SWITCH].label} switches TLS on")


def check_tls(cert: Path, key: Path, root: Path | None) -> None:
    """Check that the files are certificates and their key, before the server starts.

    Raises:
        SettingsError: naming the variable and the file.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name, path in ((_CERT, cert), (_KEY, key), (_ROOT, root)):
        if path is not None and not path.is_file():
            raise SettingsError(f"{BY_NAME[name].label}='{path}': there is no such file")
    try:
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{BY_NAME[_CERT].label}='{cert}' and {BY_NAME[_KEY].label}='{key}' are no certificate in PEM and its key "
            f"without a password: {error}"
        ) from error
    try:
        if root is not None:
            context.load_verify_locations(root)
    except OSError as error:
        raise SettingsError(f"{BY_NAME[_ROOT].label}='{root}' holds no certificates in PEM: {error}") from error
