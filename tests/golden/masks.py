"""What differs from one run or machine to the next, and what stands in the recorded files in its place."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Applied in this order to each text.
MASKS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"(?<=Allow: )[^\r\n]+", lambda found: ", ".join(sorted(found[0].split(", ")))),  # a set's order is chance
    (r"\b(Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", "<date>"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "<time>"),
    (r"(?i)(?<=server-timing: )[^\r\n]+", "<timing>"),
    (r"(?i)(?<=x-amzn-requestid: )[0-9a-f-]{36}", "<id>"),
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "<id>"),
    (r"\b[0-9a-f]{24}-[0-9a-f]{16}\b", "<archive>"),
    (r"; it is loaded again in \d+ s, or by whoever loads it by name", ""),  # or not, once that time is over
    (r'("(?:ns|last_inference|host_bytes)":)\d+', r"\1<n>"),
    (r"(?m)^\s*(?:ns|last_inference): \d+\n", ""),  # protobuf leaves zeros out
    (r'(?<="data":\[1,1,0,)\d{5,}', "<session>"),
    (r"\b\d{16,20}(?=; Expires)|(?<=sessionId\":\")\d+", "<session>"),
    (r'(?<=\nversion: ")[\d.]+(?="\nextensions)|(?<="version":")[\d.]+(?=","extensions)', "<version>"),
    (r"(127\.0\.0\.1|localhost):\d+", r"\1:<port>"),
    (r"\b_ssl\.c:\d+", "_ssl.c"),
    (r"\bmme-(?:check|pack)-\w+", "mme-<random>"),
)


class Masks:
    """The masks of one run, with the folders and words that only it has.

    Args:
        words: literal texts, and the names of what stands in their place.
    """

    def __init__(self, words: Mapping[str, str]) -> None:
        self._words = sorted(words.items(), key=lambda pair: -len(pair[0]))  # a folder before what it is in

    def __call__(self, text: str) -> str:
        """The text as it is recorded."""
        text = self.named(text)
        for pattern, instead in MASKS:
            text = re.sub(pattern, instead, text)
        return text

    def named(self, text: str) -> str:
        """The text with names in place of the words alone."""
        for word, name in self._words:
            text = text.replace(word, f"<{name}>")
        return text
