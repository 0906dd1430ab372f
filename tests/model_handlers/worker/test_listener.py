"""An event loop hears every channel; what posts never waits; each end is told once."""

import asyncio
import contextlib
import os
import socket
import threading
from queue import SimpleQueue

import numpy as np
import pytest
import uvloop

from model_handlers.worker import channel as channels
from model_handlers.worker.channel import Channel, DeafError
from model_handlers.worker.memory import INLINE, Frame, FrameReader
from model_handlers.worker.wire import Packing, ProtocolError, encode_message
from tests.event_loop import LoopThread
from tests.waiting import PATIENCE, eventually

pytestmark = pytest.mark.usefixtures("home", "nothing_held")


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def home(request):
    """Where the channels are heard: loops of either kind."""
    loop_thread = LoopThread(request.param())
    yield loop_thread.home
    loop_thread.close()


class Owner:
    """A channel, what came on it, and the other side."""

    def __init__(self, home, take=None):
        ours, self.theirs = socket.socketpair()
        self.came, self.ends = [], []
        self.lost = threading.Event()
        self._take = take
        self.channel = Channel(ours, home, self._taken, self._lost_end)
        self.channel.start()

    def _taken(self, message, _):
        if self._take is not None:
            self._take(message)
        self.came.append(message["n"])

    def _lost_end(self, error):
        self.ends.append(error)
        self.lost.set()

    def say(self, *numbers):
        """From the other side."""
        self.theirs.sendall(b"".join(bytes(encode_message({"n": number})) for number in numbers))

    def close(self):
        """Both sides."""
        self.channel.close()
        self.theirs.close()


@pytest.fixture
def owners(home):
    """Makes them, and closes them in the end."""
    made = []

    def make(take=None):
        made.append(Owner(home, take))
        return made[-1]

    yield make
    for owner in made:
        owner.close()


def heard(end, count):
    """The numbers of the next frames that come out of the other side."""
    reader, found = FrameReader(), []
    while len(found) < count:
        while (frame := reader.next()) is not None:
            found.append(frame[0]["n"])
        if len(found) < count:
            assert reader.receive(end)
    return found


def large(number, size=INLINE + 1):
    """A frame with memory of its own."""
    packing = Packing()
    packing.add(np.zeros(size, np.uint8), "it")
    return Frame({"n": number}, packing)


def test_many_channels(owners):
    """Two hundred, all talking: each one's frames come in order, and none to another."""
    all_of_them = [owners() for _ in range(200)]
    for round_ in range(10):
        for number, owner in enumerate(all_of_them):
            owner.say(*(1000 * number + 10 * round_ + i for i in range(10)))
    for number, owner in enumerate(all_of_them):
        eventually(lambda owner=owner: len(owner.came) == 100)
        assert owner.came == list(range(1000 * number, 1000 * number + 100))


