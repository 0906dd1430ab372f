"""Credentials of repositories in S3 out of a file, as Triton's TRITON_CLOUD_CREDENTIAL_PATH names one.

    {"s3": {"": {"key_id": "…", "secret_key": "…"}, "s3://bucket/prefix": {"profile": "…", "region": "…"}}}

Of the prefixes that a repository's URL begins with the longest counts. What the file has of other clouds is let be.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Fields of the file → what a session of boto3 calls them.
_FIELDS = {
    "key_id": "aws_access_key_id",
    "secret_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "region": "region_name",
    "profile": "profile_name",
}
Credentials = dict[str, str]  # arguments of a session of boto3; none for those that boto3 finds by itself
NO_CREDENTIALS: Mapping[str, str] = {}  # but those that boto3 finds


def read_credentials(path: Path) -> dict[str, Credentials]:
    """Prefix → the credentials for what begins with it.

    Raises:
        MmeError: INVALID_ARGUMENT when the file can't be read, or is not of that form.
    """
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise invalid_argument(f"the credentials in {path} can't be read: {error}") from None
    known = document.get("s3", {}) if isinstance(document, dict) else None
    if not isinstance(known, dict) or not all(map(_is_entry, known.values())):
        entry = f'{{"s3": {{"s3://bucket": {{{", ".join(f"{chr(34)}{name}{chr(34)}: …" for name in _FIELDS)}}}}}}}'
        raise invalid_argument(f"the credentials in {path} are not of the form {entry}, all of them texts")
    for prefix, entry in known.items():
        if bool(entry.get("key_id")) != bool(entry.get("secret_key")):
            raise invalid_argument(f"the credentials in {path} have half a key for '{prefix}': key_id and secret_key")
    return {
        prefix: {_FIELDS[name]: text for name, text in entry.items() if name in _FIELDS and text}
        for prefix, entry in known.items()
    }


def credentials_for(url: str, known: Mapping[str, Credentials]) -> Credentials:
    """Those for what is at a URL."""
    prefixes = [prefix for prefix in known if url.startswith(prefix)]
    return known[max(prefixes, key=len)] if prefixes else {}


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(value, str) for value in entry.values())
