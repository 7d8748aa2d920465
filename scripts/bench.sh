#!/usr/bin/env bash
set -euo pipefail

usage() {
    cat <<'TEXT'
bench.sh [FOLDER]: every table of the README and of kernels/README.md, on a machine with a GPU.

FOLDER is bench-results/all if none is given. Each part has a folder of its own there; a part that has ended is skipped
when the script is called again. In about this time on an H200:

  step        10 min  batch 8 x 512 of Qwen2.5-1.5B's shape: ours, AdamW, and every CPU offload that is installed
  step_1024    4 min  the same at 8 x 1024, ours alone
  selection    3 min  what selecting costs
  growth       6 min  0.5B, 1.5B and 3B; 4, 8 and 12 cores of the CPU process
  contention   3 min  the floor beside the CPU process's pass, and beside copies
  memory       1 min  the CPU process's pass beside what the memory gives
  kernels     10 min  every kernel beside torch, torch.compile and a copy of as many bytes

Environment:
  PYTHON   the interpreter (python3); the source tree is used, nothing has to be installed but its dependencies
  PARTS    some of the parts, as in PARTS="step memory"
TEXT
}

[[ ${1:-} == -h || ${1:-} == --help ]] && { usage; exit; }
cd "$(dirname "$0")/.."
folder=${1:-bench-results/all}
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
all=(step step_1024 selection growth contention memory kernels)
read -ra parts <<<"${PARTS:-${all[*]}}"

together=U=4,stagger=false,weight_prediction=0 # all windows end in the same step, as in the paper

arguments() {
    case $1 in
        step)
            echo step --trace --zenflow U=4 U=8 U=4,weight_prediction=0 $together ${together/U=4/U=8} \
                U=4,accumulate_on=host U=4,accumulate_on=host,deferred_rule=replay --peer-windows 3
            ;;
        step_1024) echo step --trace --length 1024 --trainers zenflow sync --zenflow U=4 U=8 $together ;;
        selection) echo step --trainers zenflow --zenflow U=4 --selection ;;
        growth) echo step --trainers zenflow --zenflow U=4 --growth ;;
        contention) echo step --trainers floor --contention 8 12 ;;
        memory) echo memory --threads 4 8 12 ;;
        kernels) echo kernels ;;
        *) echo "PARTS names '$1'; allowed: ${all[*]}." >&2; exit 2 ;;
    esac
}

for part in "${parts[@]}"; do
    words=$(arguments "$part")
    if [[ -e $folder/$part/ended ]]; then
        echo "== $part has ended before"
        continue
    fi
    echo "== $part"
    # shellcheck disable=SC2086  # words of a command line
    "${PYTHON:-python3}" -m zenflow.bench $words --out "$folder/$part"
    mkdir -p "$folder/$part"
    touch "$folder/$part/ended"
done
echo "Everything is in $folder."
