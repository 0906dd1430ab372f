"""Triton's routes of the shared memory extension. A Flask blueprint; regions are read and changed on the event loop.

GET   /v2/systemsharedmemory[/region/{name}]/status       the regions that are registered
POST  /v2/systemsharedmemory/region/{name}/register       one more
POST  /v2/systemsharedmemory[/region/{name}]/unregister   one less, or all

and the same of /v2/cudasharedmemory, of which there are none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import Blueprint, Response

from container.views import empty_answer, json_answer, json_body

if TYPE_CHECKING:
    from container.on_loop import OnLoop
    from container.service import Service
    from container.shared_memory import CudaRegions, Regions
    from container.views import View


def blueprint(service: Service, on_loop: OnLoop, _hot: View) -> Blueprint:
    """The routes over a service."""
    routes = Blueprint("shared memory", __name__, url_prefix="/v2")
    _add_routes(routes, "systemsharedmemory", service.regions, on_loop)
    _add_routes(routes, "cudasharedmemory", service.cuda_regions, on_loop)
    return routes


def _add_routes(routes: Blueprint, kind: str, regions: Regions | CudaRegions, on_loop: OnLoop) -> None:
    def status(name: str = "") -> Response:
        return json_answer(on_loop.call(regions.rows, name))

    def register(name: str = "") -> Response:
        on_loop.call(regions.register, name, json_body())
        return empty_answer()

    def unregister(name: str = "") -> Response:
        on_loop.call(regions.unregister, name)
        return empty_answer()

    for view, method in ((status, "GET"), (register, "POST"), (unregister, "POST")):
        deed = view.__name__
        routes.add_url_rule(f"/{kind}/{deed}", f"{kind} {deed} all", view, methods=[method])
        routes.add_url_rule(f"/{kind}/region/<path:name>/{deed}", f"{kind} {deed}", view, methods=[method])
