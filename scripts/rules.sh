#!/usr/bin/env bash
# What the deferred rules cost in quality: pretraining, the sweep of 48 runs and its report, all in one folder.
#   scripts/rules.sh [FOLDER [SETTING...]]      for a GPU; settings are zenflow-train's and go to all runs
#   scripts/rules.sh runs/rules_debug debug=rules     the whole path in a minute on two CPU cores
# PYTHON names the interpreter (default: python3); the source tree is used, nothing has to be installed.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-runs/rules}
shift $(($# > 0 ? 1 : 0))
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}

"$python" -m experiments.train experiment=rules_pretrain "$@" hydra.run.dir="$folder/pretrain"
"$python" -m experiments.train experiment=rules_sweep "$@" \
    model.path="$folder/pretrain/model" hydra.sweep.dir="$folder/sweep"
"$python" -m zenflow.report "$folder/sweep" --out "$folder/report"
