#!/usr/bin/env bash
# Applies models/NAME to kubectl's current cluster; --dry-run prints the objects instead.
set -euo pipefail
cd "$(dirname "$0")"

DRY_RUN=
NAME=
for argument in "$@"; do
    case "$argument" in
        --dry-run) DRY_RUN=1 ;;
        *) NAME=$argument ;;
    esac
done

if [[ ! $NAME =~ ^[A-Za-z0-9][A-Za-z0-9.-]*$ || ! -f models/$NAME/kustomization.yaml ]]; then
    echo "Must provide valid model name" >&2
    echo "one of:" models/*/ >&2
    exit 1
fi

if command -v kustomize > /dev/null; then
    RENDER=(kustomize build)
else
    RENDER=(kubectl kustomize)
fi
OBJECTS=$("${RENDER[@]}" "models/$NAME")
if [[ $DRY_RUN ]]; then
    echo "$OBJECTS"
else
    if [[ $OBJECTS == *nvidia.com/gpu:* ]]; then
        echo "warning: models/$NAME asks for GPUs, and its manifests have not been tried with one" >&2
    fi
    kubectl apply -f - <<< "$OBJECTS"
fi
