"""An endpoint: what the front asks, whether it has many models or one.

A multi-model endpoint has a platform behind it; one of a single model passes requests to its container as they are.
What is said here of a request is said by SageMaker before the container sees it.
"""

from __future__ import annotations

import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from container.local.faults import model_error, no_endpoint, no_target, target_not_wanted, timed_out
from container.local.platform import Limits
from container.local.upstream import Answer, SilentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from container.local.platform import Platform
    from container.local.upstream import Container

ANY_NAME = "local"  # in errors, of an endpoint that answers to any name
_INVOCATIONS = "/invocations"


@dataclass(frozen=True)
class Endpoint:
    """What boto3 calls.

    Attributes:
        name: the only one that it answers to; "" answers to any.
        container: that serves it.
        platform: for many models; None for one.
        limits: how long each thing may take.
    """

    name: str
    container: Container
    platform: Platform | None = None
    limits: Limits = field(default_factory=Limits)

    def check(self, name: str, target: str) -> None:
        """Refuse what SageMaker would refuse.

        Raises:
            RuntimeApiError: it is another endpoint, or a target model is missing, or is not wanted.
        """
        if self.name and name != self.name:
            raise no_endpoint(name)
        if self.platform and not target:
            raise no_target(str(uuid.uuid4()))
        if target and not self.platform:
            raise target_not_wanted(name)

    def invoke(self, target: str, body: bytes, headers: Mapping[str, str], patience: float = 0.0) -> Answer:
        """The container's answer of status 200.

        Args:
            target: the model, "" on an endpoint of one.
            body: the request's.
            headers: the request's, those that the platform lets through.
            patience: seconds, a load included; 0 means SageMaker's own.

        Raises:
            RuntimeApiError: what SageMaker would say instead.
        """
        patience = patience or self.limits.invocation
        answer = (
            self.platform.invoke(target, body, headers, patience)
            if self.platform
            else self._asked(body, headers, patience)
        )
        return self._checked(answer)

    @contextmanager
    def stream(self, body: bytes, headers: Mapping[str, str]) -> Iterator[tuple[Answer, Iterator[bytes]]]:
        """The same of one model, read as it comes.

        Raises:
            RuntimeApiError: what SageMaker would say; `SilentError` where the answer breaks off.
        """
        with self.container.stream(_INVOCATIONS, body, headers, self.limits.stream) as (answer, pieces):
            if answer.status != 200:
                self._checked(Answer(answer.status, answer.headers, b"".join(pieces)))
            yield answer, pieces

    def _asked(self, body: bytes, headers: Mapping[str, str], patience: float) -> Answer:
        began = time.monotonic()
        try:
            return self.container.ask("POST", _INVOCATIONS, body, headers, patience)
        except SilentError as error:
            if time.monotonic() - began >= patience:
                raise timed_out(self.name or ANY_NAME) from error
            raise model_error(502, str(error), self.name or ANY_NAME) from error

    def _checked(self, answer: Answer) -> Answer:
        if answer.status == 200:
            return answer
        raise model_error(answer.status, answer.body.decode("utf-8", "replace"), self.name or ANY_NAME)
