"""Settings of TLS and keys: what needs what, what gRPC has of HTTP, and where none of them can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from container.settings import SettingsError, read_settings

PAIR = {"MME_TLS_CERT": "/tls.crt", "MME_TLS_KEY": "/tls.key"}
OWN = {"MME_GRPC_SERVER_CERT": "/own.crt", "MME_GRPC_SERVER_KEY": "/own.key"}
CA = {"MME_TLS_CLIENT_CA": "/ca.crt"}


def of_grpc(settings):
    """How it has TLS."""
    found = settings.grpc_server_cert, settings.grpc_server_key, settings.grpc_root_cert
    return settings.grpc_use_ssl, settings.grpc_use_ssl_mutual, *(path and str(path) for path in found)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (False, False, None, None, None)),
        (PAIR, (True, False, "/tls.crt", "/tls.key", None)),
        ({**PAIR, **CA}, (True, True, "/tls.crt", "/tls.key", "/ca.crt")),
        ({**PAIR, **OWN}, (True, False, "/own.crt", "/own.key", None)),
        ({**PAIR, **CA, "MME_GRPC_USE_SSL": "true"}, (True, False, "/tls.crt", "/tls.key", "/ca.crt")),
        ({**PAIR, "MME_GRPC_USE_SSL": "false"}, (False, False, None, None, None)),
        ({**OWN, "MME_GRPC_USE_SSL": "true"}, (True, False, "/own.crt", "/own.key", None)),
    ],
)
def test_grpc_has_the_certificates_of_http_unless_it_has_its_own(environ, expected):
    """And none where its own switch is off."""
    settings = read_settings({**environ, "MME_GRPC_PORT": "8001"})
    assert of_grpc(settings) == expected
    assert settings.tls_cert == (Path("/tls.crt") if "MME_TLS_CERT" in environ else None)


@pytest.mark.parametrize("name", ["MME_TLS_CERT", "MME_TLS_KEY", "MME_TLS_CLIENT_CA"])
def test_tls_needs_a_certificate_and_its_key(name):
    """Nobody is to believe that a port has TLS which has none."""
    with pytest.raises(SettingsError, match=r"TLS needs --tls-(cert/MME_TLS_CERT|key/MME_TLS_KEY) as well"):
        read_settings({name: "/x"})


@pytest.mark.parametrize("platform", [{"SAGEMAKER_MULTI_MODEL": "true"}, {"SAGEMAKER_BIND_TO_PORT": "8080"}])
@pytest.mark.parametrize("environ", [PAIR, {"MME_KEY_FILE": "/keys"}, {**PAIR, **CA}])
def test_sagemaker_has_neither_tls_nor_keys(platform, environ):
    """Each variable is named, and the platform's that speaks against it."""
    with pytest.raises(SettingsError) as raised:
        read_settings({**platform, **environ})
    for name in environ:
        assert f"{name}: SageMaker speaks plain HTTP and brings no key, and {next(iter(platform))} is set" in str(
            raised.value
        )


def test_keys_in_plain_text_are_told():
    """A proxy may have the TLS; with a certificate there is nothing to tell."""
    told = "keys arrive in plain text"
    assert any(told in notice for notice in read_settings({"MME_KEY_FILE": "/keys"}).notices)
    assert not any(told in notice for notice in read_settings({"MME_KEY_FILE": "/keys", **PAIR}).notices)
