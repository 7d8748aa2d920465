#!/usr/bin/env bash
# install_torch.sh PYTHON: torch for the environment of PYTHON. With an NVIDIA driver the ordinary package, which brings
# CUDA; without one the CPU build, a tenth of the size. Where pip finds that build is not the same everywhere, hence the
# order: the sources that pip is set up with, PyTorch's own index of CPU builds, and last the ordinary package, which
# works without a GPU too. Most of its modules are never imported: Python compiles the others when they are.
set -euo pipefail
[[ ${1:-} == -h || ${1:-} == --help ]] && { sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit; }
python=${1:?an interpreter, as in install_torch.sh PYTHON}
version=${TORCH:-2.13.0}

install() { "$python" -m pip install --quiet --no-compile "$@"; }

if "$python" -c 'import torch' 2>/dev/null; then exit 0; fi
if nvidia-smi --list-gpus >/dev/null 2>&1; then
    install "torch==$version"
elif install "torch==$version+cpu" 2>/dev/null; then
    :
elif install --retries 1 --timeout 10 --index-url https://download.pytorch.org/whl/cpu "torch==$version" 2>/dev/null; then
    :
else
    install "torch==$version"
fi
