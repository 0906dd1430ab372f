"""What a PyTorch file is, told from its names: nothing of it is read into memory, nothing unpickled.

All that PyTorch writes today are zip archives. TorchScript and exported programs hold weights, code and plain data.
A module that was saved whole (`torch.save(model)`) is a pickle, which runs whatever its author likes when it is read,
and is refused; beside code of its name it is taken for weights, of which tensors alone are read. Refused is an archive,
too, that would unfold into far more than it is. Runs on load threads.
"""

from __future__ import annotations

import zipfile
from enum import Enum
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from pathlib import Path

_CODE, _WEIGHTS = ".py", ".pt"
_PICKLE = b"\x80"  # the first byte of a pickle of any protocol in use
_GROWTH = 4  # weights are stored as they are; only code is compressed
_SPARE = 64 << 20  # bytes of code that a small archive may unfold into
_SCRIPT = "constants.pkl"
_PROGRAMS = ("models/", "serialized_exported_program.json")
_COMPILED = "data/aotinductor/"
_OPAQUE = "data/constants/opaque_obj_"  # pickles that torch.export.load would run
_INSTEAD = "save the model with torch.jit.script(model).save(…), or torch.export.save(…) for a .pt2"


class Format(Enum):
    """What PyTorch has to do to load a file."""

    SCRIPT = "TorchScript"
    EXPORTED = "exported program"
    COMPILED = "AOTInductor package"
    CODE = "code of a module, with its weights"


def recognise(path: Path, model: str) -> Format:
    """The format of a file.

    Raises:
        MmeError: INVALID_MODEL for what is none of them, a pickle without the code that it is of, or a zip bomb.
    """
    if path.suffix == _CODE:
        return Format.CODE
    try:
        with path.open("rb") as file:
            start = file.read(1)
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        if isinstance(error, zipfile.BadZipFile) and start == _PICKLE:
            if source_of(path).is_file():
                return Format.CODE
            raise invalid_model(f"{_pickled(path, model)}") from None
        raise invalid_model(
            f"'{path.name}' of model '{model}' is no PyTorch file, which is a zip archive: {error}; {_INSTEAD}"
        ) from None
    _check_growth(path, sum(member.file_size for member in members), model)
    return _format(path, {member.filename.partition("/")[2] for member in members}, model)


def source_of(path: Path) -> Path:
    """Where the code is whose weights a file is."""
    return path.with_suffix(_CODE)


def weights_of(path: Path) -> Path | None:
    """The weights of code, None where it brings none."""
    weights = path.with_suffix(_WEIGHTS)
    return weights if weights.is_file() else None


def _check_growth(path: Path, unfolded: int, model: str) -> None:
    size = path.stat().st_size
    if unfolded > _GROWTH * size + _SPARE:
        raise invalid_model(
            f"'{path.name}' of model '{model}' has {size} bytes and would unfold into {unfolded}: PyTorch stores "
            "weights as they are, so this is no file of its making"
        )


def _format(path: Path, names: set[str], model: str) -> Format:
    if any(name.startswith(_OPAQUE) for name in names):
        raise invalid_model(
            f"'{path.name}' of model '{model}' holds pickled Python objects as constants, which could run any code and "
            "are not read: export the model without them"
        )
    if _SCRIPT in names:
        return Format.SCRIPT
    if any(name.startswith(_PROGRAMS) for name in names):
        return Format.EXPORTED
    if any(name.startswith(_COMPILED) for name in names):
        return Format.COMPILED
    if "data.pkl" in names:
        if source_of(path).is_file():
            return Format.CODE
        raise invalid_model(_pickled(path, model))
    raise invalid_model(
        f"'{path.name}' of model '{model}' is a zip archive, but neither TorchScript nor an exported program; "
        f"{_INSTEAD}"
    )


def _pickled(path: Path, model: str) -> str:
    return (
        f"'{path.name}' of model '{model}' is a pickle (torch.save), which could run any code when it is read, and is "
        f"not read: {_INSTEAD}; weights alone are read beside {source_of(path).name}, the code of their module"
    )
