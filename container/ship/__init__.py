"""From a model file to a live endpoint: pack, push, deploy, update, delete, invoke, bench.

Each fails by an MmeError: INVALID_ARGUMENT for what a person can mend (exit code 2), UNAVAILABLE for the rest (1).
"""
