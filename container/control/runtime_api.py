"""The SageMaker Runtime API, so that plain boto3 talks to this server: `endpoint_url=http://…`. A Flask blueprint.

InvokeEndpoint and InvokeEndpointWithResponseStream are hot routes. The other operation of the API is refused as boto3
expects errors to look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import Blueprint, Response

from container.inference import errors

if TYPE_CHECKING:
    from container.control.on_loop import OnLoop
    from container.control.views import View
    from container.process.service import Service


def blueprint(_service: Service, _on_loop: OnLoop, hot: View) -> Blueprint:
    """The routes; `hot` answers the first two."""
    routes = Blueprint("runtime_api", __name__)

    def unsupported(endpoint: str) -> Response:
        status, headers, body = errors.runtime_error(
            "ValidationError",
            f"endpoint '{endpoint}' offers no async invocation: use invoke_endpoint or "
            "invoke_endpoint_with_response_stream",
        )
        return Response(body, status, errors.header_pairs(headers))

    routes.add_url_rule("/endpoints/<endpoint>/invocations", "invoke_endpoint", hot, methods=["POST"])
    stream = "invoke_endpoint_with_response_stream"
    routes.add_url_rule("/endpoints/<endpoint>/invocations-response-stream", stream, hot, methods=["POST"])
    routes.add_url_rule("/endpoints/<endpoint>/async-invocations", "async", unsupported, methods=["POST"])
    return routes
