"""A program that runs to its end beside the server, for a model: an installer. Runs on the thread that waits for it.

It hangs on a leash as a model's process does, so it ends with us however we end, and with all that it started. What it
prints goes line by line into the log, under the model's name.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError
from model_handlers.system.system_limits import advised
from model_handlers.worker.fork_client import FORKS
from model_handlers.worker.leash import OF_OTHERS, Leash, signal_name
from model_handlers.worker.output import Output

if TYPE_CHECKING:
    from model_handlers.cancel_token import CancelToken
    from model_handlers.worker.fork_server import Program

_WORDS = 3  # lines of standard error in an error message


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended.

    Attributes:
        code: its exit code, -n for signal n, None where it ended together with the fork server.
        words: the last lines that it wrote to standard error.
    """

    code: int | None
    words: list[str]

    def __str__(self) -> str:
        words = " | ".join(self.words[-_WORDS:])
        return self._how() + (f": {words}" if words else "")

    @property
    def kind(self) -> Kind:
        """What it means where it did not do its work: nothing of the model, where somebody ended it."""
        others = self.code is None or -self.code in OF_OTHERS
        return Kind.EXECUTION_FAILED if others else Kind.INVALID_MODEL

    def _how(self) -> str:
        if self.code is None:
            return "ended together with the process that it was forked from; load the model again"
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        again = "; load the model again" if -self.code in OF_OTHERS else ""
        return f"was killed by {signal_name(-self.code)}{again}"


def run(program: Program, model: str, name: str, token: CancelToken) -> Ended:
    """Execute a program and wait for its end.

    Args:
        program: it.
        model: the model that it runs for.
        name: what the process is called.
        token: ends the program when it is cancelled.

    Raises:
        MmeError: UNAVAILABLE when no process can be had; as `CancelToken.check`.
    """
    with contextlib.ExitStack() as held:
        try:
            output = Output(model, name)
            held.callback(output.close)
            ours, theirs = map(held.enter_context, socket.socketpair())
            FORKS.fork(name, [theirs.fileno(), *output.writers], program)
        except OSError as error:
            raise _no_process(model, error) from error
        theirs.close()
        output.start()
        leash = Leash(ours)
        held.callback(leash.let_go)
        token.check()

        def over(seconds: float) -> Leash | None:
            leash.wait(seconds)
            return leash if leash.over else None

        token.wait(over)
        if leash.refused:
            raise _no_process(model, leash.refused)
        return Ended(leash.code, output.last_words())


def _no_process(model: str, error: OSError) -> MmeError:
    return MmeError(Kind.UNAVAILABLE, f"model '{model}': no process can be started for it: {advised(error)}")
