"""What refusals of AWS mean, and which objects of a model in S3 are needed. PURE.

The message of a service is always told: it alone names the key, the policy, the role.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from model_handlers.config.pbtxt import parse_config
from model_handlers.errors import MmeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


S3, STS, SSO = "S3", "STS", "SSO"
_OPERATIONS = {
    **dict.fromkeys(("AssumeRole", "AssumeRoleWithWebIdentity", "AssumeRoleWithSAML", "GetSessionToken"), STS),
    **dict.fromkeys(("GetRoleCredentials", "CreateToken"), SSO),
}
_LONGEST = 300  # characters of a message
_SPACES = re.compile(r"\s+")

# What a message of AccessDenied speaks of → a code of ours.
_TOPICS = (
    (re.compile(r"explicit deny"), "ExplicitDeny"),
    (re.compile(r"\bkms:", re.IGNORECASE), "KeyDenied"),
    (re.compile(r"requester pays", re.IGNORECASE), "RequesterPays"),
    (re.compile(r"\bs3express:"), "SessionDenied"),
)
# Service and codes → sentence.
_TABLE = {
    (S3, "AccessDenied AllAccessDisabled Forbidden 403"): (
        "S3 denies access to {uri}{name}: allow s3:GetObject and s3:ListBucket to this role (without the latter, S3 "
        "denies what does not exist)"
    ),
    (S3, "KeyDenied"): (
        "KMS does not let this role decrypt {uri}{name}: allow kms:Decrypt on the bucket's key, to the role and in "
        "the key's policy"
    ),
    (S3, "ExplicitDeny"): (
        "a policy denies {uri}{name} to this role explicitly, which no allowance outweighs: change the policy that "
        "the message names"
    ),
    (S3, "SessionDenied"): (
        "S3 Express does not let this role open a session for {uri}: allow s3express:CreateSession on the directory "
        "bucket"
    ),
    (S3, "407"): (
        "the proxy between this process and {uri} wants to know who asks: name the user and the password in "
        "HTTP_PROXY or HTTPS_PROXY, or the host in NO_PROXY"
    ),
    (S3, "RequesterPays"): (
        "whoever asks for {uri}{name} has to pay for it (requester pays), which this server does not: copy the "
        "models to a bucket of your own"
    ),
    (S3, "KMS.Disabled KMS.KMSInvalidState KMS.NotFound KMS.InvalidKeyUsage"): (
        "the key of KMS that {uri}{name} is encrypted with can't be used ({code}): enable it, or encrypt the object "
        "anew"
    ),
    (
        S3,
        "ExpiredToken InvalidAccessKeyId InvalidToken RequestTimeTooSkewed SignatureDoesNotMatch 400",
    ): (  # 400: HEAD with an expired token
        "S3 does not accept the AWS credentials for {uri} ({code}): they have expired or are wrong, or the region or "
        "the clock is; renew them, or set AWS_DEFAULT_REGION to the bucket's"
    ),
    (S3, "301 AuthorizationHeaderMalformed IllegalLocationConstraint PermanentRedirect"): (
        "the bucket of {uri} is in another region than this process asks ({code}): set AWS_DEFAULT_REGION to the "
        "bucket's"
    ),
    (S3, "307 TemporaryRedirect Redirect"): (
        "S3 sends the requests for {uri} elsewhere for now ({code}), as it does of a bucket that is new or moves: "
        "set AWS_DEFAULT_REGION to the bucket's region, or try again in an hour"
    ),
    (S3, "InvalidObjectState"): "{uri}{name} is archived in a cold storage class: restore it first",
    (STS, "AccessDenied"): (
        "STS does not let this process assume its role for {uri}: the role's trust policy has to allow it (IRSA: the "
        "OIDC provider of the cluster, and this namespace and service account)"
    ),
    (STS, "ExpiredToken"): (
        "STS does not accept the token of this process for {uri}, since it has expired ({code}): renew the token "
        "file, or the credentials that the role is assumed with"
    ),
    (STS, "InvalidIdentityToken IDPRejectedClaim"): (
        "STS does not accept the web identity token of this process for {uri} ({code}): IAM needs an identity "
        "provider of the token's issuer and audience"
    ),
    (STS, "RegionDisabled"): (
        "STS is switched off in the region that this process asks for {uri} ({code}): switch it on in IAM's account "
        "settings, or set AWS_STS_REGIONAL_ENDPOINTS"
    ),
    (STS, "InvalidClientTokenId SignatureDoesNotMatch"): (
        "STS does not accept the AWS credentials that a role is to be assumed with for {uri} ({code}): renew them"
    ),
    (SSO, "Unauthorized InvalidGrant"): (
        "the login of AWS's single sign-on for {uri} does not hold ({code}): run `aws sso login`"
    ),
}
_SENTENCES = {(service, code): text for (service, codes), text in _TABLE.items() for code in codes.split()}
_SAID_BY_STATUS = {status.phrase for status in HTTPStatus}  # of HEAD, as if it were a message


def service_of(operation: str) -> str:
    return _OPERATIONS.get(operation, S3)


def sentence(service: str, error: Mapping[str, Any], uri: str, name: str) -> str:
    """What a refusal by a service means, "" for one that the table does not have."""
    code, said = str(error.get("Code", "")), message(error)
    topic = code
    if service == S3 and code == "AccessDenied":
        topic = next((topic for pattern, topic in _TOPICS if pattern.search(said)), code)
    found = _SENTENCES.get((service, topic.removesuffix("Exception")))
    if found is None:
        return ""
    return found.format(uri=uri, name=name, code=code) + told(service, said)


def by_another(error: Mapping[str, Any]) -> str:
    """The end of a sentence about an answer without a body, where something between S3 and here may have given it."""
    code, metadata = str(error.get("Error", {}).get("Code", "")), error.get("ResponseMetadata", {})
    names = metadata.get("RequestId") or metadata.get("HTTPHeaders", {}).get("x-amz-request-id")
    return (
        ""
        if names or not code.isdigit() or code == "407"
        else "; the answer has no x-amz-request-id: a proxy may have given it"
    )


def message(error: Mapping[str, Any]) -> str:
    """What the service says, on one line and not longer than it need be; "" for HEAD's, which has no body."""
    said = _SPACES.sub(" ", str(error.get("Message", ""))).strip()
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."


