"""The `context` that a script's functions may take: what Amazon's containers tell them of model, device and request.

One object a model, about one request at a time. Of the client's headers it knows those that reach a model: content
type, accept, custom attributes and the id of its session. What a function asks to be measured is not.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from model_handlers.scripts.body import DEFAULT_TYPE, LITERAL, NONFINITE

if TYPE_CHECKING:
    from collections.abc import Mapping

CUSTOM_ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
_SESSION_ID = "X-Amzn-SageMaker-Session-Id"
_NONE: Mapping[str, str] = MappingProxyType({})


class Context:
    """What is known, and what a function says of its answer.

    Attributes:
        model_name: the model.
        manifest: a description of the archive, which ours do not have: its model's name alone.
        system_properties: `model_dir`, `gpu_id` (None without one), `batch_size` and `server_name`.
        request_processor: a list of the one request's properties.
        parameters: those of the model's configuration.
        literal: whether JSON says NaN and Infinity in place of null.
        metrics: takes what a function wants to be measured, to no effect.
    """

    def __init__(self, model: str, model_dir: str, gpu_id: int | None, parameters: Mapping[str, str] = _NONE) -> None:
        self.model_name = model
        self.parameters = parameters
        self.literal = parameters.get(NONFINITE) == LITERAL
        self.manifest: dict[str, Any] = {"model": {"modelName": model}}
        self.system_properties: dict[str, Any] = {
            "model_dir": model_dir,
            "gpu_id": gpu_id,
            "batch_size": 1,
            "server_name": "mme",
        }
        self.metrics = Metrics()
        self.begin("", {})

    def begin(self, request_id: str, headers: dict[str, str]) -> None:
        """From now on it is about this request."""
        self.request_ids = {0: request_id}
        self.request_processor = [RequestProperties(headers)]
        self._status = 200
        self._phrase = ""
        self._headers: dict[str, str] = {}

    def get_request_id(self, idx: int = 0) -> str:
        """The client's id for the request, or ""."""
        return self.request_ids[idx]

    def get_request_header(self, idx: int, key: str) -> str | None:
        """A header of the request, in whatever case."""
        return self.request_processor[idx].get_request_property(key)

    def get_all_request_header(self, idx: int) -> dict[str, str]:
        """All headers that are known of the request."""
        return self.request_processor[idx].get_request_properties()

    def set_response_content_type(self, idx: int, value: str) -> None:  # noqa: ARG002 - its interface
        """Say what the answer is, where the function's answer does not."""
        self._headers["content-type"] = value

    def get_response_content_type(self, idx: int) -> str | None:  # noqa: ARG002
        """What was said."""
        return self._headers.get("content-type")

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:  # noqa: ARG002
        """Say that the answer is an error, from 400 on."""
        self._status, self._phrase = code, phrase

    def get_response_status(self, idx: int) -> tuple[int, str]:  # noqa: ARG002
        """What was said."""
        return self._status, self._phrase

    def set_response_header(self, idx: int, key: str, value: str) -> None:  # noqa: ARG002
        """Set a header of the answer, of which the content type reaches the client."""
        self._headers[key.lower()] = value

    def get_response_headers(self, idx: int) -> dict[str, str]:  # noqa: ARG002
        """What was set, by lower-case name."""
        return dict(self._headers)


class RequestProperties:
    """The headers of one request."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers

    def get_request_properties(self) -> dict[str, str]:
        """All of them."""
        return dict(self._headers)

    def get_request_property(self, key: str) -> str | None:
        """One, in whatever case."""
        return next((value for name, value in self._headers.items() if name.lower() == key.lower()), None)


class Metrics:
    """Takes anything that is to be measured, and measures nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("add_"):
            return lambda *_args, **_kwargs: None
        raise AttributeError(f"no metric is made by '{name}'")


def request_headers(content_type: str, accept: str, custom_attributes: str, session_id: str = "") -> dict[str, str]:
    """The headers of a request as a context tells them."""
    headers = {"Content-Type": content_type or DEFAULT_TYPE, "Accept": accept}
    told = {CUSTOM_ATTRIBUTES: custom_attributes, _SESSION_ID: session_id}
    return headers | {name: value for name, value in told.items() if value}
