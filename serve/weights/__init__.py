"""Weights once: models kept on disk in forms that load by mapping, whose pages all who use them share.

`store` and `draft` are the directory on disk, `refining` works on it in a process of its own, `forms` is what a load
asks, `tiering` decides on the event loop which models are worth more memory. What a form is, `model_handlers/mapped.py`
says.
"""
