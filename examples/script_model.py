"""A model with an inference script, as SageMaker's scikit-learn container takes it.

    model.joblib           the classifier of digits, trained here
    code/inference.py      `digits_script/inference.py`

There is nothing of Triton's in it, no config.pbtxt and no versions: it is packed and served as it is. Knows nothing of
archives, servers or requests.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import joblib  # type: ignore[import-untyped]

from examples import classifiers

NAME = "digits-script"
SCRIPT = Path(__file__).parent / "digits_script" / "inference.py"


def write(folder: Path) -> None:
    """Train, and write the model with its script."""
    (folder / "code").mkdir(parents=True)
    joblib.dump(classifiers.train("digits").estimator, folder / "model.joblib")
    shutil.copyfile(SCRIPT, folder / "code" / "inference.py")
