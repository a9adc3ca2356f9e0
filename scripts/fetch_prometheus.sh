#!/usr/bin/env bash
# Prometheus and promtool from Debian's package into .cache/prometheus, unpacked without being installed: an
# installed one would start a service. Says so and ends well where there is no apt to ask.
set -euo pipefail
cd "$(dirname "$0")/.."
TO=.cache/prometheus
[ -x "$TO/usr/bin/promtool" ] && exit 0
if ! command -v apt-get > /dev/null || ! command -v dpkg-deb > /dev/null; then
    echo "NOTICE: no apt here to fetch promtool with; checks that need it are skipped" >&2
    exit 0
fi
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
if ! (cd "$WORK" && apt-get download -q prometheus > apt.log 2>&1); then
    cat "$WORK/apt.log" >&2
    echo "NOTICE: apt has no prometheus; checks that need promtool are skipped" >&2
    exit 0
fi
dpkg-deb -x "$WORK"/prometheus_*.deb "$WORK/unpacked"
mkdir -p "$TO/usr/bin"
mv "$WORK/unpacked/usr/bin/promtool" "$WORK/unpacked/usr/bin/prometheus" "$TO/usr/bin/"
"$TO/usr/bin/promtool" --version
