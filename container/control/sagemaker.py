"""SageMaker's container contract: the routes beside inference. A Flask blueprint; views run on the server's threads.

GET    /models                  list, 100 a page, continued by next_page_token
POST   /models                  load: {"model_name", "url"}; the platform's, and a client's where overrides are allowed
GET    /models/{name}           one model
DELETE /models/{name}           unload; answered when the memory was given back
GET    /execution-parameters    for batch transform

SageMaker's names of models are opaque, and a header of its requests tells what clients call them. A model is served
under that name, which is in answers, errors and metrics, and which the model is told; SageMaker's own is another name
for it, by which these routes show it.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from flask import Blueprint, Response, request

from container.control.pending import waiting
from container.control.views import json_answer, json_body
from container.inference.headers import TARGET_MODEL, name_of
from container.settings import Mode
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from container.control.on_loop import OnLoop
    from container.control.pending import Steps
    from container.control.views import View
    from container.process.service import Service
    from container.settings import Settings
    from serve.engine import Engine

PAGE = 100  # models in one answer, what SageMaker's own containers send


def blueprint(service: Service, on_loop: OnLoop, hot: View) -> Blueprint:
    """The routes over a service; `hot` answers the inference ones."""
    routes = Blueprint("sagemaker", __name__)
    engine = service.engine

    def list_models() -> Response:
        token = request.args.get("next_page_token", "")
        return json_answer(page(on_loop.call(_posted, engine), token))

    def load_model() -> Steps:
        engine.options.control.check()
        document = json_body(required=True)
        _check_may_name_folders(service.settings)
        name, url = _text(document, "model_name"), _text(document, "url")
        target = name_of(request.headers.get(TARGET_MODEL, ""))
        yield engine.load(target, url, name) if target else engine.load(name, url)
        return json_answer(_described(name, url))

    def get_model(name: str) -> Response:
        return json_answer(_described(name, on_loop.call(engine.index.url, engine.registry.canonical(name))))

    def unload_model(name: str) -> Steps:
        engine.options.control.check()
        if target := name_of(request.headers.get(TARGET_MODEL, "")):
            on_loop.call(engine.registry.check_alias, name, target)
        yield engine.unload(engine.registry.canonical(name))
        return json_answer({})

    def execution_parameters() -> Response:
        settings = service.settings
        return json_answer(
            {
                "MaxConcurrentTransforms": settings.max_concurrent_transforms,
                "BatchStrategy": settings.batch_strategy,
                "MaxPayloadInMB": settings.max_payload_in_mb,
            }
        )

    routes.add_url_rule("/ping", "ping", hot, methods=["GET", "POST"])
    routes.add_url_rule("/invocations", "invocations", hot, methods=["POST"])
    routes.add_url_rule("/models/<path:name>/invoke", "invoke", hot, methods=["POST"])
    routes.add_url_rule("/models", "list_models", list_models)
    routes.add_url_rule("/models", "load_model", waiting(on_loop, load_model), methods=["POST"])
    routes.add_url_rule("/models/<path:name>", "get_model", get_model)
    routes.add_url_rule("/models/<path:name>", "unload_model", waiting(on_loop, unload_model), methods=["DELETE"])
    routes.add_url_rule("/execution-parameters", "execution_parameters", execution_parameters)
    return routes


def page(models: list[tuple[str, str]], token: str) -> dict[str, Any]:
    """The models behind those that `token` stands for, "" for none: at most `PAGE`, and a token if there are more.

    The token carries the last name shown, so that models which come and go between two pages shift nothing.

    Raises:
        MmeError: INVALID_ARGUMENT for a token that is none.
    """
    after = _token_name(token)
    rest = [(name, url) for name, url in models if name > after]
    document: dict[str, Any] = {"models": [_described(name, url) for name, url in rest[:PAGE]]}
    if len(rest) > PAGE:
        document["nextPageToken"] = base64.urlsafe_b64encode(rest[PAGE - 1][0].encode()).decode()
    return document


def _posted(engine: Engine) -> list[tuple[str, str]]:
    """(name, url) of every registered model as they were posted, by name."""
    posted = {name: alias for alias, name in engine.registry.aliases.items()}
    return sorted((posted.get(name, name), url) for name, url in engine.index.registered())


def _token_name(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except ValueError:  # no base64, no ASCII, no UTF-8
        raise invalid_argument(
            f"next_page_token '{token[:100]}' is none that this server gave out; start without one"
        ) from None


def _check_may_name_folders(settings: Settings) -> None:
    """Refuse a folder unless the platform names it: what lies in it, as in /tmp, may be code of any user.

    Raises:
        MmeError: FORBIDDEN.
    """
    if settings.mode is not Mode.PLATFORM and not settings.allow_load_overrides:
        raise MmeError(
            Kind.FORBIDDEN,
            "POST /models is not allowed: without SAGEMAKER_MULTI_MODEL=true models come from the server's store or "
            "repository, and a folder that a client names is code that the server runs; load by POST "
            "/v2/repository/models/NAME/load, or start the server with "
            "--allow-load-overrides/MME_ALLOW_LOAD_OVERRIDES=true if all of its clients may do that",
        )


def _described(name: str, url: str) -> dict[str, str]:
    return {"modelName": name, "modelUrl": url}


def _text(document: dict[str, Any], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not value:
        raise invalid_argument(
            f'the body must name \'{key}\', as in {{"model_name": "bert", "url": "/opt/ml/models/bert/model"}}'
        )
    return value
