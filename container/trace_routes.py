"""Triton's routes of the trace extension. A Flask blueprint; the settings are read and changed on the event loop.

GET, POST  /v2/trace/setting                 the server's
GET        /v2/models/{name}/trace/setting   a model's, which are the server's
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import Blueprint, Response, request

from container.extensions import change_traces, trace_settings
from container.views import json_answer, json_body

if TYPE_CHECKING:
    from container.on_loop import OnLoop
    from container.service import Service
    from container.views import View


def blueprint(service: Service, on_loop: OnLoop, _hot: View) -> Blueprint:
    """The routes over a service."""
    routes = Blueprint("trace", __name__, url_prefix="/v2")
    tracer = service.tracer

    def setting() -> Response:
        return of_model("")

    def of_model(name: str) -> Response:
        if request.method == "POST":
            on_loop.call(change_traces, tracer, name, json_body())
        return json_answer(trace_settings(tracer))

    routes.add_url_rule("/trace/setting", "setting", setting, methods=["GET", "POST"])
    routes.add_url_rule("/models/<path:name>/trace/setting", "model setting", of_model, methods=["GET", "POST"])
    return routes
