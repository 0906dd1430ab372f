"""Flags of the commands are written out, and their numbers have bounds."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

import pytest

from container.cli import main

ROOT = Path(__file__).parents[2]


def parsers_in(path):
    """The calls of a file that make a parser."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name == "ArgumentParser":
                yield node


def test_no_parser_takes_the_beginning_of_a_flag(monkeypatch, capsys):
    """Neither `mme` nor any of its commands, nor theirs: what it means could change with the next flag."""
    made = []
    init = argparse.ArgumentParser.__init__

    def noted(parser, *args, **options):
        init(parser, *args, **options)
        made.append(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "__init__", noted)
    commands = [[], *([each.name] for each in main.COMMANDS)]  # whose parsers are made when they are asked for
    for run, words in [(main.serve_command, []), *((main.main, words) for words in commands)]:
        with pytest.raises(SystemExit):
            run([*words, "--help"])
    capsys.readouterr()
    assert {"mme", "mme serve", "mme config check", "serve"} <= {parser.prog for parser in made}
    assert [parser.prog for parser in made if parser.allow_abbrev] == []


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_nor_does_any_other_program_of_the_project(folder):
    """Each says so where its parser is made."""
    for path in (ROOT / folder).rglob("*.py"):
        for call in parsers_in(path):
            said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert said.get("allow_abbrev") == "False", f"{path}:{call.lineno}"


@pytest.mark.parametrize(
    "words", [["models", "--ur=http://x"], ["serve", "--model-stor=s3://b"], ["bench", "--json", "{}", "--zip=1"]]
)
def test_the_beginning_of_a_flag_is_told_as_unknown(words, capsys):
    """With the flag that was likely meant."""
    with pytest.raises(SystemExit):
        main.main(words)
    assert words[-1].partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["models", "--timeout"],
        ["bench", "--json", "{}", "--zipf"],
        ["local", "a", "--throttle"],
        ["local", "a", "--async-workers"],
        ["update", "e", "--bake-seconds"],
        ["deploy", "e", "--instances"],
        ["build-engine", "m.onnx", "--workspace"],
    ],
)
@pytest.mark.parametrize("value", ["1000000000000000000", "-1", "inf", "nan"])
def test_no_flag_takes_a_number_beyond_its_bound(words, value, capsys):
    """It says which numbers it takes."""
    with pytest.raises(SystemExit):
        main.main([*words[:-1], f"{words[-1]}={value}"])
    assert f"{words[-1]}: expected a" in capsys.readouterr().err
