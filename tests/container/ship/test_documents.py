"""What the documents on shipping say is what the commands take, and what they ask of AWS."""

from __future__ import annotations

import re
from pathlib import Path

from container.ship import endpoint

ROOT = Path(__file__).parents[3]
_CALL = re.compile(r'(?:call|Call|find|rows)\(\s*(?:service|"([a-z-]+)"),\s*"([a-z_]+)"')


def test_the_policy_allows_every_call():
    """Each operation that the commands ask for is among the actions of the document's policy."""
    document = (ROOT / "docs" / "deploy.md").read_text()
    found = set()
    for file in (ROOT / "container" / "ship").glob("*.py"):
        text = file.read_text()
        found |= {(service or "application-autoscaling", name) for service, name in _CALL.findall(text)}

    assert len(found) > 20
    for service, operation in found - {("s3", "list_objects_v2"), ("s3", "head_object"), ("s3", "head_bucket")}:
        action = f"{service}:{operation.title().replace('_', '')}"
        assert f'"{action}"' in document, action


def test_every_alarm_is_named():
    """The table of what is made has all of them."""
    document = (ROOT / "docs" / "deploy.md").read_text()
    for alarm in endpoint.alarms("NAME", "ml.g5.xlarge", multi_model=True):
        assert f"-{alarm['AlarmName'].removeprefix('mme-NAME-')}`" in document
