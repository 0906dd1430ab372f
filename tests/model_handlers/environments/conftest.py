"""Archives by their members, and patience."""

import gzip
import io
import tarfile

import pytest

from model_handlers.environment import Patience
from model_handlers.system.threads import NEVER, CancelToken


@pytest.fixture
def patience():
    """That of a model `m` which is wanted for a minute."""
    return Patience("m", 60, NEVER)


@pytest.fixture
def ends_once():
    """Patience that ends by a deadline or a cancellation as soon as a condition holds."""

    def ends_once(condition, why):
        def look():
            over = bool(condition())
            if over and why == "deadline":
                patience.deadline = 0
            return over and why == "cancelled"

        patience = Patience("m", 60, CancelToken(cancelled=look))
        return patience

    return ends_once


def member_of(name, content=b"", **fields):
    """A member of an archive; `fields` are those of its header."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    return member, content


def tar_of(*members, **options):
    """A tar of members: pairs (name, content), or made by `member_of`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **options) as archive:
        for member, content in members:
            info = member if isinstance(member, tarfile.TarInfo) else member_of(member, content)[0]
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


class Archives:
    """The above by one name, for tests that cannot import from here."""

    member = staticmethod(member_of)
    tar = staticmethod(tar_of)

    @staticmethod
    def link(name, to, **fields):
        """A symbolic link."""
        return member_of(name, type=tarfile.SYMTYPE, linkname=to, **fields)

    @staticmethod
    def hard_link(name, to):
        """A hard link."""
        return member_of(name, type=tarfile.LNKTYPE, linkname=to)

    @staticmethod
    def packed(*members, **options):
        """The same as a tar, compressed."""
        return gzip.compress(tar_of(*members, **options), 1)


@pytest.fixture(scope="session")
def archives():
    """See `Archives`."""
    return Archives
