#!/bin/sh
# Ours and llama.cpp in turns on the same weights and cores, so that a busy neighbour meets both. By hand:
#     tests/bench/turns.sh MODEL.bin TURNS PYTHON [qwen3's options]      PYTHON: one with llama-cpp-python, gguf, numpy
# The last lines are the medians. KIND=q8_0 compares INT8 with Q8_0; THREADS as many as there are cores; SHORT=short
# leaves llama.cpp's decoding at 512 and 2048 out.
set -eu
model=$1 turns=$2 python=$3
shift 3
threads=${THREADS:-$(nproc)} kind=${KIND:-bf16}
[ "$kind" = bf16 ] || set -- --dtype int8 "$@"
results=$(mktemp)
trap 'rm -f "$results"' EXIT
turn=0
while [ $turn -lt "$turns" ]; do
    turn=$((turn + 1))
    ./qwen3 "$model" -d cpu -j "$threads" --bench --json "$@" 2>/dev/null |
        sed 's/"work"/\n&/g' |
        sed -n 's/.*"read_GBps": \([0-9.]*\).*/ours read_GBps \1/p
                s/"work": "\([a-z]*\)", "position": \([0-9]*\), "tokens_per_s": \([0-9.]*\),.*"read_share": \([0-9.]*\).*/ours \1_\2 \3\nours share_\1_\2 \4/p' >>"$results"
    "$python" tests/reference/peer_llama_cpp.py "$model" "$threads" "$kind" ${SHORT:-} 2>/dev/null | tr ',{}' '\n\n\n' |
        sed -n 's/.*"\([a-z]*_[0-9]*\)": \([0-9.]*\).*/llama.cpp \1 \2/p' >>"$results"
    echo "turn $turn of $turns" >&2
done
sort -k1,2 -k3,3n "$results" | awk '
    {key = $1 " " $2; if (key != last) {flush(); n = 0; last = key} v[++n] = $3}
    function flush() {if (n) printf "%-10s %-17s median %8.2f   (%.2f to %.2f, n = %d)\n", substr(last, 1, index(last, " ") - 1),
        substr(last, index(last, " ") + 1), v[int((n + 1) / 2)], v[1], v[n], n}
    END {flush()}'
