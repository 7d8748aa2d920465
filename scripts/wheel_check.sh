#!/usr/bin/env bash
# wheel_check.sh PYTHON: what a user of the wheel gets. Builds it, installs it in a clean environment, and runs the
# console script from a directory that has nothing to do with this one.
set -euo pipefail
[[ ${1:-} == -h || ${1:-} == --help ]] && { sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit; }
cd "$(dirname "$0")/.."
root=$PWD
python=$(realpath --no-symlinks "${1:?an interpreter, as in wheel_check.sh PYTHON}")
work=$(mktemp -d)
trap 'rm -rf "$work" "$root/build"' EXIT

rm -rf build
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work" .
"$python" -m venv "$work/venv"
scripts/install_torch.sh "$work/venv/bin/python"
"$work/venv/bin/python" -m pip install --quiet --no-compile "$work"/zenflow_triton-*.whl
mkdir "$work/elsewhere"
cd "$work/elsewhere"
"$work/venv/bin/zenflow-train" --help >help.txt
grep -q topk_ratio help.txt
"$work/venv/bin/zenflow-train" debug=smoke
"$work/venv/bin/python" - <<'PYTHON'
import importlib.util

assert importlib.util.find_spec("kernels") is None, "the wheel must not bring a package named kernels"
PYTHON
