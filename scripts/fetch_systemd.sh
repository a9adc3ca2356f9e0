#!/usr/bin/env bash
# systemd-analyze, the units that come with it and the libraries it needs, from Debian's packages into .cache/systemd,
# unpacked without being installed. Does nothing where there is one; says so and ends well where there is no apt to ask.
set -euo pipefail
cd "$(dirname "$0")/.."
TO=.cache/systemd
if command -v systemd-analyze > /dev/null || [ -e "$TO" ]; then
    exit 0
fi
if ! command -v apt-get > /dev/null || ! command -v dpkg-deb > /dev/null; then
    echo "NOTICE: no apt here to fetch systemd-analyze with; checks that need it are skipped" >&2
    exit 0
fi
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
# Only libraries beside systemd itself, and not the C library of this machine.
mapfile -t PACKAGES < <(
    apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
        --no-enhances systemd | grep -E '^(systemd|lib[a-z0-9.+-]+)$' | grep -vE '^(libc6|libc-bin|libgcc-s1)$' | sort -u
)
if ! (cd "$WORK" && apt-get download -q "${PACKAGES[@]}" > apt.log 2>&1); then
    cat "$WORK/apt.log" >&2
    echo "NOTICE: apt has no systemd; checks that need systemd-analyze are skipped" >&2
    exit 0
fi
for package in "$WORK"/*.deb; do
    dpkg-deb -x "$package" "$WORK/unpacked"
done
mkdir -p .cache
mv "$WORK/unpacked" "$TO"
