"""A backend of one's own: which of a few centroids is nearest. The model file is a CSV of names and coordinates."""

import numpy as np

from model_handlers.base import Handler
from model_handlers.config.validate import normalise
from model_handlers.errors import invalid_model


class NearestHandler(Handler):
    """A table of centroids."""

    backend = "nearest"
    default_filename = "centroids.csv"

    def __init__(self, config, names, centroids):
        super().__init__(config)
        self.names, self.centroids = names, centroids

    @classmethod
    def autocomplete(cls, config, model_file):
        """Check what the configuration says, without loading."""
        return normalise(config)

    @classmethod
    def load(cls, config, model_file, device, lane):
        """Read the table."""
        try:
            rows = np.loadtxt(model_file, delimiter=",", dtype=str, ndmin=2)
            names, centroids = rows[:, 0].astype(bytes).astype(object), rows[:, 1:].astype(np.float32)
        except (OSError, ValueError) as error:
            raise invalid_model(
                f"model '{config.name}': {model_file.name} is no table of centroids: {error}"
            ) from error
        return cls(cls.autocomplete(config, model_file), names, centroids)

    def execute(self, inputs, outputs):
        """A batch at a time: an array an output, in the order asked for."""
        distances = np.linalg.norm(inputs["FLOWERS"][:, None] - self.centroids, axis=2)
        best = distances.argmin(1)
        answers = {"SPECIES": self.names[best, None], "DISTANCE": distances.min(1, keepdims=True)}
        return [answers[name] for name in outputs]

    def close(self):
        """Give everything back."""
        del self.names, self.centroids
