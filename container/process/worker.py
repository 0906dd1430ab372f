"""The gunicorn worker: one event loop that owns the engine and answers inference, and Flask on threads for the rest.

Gunicorn's master keeps us alive: it starts us, restarts us when we die, and kills us when our loop stands still. The
loop tells it so once a second by `notify`, which touches a file. Signals arrive on the loop: SIGTERM drains, SIGINT
and SIGQUIT end at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import uvloop
from gunicorn.arbiter import Arbiter
from gunicorn.workers.base import Worker

from container.control.app import ControlPlane
from container.http1 import Http1Server, Limits
from container.inference.errors import too_large
from container.inference.limits import ConnectionCap, Turns, by_thread
from container.process.master import LostGpus
from container.process.resources import OpenFiles, QuietCollector, most_connections, raise_limit
from container.process.service import Service
from container.process.sockets import PORT_SECONDS, Tls, listening
from container.settings.places import http_certificates
from model_handlers.errors import MmeError
from model_handlers.system.memory import return_large_blocks
from serve.state_file import is_followed, life_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from container.grpc.server import GrpcServer
    from container.process.master import LastWords
    from container.process.resources import Followed
    from container.settings import Settings

_log = logging.getLogger("mme.worker")
_SWITCH_INTERVAL = 0.0005  # seconds; a lane's thread must not keep the loop waiting for Python's default of 5 ms
_NOTIFY_SECONDS = 1.0
_FOLLOW_SECONDS = 1.0  # between two looks at the files of certificates and keys
_QUICK_SECONDS = 1.0  # for models to end that owe answers to clients that have left
_CLOSE_SECONDS = 2.0  # for models to end that owe none; gunicorn kills us a second later
_TELLING_SECONDS = 1.0  # for clients to hear it that wait for a load which does not end in time
_PARTING_SECONDS = 1.0  # for clients that keep connections to hear, with one more answer, that they are to leave
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


class EngineWorker(Worker):  # type: ignore[misc]  # gunicorn ships no types
    """One process, one loop, one engine."""

    words: LastWords  # given by the master, see `process.master`
    over = False  # whether it has served, and closed what would outlive it
    _graceful = True

    def load_wsgi(self) -> None:
        """The application is made on the loop, where its engine lives."""

    def init_signals(self) -> None:
        """Back to defaults until the loop takes them over: the master's handlers are not ours."""
        for number in self.SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def run(self) -> None:
        """Serve until told to stop; gunicorn calls this once."""
        sys.setswitchinterval(_SWITCH_INTERVAL)
        return_large_blocks()
        raise_limit()
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
            self.over = True
        except Exception as error:
            self.words.fails(error)
            raise

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in _ENDING:
            loop.add_signal_handler(number, self._stop_asked, number, stop)
        loop.add_signal_handler(signal.SIGUSR1, self.log.reopen_files)
        settings: Settings = self.app.settings
        turns = Turns(loop.call_soon)
        cap = ConnectionCap(settings.max_connections or most_connections())
        certificates = http_certificates(settings)
        listeners: list[asyncio.Server] = []
        service: Service | None = None
        try:
            tls = None if certificates is None else Tls("HTTP", certificates, "http/1.1")
            options = {} if tls is None else tls.options
            service = Service(settings, loop, life_of(self.ppid), self.words)
            front = ControlPlane(service, loop)
            grpc = _grpc_server(service, turns, cap)
            metrics = await _metrics_server(service, front, options, listeners)
        except MmeError as error:  # what a server lacks that can't begin, as its port, it would lack again
            _log.error("%s", error)
            if service is not None:
                await service.close()
            raise SystemExit(Arbiter.WORKER_BOOT_ERROR) from None
        gate = front.gate([each.sock for each in self.sockets])
        http = Http1Server(front.handle, http_limits(settings), loop, too_large, gate, turns, service.memory, cap)
        listeners += [
            await loop.create_server(http.protocol_factory, sock=each.sock, **options) for each in self.sockets
        ]
        service.unsent += [lambda: http.unsent, *([] if grpc is None else [lambda: grpc.unsent])]
        service.start()
        files: list[Followed | None] = [service.keys, tls]
        forget: list[Callable[[], None]] = [each.forget_heads for each in (http, metrics) if each is not None]
        if grpc is not None:
            files.append(grpc.tls)
            forget.append(grpc.check_again)
            await grpc.start()
        following = loop.create_task(_follow([each for each in files if each is not None], forget))
        await self._beat_until(stop, service)
        following.cancel()
        await self._end(service, front, http, grpc, listeners, metrics)

    async def _end(
        self,
        service: Service,
        front: ControlPlane,
        http: Http1Server,
        grpc: GrpcServer | None,
        listeners: Sequence[asyncio.Server],
        metrics: Http1Server | None,
    ) -> None:
        settings, loop = service.settings, asyncio.get_running_loop()
        # A supervisor that keeps a connection would take the server for lost, whose next worker is there.
        service.routes.draining = not (self._graceful and is_followed(self.ppid))
        for listener in listeners:
            listener.close()
        if metrics is not None:
            metrics.abort()
        seconds = max(settings.drain_seconds, _TELLING_SECONDS) if self._graceful else 0.0
        http.drain(min(settings.drain_seconds / 2, _PARTING_SECONDS) if self._graceful else 0.0)
        ends = loop.time() + seconds
        cut = loop.call_at(ends - _TELLING_SECONDS, service.engine.cache.cut_short)
        drained = await self._drained(http, grpc, seconds)
        cut.cancel()
        if not drained:
            if http.in_flight:
                _log.warning("%d requests were not answered within %.0f s", http.in_flight, seconds)
            http.abort()
        front.close()
        rest = max(ends - loop.time(), 0.0) + _CLOSE_SECONDS
        await _close_in_time(service, rest if drained and self._graceful else _QUICK_SECONDS)

    def _stop_asked(self, number: int, stop: asyncio.Event) -> None:
        self.words.asked()
        self._graceful = number == signal.SIGTERM
        self.alive = False
        stop.set()

    async def _beat_until(self, stop: asyncio.Event, service: Service) -> None:
        """Tell the master that the loop turns, and collect garbage; stop when asked to, or when the master is gone."""
        collector, files = QuietCollector(), OpenFiles()
        gpus = LostGpus(service.settings.cache_dir, life_of(self.ppid))
        while not stop.is_set():
            self.notify()
            collector.look()
            files.look()
            if gpus.look():
                self._stop_asked(signal.SIGTERM, stop)
            service.routes.broken = gpus.are_broken
            if self.ppid != os.getppid():
                _log.error("the master process is gone; stopping")
                self._stop_asked(signal.SIGTERM, stop)
            try:
                async with asyncio.timeout(_NOTIFY_SECONDS):
                    await stop.wait()
            except TimeoutError:
                continue

    async def _drained(self, http: Http1Server, grpc: GrpcServer | None, seconds: float) -> bool:
        """Wait for the last answers, and keep the master informed meanwhile; False if HTTP's were not all given."""
        closing = asyncio.ensure_future(http.wait_closed(seconds))
        waited = {closing} if grpc is None else {closing, asyncio.ensure_future(grpc.drain(seconds))}
        while not all(future.done() for future in waited):
            self.notify()
            await asyncio.wait(waited, timeout=_NOTIFY_SECONDS)
        return closing.result()


