"""/dashboard: the page, its data as JSON, its files.

GET /dashboard            the frame of the page, which holds no data; its script asks for them, and for a key where
                          one is needed. ?filter=… shows models with that in their name
GET /dashboard/data       the data as JSON
GET /dashboard/static/…   its style and its scripts

Everything comes from this server: the policy in the header forbids the page to load or send anything elsewhere, and to
run or style anything that is not in those files. On SageMaker nothing but the container itself reaches these routes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from flask import Response, render_template, request, send_from_directory

from container.control.http import argument

if TYPE_CHECKING:
    from container.control.http import Build, Operation
    from container.dashboard.document import Documents
    from container.http1 import HttpRequest

_FOLDER = Path(__file__).parent
TEMPLATES = _FOLDER / "templates"

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


class Pages:
    """The operations of these routes over a watched engine, by the names of the route table; see `control.http`."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    def by_name(self) -> dict[str, Operation]:
        return {"dashboard": self.page, "dashboard_data": self.data, "dashboard_static": self.static}

    async def page(self, _exchange: HttpRequest) -> Build:
        return _page

    async def data(self, exchange: HttpRequest) -> Build:
        document = self._documents.document(argument(exchange, "filter").strip()[:_LONGEST_FILTER])
        return lambda: Response(orjson.dumps(document), headers=_HEADERS, content_type="application/json")

    async def static(self, _exchange: HttpRequest, filename: str) -> Build:
        return partial(send_from_directory, _FOLDER / "static", filename)


def _page() -> Response:
    here = "" if request.path.endswith("/") else "dashboard/"  # a proxy may put us under another path
    text = render_template("dashboard.html", here=here)
    return Response(text, headers=_HEADERS, content_type="text/html; charset=utf-8")
