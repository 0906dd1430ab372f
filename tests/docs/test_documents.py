"""What the documents say is what the code does: links, commands, variables, flags, routes, sentences."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest

from container.cli import main
from container.settings.schema import BY_NAME
from container.settings.triton_flags import TRITON_FLAGS, Ignore, Refuse
from model_handlers.registry import BACKENDS, served_backends
from serve.loading.prepare import PARAMETERS
from tests.contract.models import ONE, lay_out, plus
from tests.contract.server import Server
from tests.docs.sentences import ROOT, is_said, texts

if TYPE_CHECKING:
    from pathlib import Path

DOCS = sorted((ROOT / "docs").glob("*.md"))
GUIDES = [path for path in DOCS if path.name not in {"architecture.md", "benchmarks.md"}]
TRITON = (ROOT / "docs" / "coming-from-triton.md").read_text()
OTHERS = (ROOT / "docs" / "coming-from-other-containers.md").read_text()
OF_MODELS = set(PARAMETERS)  # in a config.pbtxt
_LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")
_VARIABLE = re.compile(r"\b(?:MME|SAGEMAKER|AZUREML)_[A-Z_]*[A-Z]\b(?!_)")
_MARKED = re.compile(r"(`+) ?(.+?) ?\1")


def marked(text: str) -> list[str]:
    """What stands between backticks."""
    return [found[1] for found in _MARKED.findall(text)]


def section(text: str, title: str) -> str:
    """The part of a document under a heading."""
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of its tables, without headings and rulers."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def commands(path: Path) -> list[str]:
    """The command lines of `mme` in its blocks; a backslash continues one, a # ends it."""
    text = path.read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if re.match(r"(    )?mme ", line)]
    return [re.split(r"\s+(?:#|&$|\|)\s*", line)[0] for line in lines]


@pytest.mark.parametrize("path", [ROOT / "README.md", *DOCS], ids=lambda path: path.name)
def test_every_link_leads_somewhere(path):
    """To a file of the project; and to a heading of it, where one is named."""
    for target, anchor in _LINK.findall(path.read_text()):
        there = path.parent / target
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert anchor[1:] in slugs, f"{target}{anchor}"


def test_the_index_has_every_document():
    """Each once, so that nobody has to know its name; questions lead into the middle of some again."""
    text = (ROOT / "docs" / "README.md").read_text()
    pages = text.replace(section(text, "By question"), "")
    named = [target for target, _ in _LINK.findall(pages)]
    assert sorted(named) == sorted(path.name for path in DOCS if path.name != "README.md")


