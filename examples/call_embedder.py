"""Embed sentences that are sent as text, and find the nearest to a question.

    python -m examples.call_embedder [URL]

Both archives have the same interface: `embedder.tar.gz`, whose Python model tokenizes and calls the encoder, and
`embedder-ensemble.tar.gz`, where the server takes the tokens from one model to the other. A client needs no tokenizer.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import boto3
import numpy as np

from examples.sentences import QUERIES, SENTENCES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

TARGETS = ("embedder.tar.gz", "embedder-ensemble.tar.gz")


def main() -> None:
    """Print the sentence nearest to each question, by both archives."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
    # boto3 wants a region and credentials; on a server of one's own nobody checks them.
    anybody = {"region_name": "us-east-1", "aws_access_key_id": "any", "aws_secret_access_key": "any"}
    runtime = boto3.client("sagemaker-runtime", endpoint_url=url, **anybody)
    for target in TARGETS:
        print(target)
        corpus = embed(runtime, target, SENTENCES)
        for query, embedding in zip(QUERIES, embed(runtime, target, QUERIES), strict=True):
            cosines = corpus @ embedding  # embeddings have length 1
            print(f"  {query:50s} {cosines.max():.2f}  {SENTENCES[np.argmax(cosines)]}")


def embed(runtime: Any, target: str, sentences: Sequence[str]) -> NDArray[np.float32]:
    """FP32 [sentences, 384], of up to 32 sentences. `runtime` is a client of boto3."""
    text = {"name": "TEXT", "shape": [len(sentences), 1], "datatype": "BYTES", "data": list(sentences)}
    answer = runtime.invoke_endpoint(
        EndpointName="any", TargetModel=target, ContentType="application/json", Body=json.dumps({"inputs": [text]})
    )
    (embedding,) = json.load(answer["Body"])["outputs"]
    return np.array(embedding["data"], np.float32).reshape(embedding["shape"])


if __name__ == "__main__":
    main()
