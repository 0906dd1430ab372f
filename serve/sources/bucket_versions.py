"""Which objects of a model in S3 its version policy has a use for: the others need not be downloaded. PURE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from model_handlers.config.pbtxt import parse_config
from model_handlers.errors import MmeError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Named(Protocol):
    """An object."""

    @property
    def name(self) -> str:
        """Its name, which begins with the model's."""


T = TypeVar("T", bound=Named)


def has_choice(objects: Sequence[Named]) -> bool:
    """Whether a version may be left out: there are several, and no code, which may look into the others."""
    versions = {version for obj in objects if (version := _version_of(obj.name)) is not None}
    return len(versions) > 1 and not any(obj.name.endswith(".py") for obj in objects)


def served(objects: Sequence[T], config: str, model: str) -> tuple[T, ...]:
    """What there is but for the versions that are not served.

    Args:
        objects: of the model.
        config: the text of its configuration, "" for none.
        model: the name of the model.
    """
    try:
        parsed = parse_config(config, model=model, strict_name=False)
    except MmeError:  # whoever loads it tells
        return tuple(objects)
    if parsed.agents or parsed.op_libraries:  # which may name files of any version
        return tuple(objects)
    found = {version for obj in objects if (version := _version_of(obj.name)) is not None}
    wanted = {None, *parsed.version_policy.select(tuple(found))}
    if wanted == {None}:
        return tuple(objects)
    return tuple(obj for obj in objects if _version_of(obj.name) in wanted)


def _version_of(name: str) -> int | None:
    """The version that an object belongs to, None for one that belongs to the model."""
    _, _, below = name.partition("/")
    directory, slash, _ = below.partition("/")
    if not slash or not directory.isascii() or not directory.isdigit() or str(int(directory)) != directory:
        return None
    return int(directory)
