"""SavedModels as TensorFlow 2.21 wrote them: a test process that only serves them imports no TensorFlow to write them.

`half_plus_two.zip` was `tf.function(lambda x: {"y": x * tf.Variable(0.5) + 2}, [tf.TensorSpec([None], tf.float32, "x")])`,
`rows_times.zip` `tf.function(lambda x: {"y": x @ tf.Variable(ROWS[:3, :2])}, [tf.TensorSpec([None, 3], tf.float32, "x")])`.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from tests.frameworks import framework_later


def unpack(name: str, folder: Path) -> Path:
    """One of them into a folder, which is returned; no test where nothing is there to serve it."""
    framework_later("tensorflow")
    with zipfile.ZipFile(Path(__file__).parent / f"{name}.zip") as file:
        file.extractall(folder)
    return folder
