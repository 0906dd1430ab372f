"""Traces of requests: which trace a request belongs to, what is traced, and the two forms in which it is told.

`traced.py` follows requests; spans are sent by OpenTelemetry's protocol, files are in Triton's own format.
"""
