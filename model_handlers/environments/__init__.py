"""Environments of models' own: interpreters and packages that are not the server's.

`wanted` is what a model asks for, `cache` gives it the `environment`.
"""