def test_posts_of_many_threads_are_whole(owners):
    """Frames are never mixed, and those of one thread keep their order."""
    owner = owners()

    def post(number):
        for i in range(200):
            frame = large(1000 * number + i) if i % 50 == 0 else Frame({"n": 1000 * number + i, "text": "x" * i * 20})
            owner.channel.post(frame)

    threads = [threading.Thread(target=post, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    found = heard(owner.theirs, 1000)
    for thread in threads:
        thread.join()

    for number in range(5):
        assert [n for n in found if n // 1000 == number] == [1000 * number + i for i in range(200)]


def test_what_posts_never_waits(owners):
    """What the other side does not read is kept, and arrives when it does; others are heard meanwhile."""
    deaf, other = owners(), owners()
    for number in range(300):
        deaf.channel.post(large(number) if number % 100 == 0 else Frame({"n": number, "text": "x" * 10_000}))
    other.say(1)
    eventually(lambda: other.came == [1])
    assert deaf.channel.unsent

    assert heard(deaf.theirs, 300) == list(range(300))
    eventually(lambda: not deaf.channel.unsent)
    deaf.channel.post(Frame({"n": 300}))
    assert heard(deaf.theirs, 1) == [300]


def test_what_reads_nothing_at_all_is_lost(owners, monkeypatch):
    """What may wait has a bound; what is beyond it is told of once, and its frames are given back."""
    monkeypatch.setattr(channels, "_MAX_UNSENT", 1 << 20)
    owner = owners()
    for number in range(400):
        owner.channel.post(Frame({"n": number, "text": "x" * 10_000}))

    assert [type(error) for error in owner.ends] == [DeafError]
    assert "does not read what it is told" in str(owner.ends[0])
    assert not owner.channel.unsent


@pytest.mark.parametrize("what", ["nothing", "frames", "unread frames"])
def test_the_other_side_goes(owners, what):
    """All that it said is taken first; the end is told once; what is posted then is lost without a word."""
    owner = owners()
    if what == "unread frames":  # then the end of the stream comes as a reset
        owner.channel.post(Frame({"n": 0}))
    if what != "nothing":
        owner.say(*range(1000))
    owner.theirs.close()
    assert owner.lost.wait(PATIENCE)
    owner.channel.post(large(1))

    assert owner.ends == [None]
    assert owner.came == ([] if what == "nothing" else list(range(1000)))


def test_close_in_the_middle(owners):
    """Nothing is told, unsent frames give their descriptors back, and nothing comes any more."""
    owner = owners()
    for number in range(300):
        owner.channel.post(large(number))
    assert owner.channel.unsent
    assert owner.channel.close()
    assert not owner.channel.close()
    owner.channel.post(large(0))
    owner.channel.drain()

    assert owner.ends == []
    assert not owner.channel.unsent


def test_close_by_what_takes(owners):
    """A channel may be closed from within, by what came on it."""
    closing = owners(lambda _: closing.channel.close())
    closing.say(1)
    eventually(lambda: closing.channel.closed)
    other = owners()
    other.say(2)
    eventually(lambda: other.came == [2])

    assert closing.ends == []


@pytest.mark.parametrize("held", [False, True])
def test_drain_takes_what_came(owners, held):
    """To the end, or as far as it came where something else still holds the other side; then the channel is closed."""
    gate = threading.Event()
    owner = owners(lambda _: gate.wait(PATIENCE))
    owner.say(*range(5000))
    keeps = owner.theirs.dup() if held else None
    owner.theirs.close()
    threading.Timer(0.05, gate.set).start()
    owner.channel.drain()

    assert owner.came == list(range(5000))
    assert owner.channel.closed
    assert owner.ends == ([] if held else [None])
    if keeps is not None:
        keeps.close()


def test_what_cannot_be_taken_ends_the_channel_alone(owners):
    """Whatever is raised, by a frame or by what takes it, is told; other channels go on."""

    def refuse(message):
        raise ZeroDivisionError(message["n"])

    refusing, garbled, other = owners(refuse), owners(), owners()
    refusing.say(1, 2)
    garbled.theirs.sendall(b"\xff\xff\xff\xff")
    assert refusing.lost.wait(PATIENCE)
    assert garbled.lost.wait(PATIENCE)
    other.say(3)
    eventually(lambda: other.came == [3])

    assert [type(error) for error in refusing.ends + garbled.ends] == [ZeroDivisionError, ProtocolError]
    assert refusing.came == []


def test_channels_come_and_go(home):
    """Numbers of descriptors are used again at once: none hears what was meant for another."""
    for number in range(300):
        owner = Owner(home)
        owner.say(number)
        if number % 3 == 0:
            owner.close()
            continue
        eventually(lambda owner=owner: owner.came)
        owner.close()
        assert owner.came == [number]


def test_a_channel_that_cannot_be_heard_is_lost(home):
    """The system's refusal is told."""
    ours, theirs = socket.socketpair()
    told = SimpleQueue()
    channel = Channel(ours, home, print, told.put)
    with theirs, open(os.devnull, "rb") as null:  # noqa: PTH123 - epoll refuses it
        os.dup2(null.fileno(), ours.fileno())
        channel.start()
        assert isinstance(told.get(timeout=PATIENCE), PermissionError)

    assert channel.closed


def test_a_loop_reads_what_is_small(owners):
    """A thread reads what is large, and nothing that came behind it is taken before."""
    places = []
    owner = owners(lambda _: places.append(threading.current_thread().name))
    for number in range(300):
        if number % 100 == 50:
            frame = large(number)
            with contextlib.closing(frame):
                socket.send_fds(owner.theirs, [frame.data], [frame.fd])
        else:
            owner.say(number)
    owner.theirs.sendall(encode_message({"n": 300, "text": "x" * INLINE}))
    owner.say(301)
    eventually(lambda: len(owner.came) == 302)
    owner.say(302)
    eventually(lambda: len(owner.came) == 303)

    assert owner.came == list(range(303))
    assert not [place for place in map(places.__getitem__, (50, 150, 250, 300)) if not place.startswith("work")]
    assert {places[number] for number in (0, 49, 302)} == {"loop"}


def test_what_talks_faster_than_a_loop_hears_waits(owners, home):
    """Nothing is read before the loop has done with what came before it."""
    owner, busy, gate = owners(), threading.Event(), threading.Event()
    home.loop.call_soon_threadsafe(lambda: (busy.set(), gate.wait(PATIENCE)))
    assert busy.wait(PATIENCE)
    owner.theirs.setblocking(False)
    said = 0
    with contextlib.suppress(BlockingIOError):  # its buffer is full
        while True:
            owner.theirs.send(encode_message({"n": said}))
            said += 1
    assert owner.came == []
    gate.set()
    eventually(lambda: len(owner.came) == said)


def test_what_is_handed_more_than_is_let_go_of_waits(owners, monkeypatch):
    """Large frames are taken as their owners go; what keeps them for good holds each up for a moment alone."""
    monkeypatch.setattr(channels, "_MOST_ALIVE", 10)
    monkeypatch.setattr(channels, "_HELD_SECONDS", PATIENCE)
    kept = []
    owner = owners(lambda _: (kept.append(np.zeros(1)), owner.channel.keep(kept[-1], 4)))

    def say(*numbers):
        for number in numbers:
            with contextlib.closing(large(number)) as frame:
                socket.send_fds(owner.theirs, [frame.data], [frame.fd])

    say(*range(12))
    eventually(lambda: len(owner.came) == 3)
    kept.pop(0)
    eventually(lambda: len(owner.came) == 4)
    del kept[:2]
    eventually(lambda: len(owner.came) == 6)
    monkeypatch.setattr(channels, "_HELD_SECONDS", 0)
    kept.pop(0)
    eventually(lambda: len(owner.came) == 12)

    assert owner.came == list(range(12))
