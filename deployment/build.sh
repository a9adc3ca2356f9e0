#!/bin/sh
# The steps to build an image: the Containerfile runs them in its stages, and scripts/image_root.sh without a
# container engine.
#
#   build.sh torch PYTHON     create an environment at /opt/tgis with torch; PYTHON has pip
#   build.sh service PYTHON   install the service into it from the current directory, and compile its kernels
#   build.sh user ROOT        create its user, and the directories it may write, below ROOT
#
# Every package is a wheel pinned in locks/ with its hash. VARIANT: cpu or cuda. TORCH_INDEX: index of torch's build for
# CPUs; empty: pip's index.
# COMPILED: directory of the same sources with compiled kernels; empty: all kernels are compiled.
# shellcheck disable=SC2086 # LOCKED is a list of words
set -eu
umask 022
unset PYTHONPATH PYTHONDONTWRITEBYTECODE PYTHONHOME

PREFIX=/opt/tgis
VARIANT=${VARIANT:-cpu}
TORCH_INDEX=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}
LOCKED="--require-hashes --no-deps --only-binary :all:"

# pip is not installed. Bytecode is written for modules imported below, not for thousands of files that never are.
install() {
    "$python" -m pip --python "$PREFIX/bin/python" install -q --no-cache-dir --no-compile "$@"
}

case $1 in
torch)
    python=$2
    "$python" -m venv --without-pip "$PREFIX"
    case $VARIANT in
    cpu) install $LOCKED ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r locks/torch-cpu.lock ;;
    cuda) install $LOCKED -r locks/torch-cuda.lock ;;
    *) echo "error: VARIANT is cpu or cuda" >&2; exit 2 ;;
    esac
    ;;
service)
    python=$2
    install $LOCKED -r locks/service.lock
    # Build requirements are not installed.
    builders=$(mktemp -d)
    trap 'rm -rf "$builders"' EXIT
    "$python" -m pip install -q --no-cache-dir $LOCKED --target "$builders" -r locks/build.lock
    (export PYTHONPATH="$builders" && install --no-deps --no-build-isolation ./client .)
    # Outside the sources, so that the installed package is imported.
    cd /
    "$PREFIX/bin/python" -c 'import tgis.cli.entry, tgis.cli.main, tgis.launcher.main, tgis.cli.health_probe, tgis.router.app'
    "$PREFIX/bin/python" -m tgis.shard.kernels.cpu.precompile ${COMPILED:+"$COMPILED"}
    if [ "$VARIANT" = cuda ]; then
        # For A100, L4 and L40S, H100 and H200, B200. This calls gcc, and needs no GPU.
        "$PREFIX/bin/python" -m tgis.shard.kernels.cuda.offline.precompile 80 89 90 100
    fi
    ;;
user)
    root=$2
    mkdir -p "$root/etc" "$root/home/tgis" "$root/tmp" "$root/models" "$root/mnt/models"
    grep -qs '^tgis:' "$root/etc/passwd" ||
        echo 'tgis:x:2000:0:text generation:/home/tgis:/sbin/nologin' >> "$root/etc/passwd"
    chmod 1777 "$root/tmp"
    # Any user id in group 0 works: OpenShift chooses one for each namespace.
    chown 2000:0 "$root/home/tgis"
    chmod 770 "$root/home/tgis"
    ;;
*)
    echo "error: no step $1" >&2
    exit 2
    ;;
esac
