"""From an environment to parsed values: which variables are given, which are unknown, what they say.

Collects every problem instead of stopping at the first. Knows the table, but no rule between variables.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from container.settings.kinds import Refused
from container.settings.table import BY_NAME, VARIABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

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

_PLACES = {variable.name: place for place, variable in enumerate(VARIABLES)}


class Given(NamedTuple):
    """One value as it was given: how to name its origin, and its text."""

    label: str
    text: str


@dataclass(slots=True)
class Reading:
    """What an environment says, and what is wrong with it.

    Attributes:
        given: variable to its text; an empty variable counts as not given.
        parsed: variable to its value, for those that parse.
        fields: field of `Settings` to value, the variable that comes first in the table winning.
        problems: reasons not to start, a sentence each.
        notices: what deserves a log line, a sentence each.
    """

    given: dict[str, Given] = field(default_factory=dict)
    parsed: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def collect(self, environ: Mapping[str, str]) -> None:
        """Take the variables of the table out of `environ`; refuse or tell others that may be meant for us."""
        for name, text in sorted(environ.items()):
            if not text.strip() or _is_service_link(name, text):
                continue
            if name in BY_NAME:
                self.given[name] = Given(BY_NAME[name].label, text.strip())
            elif name.startswith(_STRICT_PREFIXES):
                self.problems.append(_unknown(name))
            elif name.startswith(_LOOSE_PREFIX) and (meant := _nearest(name, _LOOSE_PREFIX, _MISTYPED)):
                self.notices.append(f"{name} means nothing to the server; did you mean {meant}?")
            elif name.startswith(_OF_CONTAINERS):
                self.notices.append(f"{name} has no effect: it is of a model server of Amazon's containers")

    def parse(self) -> None:
        """Parse what is given, in the table's order."""
        for name in sorted(self.given, key=_PLACES.__getitem__):
            given, variable = self.given[name], BY_NAME[name]
            try:
                value = variable.parse(given.text)
            except Refused as error:
                self.problems.append(f"{given.label}={given.text!r}: {error}")
                continue
            except ValueError as error:
                self.problems.append(f"{given.label}={given.text!r}: expected {error}")
                continue
            self.parsed[name] = value
            if variable.field:
                self.fields.setdefault(variable.field, value)
            if variable.has_notice:
                self.notices.append(f"{given.label} has {variable.help}")

    def label(self, name: str) -> str:
        """How to name a given variable in a message."""
        return self.given[name].label


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
