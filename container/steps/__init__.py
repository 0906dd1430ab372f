"""What is done around inference calls: `CallStep` is one such thing, see `Call.steps`. On the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from container.inference.call import Call
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.errors import MmeError
    from serve.request import InferenceRequest, InferenceResponse


class CallStep:
    """One such thing. Not compiled, so that what is not compiled either may be one."""

    def made(self, call: Call, request: InferenceRequest, config: ModelConfig) -> None:
        """Its request is about to be submitted to a model of this configuration; raises to refuse it."""

    def refused(self, call: Call) -> None:
        """Its request was not accepted, whether it was made or not."""

    def responded(self, call: Call, response: InferenceResponse) -> None:
        """The model has sent one response of several."""

    def completed(self, call: Call, result: InferenceResponse | MmeError | None) -> None:
        """The model has sent the one response, an error, or the end of several responses."""

    def over(self, call: Call, error: MmeError | None) -> None:
        """Its answer was handed over, or it has none: the error says why."""
