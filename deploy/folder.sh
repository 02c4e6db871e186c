#!/bin/sh
# Puts programs and the files that they read beside each other: deploy/folder.sh FOLDER PROGRAM...
# (deploy/image.sh and deploy/dist.sh use it.)
set -eu
[ $# -ge 2 ] || { sed -n '2p' "$0" >&2; exit 1; }
here=$(cd "$(dirname "$0")/.." && pwd)
folder=$1
shift
mkdir -p "$folder/bin/data" "$folder/tiny"
cp "$@" "$here/tokenizer.bin" "$folder/bin/"
cp -r "$here/data/datagen" "$folder/bin/data/" # for datagen, and --docs
rm -f "$folder/bin/data/datagen/"*.py
cp "$here/data/tiny/model.bin" "$here/data/tiny/tokenizer.bin" "$folder/tiny/"
cp "$here/LICENSE" "$here/LICENSE-tokenizer" "$here/server/page/LICENSE-temml" "$folder/"
