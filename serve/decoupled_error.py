"""What everybody is told who can't take the answers of a decoupled model. PURE."""

from __future__ import annotations

from model_handlers.errors import Kind, MmeError


class DecoupledError(MmeError):
    """Somebody who takes one response asks a model that sends any number of them.

    Args:
        subject: the model.
    """

    def __init__(self, subject: str) -> None:
        super().__init__(
            Kind.INVALID_ARGUMENT,
            f"{subject} sends any number of responses to a request (decoupled transaction policy), which this route "
            "can't carry; use generate_stream, or /invocations",
        )
