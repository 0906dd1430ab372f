"""Compiles the path of a request where MME_COMPILE=1 says so; setup.cfg says all the rest.

mypyc, which comes with mypy, makes C of the annotated Python that runs as well without it. It needs a C compiler and
Python's headers. Listed are modules that every request goes through and that mypyc takes as they are: nothing in them
is subclassed by interpreted code or referred to weakly (mypyc's objects leave such references dangling), changes its
class, or bounds a slice by a call that does something, since mypyc makes that call twice. Each storey is a library of
its own inside its package: a model's process that has an environment of its own finds `model_handlers` alone.
MME_OPTIMIZE is the C compiler's level, 3 if it is not set: 0 takes half the time.
"""

import os

from setuptools import Extension, setup

COMPILED = {
    "model_handlers": [
        "executor",
        "in_process",
        "python/host",
        "python/outputs",
        "requests",
        "worker/events",
        "worker/executor",
        "worker/instance",
        "worker/main",
        "worker/memory",
        "worker/policies",
        "worker/process",
        "worker/requests",
        "worker/wire",
    ],
    "serve": [
        "cache/entry",
        "cache/model_cache",
        "model/batcher",
        "model/execution",
        "model/layout_check",
        "model/model",
        "model/replies",
        "model/tensors",
        "request",
        "statistics",
    ],
    "container": [
        "inference/errors",
        "inference/call",
        "codec/request",
        "codec/decode",
        "codec/encode",
        "codec/json_data",
        "grpc/codec",
        "grpc/inference",
        "grpc/rpc",
        "http1/connection",
        "http1/request",
        "http2/connection",
        "http2/frames",
        "http2/streams",
        "inference/http",
        "inference/limits",
    ],
}


def _compiled() -> list[Extension]:
    from mypyc.build import mypycify  # noqa: PLC0415 - who does not compile needs no mypy

    groups = [
        ([f"{storey}/{module}.py" for module in modules], f"{storey}.compiled") for storey, modules in COMPILED.items()
    ]
    options = ["--config-file", "setup.cfg", *[file for files, _ in groups for file in files]]
    return mypycify(options, opt_level=os.environ.get("MME_OPTIMIZE", "3"), debug_level="0", separate=groups)


setup(ext_modules=_compiled() if os.environ.get("MME_COMPILE") == "1" else [])
