"""Models that are Python code of their author's, written for Triton's Python backend."""
