"""Which values of which settings are refused, in which words; and what is said of those that are taken.

Each variable of the table meets every value of `VALUES`; each flag of tritonserver too. Rules between variables, and
what the disk has to say, are rows of `cases_settings`.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING
from unittest import mock

from container.cli import main
from container.settings import Settings, SettingsError, choose_single_model, places, read_settings
from container.settings.parsers import to_text
from container.settings.schema import VARIABLES
from container.settings.triton_flags import TRITON_FLAGS, Ignore, Use
from tests.golden.cases_settings import COMMANDS, FLAG_VALUES, FLAGS, FOLDERS, RULES, SINGLE, VALUES
from tests.golden.commands import run
from tests.golden.masks import Masks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


_PINNED = {"XDG_CACHE_HOME": "/tmp", "MME_HOST": "0.0.0.0"}  # noqa: S108 - else they depend on who asks, and where
_DEFAULT = read_settings(_PINNED)
_USED = {flag: meaning for flag, meaning in TRITON_FLAGS.items() if isinstance(meaning, Use)}
_SEVERAL, _ONE = ([flag for flag, meaning in _USED.items() if bool(meaning.read) is reads] for reads in (True, False))
_IDLE = [flag for flag, meaning in TRITON_FLAGS.items() if isinstance(meaning, Ignore)]


def record(folder: Path) -> dict[str, str]:
    """See the module."""
    above, folder = folder, folder / "here"
    for name, content in FOLDERS.items():
        place = folder / name
        (place if content is None else place.parent).mkdir(parents=True, exist_ok=True)
        if content is not None:
            place.write_text(content)
    masked = Masks({str(folder): "folder", str(above): "above"})
    with contextlib.chdir(folder):
        parts = [
            *(
                _met(row.label, lambda text, name=row.name: read({name: text}), masked)
                for row in sorted(VARIABLES, key=lambda row: row.name)
            ),
            *(_met(flag, lambda text, flag=flag: read({}, f"{flag}={text}"), masked) for flag in _SEVERAL),
            *(_met(flag, lambda text, flag=flag: read({}, f"{flag}={text}"), masked, FLAG_VALUES) for flag in _ONE),
            _listed("flags without an effect", (read({}, flag) for flag in _IDLE)),
            *(f"{flags}\n{_indented(read({'MME_HOST': 'h'}, *flags))}" for flags in FLAGS),
            *(f"{_shown(environ)}\n{_indented(read(_placed(environ, folder)))}" for environ in RULES),
            f"where no extra is installed\n{_indented(_bare())}",
            *(f"SINGLE {what}\n{_indented(_single(folder, *what))}" for what in SINGLE),
            *(f"$ {' '.join(words)}\n{_command(words, folder)}" for words in COMMANDS),
        ]
    return {"refusals.txt": masked("\n".join(parts)).replace("\0", "\\0")}


def read(environ: dict[str, str], *flags: str) -> list[str]:
    """The sentences about these settings: `!` before a refusal, else a notice or what is understood."""
    try:
        found = read_settings({**_PINNED, **environ}, flags)
        places.check_places(found)
    except SettingsError as error:
        return [f"! {problem}" for problem in error.problems]
    except OSError as error:  # the command says so
        return [f"! {error.strerror}"]
    changed = {
        name: value
        for name in sorted(Settings.__dataclass_fields__)
        if name != "notices" and (value := getattr(found, name)) != getattr(_DEFAULT, name)
    }
    return [*found.notices, " ".join(f"{name}={to_text(value)}" for name, value in changed.items())]


def _met(label: str, ask: Callable[[str], list[str]], masked: Masks, values: Sequence[str] = VALUES) -> str:
    """One setting, with what becomes of each value; values of one fate together."""
    fates: dict[tuple[str, ...], list[str]] = {}
    for text in values:
        said = (_without(text, masked.named(line)) for line in ask(text))
        fates.setdefault(tuple(map(_short, filter(None, said))), []).append(_short(repr(text), 40))
    lines, most = [label], max(map(len, fates.values()))
    for fate, texts in sorted(fates.items(), key=lambda each: len(each[1]) == most):
        lines.append("  all others" if len(texts) == most > 4 else f"  {' '.join(texts)}")
        lines += (f"    {line}" for line in fate)
    return "\n".join(lines) + "\n"


def _without(text: str, line: str) -> str:
    """A sentence without the value, so that those of several values are one."""
    for before, after in ((f"={text!r}", "=…"), (f"={text}", "=…"), (f"<folder>/{text}", "<folder>/…")):
        if before in line:
            line = re.sub(rf"{re.escape(before)}(?=[ ':]|$)", after, line)
    return line


def _short(text: str, most: int = 240) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text)})"


def _listed(title: str, told: object) -> str:
    return f"{title}\n" + "".join(f"  {line}\n" for lines in told for line in lines if line)


def _indented(lines: list[str]) -> str:
    return "".join(f"  {line}\n" for line in lines)


def _placed(environ: dict[str, str], folder: Path) -> dict[str, str]:
    return {name: text.replace("HERE", str(folder)) for name, text in environ.items()}


def _shown(environ: dict[str, str]) -> str:
    return " ".join(f"{name}={text!r}" for name, text in environ.items())


def _bare() -> list[str]:
    with mock.patch.object(places, "is_installed", return_value=False):
        return [*read({"MME_TRACE_URL": "http://h"}), *read({"MME_GRPC_PORT": "0"})]


def _single(folder: Path, name: str, default: str) -> list[str]:
    try:
        model = choose_single_model(folder / name, default)
    except SettingsError as error:
        return [f"! {problem}" for problem in error.problems]
    return [f"{model.name} in {model.folder}", model.warning]


def _command(words: tuple[str, ...], home: Path) -> str:
    """What the command line refuses, before any server starts."""
    with mock.patch.dict(os.environ, {"HOME": str(home), "MME_HOST": "0.0.0.0"}, clear=True):
        if words[0] == "serve":
            return run(*words[1:], command=main.serve_command)
        return run(*words[1:])
