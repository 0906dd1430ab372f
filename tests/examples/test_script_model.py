"""The example of an inference script: built by its command, and served as it is to plain boto3."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import boto3
import joblib
import numpy as np
import pytest
from rich.console import Console

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # examples are run from the root, never installed

from examples import call_script, classifiers, demo_servers, script_model  # noqa: E402
from examples.build_models import Layout  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.long]  # test_python_models asks the same archive


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """What the command builds, once."""
    folder = tmp_path_factory.mktemp("script")
    command = [sys.executable, "-m", "examples.build_models", str(folder), script_model.NAME]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return Layout(folder)


@pytest.fixture
def client(out, tmp_path):
    """A client of a server whose store holds the archive."""
    console = Console(quiet=True)
    with demo_servers.s3_server() as s3_url:
        demo_servers.upload([out.archive(script_model.NAME)], s3_url, console)
        places = {"cache": tmp_path / "cache", "log": tmp_path / "server.log"}
        with demo_servers.Container(s3_url=s3_url, memory_budget="1GB", console=console, **places) as container:
            runtime = boto3.client("sagemaker-runtime", endpoint_url=container.url, **demo_servers.CREDENTIALS)
            yield runtime
            runtime.close()


def test_the_archive_is_what_sagemakers_container_takes(out):
    """A joblib file and `code/inference.py` at the root, and nothing of Triton's."""
    with tarfile.open(out.archive(script_model.NAME)) as tar:
        assert sorted(tar.getnames()) == ["code", "code/inference.py", "model.joblib"]


def test_rows_of_csv_are_answered_in_json(out, client):
    """One row and many: each gets the digit that scikit-learn itself would give, and how sure it is."""
    estimator = joblib.load(out.model(script_model.NAME) / "model.joblib")
    held_out = classifiers.split_data("digits").held_out_features
    for rows in (held_out[:1], held_out):
        digits = call_script.read_digits(client, call_script.as_csv(rows))

        assert [digit["label"] for digit in digits] == estimator.predict(rows).tolist()
        sure = estimator.predict_proba(rows).max(axis=1)
        np.testing.assert_allclose([digit["probability"] for digit in digits], sure, atol=1e-4)
