"""The dashboard for Grafana and the rules for Prometheus: they ask for what a server tells, in words that parse."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import yaml

from container.observe.emf import UNITS
from container.observe.metrics import families as families_of_server
from model_handlers.system.devices import readings
from serve.options import DEFAULT_LATENCIES
from tests.contract.models import ONE, lay_out, pack, plus
from tests.contract.server import Server
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.metric_text import families_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "mme.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
GROUPS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
HISTOGRAM = """
max_batch_size: 4
model_metrics { metric_control { metric_identifier { family: "nv_inference_first_response_histogram_ms" }
  histogram_options { buckets: [ 1, 100 ] } } }
"""
WATCHING = (DEPLOY.parent / "docs" / "watching.md").read_text()
METRICS, CLOUDWATCH = (
    WATCHING.partition(f"## {title}\n")[2].partition("\n## ")[0] for title in ("Metrics", "CloudWatch")
)
ASKED, _, TABLES = METRICS.partition("| of each model")
DOCUMENTED = re.findall(r"^\|.*\| `(.+)` \|$", ASKED, re.MULTILINE)
_NAME = re.compile(r"\b(?:mme|nv)_\w+")
_RECORDED = re.compile(r"\w+(?::\w+)+")
_SELECTOR = re.compile(r"\b((?:mme|nv)_\w+)\{([^}]*)\}")
_BY = re.compile(r"\bby \(([^)]*)\)")


def queries() -> Iterator[str]:
    """Every query of the dashboard."""
    for panel in PANELS:
        yield from (target["expr"] for target in panel["targets"])


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> list[Metric]:
    """What a server tells that has answered a request; and of a GPU, which few machines have that run tests."""
    folder = tmp_path_factory.mktemp("told")
    pack(lay_out(folder / "plus", plus(1), HISTOGRAM), folder / "store" / "plus.tar.gz")
    with Server(folder / "server", {"MME_MODEL_STORE": str(folder / "store")}) as server:
        target = {"X_Amzn_SageMaker_Target_Model": "plus.tar.gz"}
        assert server.ask("POST", "/invocations", ONE, Content_Type="application/json", **target).status == 200
        told = families_of(server.ask("GET", "/metrics").body.decode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu("GPU-1")]))
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        gpus = SimpleNamespace(machine=SimpleNamespace(gpus=readings()))
        text = [
            family.text(gpus)
            for family in families_of_server(DEFAULT_LATENCIES)
            if family.name.startswith(("nv_gpu_", "nv_energy_"))
        ]
    return told + families_of(b"".join(text).decode())


@pytest.fixture(scope="module")
def told(families) -> dict[str, set[str]]:
    """Sample → its labels; a family without samples under its own name."""
    samples: dict[str, set[str]] = {family.name: set() for family in families}
    for family in families:
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


@pytest.mark.slow
@pytest.mark.parametrize("expression", [*queries(), *(rule["expr"] for rule in RULES), *DOCUMENTED])
def test_a_query_asks_for_what_a_server_tells(told, expression):
    """Every metric that it names is one of a real server's, with the labels that it selects and groups by."""
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    asked = set(_NAME.findall(_RECORDED.sub("", expression)))
    assert asked <= set(told)
    assert set(_RECORDED.findall(expression)) <= recorded
    labels = set().union(*(told[name] for name in asked)) | {"instance", "job", "gpu_uuid"}  # the last where GPUs are
    for name, matchers in _SELECTOR.findall(expression):
        selected = {re.split(r"[=!]", matcher)[0].strip() for matcher in matchers.split(",")}
        # a family without samples yet, such as of the response cache, tells no labels
        assert selected <= told[name] | {"instance", "job"} or not told[name], name
    grouped = {label.strip() for found in _BY.findall(expression) for label in found.split(",")}
    assert grouped <= labels


