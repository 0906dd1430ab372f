"""Which models need no inference script in Amazon's containers, and the script that each of them gets here instead.

Told by the names of a model's files. The scripts lie in `built_in`, from where they are imported as a customer's would
be.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "built_in"
BOOSTER = "booster.py"
PIPELINE = "pipeline.py"
LINES = "SAGEMAKER_BATCH"  # a parameter of models whose answers are put together line by line
TASK = "HF_TASK"  # a parameter of models, by the variable that Amazon's container has for it

BOOSTER_FILE = "xgboost-model"  # what SageMaker's XGBoost calls it
CONFIG_FILE = "config.json"  # of a model that transformers saved, beside its weights
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "tf_model*.h5")


def script_for(directory: Path) -> str:
    """The file name of the script for what lies in a directory, "" for none."""
    if (directory / BOOSTER_FILE).is_file():
        return BOOSTER
    return PIPELINE if is_saved_pipeline(directory) else ""


def is_saved_pipeline(directory: Path) -> bool:
    """Whether it holds a model as Hugging Face's libraries save them."""
    saved = (directory / CONFIG_FILE).is_file()
    return saved and any(path for pattern in _WEIGHTS for path in directory.glob(pattern))
