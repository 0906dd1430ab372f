"""What servers of these tests end, tests of others expect to be there."""

import pytest

from serve.threads import ThreadPool


@pytest.fixture(scope="module", autouse=True)
def shared_thread_again():
    """The thread that starts others, which the last server of a process ends."""
    yield
    (pool := ThreadPool("again")).submit(int)
    pool.shutdown()
