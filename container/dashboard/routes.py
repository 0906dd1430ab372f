"""/dashboard: the page, its data as JSON, its two files. A Flask blueprint; views run on the server's threads.

GET /dashboard            the page as things stand; ?filter=… shows models with that in their name. Where keys are
                          needed, without one for `statistics`: a page that asks for it, and keeps it until it is closed
GET /dashboard/data       the same as JSON
GET /dashboard/static/…   its style and its script

Everything comes from this server: the policy in the header forbids the page to load or send anything elsewhere, and to
run or style anything that is not in those two files. On SageMaker nobody but the container itself reaches these routes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from flask import Blueprint, Response, render_template, request

from container.dashboard import drawing
from container.dashboard.history import SECONDS
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

    kept: tuple[dict[str, Any], str, str] | None = None  # what was rendered last, where it is, and the page

    def page() -> Response:
        nonlocal kept
        here = "" if request.path.endswith("/") else "dashboard/"  # a proxy may put us under another path
        denial = None if keys is None else keys.denial("statistics", request.headers.get("Authorization"))
        if denial is not None:
            text = render_template("key.html", here=here, denial=denial, version=installed_version())
            return Response(text, 403 if denial.known else 401, _HEADERS, content_type="text/html; charset=utf-8")
        wanted = _wanted()
        view = on_loop.call(documents.document, wanted)
        last = kept
        if last is None or last[0] is not view or last[1] != here:
            text = render_template(
                "dashboard.html",
                view=view,
                wanted=wanted,
                here=here,
                charts=drawing.CHARTS,
                seconds=SECONDS,
                version=installed_version(),
                draw=drawing,
            )
            last = kept = view, here, text
        return Response(last[2], headers=_HEADERS, content_type="text/html; charset=utf-8")

    def data() -> Response:
        document = on_loop.call(documents.document, _wanted())
        return Response(orjson.dumps(document), headers=_HEADERS, content_type="application/json")

    routes.add_url_rule("", "page", page)
    routes.add_url_rule("/data", "data", data)
    return routes


def _wanted() -> str:
    return request.args.get("filter", "").strip()[:_LONGEST_FILTER]
