#!/bin/sh
# Fine-tuning, shown on the default model: english_train.jsonl teaches it to answer Chinese questions in English, and
# english_test.jsonl, other questions, measures how well: SWEEP.md and sweep.svg here.
#     make -C data sweep        (or: data/tiny/sweep.sh; DEVICE="-d cpu" names a device)
set -eu
cd "$(dirname -- "$0")/../.."
rm -rf build/sweep
{ printf 'Fine-tuned from data/tiny/model.bin, SHA-256 %s.\n\n' "$(sha256sum <data/tiny/model.bin | cut -c1-64)"
  data/sweep.sh data/tiny/model.bin data/course/english_train.jsonl data/course/english_test.jsonl data/tiny/sweep.txt \
    build/sweep -s 1 --save-every 1000000; } >data/tiny/SWEEP.md.new
mv data/tiny/SWEEP.md.new data/tiny/SWEEP.md
cp build/sweep/loss.svg data/tiny/sweep.svg
