"""The SageMaker Runtime API, so that plain boto3 talks to this server: `endpoint_url=http://…`. A Flask blueprint.

InvokeEndpoint is a hot route. The other operations of the API are refused as boto3 expects errors to look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import Blueprint, Response

from container import answers

if TYPE_CHECKING:
    from container.on_loop import OnLoop
    from container.service import Service
    from container.views import View


def blueprint(_service: Service, _on_loop: OnLoop, hot: View) -> Blueprint:
    """The routes; `hot` answers InvokeEndpoint."""
    routes = Blueprint("runtime_api", __name__)

    def unsupported(endpoint: str) -> Response:
        status, headers, body = answers.runtime_error(
            "ValidationError",
            f"endpoint '{endpoint}' offers invoke_endpoint only: no streaming and no async invocation",
        )
        return Response(body, status, answers.header_pairs(headers))

    routes.add_url_rule("/endpoints/<endpoint>/invocations", "invoke_endpoint", hot, methods=["POST"])
    for operation in ("invocations-response-stream", "async-invocations"):
        routes.add_url_rule(f"/endpoints/<endpoint>/{operation}", operation, unsupported, methods=["POST"])
    return routes
