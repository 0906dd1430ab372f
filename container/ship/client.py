"""How commands ask a server: over plain HTTP, or through boto3, SageMaker and `mme local`.

A sender takes a request, a target model and an inference id, and gives the answer; it may be called from many threads.
The server's own sentence is what one reads when it refuses. `mme local` that is named by its URL alone is recognised.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import http.client
import ipaddress
import json
import re
import ssl
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from container.cli import DEFAULT_URL
from container.ship.aws import aws_errors
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from container.ship.requests import Request

    Sender = Callable[[Request, str, str], "HttpResponse"]


JSON = "application/json"
_MOST_KEY = 4096  # bytes of a file with a key
_KEY = re.compile(r"[!-~]+")
LOCAL_NAME = "local"  # of an endpoint that answers to any


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """What a server said: headers under lower-case names, and the body."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class Identity:
    """How a server is known (by a file of certificates, else what the system trusts), and we to it; false if unsaid."""

    ca: Path | None = None
    key: str = ""

    def __bool__(self) -> bool:
        return self.ca is not None or bool(self.key)

    @cached_property
    def context(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise invalid_argument(f"--ca '{self.ca}' holds no certificates in PEM: {error}") from error

    @property
    def authorization(self) -> str:
        """What a request says under that name, "" for nothing."""
        return f"Bearer {self.key}" if self.key else ""


NO_IDENTITY = Identity()


def identity_of(arguments: argparse.Namespace) -> Identity:
    path: Path | None = arguments.key_file
    if path is None:
        return Identity(arguments.ca)
    with path.open("rb") as file:
        key = file.read(_MOST_KEY).decode("latin-1").strip()
    if not _KEY.fullmatch(key) or key.startswith("sha256:"):
        raise invalid_argument(f"--key-file '{path}': it has to hold a key and nothing else, as `mme key` prints it")
    return Identity(arguments.ca, key)


class LocalEndpoint(NamedTuple):
    """An endpoint of `mme local`: a name that it answers to, and the URL of the container behind it."""

    name: str
    container: str


def post(
    url: str, body: bytes | None, headers: Mapping[str, str], timeout: float, identity: Identity = NO_IDENTITY
) -> HttpResponse:
    """The answer to a POST, or to a GET where there is no body."""
    request = urllib.request.Request(url, data=body, headers=dict(headers))  # noqa: S310 - checked_url has seen it
    if identity.key:
        request.add_unredirected_header("Authorization", identity.authorization)
    opener = _opener(url, identity)
    try:
        with opener.open(request, timeout=timeout) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return HttpResponse(response.status, headers, response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise MmeError(Kind.UNAVAILABLE, f"{error.code} {error.reason}: {sentence_of(error.read())}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ssl.SSLCertVerificationError):
            what = (
                f"{url} shows a certificate that nothing vouches for ({reason.verify_message}): name who does by --ca"
            )
            raise MmeError(Kind.UNAVAILABLE, what) from error
        what = f"{url} does not answer{_by_proxy(url)}: {reason or type(reason).__name__}; is the server up?"
        raise MmeError(Kind.UNAVAILABLE, what) from error


def _opener(url: str, identity: Identity) -> urllib.request.OpenerDirector:
    """What asks a server: one of this machine without a proxy, which can't reach it, others as the environment says."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})] if _is_here(url) else []
    if url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=identity.context))
    return urllib.request.build_opener(*handlers)


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _by_proxy(url: str) -> str:
    """The part of a sentence that says by which proxy a server was asked, "" for none."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or _is_here(url) or urllib.request.proxy_bypass(parts.netloc):
        return ""
    return f" by the proxy {urlsplit(proxy).hostname or 'of the environment'} (NO_PROXY lists hosts that need none)"


def ask(
    url: str, body: bytes | None, timeout: float, identity: Identity = NO_IDENTITY
) -> tuple[Any, Mapping[str, str]]:
    """The JSON that a server answers, and its headers under lower-case names."""
    answer = post(url, body, {"Content-Type": JSON}, timeout, identity)
    try:
        return json.loads(answer.body), answer.headers
    except ValueError as error:
        raise MmeError(Kind.UNAVAILABLE, f"{url} answers no JSON: is it a server of models?") from error


def local_endpoint(url: str, timeout: float, identity: Identity = NO_IDENTITY) -> LocalEndpoint | None:
    """What `mme local` says of itself at a URL; None where there is another server, or none."""
    try:
        told, _ = ask(f"{url}/", None, timeout, identity)
    except MmeError:  # no server answers that, and one that does not answer at all is told of by the first request
        return None
    if not isinstance(told, dict) or not {"endpoint", "container", "loaded"} <= told.keys():
        return None
    return LocalEndpoint(str(told["endpoint"] or LOCAL_NAME), str(told["container"]))


def sentence_of(body: bytes) -> str:
    """What an error body says: its `error` or `message`, else the beginning of the text."""
    text = body.decode("utf-8", "replace")
    try:
        parsed = json.loads(text)
    except ValueError:
        return text[:500]
    if isinstance(parsed, dict):
        return str(next((parsed[key] for key in ("error", "message", "Message") if key in parsed), parsed))
    return text[:500]


def checked_url(url: str, flag: str = "--url") -> str:
    """A server's address without a slash at its end; `flag` gave it."""
    if not re.match(r"https?://[^/]", url):
        raise invalid_argument(f"{flag} '{url}' is not an address such as {DEFAULT_URL}")
    return url.rstrip("/")


_ANSWERS = frozenset(  # what a running endpoint says of a request
    {"InternalFailure", "ModelError", "ModelNotReadyException", "ServiceUnavailable", "ValidationError"}
)


def sender_of(arguments: argparse.Namespace, connections: int = 1) -> Sender:
    """The sender that the arguments name, for so many threads."""
    if arguments.name and arguments.endpoint:
        raise invalid_argument(f"two endpoints: '{arguments.name}' and --endpoint '{arguments.endpoint}'")
    if arguments.local and arguments.url:
        raise invalid_argument("--local is the Runtime API and --url plain HTTP: give one of them")
    identity = identity_of(arguments)
    endpoint = arguments.name or arguments.endpoint or (LOCAL_NAME if arguments.local else "")
    url = arguments.local or arguments.url or ""
    if not endpoint:
        url = checked_url(url or DEFAULT_URL)
        local = local_endpoint(url, arguments.timeout, identity)
        if local is None:
            return _plain(url, arguments.timeout, identity)
        endpoint = local.name
        print(
            f"{url} is `mme local`, which speaks the Runtime API: asked through boto3, as by --local", file=sys.stderr
        )
    if url:
        url = checked_url(url, "--local" if arguments.local else "--url")
    elif identity:
        raise invalid_argument("--ca and --key-file are for a server of --url or --local: AWS knows you by credentials")
    return _runtime(endpoint, url, identity, arguments, connections)


def _plain(url: str, timeout: float, identity: Identity) -> Sender:
    """Over HTTP, as SageMaker asks a container."""

    def send(request: Request, target: str, inference_id: str) -> HttpResponse:
        headers = {
            "Content-Type": request.content_type,
            "Accept": request.accept,
            "X-Amzn-SageMaker-Target-Model": target,
            "X-Amzn-SageMaker-Inference-Id": inference_id,
        }
        given = {name: value for name, value in headers.items() if value}
        return post(f"{url}/invocations", request.body, given, timeout, identity)

    return send


def _runtime(endpoint: str, url: str, identity: Identity, arguments: argparse.Namespace, connections: int) -> Sender:
    """Through boto3: on AWS, or at `url`, which needs no credentials and no region."""
    import boto3  # noqa: PLC0415 - heavy
    from botocore import UNSIGNED  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415
    from botocore.exceptions import ClientError  # noqa: PLC0415

    timeout = arguments.timeout
    with aws_errors("sagemaker-runtime"):
        session = boto3.session.Session(region_name=arguments.region)
        config = Config(read_timeout=timeout, retries={"total_max_attempts": 1}, max_pool_connections=connections)
        local: dict[str, Any] = {}
        if url:
            local = {"endpoint_url": url, "region_name": session.region_name or "us-east-1"}
            if identity.ca is not None:
                local["verify"] = str(identity.ca)
            if identity.key or session.get_credentials() is None:
                config = config.merge(Config(signature_version=UNSIGNED))
        client = session.client("sagemaker-runtime", config=config, **local)

    def show_key(request: Any, **_: Any) -> None:
        request.headers["Authorization"] = identity.authorization

    if identity.key:
        client.meta.events.register("before-send.sagemaker-runtime", show_key)

    def send(request: Request, target: str, inference_id: str) -> HttpResponse:
        given = {
            "TargetModel": target,
            "InferenceId": inference_id,
            "ContentType": request.content_type,
            "Accept": request.accept,
        }
        with aws_errors(f"endpoint '{endpoint}'"):
            try:
                response = client.invoke_endpoint(
                    EndpointName=endpoint, Body=request.body, **{key: value for key, value in given.items() if value}
                )
                return HttpResponse(200, response["ResponseMetadata"]["HTTPHeaders"], response["Body"].read())
            except ClientError as error:
                raise _refusal(error, error.response) from error

    return send


def _refusal(error: Exception, answer: Mapping[str, Any]) -> Exception:
    """The model's own sentence where there is one, else what SageMaker says; AWS's refusals stay what they are."""
    code = answer["Error"].get("Code", "")
    if code not in _ANSWERS:
        return error
    original = answer.get("OriginalMessage")
    message = sentence_of(original.encode()) if original else answer["Error"].get("Message")
    return MmeError(Kind.UNAVAILABLE, f"{code}: {message}")
