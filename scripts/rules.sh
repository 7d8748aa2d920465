#!/usr/bin/env bash
# What the deferred rules cost in quality: pretraining, then a sweep of 54 runs and its report on each of two corpora.
#   scripts/rules.sh [FOLDER [SETTING...]]      for a GPU; settings are zenflow-train's and go to all runs
#   scripts/rules.sh runs/rules_debug debug=rules     the whole path in two minutes on two CPU cores
# CORPORA are choices of data= (default: headers, torch's in C++, and c_headers, the system's in C); SWEEP is
# rules_sweep, rules_long for 2,000 steps beside offloads that follow AdamW, or rules_peers for 600 beside the offloads
# of other projects (packages torchao and deepspeed). A model that is there is not made anew. Where runs fail, the rest
# is reported all the same, and the exit code is theirs.
# PYTHON names the interpreter (default: python3); the source tree is used, nothing has to be installed.
set -euo pipefail
[[ ${1:-} == -h || ${1:-} == --help ]] && { sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit; }
cd "$(dirname "$0")/.."
folder=${1:-runs/rules}
shift $(($# > 0 ? 1 : 0))
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
sweep=${SWEEP:-rules_sweep}

if [[ ! -e $folder/pretrain/model ]]; then
    "$python" -m experiments.train experiment=rules_pretrain "$@" hydra.run.dir="$folder/pretrain"
fi
for corpus in ${CORPORA:-headers c_headers}; do
    "$python" -m experiments.train "experiment=$sweep" "data=$corpus" "$@" \
        model.path="$folder/pretrain/model" hydra.sweep.dir="$folder/$sweep/$corpus" || {
        failed=$?
        ((failed < 128)) || exit "$failed" # interrupted
    }
done
"$python" -m zenflow.report "$folder/$sweep" --out "$folder/report_$sweep"
exit "${failed:-0}"
