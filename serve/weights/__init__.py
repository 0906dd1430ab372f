"""Models' weights once: forms that load by mapping, whose pages all models with the same weights share."""
