"""Models that are Python code of their author's, written for Triton's Python backend.

`handler.py` is what the engine sees, `host.py` runs the author's class, `pb_utils.py` is what that class imports. All
three work in whatever process they are loaded into, and speak to no other.
"""
