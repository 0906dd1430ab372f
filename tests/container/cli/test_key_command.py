"""`mme key`: what it prints or writes is a key and the line by which a server knows it."""

from __future__ import annotations

import stat

import pytest

from container.cli.main import main
from container.steps.access import Keys


def test_a_key_and_its_line_are_printed(capsys, tmp_path):
    """On standard output and on standard error; each time other ones."""
    keys = set()
    for _ in range(2):
        assert main(["key", "health,inference"]) == 0
        key, line = capsys.readouterr()
        (tmp_path / "keys").write_text(line)
        known = Keys(tmp_path / "keys")
        assert known.denial("health", f"Bearer {key.strip()}") is None
        assert known.denial("metadata", f"Bearer {key.strip()}").status == 403
        keys.add(key)
    assert len(keys) == 2
    assert all(len(key) == 44 for key in keys)


def test_a_key_is_written_for_its_owner_and_the_line_is_added(capsys, tmp_path):
    """A file of a key that is there is not overwritten."""
    file, keys = tmp_path / "client.key", tmp_path / "keys"
    keys.write_text("# keys\n")
    for _ in range(2):
        main(["key", "*", "-o", str(file), "--key-file", str(keys)])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Keys(keys).denial("logging", f"Bearer {file.read_text().strip()}") is None
    assert len(keys.read_text().splitlines()) == 2
    assert file.read_text() not in "".join(capsys.readouterr())


def test_what_a_key_is_for_has_to_be_there(capsys):
    """Else the error lists it."""
    with pytest.raises(SystemExit):
        main(["key", "everything"])
    assert "model-repository" in capsys.readouterr().err


def test_a_line_is_one_of_its_own_behind_one_without_an_end(tmp_path, capsys):
    """As some editors leave the last line of a file."""
    keys = tmp_path / "keys"
    keys.write_text("# ours")
    for _ in range(2):
        main(["key", "inference", "--key-file", str(keys)])
    first, *lines = keys.read_text().splitlines()
    assert first == "# ours"
    assert [line.startswith("sha256:") and line.endswith(" inference") for line in lines] == [True, True]
