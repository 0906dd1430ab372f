"""What the fork server is asked for: a process by its name, which is a fork or executes a program.

PURE but for `execute`, which runs in the new process. An order is one packet of JSON:

    {"name": "…", "fds": n, "program": null or the fields of a `Program`}
"""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NoReturn

from model_handlers.worker.wire_json import dumps, loads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_ORDER = 64 << 10  # bytes of a packet
_NOT_EXECUTED = 127  # the exit code by which shells say so


@dataclass(frozen=True, slots=True)
class Program:
    """An executable and what surrounds it.

    Attributes:
        arguments: the executable, by its path, and its arguments.
        directory: where it runs, "" for where the server runs.
        variables: environment variables to set, on top of the server's own.
        removed: environment variables to take away.
        in_front: search paths (PATH, …) and what is looked at before all that is in them.
        niceness: its priority; models' processes have 0.
        speaks: whether it gets the sockets, by their numbers behind the arguments. Otherwise it gets its output alone.
    """

    arguments: Sequence[str]
    directory: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    removed: Sequence[str] = ()
    in_front: Mapping[str, str] = field(default_factory=dict)
    niceness: int = 0
    speaks: bool = False

    def environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment variables that it sees."""
        kept = {name: value for name, value in inherited.items() if name not in self.removed}
        paths = {name: os.pathsep.join(filter(None, (path, kept.get(name)))) for name, path in self.in_front.items()}
        return {**kept, **paths, **self.variables}

    def execute(self, sockets: Sequence[int]) -> NoReturn:
        """Become it. What the system has against that goes to standard error."""
        arguments = list(self.arguments)
        if self.speaks:
            for fd in sockets:
                os.set_inheritable(fd, True)
            arguments += map(str, sockets)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
            if self.directory:
                os.chdir(self.directory)
            os.execve(arguments[0], arguments, self.environ(os.environ))  # noqa: S606 - no shell is what we want
        except OSError as error:
            sys.stderr.write(f"{arguments[0]} can't be executed: {error.strerror}\n")
            os._exit(_NOT_EXECUTED)


@dataclass(frozen=True, slots=True)
class Order:
    """A request to the fork server.

    Attributes:
        name: what the process is called.
        fds: how many descriptors come with it: the sockets, then leash, standard output and standard error.
        program: what it executes; None for a fork.
    """

    name: str
    fds: int
    program: Program | None = None

    def packet(self) -> bytes:
        """The order as bytes.

        Raises:
            OSError: it is too long.
        """
        data = dumps({"name": self.name, "fds": self.fds, "program": self.program and asdict(self.program)})
        if len(data) > MAX_ORDER:
            raise OSError(errno.E2BIG, f"what it takes to start '{self.name[:200]}' is {len(data)} bytes long")
        return data

    @classmethod
    def of(cls, packet: bytes) -> Order:
        """The order that these bytes are."""
        fields = loads(memoryview(packet))
        program = fields["program"]
        return cls(fields["name"], fields["fds"], program and Program(**program))
