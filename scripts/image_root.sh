#!/bin/sh
# image_root.sh ROOT PYTHON: the layers of the image as a directory, by the commands of the Containerfile, where there
# is no container engine. ROOT holds what the image has beside its base: /opt/tgis, the user, the directories.
# What the base would bring, libc and PYTHON's own installation, is this machine's, and whoever runs ROOT mounts
# it there. Needs root, for a mount at /opt/tgis that nobody else sees.
set -eu
root=$1 python=$2
made=$root/.made
sources="tgis client protos pyproject.toml locks deployment/build.sh scripts/build_protos.py scripts/image_root.sh"

mkdir -p "$root"
exec 9> "$root/.lock"
flock 9 # tests at the same time need it made once
# shellcheck disable=SC2086 # a list of words
if [ -e "$made" ] && [ -z "$(find $sources -name __pycache__ -prune -o -type f -newer "$made" -print -quit)" ]; then
    exit
fi
mkdir -p "$root/opt/tgis"
rm -f "$made"
deployment/build.sh user "$root"

# shellcheck disable=SC2016 # expanded by the shell in there
# A place like this machine, but with ROOT's /opt/tgis: the interpreter's path is written into what is installed.
unshare --mount sh -euc '
    root=$1 python=$2 here=$PWD
    mount --make-rprivate /
    place=$(mktemp -d)
    trap "rmdir \"$place\"" EXIT
    mount -t tmpfs tmpfs "$place"
    show() {
        for entry in "$1"/*; do
            if [ -L "$entry" ]; then
                cp -P "$entry" "$place$entry"
            elif [ -d "$entry" ] && [ "$entry" != /opt ] && [ "$entry" != /opt/tgis ]; then
                mkdir "$place$entry"
                mount --rbind "$entry" "$place$entry"
            fi
        done
    }
    show ""
    mkdir -p "$place/opt/tgis"
    show /opt
    mount --bind "$root/opt/tgis" "$place/opt/tgis"
    export COMPILED="$here" # kernels that are already compiled in the sources
    for step in torch service; do
        chroot "$place" sh -euc "cd \"\$1\" && exec deployment/build.sh \"\$2\" \"\$3\"" sh "$here" "$step" "$python"
    done
    umount -R -l "$place"
' sh "$(realpath "$root")" "$python"
touch "$made"