@pytest.mark.slow
def test_the_dashboard_shows_what_a_server_tells(families):
    """All of it but for eight, whose like is shown: a metric on no panel would be found by nobody."""
    shown = {name for query in queries() for name in _NAME.findall(query)}
    unseen = {family.name for family in families if not any(name.startswith(family.name) for name in shown)}
    assert unseen == {
        "mme_guessed_batching",
        "mme_models_left_out",
        "nv_cache_hit_duration_per_model",
        "nv_cache_miss_duration_per_model",
        "nv_energy_consumption",
        "nv_model_load_duration_secs",
        "nv_pinned_memory_pool_total_bytes",
        "nv_pinned_memory_pool_used_bytes",
    }


@pytest.mark.slow
def test_the_document_names_what_a_server_tells(families):
    """Every metric, and no other, in the tables of docs/watching.md."""
    named = {name for line in TABLES.splitlines() if line.startswith("|") for name in _NAME.findall(line)}
    assert {name.removesuffix("_total") for name in named} == {
        family.name.removesuffix("_total") for family in families
    }


def test_the_document_names_what_cloudwatch_is_told():
    """Every metric that is written to the log, and no other."""
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", CLOUDWATCH, re.MULTILINE)))) == set(UNITS)


def test_the_dashboard_is_built_as_grafana_documents_it():
    """Identity, schema, variables; panels with numbers of their own, side by side in 24 columns, none over another."""
    assert {"uid", "title", "schemaVersion", "templating", "time", "refresh", "panels"} <= set(DASHBOARD)
    assert re.fullmatch(r"[\w-]{1,40}", DASHBOARD["uid"])
    assert "id" not in DASHBOARD, "an id is the installation's to give"
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["type"] in {"timeseries", "stat"}
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_the_dashboard_belongs_to_no_installation():
    """Its data source is a variable, and every other variable of a query is one of the dashboard or Grafana's own."""
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "instance", "model"}
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    used = {name for query in queries() for name in re.findall(r"\$(\w+)", query)}
    assert used <= variables | {"__rate_interval"}


@pytest.mark.parametrize("rule", [rule for rule in RULES if "alert" in rule], ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_what_to_do(rule):
    """A severity, a summary, a description, a section of docs/operations.md; and docs/watching.md has a line on it."""
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert {"summary", "description", "runbook_url"} == set(rule["annotations"])
    page, _, section = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^## (.+)$", (DEPLOY.parent / page).read_text(), re.MULTILINE)
    assert section in {heading.lower().replace(" ", "-") for heading in headings}
    assert f"`{rule['alert']}`" in (DEPLOY.parent / "docs" / "watching.md").read_text()


@pytest.fixture(scope="module")
def promtool() -> str:
    """Prometheus's own checker. Without it the tests are skipped, or fail where REQUIRE_PROMTOOL=1."""
    found = shutil.which("promtool")
    if found is None and os.environ.get("REQUIRE_PROMTOOL") != "1":
        pytest.skip("promtool is not installed: Debian's package prometheus has it")
    assert found is not None, "REQUIRE_PROMTOOL=1, and there is no promtool"
    return found


def run(folder: Path, *command: str) -> None:
    """It has to succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "command", ["check rules alerts.yml", "check config prometheus.yml", "test rules alerts_test.yml"]
)
def test_prometheus_accepts_the_rules_and_fires_them(promtool, command):
    """They parse, the configuration beside them loads them, and alerts fire when they should and only then."""
    run(DEPLOY / "prometheus", promtool, *command.split())


def test_prometheus_can_read_the_queries(promtool, tmp_path):
    """Each of them, and of the document's, as a rule, with a value for every variable."""
    rules = [
        {"record": f"query:{number}", "expr": re.sub(r"\$__rate_interval", "5m", query).replace("$", "")}
        for number, query in enumerate([*queries(), *DOCUMENTED])
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run(tmp_path, promtool, "check", "rules", "rules.yml")
