#!/usr/bin/env bash
# fetch_haproxy.sh: unpacks HAProxy and its libraries from Debian's packages into .cache/haproxy, without installing them.
# Does nothing if there is one. Without apt it prints a notice and succeeds.
set -euo pipefail
cd "$(dirname "$0")/.."
TO=.cache/haproxy
if command -v haproxy > /dev/null || [ -e "$TO" ]; then
    exit 0
fi
if ! command -v apt-get > /dev/null || ! command -v dpkg-deb > /dev/null; then
    echo "NOTICE: no apt here to fetch haproxy with; tests that need it are skipped" >&2
    exit 0
fi
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
# Only libraries besides HAProxy, without the C library of this machine.
mapfile -t PACKAGES < <(
    apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
        --no-enhances haproxy | grep -E '^(haproxy|lib[a-z0-9.+-]+)$' | grep -vE '^(libc6|libc-bin|libgcc-s1)$' | sort -u
)
if ! (cd "$WORK" && apt-get download -q "${PACKAGES[@]}" > apt.log 2>&1); then
    cat "$WORK/apt.log" >&2
    echo "NOTICE: apt has no haproxy; tests that need it are skipped" >&2
    exit 0
fi
for package in "$WORK"/*.deb; do
    dpkg-deb -x "$package" "$WORK/unpacked"
done
mkdir -p .cache
mv "$WORK/unpacked" "$TO"
