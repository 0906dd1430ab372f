"""Inference scripts for archives that bring none: see `default_script`. Each defines as little as can be."""
