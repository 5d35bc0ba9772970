#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything on a machine with a GPU, in under 8 minutes: builds for that GPU, runs the cases of
# tests/ops on it, times the kernels; one table last, JSON to bench/results/gpu.json.
#
#   bench/gpu.sh [--dry-run] [options of bench/gpu.py]
#
# Needs nvcc and a CUDA build of torch in $PYTHON (default: python3), or network to install one
# ($TORCH, default: torch>=2.10) into build/gpu-venv. --dry-run needs neither and lists the cases.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly BUDGET_S=470
readonly BUILD_S=240 TESTS_S=120 # at most, of the budget
readonly VENV=build/gpu-venv
PYTHON=${PYTHON:-python3}

die() { printf 'bench/gpu.sh: %s\n' "$1" >&2; exit 1; }
say() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }
has_modules() { "$1" -c "import $2" 2> /dev/null; }

if [[ " $* " == *" --dry-run "* ]]; then
  PYTHONPATH=python exec "$PYTHON" bench/gpu.py "$@"
fi
nvidia-smi -L 2> /dev/null | grep -q GPU || die "no GPU: nvidia-smi shows none"
NVCC=${CUDACXX:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
[[ -x $(command -v "$NVCC") ]] || die "no CUDA compiler: put nvcc on PATH or set CUDACXX"

say "Environment"
"$PYTHON" -m venv --system-site-packages "$VENV"
python=$PWD/$VENV/bin/python
export PATH=$PWD/$VENV/bin:$PATH
has_modules "$python" torch || "$python" -m pip install --quiet "${TORCH:-torch>=2.10}"
"$python" -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"'
for tool in cmake ninja pybind11 pytest hypothesis numpy; do
  has_modules "$python" "$tool" || "$python" -m pip install --quiet "$tool"
done

say "Build"
capability=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
timeout "$BUILD_S" bash -euo pipefail -c '
  cmake -S . -B build/gpu -G Ninja -DPAGED_KV_CUDA=ON -DPAGED_KV_INPLACE=ON \
    -DCMAKE_CUDA_COMPILER="$1" -DCMAKE_CUDA_ARCHITECTURES="$2-real" -DPython_EXECUTABLE="$3" \
    -Dpybind11_DIR="$("$3" -m pybind11 --cmakedir)" > /dev/null
  cmake --build build/gpu' build "$NVCC" "$capability" "$python" || die "the build failed"

say "Correctness"
export PYTHONPATH=python
correct=yes
timeout "$TESTS_S" "$python" -m pytest -q -p no:cacheprovider tests/ops -k 'cuda and not library' \
  || correct="NO: pytest ended with $?"

say "Timing"
timed=yes
"$python" bench/gpu.py --budget-s $((BUDGET_S - SECONDS - 20)) "$@" || timed=NO
printf 'correct on the GPU: %s; everything timed: %s; %d s\n' "$correct" "$timed" "$SECONDS"
[[ $correct == yes && $timed == yes ]]
