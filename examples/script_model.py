r"""Builds a model with an inference script, as SageMaker's scikit-learn container takes it, and packs it.

    python -m examples.script_model OUT_DIR

    OUT_DIR/digits-script/model.joblib           the classifier of digits, trained here
    OUT_DIR/digits-script/code/inference.py      `digits_script/inference.py`
    OUT_DIR/digits-script.tar.gz                 made by `mme pack`

The archive holds nothing of Triton's: no config.pbtxt, no versions. It is served as it is, CSV in and JSON out:

    mme serve --model-store OUT_DIR
    curl localhost:8080/invocations -H 'X-Amzn-SageMaker-Target-Model: digits-script.tar.gz' \
        -H 'Content-Type: text/csv' --data-binary @rows.csv
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import joblib  # type: ignore[import-untyped]

from examples import classifiers
from examples.build_models import pack

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NAME = "digits-script"
SCRIPT = Path(__file__).parent / "digits_script" / "inference.py"


def build(out: Path) -> Path:
    """Train, write the model with its script below `out`, pack it; returns the archive.

    Raises:
        subprocess.CalledProcessError: `mme pack` refused the model; its error is on the standard error.
    """
    folder = out / NAME
    (folder / "code").mkdir(parents=True, exist_ok=True)
    joblib.dump(classifiers.train("digits").estimator, folder / "model.joblib")
    shutil.copyfile(SCRIPT, folder / "code" / "inference.py")
    archive = out / f"{NAME}.tar.gz"
    pack(folder, archive)
    return archive


def as_csv(rows: NDArray[np.float32]) -> str:
    """Rows of pixels [n, 64] as the script wants them."""
    return "".join(",".join(f"{value:g}" for value in row) + "\n" for row in rows)


def main() -> None:
    """Build below the folder named on the command line."""
    parser = argparse.ArgumentParser(prog="examples.script_model", description="Build and pack a script's model.")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    print(build(parser.parse_args().out))


if __name__ == "__main__":
    main()
