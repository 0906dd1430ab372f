"""What the example backends have in common: no file, no framework, and answers that come from threads of their own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, ClassVar

from model_handlers.base import Handler
from model_handlers.config_checks import normalise
from model_handlers.errors import Kind, MmeError, invalid_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from model_handlers.base import Device
    from model_handlers.config import ModelConfig
    from model_handlers.requests import ModelRequest, ModelResponse, Responder


class FilelessHandler(Handler):
    """A model that is all in its configuration."""

    default_filename: ClassVar[str] = ""
    sees_requests: ClassVar[bool] = True
    inputs: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:  # noqa: ARG003 - there is none
        """Check that the configuration declares what the backend takes and gives."""
        for what, specs, names in (("input", config.inputs, cls.inputs), ("output", config.outputs, cls.outputs)):
            found = [spec.name for spec in specs]
            if not found or (names and sorted(found) != sorted(names)):
                raise invalid_model(
                    f"model '{config.name}': backend '{cls.backend}' needs the {what}s "
                    f"{', '.join(names) or 'declared'}, and config.pbtxt has {', '.join(found) or 'none'}"
                )
        return normalise(config)

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str) -> Handler:  # noqa: ARG003 - of no file
        """Nothing but the configuration is looked at."""
        return cls(cls.autocomplete(config, model_file))

    def close(self) -> None:
        """There is nothing to give back."""


class StreamingHandler(FilelessHandler):
    """A decoupled model of which each request is answered by a thread of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self._closing = threading.Event()
        self._threads: set[threading.Thread] = set()

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        """As above, and that it may answer as often as it likes."""
        if not config.decoupled:
            raise invalid_model(
                f"model '{config.name}': backend '{cls.backend}' answers a request several times: set "
                "model_transaction_policy { decoupled: true }"
            )
        return super().autocomplete(config, model_file)

    def execute_requests(self, requests: Sequence[ModelRequest]) -> list[ModelResponse | MmeError | None]:
        """Begin a thread for each request; its responses come from there."""
        answers: list[ModelResponse | MmeError | None] = []
        for request in requests:
            if request.responder is None:
                answers.append(MmeError(Kind.UNSUPPORTED, f"model '{self.config.name}' answers streams alone"))
                continue
            self._begin(request, request.responder)
            answers.append(None)
        self.hold(requests)
        return answers

    def hold(self, requests: Sequence[ModelRequest]) -> None:
        """Keep the instance busy as long as the requests ask for; of itself not at all."""

    def respond(self, request: ModelRequest, send: Callable[[ModelResponse], None]) -> None:
        """Answer a request, as often as it takes; runs on the request's thread."""
        raise NotImplementedError

    def pause(self, seconds: float) -> None:
        """Wait, but not longer than the model lives."""
        self._closing.wait(seconds)

    def close(self) -> None:
        """End the threads: whoever still waits is told."""
        self._closing.set()
        for thread in list(self._threads):
            thread.join()

    def _begin(self, request: ModelRequest, responder: Responder) -> None:
        thread = threading.Thread(target=self._answer, args=(request, responder), name=f"{self.config.name} answers")
        self._threads.add(thread)
        thread.start()

    def _answer(self, request: ModelRequest, responder: Responder) -> None:
        gone = MmeError(Kind.UNAVAILABLE, f"model '{self.config.name}' was unloaded")
        last: MmeError | None = None

        def send(response: ModelResponse) -> None:
            if self._closing.is_set():
                raise gone
            if responder.is_cancelled():
                raise MmeError(Kind.CANCELLED, "the client left")
            responder.send(response, final=False)

        try:
            self.respond(request, send)
        except MmeError as error:
            last = error
        finally:
            responder.send(last, final=True)
            self._threads.discard(threading.current_thread())
