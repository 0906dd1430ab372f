"""Requests that came to a model's process together, and are executed one by one: the process's side of it.

Two messages cost more than many a model's execution. So where requests wait for a quick model that executes each for
itself, several cross together, and so do their answers. None is the worse for it:

- In front of their inputs lies how many were begun. Should the process die, the other side knows who never was.
- What is answered already does not wait for a slow one behind it: a thread looks every few milliseconds, as long as
  such requests come, and sends it as what a model says of its own accord.
- Nor for anything that the model asks the server: that may be what somebody does who waits for one of these answers.
- Those behind a slow one do not wait for it either: the thread gives them back, for whoever else can execute them. So
  each execution has all of the time that one may take, but for a moment.

The thread and the executing one share two deques, whose single operations need no lock: who takes an answer, sends it,
and who takes a request, begins it or gives it back.
"""

from __future__ import annotations

import struct
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from model_handlers.requests import PUT_BACK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from model_handlers.requests import ModelRequest
    from model_handlers.tensor import Array
    from model_handlers.worker.batches import Answer
    from model_handlers.worker.events import ResponderInChild

    # Executes one request, and never raises. The flag says that the answer, None where the responder has got it or
    # will, is written before the model executes anything else.
    Execute = Callable[[ModelRequest, ResponderInChild, bool], Answer]

PROGRESS = struct.Struct("<q")  # how many were begun
_now = time.perf_counter_ns
_TICK_SECONDS = 0.01
_QUIET_TICKS = 100  # then nobody looks any more, until requests cross together again


class OneByOne:
    """Executes them, on one thread."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._waiting: deque[tuple[int, ModelRequest, ResponderInChild]] = deque()
        self._unsent: deque[tuple[int, ResponderInChild, Answer]] = deque()
        self._rounds = 0
        self._executes = False
        self._watched = False

    def run(
        self, requests: Sequence[ModelRequest], responders: Sequence[ResponderInChild], shared: Array
    ) -> tuple[list[Answer], int]:
        """Execute them.

        Args:
            requests: who came together.
            responders: theirs.
            shared: the memory that they came in, with room for PROGRESS in front.

        Returns:
            the answer to each, None where it was sent or will be, PUT_BACK for who was given back; and how long all of
            them took, in nanoseconds.
        """
        answers: list[Answer] = [PUT_BACK] * len(requests)
        last = len(requests) - 1
        following = zip(range(len(requests)), requests, responders, strict=True)
        index, request, responder = next(following)  # which is begun here whatever happens
        self._waiting.extend(following)
        self._rounds += 1
        self._executes = True
        if len(requests) > 1 and not self._watched:
            self._watch()
        progress = shared.data
        began = _now()
        while True:
            PROGRESS.pack_into(progress, 0, index + 1)
            answers[index] = None
            answer = self._execute(request, responder, index == last)
            if index == last:  # nobody else is to send it: it may lie in arrays that the model writes into next
                answers[index] = answer
            elif answer is not None:
                self._unsent.append((index, responder, answer))
            try:
                index, request, responder = self._waiting.popleft()
            except IndexError:
                break
        took = _now() - began
        self._executes = False
        with suppress(IndexError):
            while True:
                index, _, answer = self._unsent.popleft()
                answers[index] = answer
        return answers, took

    def send_answered(self) -> None:
        """Send what is answered, now. On any thread."""
        with suppress(IndexError):
            while True:
                _, responder, answer = self._unsent.popleft()
                responder.send(answer, final=True)

    def _give_back(self) -> None:
        """Give back those that are not begun, the last first."""
        with suppress(IndexError):
            while True:
                _, _, responder = self._waiting.pop()
                responder.put_back()

    def _watch(self) -> None:
        self._watched = True
        try:
            threading.Thread(target=self._look, name="mme answers", daemon=True).start()
        except RuntimeError:  # no thread is to be had: the answers wait for one another
            self._watched = False

    def _look(self) -> None:
        quiet = 0
        while quiet < _QUIET_TICKS:
            round_ = self._rounds
            time.sleep(_TICK_SECONDS)
            quiet = quiet + 1 if round_ == self._rounds and not self._executes else 0
            if round_ == self._rounds and self._executes:
                try:
                    self._give_back()
                    self.send_answered()
                except Exception:  # noqa: BLE001 - whatever one answer is, the others are to be sent
                    traceback.print_exc()
        self._watched = False
        if self._executes:  # some may have come in this very moment, and found it watched
            self._watch()
