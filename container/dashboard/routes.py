"""/dashboard: the page, its data as JSON, its files. A Flask blueprint; views run on the server's threads.

GET /dashboard            the frame of the page, which holds no data; its script asks for them, and for a key where
                          one is needed. ?filter=… shows models with that in their name
GET /dashboard/data       the data as JSON
GET /dashboard/static/…   its style and its scripts

Everything comes from this server: the policy in the header forbids the page to load or send anything elsewhere, and to
run or style anything that is not in those files. On SageMaker nothing but the container itself reaches these routes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from flask import Blueprint, Response, render_template, request

from container.version import installed_version

if TYPE_CHECKING:
    from container.control.app import OnLoop
    from container.dashboard.document import Documents
    from container.steps.access import Keys

_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_LONGEST_FILTER = 200


def blueprint(documents: Documents, on_loop: OnLoop, keys: Keys | None = None) -> Blueprint:
    """The routes over a watched engine; `keys` are those of clients, where they need one."""
    routes = Blueprint(
        "dashboard",
        __name__,
        url_prefix="/dashboard",
        template_folder="templates",
        static_folder="static",
        static_url_path="/static",
    )

    def page() -> Response:
        here = "" if request.path.endswith("/") else "dashboard/"  # a proxy may put us under another path
        text = render_template("dashboard.html", here=here, version=installed_version())
        return Response(text, headers=_HEADERS, content_type="text/html; charset=utf-8")

    def data() -> Response:
        denial = None if keys is None else keys.denial("statistics", request.headers.get("Authorization"))
        if denial is not None:
            return Response(status=403 if denial.known else 401, headers=_HEADERS)
        document = on_loop.call(documents.document, request.args.get("filter", "").strip()[:_LONGEST_FILTER])
        return Response(orjson.dumps(document), headers=_HEADERS, content_type="application/json")

    routes.add_url_rule("", "page", page)
    routes.add_url_rule("/data", "data", data)
    return routes
