"""Traces of requests, and the two forms in which they are told."""
