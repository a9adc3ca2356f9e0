#!/usr/bin/env bash
# fetch_debian.sh PACKAGE COMMAND: unpacks a package and its libraries from Debian into .cache/PACKAGE, without installing
# them. Does nothing if COMMAND is installed or the directory exists. Without apt it prints a notice and succeeds.
set -euo pipefail
cd "$(dirname "$0")/.."
PACKAGE=$1 COMMAND=$2
TO=.cache/$PACKAGE
if command -v "$COMMAND" > /dev/null || [ -e "$TO" ]; then
    exit 0
fi
if ! command -v apt-get > /dev/null || ! command -v dpkg-deb > /dev/null; then
    echo "NOTICE: no apt here to fetch $COMMAND with; tests that need it are skipped" >&2
    exit 0
fi
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
# Only libraries besides the package itself, without the C library of this machine.
mapfile -t PACKAGES < <(
    apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
        --no-enhances "$PACKAGE" | grep -E "^($PACKAGE|lib[a-z0-9.+-]+)$" | grep -vE '^(libc6|libc-bin|libgcc-s1)$' | sort -u
)
if ! (cd "$WORK" && apt-get download -q "${PACKAGES[@]}" > apt.log 2>&1); then
    cat "$WORK/apt.log" >&2
    echo "NOTICE: apt has no $PACKAGE; tests that need $COMMAND are skipped" >&2
    exit 0
fi
for package in "$WORK"/*.deb; do
    dpkg-deb -x "$package" "$WORK/unpacked"
done
mkdir -p .cache
mv "$WORK/unpacked" "$TO"
