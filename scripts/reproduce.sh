#!/usr/bin/env bash
set -euo pipefail

usage() {
    cat <<'TEXT'
reproduce.sh SIZE [FOLDER] [WORD...]: all ablations, the locality study and their reports, below FOLDER.

  scripts/reproduce.sh debug                        the whole path in two minutes on two CPU cores, with a tiny model
  scripts/reproduce.sh small                        MiniLM on film-review snippets: each ablation takes minutes on a CPU
  scripts/reproduce.sh full                         a GPU: a decoder over bytes, pretrained here on Python sources, then
                                                    fine-tuned on torch's C and C++ headers, 300 steps a run
  scripts/reproduce.sh full runs/large model=causal model.path=MODEL data=file data.path=FILE.jsonl
                                                    with these words of zenflow-train for every run, behind its
                                                    own; a model needs its model.path then (null if it has a package)

FOLDER is runs/reproduce_SIZE if none is given. A part that has ended is skipped when the script is called again, and a
part that had not is made anew; a folder is for one SIZE with the same SEEDS and words. What is left:

  FOLDER/locality/              locality.md, .csv, .json, .png
  FOLDER/baselines/             runs of AdamW and synchronous offload, which all ablations list: made once, in every report
  FOLDER/ablation_NAME/         the other runs, one folder each
  FOLDER/report/ablation_NAME/  report.md, report.csv, groups.csv and pictures

Environment:
  PYTHON   the interpreter (python3); the source tree is used, nothing has to be installed but its dependencies
  SEEDS    of the ablations, as in SEEDS=0,1,2 (debug: 0)
  PARTS    some of the parts, as in PARTS="locality topk_ratio staleness"
TEXT
}

case ${1:-} in
    -h | --help) usage; exit ;;
    debug | small | full) size=$1; shift ;;
    *) usage >&2; echo "SIZE is '${1:-}'; allowed: debug, small, full." >&2; exit 2 ;;
esac
root=$(realpath "$(dirname "$0")/..")
folder=$root/runs/reproduce_$size
if [[ ${1:-} != "" && $1 != *=* ]]; then
    folder=$(realpath -m "$1")
    shift
fi
cd "$root"
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}

# How a size makes its runs: words for all of them, and for the locality study alone.
pretrained=$folder/pretrain/model
case $size in
    debug) words=(debug=smoke steps=12 evaluate_every=6) study=("locality.lags=[1,4]") ;;
    small) words=() study=(experiment=ablation name=locality steps=272 evaluate_every=136 plot=true) ;;
    full)
        words=(
            model=bytes "model.path=$pretrained" data=headers steps=300 batch_size=16 evaluate_every=50
            data.max_length=512 data.evaluate_samples=1200
            optimizer.lr=2e-5 optimizer.schedule=constant optimizer.warmup_steps=0
        )
        study=()
        ;;
esac
seeds=${SEEDS:-$([[ $size == debug ]] && echo 0 || echo 0,1,2)}
all=(locality)
for file in conf/experiment/ablation_*.yaml; do
    name=${file##*/ablation_}
    all+=("${name%.yaml}")
done
read -ra parts <<<"${PARTS:-${all[*]}}"
for part in "${parts[@]}"; do
    if [[ " ${all[*]} " != *" $part "* ]]; then
        echo "PARTS names '$part'; allowed: ${all[*]}." >&2
        exit 2
    fi
done

settings="$size $seeds ${words[*]} $*"
mkdir -p "$folder/.ended"
if [[ -e $folder/.ended/settings && $(<"$folder/.ended/settings") != "$settings" ]]; then
    echo "$folder was made with other settings: $(<"$folder/.ended/settings"). Give another folder." >&2
    exit 2
fi
echo "$settings" >"$folder/.ended/settings"

# run PART COMMAND...: once; a mark beside the part says that it has ended.
run() {
    local part=$1
    shift
    if [[ -e $folder/.ended/$part ]]; then
        echo "== $part has ended before"
        return
    fi
    echo "== $part"
    rm -rf "${folder:?}/$part"
    "$python" -m "$@"
    mkdir -p "$(dirname "$folder/.ended/$part")"
    touch "$folder/.ended/$part"
}

if [[ $size == full && " ${words[*]} $* " != *" model.path="*" model.path="* ]]; then
    run pretrain experiments.train experiment=rules_pretrain hydra.run.dir="$folder/pretrain"
fi
baselines="'engine=adamw','engine=adamw_bf16 model.dtype=bfloat16','engine=adamw_offload','engine=zero_offload'"

# own NAME: the variants of an ablation, less the baselines.
own() {
    "$python" - "conf/experiment/ablation_$1.yaml" "$baselines" <<'CODE'
import re
import sys

from omegaconf import OmegaConf

listed, baselines = (re.findall("'[^']*'|null", text) for text in (
    OmegaConf.load(sys.argv[1]).hydra.sweeper.params.variant, sys.argv[2]
))
print(",".join(one for one in listed if one not in baselines))
CODE
}

# sweep FOLDER NAME VARIANTS WORD...
sweep() {
    local target=$1 name=$2 variants=$3
    shift 3
    run "$target" experiments.train "experiment=ablation_$name" "seed=$seeds" "variant=$variants" "${words[@]}" "$@" \
        hydra.sweep.dir="$folder/$target"
}

for part in "${parts[@]}"; do
    if [[ $part == locality ]]; then
        run locality experiments.locality "${study[@]}" "${words[@]}" "$@" hydra.run.dir="$folder/locality"
        continue
    fi
    [[ -e $folder/.ended/baselines ]] || sweep baselines engine "$baselines" "$@"
    variants=$(own "$part")
    sweep "ablation_$part" "$part" "$variants" "$@"
    run "report/ablation_$part" zenflow.report "$folder/ablation_$part" "$folder/baselines" \
        --out "$folder/report/ablation_$part"
done
echo "Everything is in $folder."
