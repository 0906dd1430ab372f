"""Which input of a configuration is which argument of a model, and which output which result: Triton's rules. PURE.

TorchScript has names for arguments and none for results; an exported program has both only inside. So a name is, for
inputs as for outputs and for all of them alike:

1. a name that the model knows: forward's argument, a key of its dictionary, `ARGS[0]`, `KWARGS[x]`, `RESULT[0]`;
2. or anything with a position behind it: `INPUT__0`, `OUTPUT__1`;
3. or, where there are as many as the model has, anything: the order of the configuration counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers.tensor import TensorSpec

_POSITION = re.compile(r".*__(\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for a tensor: an argument or a result.

    Attributes:
        name: what the model calls it.
        aliases: other names for it.
        required: whether it must be given.
        strings: whether it is a list of strings; None where nobody knows.
        scalar: the Python type of an argument that is no tensor: "int", "float" or "bool", else "".
        given: whether it must be there though it may be None.
    """

    name: str
    aliases: tuple[str, ...] = ()
    required: bool = True
    strings: bool | None = None
    scalar: str = ""
    given: bool = False

    @property
    def names(self) -> set[str]:
        """All its names."""
        return {self.name, *self.aliases}


def bound(what: str, specs: Sequence[TensorSpec], slots: Sequence[Slot], model: str) -> list[int]:
    """For each spec the position of its slot.

    Args:
        what: "input" or "output".
        specs: as declared.
        slots: what the model has.
        model: its name.

    Raises:
        MmeError: INVALID_MODEL when no rule holds for all of them.
    """
    positions = _by_name(specs, slots)
    if positions is None:
        positions = _by_position(what, specs, slots, model)
    if positions is None and len(specs) == len(slots):
        positions = list(range(len(slots)))
    if positions is None:
        raise invalid_model(
            f"model '{model}' has {len(slots)} {what}s{_shown(slots)} and its configuration {len(specs)} "
            f"({', '.join(spec.name for spec in specs)}), whose names fit none of them: use the model's own names, or "
            f"{what.upper()}__0, {what.upper()}__1, …"
        )
    return positions


def check_given(specs: Sequence[TensorSpec], positions: Sequence[int], slots: Sequence[Slot], model: str) -> None:
    """Every argument that a model can't do without is declared.

    Raises:
        MmeError: INVALID_MODEL, naming those that are not.
    """
    left = [slot.name for index, slot in enumerate(slots) if slot.required and index not in positions]
    if left:
        raise invalid_model(
            f"model '{model}' takes {len(slots)} inputs{_shown(slots)} and its configuration declares {len(specs)}: "
            f"declare {', '.join(left)} too"
        )


def position(name: str, otherwise: int) -> int:
    """The position that a name ends with, `otherwise` where it does not."""
    match = _POSITION.fullmatch(name)
    return otherwise if match is None else int(match.group(1))


def _by_name(specs: Sequence[TensorSpec], slots: Sequence[Slot]) -> list[int] | None:
    where = {name: index for index, slot in enumerate(slots) for name in slot.names}
    positions = [where.get(spec.name, -1) for spec in specs]
    return None if -1 in positions or len(set(positions)) < len(positions) else positions


def _by_position(what: str, specs: Sequence[TensorSpec], slots: Sequence[Slot], model: str) -> list[int] | None:
    matches = [_POSITION.fullmatch(spec.name) for spec in specs]
    positions = [int(match.group(1)) for match in matches if match is not None]
    if len(positions) < len(specs) or len(set(positions)) < len(positions):
        return None
    for spec, position in zip(specs, positions, strict=True):
        if position >= len(slots):
            raise invalid_model(
                f"model '{model}' has no {what} of position {position}, which the name '{spec.name}' asks for: it has "
                f"{len(slots)}{_shown(slots)}"
            )
    return positions


def _shown(slots: Sequence[Slot]) -> str:
    return f" ({', '.join(slot.name for slot in slots)})" if slots else ""
