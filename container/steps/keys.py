"""Keys of clients: which there are, by a file that holds their hashes, and what each may use.

    sha256:<64 hexadecimal digits> inference,health     # a comment
    sha256:<64 hexadecimal digits> *

A client sends `Authorization: Bearer KEY`, over HTTP and as metadata over gRPC. What a request wants is a category of
`restrictions`; one that is in none wants a key all the same, whatever that is for. Keys are long and drawn by chance,
so that a plain hash of one can't be reversed.
"""

from __future__ import annotations

import hmac
import re
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from container.process.followed import Followed
from container.steps.restrictions import CATEGORIES
from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from pathlib import Path

ALL = "*"
MOST_KEYS = 1000
_MOST_BYTES = 1 << 20
_LINE = re.compile(r"sha256:([0-9A-Fa-f]{64})[ \t]+(\S+)")
_BEARER = re.compile(r"bearer +([!-~]+)", re.IGNORECASE)
_NONE = "this needs a key: send it as `Authorization: Bearer KEY`"
_UNKNOWN = "the server does not know this key: send one of its key file's as `Authorization: Bearer KEY`"


class Entry(NamedTuple):
    """A key: the hexadecimal digits of its SHA-256, and the categories that it is for."""

    digest: str
    roles: frozenset[str]


class Denial(NamedTuple):
    """Why a request is not let in.

    Attributes:
        known: whether its key is known, and only not for this.
        sentence: for the client.
    """

    known: bool
    sentence: str


def digest_of(key: str) -> str:
    """What stands for a key in the file."""
    return sha256(key.encode()).hexdigest()


def parse_roles(text: str) -> frozenset[str]:
    """Categories between commas, or `*`.

    Raises:
        ValueError: with what they may be.
    """
    roles = frozenset(text.split(","))
    if roles != {ALL} and not roles <= set(CATEGORIES):
        raise ValueError(f"{ALL}, or some of {', '.join(CATEGORIES)} between commas, without spaces")
    return roles


def parse_keys(text: str) -> tuple[Entry, ...]:
    """The keys of a file. What is wrong is named by its line: what stands there may be a key itself.

    Raises:
        ValueError: a line is no key's.
    """
    found: dict[str, Entry] = {}
    for number, whole in enumerate(text.splitlines(), 1):
        line = whole.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number} is not `sha256:HASH CATEGORY,…`, as `mme key` prints it")
        digest = match[1].lower()
        if digest in found:
            raise ValueError(f"line {number} repeats a key: give it its categories in one line")
        try:
            found[digest] = Entry(digest, parse_roles(match[2]))
        except ValueError as error:
            raise ValueError(f"line {number}: a key is for {error}") from None
        if len(found) > MOST_KEYS:
            raise ValueError(f"more than {MOST_KEYS} keys")
    return tuple(found.values())


class Keys(Followed):
    """The keys of a file, as it is now.

    Args:
        path: the file's.

    Raises:
        MmeError: INVALID_ARGUMENT when it can't be read, or a line is no key's.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(f"keys of '{path}'", [path])
        self._path = path
        self._entries: tuple[Entry, ...] = ()
        self.read()

    def read(self) -> None:
        """Read the file."""
        label = f"--key-file/MME_KEY_FILE='{self._path}'"
        try:
            with self._path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise invalid_argument(f"{label}: {error.strerror}") from error
        if len(data) > _MOST_BYTES:
            raise invalid_argument(f"{label}: the file has more than {_MOST_BYTES} bytes")
        try:
            self._entries = parse_keys(data.decode())
        except UnicodeDecodeError as error:
            raise invalid_argument(f"{label}: the file is no text") from error
        except ValueError as error:
            raise invalid_argument(f"{label}: {error}") from None

    def denial(self, role: str, authorization: str | None) -> Denial | None:
        """Return why a request is not let in, None where it is.

        Args:
            role: the category of what it wants, "" for none.
            authorization: what it says under that name, if anything.
        """
        if authorization is None:
            return Denial(known=False, sentence=_NONE)
        match = _BEARER.fullmatch(authorization.strip())
        entry = self._entry(match[1]) if match is not None else None
        if entry is None:
            return Denial(known=False, sentence=_UNKNOWN)
        if not role or role in entry.roles or ALL in entry.roles:
            return None
        return Denial(known=True, sentence=f"the key is not for {role}: it is for {', '.join(sorted(entry.roles))}")

    def _entry(self, key: str) -> Entry | None:
        """The key's entry. All are looked at, each in constant time: how long it takes tells nothing."""
        digest = digest_of(key)
        found = None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        return found
