"""When workers are started again, and when not: ends of workers one after the other, and what each left behind."""

from __future__ import annotations

import os

import pytest

from container.process.master import LastWords, WorkerRestarts


class Life:
    """Workers of one master, and the master's clock."""

    def __init__(self):
        self.now = 0.0
        self.restarts = WorkerRestarts(lambda: self.now)

    def worker(self, seconds=0.0, leaves=lambda _: None):
        """One that lives for so long; the words that it leaves, and why there is to be none after it."""
        words = LastWords()
        self.restarts.begins(words)
        leaves(words)
        self.now += words.pause + seconds
        return words, self.restarts.ends(words)


@pytest.fixture
def life():
    """That of one master."""
    return Life()


def test_five_that_never_served_are_the_last(life):
    """Pauses double from half a second; the fifth end in a row gives up, with the last error and what was loaded."""

    def dies(words):
        words.loads(["b", "a"])
        words.fails(ValueError("no such endpoint"))

    ends = [life.worker(leaves=dies) for _ in range(5)]

    assert [words.pause for words, _ in ends] == [0, 0.5, 1, 2, 4]
    assert [reason for _, reason in ends[:4]] == ["", "", "", ""]
    assert ends[4][1] == (
        "5 worker processes in a row ended before /ping was answered 200, the last one while it loaded 'a', 'b': "
        "this server can't start; the last error: ValueError: no such endpoint"
    )


def test_one_that_lives_where_nothing_asks_for_a_ping_has_served(life):
    """Other platforms ask for other routes. One that ends in a long load has not."""
    assert [life.worker(61)[1] for _ in range(6)] == [""] * 6
    assert [life.worker(61, lambda words: words.loads(["a"]))[1] != "" for _ in range(5)] == [False] * 4 + [True]


def test_one_that_served_is_always_followed(life):
    """However many end: the pauses double to half a minute, and begin again behind one that lived for long."""
    ends = [life.worker(leaves=LastWords.serves) for _ in range(12)]
    assert [reason for _, reason in ends] == [""] * 12
    assert [words.pause for words, _ in ends[:5]] == [0, 0.5, 1, 2, 4]
    assert ends[-1][0].pause == 30

    life.worker(61, LastWords.serves)
    assert life.worker()[0].pause == 0.5


def test_one_that_served_makes_the_ends_before_it_an_accident(life):
    """Only those in a row count."""
    reasons = [life.worker(leaves=LastWords.serves if number == 4 else lambda _: None)[1] for number in range(9)]
    assert reasons == [""] * 9
    assert life.worker()[1]


def test_one_that_was_asked_to_end_does_not_count(life):
    """Neither as one that failed nor with a pause: a lost GPU, a reload, an end of the server."""
    assert [life.worker(leaves=LastWords.asked)[1] for _ in range(9)] == [""] * 9
    assert life.worker()[0].pause == 0


def test_what_was_loaded_at_two_ends_is_left_out(life):
    """One end may be an accident; ends of workers that served say nothing."""
    life.worker(leaves=lambda words: (words.serves(), words.loads(["c"])))
    life.worker(leaves=lambda words: words.loads(["a", "b"]))
    assert life.worker(leaves=lambda words: words.loads(["a", "c"]))[0].left_out == frozenset()
    assert life.worker()[0].left_out == {"a"}


def test_words_are_left_by_a_process_that_is_gone():
    """They lie in memory that both have; the names of too many loads are left out, a long error is cut."""
    words = LastWords()
    child = os.fork()
    if not child:
        words.serves()
        words.loads(["täst", "b"])
        words.fails(ValueError("x" * 9000))
        os._exit(0)
    os.waitpid(child, 0)

    assert words.has_served
    assert not words.was_asked
    assert words.loading == {"täst", "b"}
    assert words.error.startswith("ValueError: xxx")
    assert len(words.error) == 1000
    words.loads(["y" * 1000] * 70)
    assert words.loading == frozenset()
    words.close()
