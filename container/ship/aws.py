"""The border to AWS: clients of boto3, and what botocore raises as one sentence with the next step.

boto3 finds credentials, region and endpoints by its own rules. Codes decide what an error is, never its text. What the
person at the keyboard can mend is an INVALID_ARGUMENT.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from botocore.exceptions import ClientError

_S3_URI = re.compile(r"s3://([a-z0-9][a-z0-9.\-]{1,61}[a-z0-9])(?:/(.*))?", re.DOTALL)
_EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired", "TokenExpired"}
)
_UNKNOWN_KEYS = frozenset(
    {"InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken", "SignatureDoesNotMatch", "IncompleteSignature",
     "InvalidSignatureException", "MissingAuthenticationToken", "UnrecognizedClientException"}
)  # fmt: skip
DENIED = frozenset(
    {"AccessDenied", "AccessDeniedException", "AllAccessDisabled", "Forbidden", "UnauthorizedOperation", "403"}
)
_BUSY = frozenset({"Throttling", "ThrottlingException", "TooManyRequestsException", "SlowDown", "RequestLimitExceeded"})
_ATTEMPTS = 5
_CONNECT_SECONDS = 10
_EXPIRED_ADVICE = "the AWS credentials have expired: sign in again, as with `aws sso login`, and repeat the command"


def split_uri(uri: str) -> tuple[str, str]:
    """Bucket and key of an s3:// URI; the key is without a slash in front."""
    found = _S3_URI.fullmatch(uri)
    if found is None:
        raise invalid_argument(
            f"'{uri}' is not a place in S3: write s3://bucket/prefix; a bucket's name has 3 to 63 characters"
        )
    return found[1], found[2] or ""


class Aws:
    """The clients of one command, in one region; "" leaves that to boto3."""

    def __init__(self, region: str = "") -> None:
        import boto3  # noqa: PLC0415 - heavy

        with aws_errors("AWS"):
            self._session = boto3.session.Session(region_name=region or None)
        self._clients: dict[str, Any] = {}

    @property
    def region(self) -> str:
        if not self._session.region_name:
            raise invalid_argument("no AWS region is chosen: give --region, or set AWS_DEFAULT_REGION")
        return str(self._session.region_name)

    @property
    def signed_in(self) -> bool:
        """Whether there are credentials, good or bad."""
        with aws_errors("AWS"):
            return self._session.get_credentials() is not None

    def client(self, service: str) -> Any:
        from botocore.config import Config  # noqa: PLC0415 - heavy

        if service not in self._clients:
            self._check_region(service)
            retries = {"mode": "standard", "total_max_attempts": _ATTEMPTS}
            config = Config(retries=retries, connect_timeout=_CONNECT_SECONDS)
            with aws_errors(service):
                self._clients[service] = self._session.client(service, region_name=self.region, config=config)
        return self._clients[service]

    def call(self, service: str, operation: str, parameters: dict[str, Any], doing: str = "") -> dict[str, Any]:
        """One API call by the name that AWS gives it, such as `create_model`; `doing` is what an error calls it."""
        client = self.client(service)
        with aws_errors(doing or f"{service}:{operation}"):
            answer: dict[str, Any] = getattr(client, operation)(**parameters)
        return answer

    def find(
        self, service: str, operation: str, parameters: dict[str, Any], absent: Collection[str], doing: str = ""
    ) -> dict[str, Any] | None:
        """The same, None where AWS answers with one of the codes `absent`."""
        try:
            return self.call(service, operation, parameters, doing)
        except MmeError as error:
            if code_of(error) in absent:
                return None
            raise

    def rows(self, service: str, operation: str, key: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
        """What all pages of a listing have under `key`."""
        paginator = self.client(service).get_paginator(operation)
        with aws_errors("AWS"):
            return [row for page in paginator.paginate(**parameters) for row in page.get(key, ())]

    def _check_region(self, service: str) -> None:
        """Refuse a region that AWS has not, or that has no such service; a new one may not be known here yet."""
        for partition in self._session.get_available_partitions():
            known = self._session.get_available_regions(service, partition)
            everywhere = self._session.get_available_regions("s3", partition)
            if self.region in everywhere and known and self.region not in known:
                names = ", ".join(known)
                raise invalid_argument(f"region '{self.region}' has no {service}: choose one of {names}")
        if not re.fullmatch(r"[a-z]{2,4}(-[a-z]+)+-\d+", self.region):
            raise invalid_argument(f"'{self.region}' is not the name of a region: write one such as eu-central-1")


@contextmanager
def aws_errors(doing: str) -> Iterator[None]:
    """Whatever botocore raises inside, as an `MmeError` whose sentence has the next step."""
    from botocore import exceptions as boto  # noqa: PLC0415 - heavy

    try:
        yield
    except boto.ClientError as error:
        raise _refused(error, doing) from error
    except (boto.NoCredentialsError, boto.PartialCredentialsError) as error:
        raise invalid_argument(
            "no AWS credentials: sign in with `aws sso login` or `aws configure`, or set AWS_PROFILE"
        ) from error
    except (boto.SSOError, boto.TokenRetrievalError, boto.UnauthorizedSSOTokenError) as error:
        raise invalid_argument(_EXPIRED_ADVICE) from error
    except boto.NoRegionError as error:
        raise invalid_argument("no AWS region is chosen: give --region, or set AWS_DEFAULT_REGION") from error
    except boto.ProfileNotFound as error:
        raise invalid_argument(f"{error}: check AWS_PROFILE against `aws configure list-profiles`") from error
    except boto.ParamValidationError as error:
        raise invalid_argument(f"{doing}: {_line(str(error))}") from error
    except (boto.EndpointConnectionError, boto.ConnectTimeoutError) as error:
        reason = f"{doing} cannot be reached: check the network and the region ({_line(str(error))})"
        raise invalid_argument(reason) from error
    except boto.BotoCoreError as error:
        raise MmeError(Kind.UNAVAILABLE, f"{doing}: {_line(str(error))}") from error


def code_of(error: BaseException) -> str:
    """The code that AWS gave the error behind one of ours, "" if none."""
    cause = error.__cause__ if isinstance(error, MmeError) else error
    return str((getattr(cause, "response", None) or {}).get("Error", {}).get("Code", ""))


def _refused(error: ClientError, doing: str) -> MmeError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    message = _line(str(error.response.get("Error", {}).get("Message", "")))
    if code in _EXPIRED:
        return invalid_argument(_EXPIRED_ADVICE)
    if code in _UNKNOWN_KEYS:
        return invalid_argument(f"AWS does not accept these credentials ({code}): check AWS_PROFILE, or sign in again")
    if code in DENIED:
        return invalid_argument(f"{doing} is denied: have {error.operation_name} allowed for this identity ({message})")
    if code == "NoSuchBucket":
        return invalid_argument(f"{doing}: the bucket does not exist: make it with `aws s3 mb`, or name another")
    if code in {"ResourceLimitExceeded", "LimitExceededException", "ServiceQuotaExceededException"}:
        advice = "ask for more under Service Quotas in the console, or delete what is not used"
        return invalid_argument(f"{doing} exceeds a quota of this account: {message}; {advice}")
    if code in _BUSY or error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500:
        return MmeError(Kind.UNAVAILABLE, f"{doing}: AWS says {code}: {message}; try again in a moment")
    return invalid_argument(f"{doing}: {code}: {message}")


def _line(text: str) -> str:
    return " ".join(text.split())[:600]
