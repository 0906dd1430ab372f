"""Triton's routes of the trace extension. A Flask blueprint; the settings are read and changed on the event loop.

GET, POST  /v2/trace/setting                 the server's
GET, POST  /v2/models/{name}/trace/setting   a model's, which are the server's where it has none of its own
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import Blueprint, Response, request

from container.extensions import trace_settings
from container.views import json_answer, json_body

if TYPE_CHECKING:
    from container.on_loop import OnLoop
    from container.service import Service
    from container.views import View


def blueprint(service: Service, on_loop: OnLoop, _hot: View) -> Blueprint:
    """The routes over a service."""
    routes = Blueprint("trace", __name__, url_prefix="/v2")

    def setting() -> Response:
        return of_model("")

    def of_model(name: str) -> Response:
        wanted = json_body() if request.method == "POST" else {}
        offered = service.engine.find_all() if name else ()
        return json_answer(on_loop.call(trace_settings, service.engine, service.traces, name, wanted, offered))

    routes.add_url_rule("/trace/setting", "setting", setting, methods=["GET", "POST"])
    routes.add_url_rule("/models/<path:name>/trace/setting", "model setting", of_model, methods=["GET", "POST"])
    return routes
