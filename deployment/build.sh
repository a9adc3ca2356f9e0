#!/bin/sh
# What an image is made of, step by step: the Containerfile runs these in its stages, and scripts/image_root.sh
# without a container engine.
#
#   build.sh torch PYTHON     an environment at /opt/tgis with torch; PYTHON has pip
#   build.sh service PYTHON   the service into it, from the current directory, with its kernels compiled
#   build.sh user ROOT        its user, and the directories it may write, below ROOT
#
# TORCH_INDEX: where torch comes from; unset: where pip finds everything else. EXTRAS: of pyproject.toml.
set -eu
umask 022
unset PYTHONPATH PYTHONDONTWRITEBYTECODE PYTHONHOME

PREFIX=/opt/tgis
EXTRAS=${EXTRAS-otel,tokenizers,onnx}

# pip stays outside. Bytecode is written for what is imported below, not for thousands of files that never are.
install() {
    "$python" -m pip --python "$PREFIX/bin/python" install -q --no-cache-dir --no-compile -c constraints.txt "$@"
}

case $1 in
torch)
    python=$2
    "$python" -m venv --without-pip "$PREFIX"
    install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
    ;;
service)
    python=$2
    install ".${EXTRAS:+[$EXTRAS]}"
    # Away from the sources, so that what is imported is what was installed.
    cd /
    "$PREFIX/bin/python" -c 'import tgis.cli, tgis.launcher.main, tgis.probe, tgis.router.app'
    "$PREFIX/bin/python" -m tgis.shard.precompile
    ;;
user)
    root=$2
    mkdir -p "$root/etc" "$root/home/tgis" "$root/tmp" "$root/models" "$root/mnt/models"
    grep -qs '^tgis:' "$root/etc/passwd" ||
        echo 'tgis:x:2000:0:text generation:/home/tgis:/sbin/nologin' >> "$root/etc/passwd"
    chmod 1777 "$root/tmp"
    # Any user id will do, as long as its group is 0: OpenShift chooses one for each namespace.
    chown 2000:0 "$root/home/tgis"
    chmod 770 "$root/home/tgis"
    ;;
*)
    echo "error: no step $1" >&2
    exit 2
    ;;
esac