def told(service: str, said: str) -> str:
    """The same as the end of a sentence."""
    return f"; {service} says '{said}'" if said and said not in _SAID_BY_STATUS else ""


class Named(Protocol):
    """An object, whose name begins with the model's."""

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


def has_choice(objects: Sequence[Named]) -> bool:
    """Whether a version may be left out: there are several, and no code, which may look into the others."""
    versions = {version for obj in objects if (version := _version_of(obj.name)) is not None}
    return len(versions) > 1 and not any(obj.name.endswith(".py") for obj in objects)


def served(objects: Sequence[T], config: str, model: str) -> tuple[T, ...]:
    """What there is of a model without versions that are not served, by the text of its configuration."""
    try:
        parsed = parse_config(config, model=model, strict_name=False)
    except MmeError:  # its load tells
        return tuple(objects)
    if parsed.agents or parsed.op_libraries:  # which may name files of any version
        return tuple(objects)
    found = {version for obj in objects if (version := _version_of(obj.name)) is not None}
    wanted = {None, *parsed.version_policy.select(tuple(found))}
    if wanted == {None}:
        return tuple(objects)
    return tuple(obj for obj in objects if _version_of(obj.name) in wanted)


def _version_of(name: str) -> int | None:
    _, _, below = name.partition("/")
    directory, slash, _ = below.partition("/")
    if not slash or not directory.isascii() or not directory.isdigit() or str(int(directory)) != directory:
        return None
    return int(directory)
