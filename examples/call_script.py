"""Have a script of scikit-learn read handwritten digits: CSV in, JSON out, neither of which mme looks into.

python -m examples.call_script [URL]
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import boto3

from examples.classifiers import split_data

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TARGET = "digits-script.tar.gz"


def main() -> None:
    """Print what ten rows that training never saw are read as."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
    # boto3 wants a region and credentials; on a server of one's own nobody checks them.
    anybody = {"region_name": "us-east-1", "aws_access_key_id": "any", "aws_secret_access_key": "any"}
    runtime = boto3.client("sagemaker-runtime", endpoint_url=url, **anybody)
    split = split_data("digits")
    digits = read_digits(runtime, as_csv(split.held_out_features[:10]))
    for digit, truth in zip(digits, split.held_out_labels, strict=False):
        print(f"{digit['label']} ({digit['probability']:.0%}), is {truth}")


def read_digits(runtime: Any, csv: str) -> list[dict[str, Any]]:
    """`label` and `probability` of each row. `runtime` is a client of boto3."""
    answer = runtime.invoke_endpoint(
        EndpointName="any", TargetModel=TARGET, ContentType="text/csv", Accept="application/json", Body=csv
    )
    digits: list[dict[str, Any]] = json.load(answer["Body"])["digits"]
    return digits


def as_csv(rows: NDArray[np.float32]) -> str:
    """Rows of pixels [n, 64] as the script wants them."""
    return "".join(",".join(f"{value:g}" for value in row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
