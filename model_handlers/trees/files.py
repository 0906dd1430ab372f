"""Which kind of file a model of trees is, and which version of its format. Looks at a few bytes, imports no library."""

from __future__ import annotations

import re
import struct
from enum import Enum
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model
from model_handlers.parameters import choice

if TYPE_CHECKING:
    from pathlib import Path

    from model_handlers.config import ModelConfig

_TAIL = 200
_JSON_VERSION = re.compile(rb'"version"\s*:\s*\[\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\]')
_UBJ_VERSION = re.compile(rb"version\[#L.{8}(.{3,15})", re.DOTALL)
_LIGHTGBM_VERSION = re.compile(r"^version=(v\d+)\s*$", re.MULTILINE)
_CHECKPOINT_MAJORS = range(1, 100)


class FileKind(Enum):
    """A format of trees, by FIL's word for it (`model_type`)."""

    XGBOOST = "xgboost"  # the binary of XGBoost before 2.0
    XGBOOST_JSON = "xgboost_json"
    XGBOOST_UBJ = "xgboost_ubj"
    LIGHTGBM = "lightgbm"
    TREELITE = "treelite_checkpoint"


_SUFFIXES = {
    ".json": FileKind.XGBOOST_JSON,
    ".ubj": FileKind.XGBOOST_UBJ,
    ".txt": FileKind.LIGHTGBM,
    ".tl": FileKind.TREELITE,
}


def kind_of(config: ModelConfig, model_file: Path) -> FileKind:
    """What the configuration says that the file is, else what its name says.

    XGBoost writes JSON or UBJSON into a file of any name but for two suffixes, so its kinds are told apart by content.

    Raises:
        MmeError: INVALID_MODEL for a `model_type` that does not exist.
    """
    by_name = _SUFFIXES.get(model_file.suffix.lower(), FileKind.XGBOOST)
    kind = FileKind(choice(config, "model_type", by_name.value, [kind.value for kind in FileKind]))
    return _xgboost_kind(kind, model_file) if kind.value.startswith("xgboost") else kind


def _xgboost_kind(kind: FileKind, model_file: Path) -> FileKind:
    with model_file.open("rb") as file:
        head = file.read(2)
    if not head.startswith(b"{"):
        return kind
    return FileKind.XGBOOST_JSON if head[1:].strip() in {b"", b'"', b"}"} else FileKind.XGBOOST_UBJ


def xgboost_version(kind: FileKind, model_file: Path) -> tuple[int, ...]:
    """The version of XGBoost that wrote a file, which its last bytes tell; () where they don't."""
    with model_file.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(file.tell() - _TAIL, 0))
        tail = file.read()
    if kind is FileKind.XGBOOST_JSON:
        found = _JSON_VERSION.search(tail)
        return tuple(map(int, found.groups())) if found else ()
    found = _UBJ_VERSION.search(tail)
    return _ubj_integers(found[1]) if found else ()


def _ubj_integers(data: bytes) -> tuple[int, ...]:
    sizes = {ord("i"): ">b", ord("U"): ">B", ord("I"): ">h", ord("l"): ">i"}
    numbers: list[int] = []
    at = 0
    while at < len(data) and data[at] in sizes and len(numbers) < 3:
        form = sizes[data[at]]
        numbers.append(struct.unpack_from(form, data, at + 1)[0])
        at += 1 + struct.calcsize(form)
    return tuple(numbers)


def lightgbm_version(model_file: Path) -> str:
    """The version of LightGBM's text format, such as `v4`; "" where the file has none."""
    with model_file.open(errors="replace") as file:
        found = _LIGHTGBM_VERSION.search(file.read(_TAIL))
    return found[1] if found else ""


def checkpoint_version(model: str, model_file: Path) -> tuple[int, int, int]:
    """The version of treelite that wrote a checkpoint.

    Raises:
        MmeError: INVALID_MODEL where none did.
    """
    with model_file.open("rb") as file:
        head = file.read(12)
    version: tuple[int, int, int] = struct.unpack("<3i", head) if len(head) == 12 else (0, 0, 0)
    if version[0] not in _CHECKPOINT_MAJORS:
        raise invalid_model(
            f"model '{model}': '{model_file.name}' is no treelite checkpoint; set the parameter 'model_type' to what "
            "it is, or write it with treelite.Model.serialize"
        )
    return version
