"""What the settings of the protocols' own features may be: restrictions, forwarded headers, keepalive, metrics. PURE.

Parsers as in `values`. Each value's `str` reads back as itself.
"""

from __future__ import annotations

import re
from dataclasses import replace

from container.restrictions import CATEGORIES, Restriction
from container.settings.values import boolean
from serve.latencies import DEFAULT_LATENCIES, DEFAULT_QUANTILES, Latencies

_RESTRICTIONS = f"CATEGORY[,CATEGORY]:HEADER=VALUE, several of them between commas, of {', '.join(CATEGORIES)}"
_KEEPALIVE = {
    "time": "grpc.keepalive_time_ms",
    "timeout": "grpc.keepalive_timeout_ms",
    "permit-without-calls": "grpc.keepalive_permit_without_calls",
    "max-pings-without-data": "grpc.http2.max_pings_without_data",
    "min-recv-ping-interval-without-data": "grpc.http2.min_ping_interval_without_data_ms",
    "max-ping-strikes": "grpc.http2.max_ping_strikes",
    "max-connection-age": "grpc.max_connection_age_ms",
    "max-connection-age-grace": "grpc.max_connection_age_grace_ms",
}
_WORDS = {"true": 1, "false": 0}
_MOST = 2**31 - 1
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
        msg = f"one header for each category, and '{twice}' has two"
        raise ValueError(msg)
    return tuple(found)


def header_pattern(text: str) -> str:
    """A regular expression; letter case does not count unless it begins with (?-i)."""
    try:
        re.compile(text.removeprefix("(?-i)"))
    except re.error as error:
        msg = f"a regular expression: {error}"
        raise ValueError(msg) from None
    if "\0" in text:
        msg = "a regular expression such as x-tenant-.*"
        raise ValueError(msg)
    return text


def keepalive(text: str) -> tuple[str, ...]:
    """Settings of gRPC's pings and connections between commas, as `time=7200000`; times are milliseconds."""
    found = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        number = _WORDS.get(value.lower(), int(value) if re.fullmatch(r"[0-9]{1,10}", value) else -1)
        if name not in _KEEPALIVE or not 0 <= number <= _MOST:
            msg = f"NAME=NUMBER between commas, of {', '.join(_KEEPALIVE)}"
            raise ValueError(msg)
        found[name] = number
    return tuple(f"{name}={number}" for name, number in found.items())


def channel_options(settings: tuple[str, ...]) -> list[tuple[str, int]]:
    """What gRPC calls the settings that `keepalive` has read."""
    pairs = (setting.split("=") for setting in settings)
    return [(_KEEPALIVE[name], int(number)) for name, number in pairs]


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
    return tuple(found) or DEFAULT_QUANTILES
