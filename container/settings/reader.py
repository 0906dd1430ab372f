"""The one reader of settings: from variables and flags to `Settings`, every problem named at once.

Takes a mapping and never looks at `os.environ` by itself; flags of `mme serve` become variables of that mapping first.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from container.settings.parsers import Refused, SettingsError
from container.settings.rules import RULES, Parsed, Problem, repositories_of
from container.settings.schema import BY_NAME, LOOPBACK, VARIABLES, Settings, user_cache_dir
from container.settings.triton_flags import Given, expand

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# A mistyped variable of these families would otherwise be a setting that silently does not hold. SageMaker itself
# adds SAGEMAKER_ variables as it likes, so those that are not in the table are let through; one that is a letter or
# two from one of the table is said.
_STRICT_PREFIXES = ("MME_", "SAGEMAKER_TRITON_")
_LOOSE_PREFIX = "SAGEMAKER_"
_MISTYPED = 0.9  # how alike names are, of which one is likely meant for the other

# What Amazon's containers hand on to their model servers by these beginnings, and what has no row in the table.
_OF_CONTAINERS = ("MMS_", "TS_", "SAGEMAKER_GUNICORN_", "SAGEMAKER_MMS_", "SAGEMAKER_TFS_", "SAGEMAKER_TS_")

# Kubernetes describes every Service of the namespace to every container; one called "mme" (or "mme-…") makes
# MME_PORT=tcp://10.0.0.1:8080, MME_SERVICE_HOST and MME_PORT_8080_TCP_ADDR, none of which is meant for us.
_SERVICE_LINK = re.compile(
    r"MME_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_LINK_URL = re.compile(r"(tcp|udp|sctp)://")
_EVERYWHERE = "0.0.0.0"  # noqa: S104 - in a container, whose ports are opened from outside
_PLATFORMS = ("AZUREML_MODEL_DIR", "KUBERNETES_SERVICE_HOST")
_MARKS = ("/.dockerenv", "/run/.containerenv")  # Docker's and Podman's
_PLACES = {variable.name: place for place, variable in enumerate(VARIABLES)}


def read_settings(environ: Mapping[str, str], arguments: Sequence[str] = (), host: str = LOOPBACK) -> Settings:
    """Read and check the settings.

    Args:
        environ: the variables.
        arguments: flags of tritonserver with their values, as if they stood in its variable.
        host: where to listen if `environ` does not say; see `listening_address`.

    Raises:
        SettingsError: with one sentence for every variable that is unknown, malformed or in conflict.
    """
    problems: list[str] = []
    notices: list[str] = []
    given = _collect(environ, problems, notices)
    expand(given, arguments, problems, notices)
    values: dict[str, Any] = {}
    for name in sorted(given, key=_PLACES.__getitem__):
        label, text = given[name]
        try:
            values[name] = BY_NAME[name].parse(text)
        except Refused as error:
            problems.append(f"{label}={text!r}: {error}")
        except ValueError as error:
            problems.append(f"{label}={text!r}: expected {error}")
        else:
            if BY_NAME[name].has_notice:
                notices.append(f"{label} has {BY_NAME[name].help}")
    fields: dict[str, Any] = {"host": host, "cache_dir": user_cache_dir(environ)}
    fields |= {BY_NAME[name].field: value for name, value in reversed(values.items()) if BY_NAME[name].field}
    fields |= repositories_of(fields.pop("model_repository", ()))
    settings = Settings(**fields)
    parsed = Parsed(values, given)
    for rule in RULES:
        changes: dict[str, Any] = {}
        for found in rule(parsed, settings):
            if isinstance(found, dict):
                changes |= found
            else:
                (problems if isinstance(found, Problem) else notices).append(found)
        settings = replace(settings, **changes) if changes else settings
    if problems:
        raise SettingsError(*problems)
    return replace(settings, notices=tuple(notices))


def _collect(environ: Mapping[str, str], problems: list[str], notices: list[str]) -> dict[str, Given]:
    """Take the variables of the table out of `environ`; refuse or tell others that may be meant for us."""
    given: dict[str, Given] = {}
    for name, text in sorted(environ.items()):
        if not text.strip() or _is_service_link(name, text):
            continue
        if name in BY_NAME:
            given[name] = Given(BY_NAME[name].label, text.strip())
        elif name.startswith(_STRICT_PREFIXES):
            problems.append(_unknown(name))
        elif name.startswith(_LOOSE_PREFIX) and (meant := _nearest(name, _LOOSE_PREFIX, _MISTYPED)):
            notices.append(f"{name} means nothing to the server; did you mean {meant}?")
        elif name == "GUNICORN_CMD_ARGS":
            notices.append(f"{name} has no effect: gunicorn is configured by the server's own settings")
        elif name.startswith(_OF_CONTAINERS):
            notices.append(f"{name} has no effect: it is of a model server of Amazon's containers")
    return given


def _is_service_link(name: str, text: str) -> bool:
    """Whether Kubernetes put the variable there to describe a Service."""
    return bool(
        _SERVICE_LINK.fullmatch(name)
        or (name.startswith("MME_") and name.endswith("PORT") and _SERVICE_LINK_URL.match(text))
    )


def _unknown(name: str) -> str:
    begins = next((prefix for prefix in _STRICT_PREFIXES if name.startswith(prefix)), "")  # which makes none alike
    nearest = _nearest(name, begins, 0.6)
    hint = f"did you mean {nearest}?" if nearest else "remove it; `mme settings` lists those there are"
    return f"{name}: there is no such variable; {hint}"


def _nearest(name: str, begins: str, cutoff: float) -> str | None:
    """The variable with an effect that is most like it behind what it begins with, if any is as much as `cutoff`."""
    known = {each.removeprefix(begins): each for each, variable in BY_NAME.items() if not variable.has_notice}
    nearest = difflib.get_close_matches(name.removeprefix(begins), known, n=1, cutoff=cutoff)
    return known[nearest[0]] if nearest else None


class Address(NamedTuple):
    """Where to listen, and the reason, to follow the address and a colon."""

    host: str
    reason: str


def listening_address(environ: Mapping[str, str], exists: Callable[[str], bool], pid: int) -> Address:
    """Return where to listen, by variables (flags among them), files that exist, and the process's own number."""
    if given := environ.get("MME_HOST", "").strip():
        return Address(given, "--host/MME_HOST says so")
    variables = (name for name in sorted(environ) if name.startswith("SAGEMAKER_") or name in _PLATFORMS)
    if name := next(variables, ""):
        return Address(_EVERYWHERE, f"all interfaces, since {name} is set")
    if mark := next((mark for mark in _MARKS if exists(mark)), ""):
        return Address(_EVERYWHERE, f"all interfaces, since there is {mark}, as in a container")
    if pid == 1:
        return Address(_EVERYWHERE, "all interfaces, since this is process 1, as in a container")
    return Address(LOOPBACK, "this machine alone, since nothing tells of a container; --host/MME_HOST says otherwise")
