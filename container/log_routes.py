"""Triton's route of the logging extension. A Flask blueprint; the settings are read and changed on the event loop.

GET, POST  /v2/logging   what is logged, and how
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import Blueprint, Response, request

from container.views import json_answer, json_body

if TYPE_CHECKING:
    from container.on_loop import OnLoop
    from container.service import Service
    from container.views import View


def blueprint(service: Service, on_loop: OnLoop, _hot: View) -> Blueprint:
    """The route over a service."""
    routes = Blueprint("logging", __name__, url_prefix="/v2")

    def logging() -> Response:
        if request.method == "POST":
            on_loop.call(service.logs.change, json_body())
        return json_answer(on_loop.call(service.logs.document))

    routes.add_url_rule("/logging", "logging", logging, methods=["GET", "POST"])
    return routes
