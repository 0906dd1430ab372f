"""Whatever is asked on one connection and however it is answered, the client parses exactly what was said."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SIZES = (0, 1, 15, 16, 4096, 65536, 65537, 300_000)


@dataclass
class Said:
    """One request and how it is answered: `parts` as they are, or one by one with turns of the loop between."""

    method: str
    status: int
    streamed: bool
    parts: list[bytes]
    turns: list[int]
    views: bool
    body: bytes

    def request(self, number, lines=b"") -> bytes:
        """On the wire."""
        head = b"%s /%d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%b\r\n"
        return head % (self.method.encode(), number, len(self.body), lines) + self.body

    @property
    def pieces(self):
        """What the handler says."""
        return [memoryview(part) for part in self.parts] if self.views else self.parts

    @property
    def empty(self) -> bool:
        """Whether the answer has no body."""
        return self.method == "HEAD" or self.status in (204, 304)

    def steps(self, exchange):
        """What the handler does, one after another."""
        if not self.streamed:
            return [lambda: exchange.respond(self.status, b"", self.pieces)]
        writes = [lambda piece=piece: exchange.write(piece) for piece in self.pieces]
        return [lambda: exchange.begin(self.status, b""), *writes, exchange.end]


@st.composite
def answers(draw):
    """A request and its answer."""
    parts = [
        bytes([65 + draw(st.integers(0, 25))]) * size for size in draw(st.lists(st.sampled_from(SIZES), max_size=5))
    ]
    return Said(
        draw(st.sampled_from(["GET", "POST", "GET", "POST", "HEAD"])),
        draw(st.sampled_from([200, 200, 200, 404, 507, 204, 304])),
        draw(st.booleans()),
        parts,
        draw(st.lists(st.integers(0, 2), min_size=len(parts) + 2, max_size=len(parts) + 2)),
        draw(st.booleans()),
        draw(st.sampled_from([b"", b"body", b"GET / HTTP/1.1\r\n\r\n"])),
    )


class Speaker:
    """A handler that says what a test wants, in its own time."""

    def __init__(self) -> None:
        self.answers: list[Said] = []
        self.left = 0
        self.sweep = None

    def __call__(self, exchange) -> None:
        exchange.on_disconnect = self.leave
        said = self.answers[int(exchange.target[1:])]
        assert (exchange.method, exchange.body) == (said.method, said.body)
        self.go_on(said.steps(exchange), list(said.turns))

    def leave(self) -> None:
        """Some client left."""
        self.left += 1

    def go_on(self, steps, turns) -> None:
        """Do the next step now, or after so many turns of the loop and sweeps."""
        while steps:
            if turns[0]:
                turns[0] -= 1
                self.sweep()
                self.loop.call_soon(self.go_on, steps, turns)
                return
            turns.pop(0)
            steps.pop(0)()


def heard(client, said):
    """Read the answer that was said; what it says of the connection."""
    while (answer := client.answer("HEAD" if said.empty else "GET")).status == 100:
        pass  # asked whether it reads
    assert answer.status == said.status
    assert answer.body == (b"" if said.empty else b"".join(said.parts))
    if said.streamed and not said.empty:
        assert answer.parts == [part for part in said.parts if part]
    return answer.headers.get("connection")


@pytest.mark.parametrize("end", ["keep", "close", "half-close"])
def test_any_interleaving(serve, end):
    """Plain and streamed answers of all sizes, at once or late, pipelined in any cutting, come in order and whole."""
    speaker = Speaker()
    server = serve(speaker, body_timeout=1e9)
    speaker.sweep, speaker.loop = server.elapse_here, server.loop

    @given(st.lists(answers(), min_size=1, max_size=8), st.lists(st.integers(0, 2000), max_size=6), st.integers(0, 3))
    @settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
    def converse(said, places, familiar):
        speaker.answers = said
        client = server.connect()
        for _ in range(familiar):
            assert heard(client.send(said[0].request(0)), said[0]) is None
        closing = [b"Connection: close\r\n" if end == "close" and each is said[-1] else b"" for each in said]
        raw = b"".join(each.request(*numbered) for each, numbered in zip(said, enumerate(closing), strict=True))
        for start, stop in pairwise([0, *sorted(place % len(raw) for place in places), len(raw)]):
            client.send(raw[start:stop])
        if end == "half-close":
            client.done_sending()
        for each in said[:-1]:
            assert heard(client, each) is None
        last = heard(client, said[-1])
        if end == "keep":
            assert last is None
            assert heard(client.send(said[0].request(0)), said[0]) is None
        else:
            assert last == "close" or end == "half-close"  # which may come after the head of the last
            assert client.at_end()
        client.close()

    converse()
    server.empty()
    assert speaker.left == 0
