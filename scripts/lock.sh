#!/bin/sh
# lock.sh UV [--upgrade]: writes locks/ from pyproject.toml and constraints.txt, with the uv of a virtual environment.
# Versions that still fit are kept, unless --upgrade asks for the newest. The hashes are those of every file of a
# release, as the index publishes them. TORCH_INDEX: PyTorch's own index, of builds for CPUs.
#
#   service.lock      what the service and the image's extras need, but for torch
#   torch-cpu.lock    torch's build for CPUs, which only PyTorch's own index has
#   torch-cuda.lock   torch's build for CUDA, and the libraries that come with it
#   install.lock      uv, with which the Makefile installs service.lock
#   build.lock        what builds the service from its sources
set -eu
uv=$1 upgrade=${2:-}
excluded=$(mktemp) empty=$(mktemp -d)
trap 'rm -rf "$excluded" "$empty"' EXIT

compile() {
    to=$1
    shift
    # shellcheck disable=SC2086 # nothing or one word
    "$uv" pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest --generate-hashes \
        --custom-compile-command 'make lock' $upgrade --output-file "locks/$to.lock" "$@"
}

# What torch's build for CUDA needs, and that for CPUs does not.
printf '%s\n' cuda-bindings cuda-toolkit nvidia-cublas nvidia-cudnn-cu13 nvidia-cusparselt-cu13 \
    nvidia-nccl-cu13 nvidia-nvshmem-cu13 triton > "$excluded"
compile service pyproject.toml --extra image -c constraints.txt --excludes "$excluded" --no-emit-package torch \
    --no-emit-package tgis-next-client

# shellcheck disable=SC2046 # names have no spaces
compile torch-cuda pyproject.toml --extra image -c constraints.txt -c locks/service.lock \
    --no-emit-package tgis-next-client $(sed -n 's/^\([a-z0-9-]*\)==.*/--no-emit-package \1/p' locks/service.lock)

# The files of a version never change, and the index is not everywhere within reach.
torch=$(sed -n 's/^torch==//p' constraints.txt)
if ! grep -qs "^torch==$torch+cpu " locks/torch-cpu.lock; then
    echo torch | compile torch-cpu - -c constraints.txt --no-deps --default-index "${TORCH_INDEX:?}"
fi

echo uv | compile install -

# hatchling asks for editables where a package is installed from its sources.
"$(dirname "$uv")/python" -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], "editables", sep="\n")' | compile build -

# Each package has a wheel for x86 and ARM, for both Pythons, and for the C library of the image. torch-cpu.lock is not
# checked, because its index is not everywhere within reach.
for machine in x86_64 aarch64; do
    for python in 3.11 3.12; do
        for name in service torch-cuda install build; do
            "$uv" pip install --quiet --dry-run --target "$empty" --python-platform "$machine-manylinux_2_34" \
                --python-version "$python" --require-hashes --no-deps --only-binary :all: -r "locks/$name.lock"
        done
    done
done
