"""The exception of everything that models import: by itself, since tensors and messages both raise it."""

from __future__ import annotations


class TritonModelException(Exception):  # noqa: N818 - the name that models know
    """What the calls of `pb_utils` raise."""
