"""Certificates for servers on this machine and their clients, made when a test wants them."""

from __future__ import annotations

import datetime as dt
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_HERE = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]


class Authority:
    """Somebody who vouches for others, in files.

    Attributes:
        certificate: its own.
    """

    def __init__(self, folder, name):
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = folder / f"{name}.crt"
        self._write(self.certificate, self._signed(self._name, self._key.public_key(), authority=True))

    def vouch(self, name):
        """The files of a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate, private = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        self._write(certificate, self._signed(subject, key.public_key(), authority=False))
        form = serialization.PrivateFormat.PKCS8
        private.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        return certificate, private

    def _signed(self, subject, public_key, *, authority):
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(_HERE), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _write(self, path, certificate):
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