def test_the_way_through_the_code_leads_past_files_and_functions_that_are_there():
    """Every path that architecture.md names exists, and what a table tells to look for is defined there."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    paths = {name for name in marked(text) if re.fullmatch(r"[\w/]+\.py", name) and "/" in name}
    places = [ROOT / folder for folder in ("", "container", "serve", "model_handlers")]
    assert [path for path in sorted(paths) if not any((place / path).is_file() for place in places)] == []
    missing = [
        f"{path[0]}: {name}"
        for path, look in ((marked(row[0]), marked(row[1])) for row in rows(text) if len(row) == 2)
        for name in look
        if path and path[0].endswith(".py") and name.islower()
        if not re.search(rf"^ *(?:async )?def {name}\(", (ROOT / path[0]).read_text(), re.MULTILINE)
    ]
    assert missing == []


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_a_document_begins_with_a_command(path):
    """Before any explanation that is longer than two sentences."""
    head = path.read_text().split("\n\n")[1:3]
    assert any(part.startswith(("    ", "```bash")) for part in head)


@pytest.mark.parametrize("command", sorted({command for path in GUIDES for command in commands(path)}))
def test_every_command_is_one(command):
    """Its flags are there, and take what is given."""
    _, *words = shlex.split(command)
    assert main.make_parser().parse_args(words).command == words[0]


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_every_variable_is_one(path):
    """Of the table of settings, or a parameter of a model."""
    named = set(_VARIABLE.findall(path.read_text())) - OF_MODELS
    assert named <= set(BY_NAME)


def test_every_parameter_of_our_own_is_explained():
    """In the table of docs/configuration.md."""
    table = rows((ROOT / "docs" / "configuration.md").read_text())
    assert {name for row in table for name in marked(row[0]) if name.startswith("MME_")} == OF_MODELS


def test_the_settings_are_those_of_the_table(capsys):
    """As `mme settings --format markdown` prints them; who changes a setting prints them anew."""
    assert main.main(["settings", "--format", "markdown"]) == 0
    table = capsys.readouterr().out
    document = (ROOT / "docs" / "settings.md").read_text()
    assert table in document, "docs/settings.md: replace its table by `mme settings --format markdown`"


OURS = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## What SageMaker and boto3 say")[0]
SENTENCES = [marked(row[0])[0] for row in rows(OURS) if marked(row[0])]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_every_sentence_of_troubleshooting_is_said(sentence):
    """By the code, word for word; `…` stands for what it puts in."""
    assert is_said(sentence)


def test_what_nobody_says_is_found_out():
    """Words of two sentences are none, and neither are words that are not there."""
    assert len(SENTENCES) > 45
    assert not is_said("this is what nobody ever says")
    assert not is_said("are taken: unload … last")


# -- coming from Triton ------------------------------------------------------------------------------------------


def test_every_variable_of_tritons_is_explained():
    """All of the table; and those without an effect are those that are logged as such."""
    explained = {name: row[1] for row in rows(section(TRITON, "Variables")) for name in marked(row[0])}
    assert set(explained) == {name for name in BY_NAME if name.startswith(("SAGEMAKER_TRITON_", "TRITON_"))}
    for name, text in explained.items():
        assert text.startswith("no effect") == BY_NAME[name].has_notice, name


def test_every_flag_of_tritons_is_named():
    """All that are understood, and no other; those without an effect apart."""
    understood = {flag for flag, meaning in TRITON_FLAGS.items() if not isinstance(meaning, Refuse)}
    ignored = {flag for flag in understood if isinstance(TRITON_FLAGS[flag], Ignore)}
    told = {
        row[0]: {word for word in marked(row[1]) if word.startswith("--")} for row in rows(section(TRITON, "Variables"))
    }
    assert set.union(*told.values()) == understood
    assert told["without an effect, which is logged once"] == ignored


def test_every_backend_and_model_file_is_served():
    """Those of Triton's that are named, and all that the registry has but those of our own."""
    archives = section(TRITON, "Archives and repositories")
    backends = {word.removeprefix("backend: ").strip('"') for word in marked(archives) if word.endswith('"')}
    assert backends == set(served_backends()) - {"sagemaker", "identity", "repeat", "square"}
    files = {word.removeprefix("1/") for word in marked(archives) if word.startswith("1/")}
    assert files <= {backend.filename for backend in BACKENDS}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of one model."""
    folder = tmp_path_factory.mktemp("documented")
    lay_out(folder / "models" / "plus", plus(1))
    environ = {"MME_MODEL_REPOSITORY": str(folder / "models"), "MME_PING_MODE": "ready"}
    with Server(folder / "server", environ) as server:
        yield server


def routes() -> list[tuple[str, str, bool]]:
    """Method, path and whether it is served, of every route that coming-from-triton.md names."""
    found = []
    for row in rows(section(TRITON, "Routes"))[1:]:
        method, prefix = "GET", ""
        for word in marked(row[0]):
            if " " in word:
                method, _, word = word.partition(" ")  # noqa: PLW2901
            whole = word.startswith(("/v2/", "/models", "/ping", "/inv", "/metrics")) or word == "/v2"
            prefix = word.rpartition("/")[0] if whole and "{name}/" in word else (word if whole else prefix)
            path = word if whole else prefix + word
            found.append(
                (method, path.replace("{name}", "plus").replace("{version}", "1"), not row[1].startswith("404"))
            )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "served"), [route for route in routes() if route[1]])
def test_every_route_is_there_or_is_not(server, method, path, served):
    """As the table says; what it answers is for other tests."""
    if method == "DELETE":  # another one must not take the model away
        path = path.replace("plus", "nobody")
        assert "nobody" in server.ask(method, path).error
        return
    body = ONE if method == "POST" else None
    answer = server.ask(method, path, body, X_Amzn_SageMaker_Target_Model="plus", Content_Type="application/json")
    unknown = answer.status in {404, 405} and b"is not a route of this server" in answer.body
    assert unknown != served, answer


# -- coming from other containers --------------------------------------------------------------------------------


def test_the_functions_of_scripts_are_those_that_are_called():
    """Each that is named is one that the code looks for."""
    named = {
        word
        for word in marked(
            section(OTHERS, "Script mode: PyTorch, Hugging Face, scikit-learn, XGBoost, MXNet containers")
        )
        if word.endswith("_fn")
    }
    assert len(named) == 7
    assert all(f"\n{name}\n" in f"\n{texts()}\n" for name in named)


def test_what_is_of_no_effect_is_logged_as_such():
    """And what has one is not."""
    for row in rows(OTHERS):
        for name in marked(row[0]):
            if name in BY_NAME:
                assert row[1].startswith("no effect") == BY_NAME[name].has_notice, name
