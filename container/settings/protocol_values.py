"""What the settings of the protocols' own features may be: restrictions, forwarded headers, keepalive, metrics. PURE.

Parsers as in `values`. Each value's `str` reads back as itself.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from container.control.routes import CATEGORIES
from container.settings.values import boolean
from container.steps.restrictions import Restriction
from serve.control import DEFAULT_LATENCIES, DEFAULT_QUANTILES, Latencies

_RESTRICTIONS = f"CATEGORY[,CATEGORY]:HEADER=VALUE, several of them between commas, of {', '.join(CATEGORIES)}"
# Names of settings → those of `http2.keepalive.Keepalive`, and how many of them are a unit there.
_KEEPALIVE: dict[str, tuple[str, int]] = {
    "time": ("time", 1000),
    "timeout": ("timeout", 1000),
    "permit-without-calls": ("permit_without_calls", 1),
    "max-pings-without-data": ("max_pings_without_data", 1),
    "min-recv-ping-interval-without-data": ("min_ping_interval", 1000),
    "max-ping-strikes": ("max_ping_strikes", 1),
    "max-connection-age": ("max_age", 1000),
    "max-connection-age-grace": ("grace", 1000),
}
_HOST = re.compile(r"(\*\.)?[0-9a-z_-]+(\.[0-9a-z_-]+)*|\[[0-9a-f:.]+\]")
_WORDS = {"true": 1, "false": 0}
_MOST = 2**31 - 1
_MOST_QUANTILES = 32  # each is a series of every model's metrics
_SWITCHES = {"counter_latencies": "counters", "summary_latencies": "summaries", "histogram_latencies": "histograms"}
_METRICS = (
    "counter_latencies=BOOL, summary_latencies=BOOL, summary_quantiles=0.5:0.05,0.99:0.001 and "
    "histogram_latencies=BOOL, between commas"
)


def restrictions(text: str) -> tuple[Restriction, ...]:
    """Groups as tritonserver's flags have them: `health,metadata:admin-key=secret`, several between commas."""
    found: list[Restriction] = []
    names: list[str] = []
    for part in text.split(","):
        category, colon, secret = part.partition(":")
        names.append(category.strip())
        if colon:
            header, equals, value = secret.partition("=")
            if not (equals and value and re.fullmatch(r"[0-9A-Za-z!#$%&'*+.^_`|~-]+", header)):
                raise ValueError(_RESTRICTIONS)
            found.append(Restriction(tuple(names), header, value))
            names = []
    found = list(dict.fromkeys(found))  # an operator's variable and flag may say the same
    named = [name for restriction in found for name in restriction.categories]
    if names or not set(named) <= set(CATEGORIES):
        raise ValueError(_RESTRICTIONS)
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"one header for each category, and '{twice}' has two")
    return tuple(found)


def hosts(text: str) -> tuple[str, ...]:
    """Hosts between commas, without ports; `*.` in front of a domain means all below it."""
    found = tuple(dict.fromkeys(part.strip().lower().removesuffix(".") for part in text.split(",")))
    if not all(_HOST.fullmatch(each) for each in found):
        raise ValueError("names such as mme.example.com, *.example.com or [fe80::1], without a port, between commas")
    return found


def header_pattern(text: str) -> str:
    """A regular expression; letter case does not count unless it begins with (?-i)."""
    try:
        re.compile(text.removeprefix("(?-i)"))
    except re.error as error:
        raise ValueError(f"a regular expression: {error}") from None
    if "\0" in text:
        raise ValueError("a regular expression such as x-tenant-.*")
    return text


def keepalive(text: str) -> tuple[str, ...]:
    """Settings of gRPC's pings and connections between commas, as `time=7200000`; times are milliseconds."""
    found = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        number = _WORDS.get(value.lower(), int(value) if re.fullmatch(r"[0-9]{1,10}", value) else -1)
        if name not in _KEEPALIVE or not 0 <= number <= _MOST:
            raise ValueError(f"NAME=NUMBER between commas, of {', '.join(_KEEPALIVE)}")
        found[name] = number
    return tuple(f"{name}={number}" for name, number in found.items())


def keepalive_rules(settings: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of `http2.keepalive.Keepalive` that the settings are which `keepalive` has read."""
    rules: dict[str, Any] = {}
    for name, number in (setting.split("=") for setting in settings):
        argument, unit = _KEEPALIVE[name]
        rules[argument] = int(number) / unit if unit > 1 else int(number)
    return rules


def latencies(text: str) -> Latencies:
    """What tritonserver's --metrics-config takes, between commas; a later word on one thing wins."""
    found: dict[str, str] = {}
    last = ""
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if equals:
            found[name], last = value, name
        elif last == "summary_quantiles":
            found[last] += f",{name}"
        else:
            raise ValueError(_METRICS)
    if not found.keys() <= {*_SWITCHES, "summary_quantiles"}:
        raise ValueError(_METRICS)
    try:
        quantiles = _quantiles(found.pop("summary_quantiles", ""))
        switches = {_SWITCHES[name]: boolean(value) for name, value in found.items()}
    except ValueError:
        raise ValueError(_METRICS) from None
    return replace(DEFAULT_LATENCIES, quantiles=quantiles, **switches)


def _quantiles(text: str) -> tuple[float, ...]:
    """The quantiles of pairs as `0.5:0.05`; how far a value may be off is no question here, where none is."""
    found = []
    for pair in text.strip("\"'").split(",") if text else ():
        quantile, _, error = pair.partition(":")
        if not 0 <= float(quantile) <= 1 or not 0 <= float(error) <= 1:
            raise ValueError(pair)
        found.append(float(quantile))
    if len(found) > _MOST_QUANTILES:
        raise ValueError(text)
    return tuple(found) or DEFAULT_QUANTILES
