"""Looks that go wrong are told, and are followed by others."""

import asyncio
import errno
import logging

import pytest

from serve.threads import Maintenance


@pytest.mark.parametrize(
    ("error", "told", "traceback"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "raise the limit of open files (ulimit -n)", False),
        (ValueError("a bug"), "a look failed", True),
    ],
)
async def test_a_look_that_fails_is_told_and_followed_by_another(error, told, traceback, caplog):
    """With a traceback where it is a mistake of ours, and with what to do where the system has no more to give."""
    errors, over = [error], asyncio.Event()

    async def look():
        if errors:
            raise errors.pop()
        over.set()

    with caplog.at_level(logging.WARNING, "mme.cache"):
        maintenance = Maintenance("watch", asyncio.get_running_loop(), look, lambda: 0.0)
        maintenance.look()
        await over.wait()
        await maintenance.close()

    [record] = caplog.records
    assert told in record.getMessage()
    assert bool(record.exc_info) == traceback
