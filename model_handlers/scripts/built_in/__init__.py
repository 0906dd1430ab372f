"""Inference scripts for archives that bring none: see `no_script`.

Each lies in this folder as a customer's would in `code/`, and defines as little: all else is the default.
"""
