#!/bin/sh
# The steps of deploy/Dockerfile. They need no Docker: any clean Debian or Ubuntu can run them, as root.
#   deploy/image.sh build DIR    in a clone: installs compilers, builds, and puts into DIR what an image needs
#   deploy/image.sh run DIR      elsewhere, with a copy of DIR: installs the libraries that its programs need, and no more
# With nvcc in the PATH the programs also run on GPUs. The CPU code is selected for the CPU at start.
set -eu
export DEBIAN_FRONTEND=noninteractive
[ $# -eq 2 ] || { sed -n '2,4p' "$0" >&2; exit 1; }
install_packages() {
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "$@" >/dev/null
    rm -rf /var/lib/apt/lists/*
}
case $1 in
build)
    cd "$(dirname "$0")/.."
    install_packages g++ make libmicrohttpd-dev libedit-dev
    make -j"$(nproc)" PORTABLE=1 ARCH=all qwen3 serve
    deploy/folder.sh "$2" qwen3 serve
    # The packages of their libraries. (Names differ between releases.)
    ldd "$2/bin/qwen3" "$2/bin/serve" | awk '$3 ~ "^/" {print $3}' | sort -u | while read -r library; do
        dpkg-query -S "*/$(basename "$(readlink -f "$library")")"
    done | sed 's/:.*//' | sort -u >"$2/packages"
    "$2/bin/qwen3" "$2/tiny/model.bin" -i "What is a warp?" -t 0
    ;;
run)
    # shellcheck disable=SC2046
    install_packages $(cat "$2/packages")
    "$2/bin/serve" --version
    ;;
*)
    echo "$0: build or run" >&2
    exit 1
    ;;
esac
