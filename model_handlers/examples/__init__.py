"""Triton's example backends: models without a file, for trying clients, batching and streams.

They are handlers like those of frameworks, with nothing special about them: something to copy.
"""