async def _follow(files: Sequence[Followed], forget: Sequence[Callable[[], None]]) -> None:
    """Look at files now and then, for ever; when one says something else, forget what it let in."""
    while files:
        await asyncio.sleep(_FOLLOW_SECONDS)
        if any([await by_thread(each.look) for each in files]):
            for each in forget:
                each()


async def _metrics_server(
    service: Service, front: ControlPlane, tls: Mapping[str, Any], listeners: list[asyncio.Server]
) -> Http1Server | None:
    """The server of the port for metrics alone, as Triton has one; None where there is to be none."""
    settings, loop = service.settings, asyncio.get_running_loop()
    if settings.metrics_port is None:
        return None
    http = Http1Server(front.handle_metrics, Limits(), loop)
    host, where = settings.metrics_address or settings.host, "MME_METRICS_PORT or MME_METRICS_ADDRESS"
    sockets = listening(host, settings.metrics_port, "metrics", where, seconds=PORT_SECONDS)
    http.gate = front.gate(sockets)
    listeners += [await loop.create_server(http.protocol_factory, sock=each, **tls) for each in sockets]
    logging.getLogger("mme.metrics").info("metrics listening at port %d", sockets[0].getsockname()[1])
    return http


def _grpc_server(service: Service, turns: Turns, cap: ConnectionCap) -> GrpcServer | None:
    if service.settings.grpc_port is None:
        return None
    from container.grpc.server import GrpcServer  # noqa: PLC0415 - optional, and 40 ms

    return GrpcServer(service, turns, cap)


async def _close_in_time(service: Service, seconds: float) -> None:
    """Give models some time to end, then end without them: a stuck one would keep the process until it is killed."""
    try:
        async with asyncio.timeout(seconds):
            await service.close(ends=True)
    except TimeoutError:
        _log.warning("models still execute; ending without them")
        logging.shutdown()
        os._exit(0)  # their processes hang on a socket of ours, and end with it


def http_limits(settings: Settings) -> Limits:
    return Limits(
        body=settings.max_body_bytes,
        header_timeout=settings.header_timeout,
        body_timeout=settings.body_timeout,
        idle_timeout=settings.idle_timeout,
    )
