"""Find the sentence nearest to each question in this very process: no server, no port.

python -m examples.build_models .demo embedder embedder-ensemble
python -m examples.in_process [STORE]
"""

from __future__ import annotations

import sys

import numpy as np

import mme
from examples.sentences import QUERIES, SENTENCES


def main() -> None:
    """Print them, by a Python model that calls the encoder, and by an ensemble of tokenizer and encoder."""
    store = sys.argv[1] if len(sys.argv) > 1 else ".demo/archives"
    with mme.Server(model_store=store, memory_budget="2GB") as server:
        for target in ("embedder.tar.gz", "embedder-ensemble.tar.gz"):
            model = server.model(target)
            corpus, queries = (
                model.infer({"TEXT": np.array(texts, object)[:, np.newaxis]})["EMBEDDING"]
                for texts in (SENTENCES, QUERIES)
            )
            print(target)
            for query, cosines in zip(QUERIES, queries @ corpus.T, strict=True):  # embeddings have length 1
                print(f"  {query:50s} {cosines.max():.2f}  {SENTENCES[cosines.argmax()]}")


if __name__ == "__main__":
    main()
