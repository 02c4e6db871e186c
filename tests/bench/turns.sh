#!/bin/bash
# Ours and llama.cpp in turns, on the same weights and cores, by instruction set, format and work:
#     tests/bench/turns.sh MODEL.bin LLAMA [TURNS, default 3]
# LLAMA: a folder with llama.cpp's programs and CPU backends (tests/bench/llama_cpp.sh makes one). The table goes to
# stdout: medians, and what was measured to RESULTS (LLAMA/turns.txt), a line a figure; a second run adds to it.
#     SHORT=1 leaves decoding at 2048 and the read bandwidth out, and takes ours from single answers
#     SETS="avx2 avx512bf16 amx"  FORMATS="bf16 int8 int4 q4_0 q4_k"  WORK="one many"  THREADS=2
#     OURS=./qwen3  SERVER=./serve
# `one` is a prompt of 512 and decoding at 100 and 2048; `many` is 1, 4 and 16 answers at once, of 64 tokens to prompts
# of 16 (the whole time counts). Shares are of the read bandwidth that --bench measured in the same turns, by the bytes
# of our file, keys and values. int8 is beside Q8_0 of the same numbers, int4 (groups of 32, embedding INT8) beside
# Q4_0; q4_0 and q4_k (Q4_K_M) are files of llama-quantize that both read.
set -eu
model=$1 llama=$2 turns=${3:-3}
threads=${THREADS:-2} ours=${OURS:-./qwen3} server=${SERVER:-./serve} results=${RESULTS:-$llama/turns.txt}
first() { [ "$(id -u)" = 0 ] && nice -n -20 "$@" || "$@"; }

# ---- The files, once.
name=$llama/$(basename "$model" .bin)
gguf() { case $1 in int8) echo "$name.q8_0.gguf" ;; int4) echo "$name.q4_0.gguf" ;; *) echo "$name.$1.gguf" ;; esac; }
mine() { case $1 in bf16) echo "$model" ;; int*) echo "$name.$1.bin" ;; *) gguf "$1" ;; esac; }
[ -f "$(mine int8)" ] || "$ours" "$model" --quantize int8 "$(mine int8)"
[ -f "$(mine int4)" ] || "$ours" "$model" --quantize int4 "$(mine int4)" --group 32
for format in bf16 int8; do
    [ -f "$(gguf $format)" ] || "$ours" "$(mine $format)" --convert "$(gguf $format)"
done
for type in Q4_0 Q4_K; do
    to=$(gguf "$(echo $type | tr QK qk)")
    [ -f "$to" ] || "$llama/amx/llama-quantize" "$(gguf bf16)" "$to" $type "$threads" >/dev/null 2>&1
done
requests() { # prompts of 16 random ids, answers of 64 tokens
    awk -v n="$1" 'BEGIN {srand(1); for (i = 0; i < n; i++) {
        printf "{\"custom_id\": \"%d\", \"method\": \"POST\", \"url\": \"/v1/completions\", \"body\": {\"prompt\": [", i
        for (k = 0; k < 16; k++) printf "%s%d", k ? ", " : "", rand() * 100000
        print "], \"max_tokens\": 64, \"ignore_eos\": true, \"temperature\": 0}}"}}'
}

# ---- A turn. Lines of results: program, set, format, work, figure.
say() { echo "$@" >>"$results"; }
bench() {
    first "$ours" "$(mine "$2")" -d cpu -j "$threads" --cpu "$1" --bench --json 2>/dev/null | sed 's/"work"/\n&/g' |
        sed -n "s/.*\"read_GBps\": \([0-9.]*\).*/read \1/p
            s/\"work\": \"\([a-z]*\)\", \"position\": \([0-9]*\), \"tokens_per_s\": \([0-9.]*\),.*/\1_\2 \3/p" |
        while read -r what rate; do say ours "$1" "$2" "$what" "$rate"; done
}
one() {
    depths=100,2048
    if [ "${SHORT:-}" ]; then
        depths=100
        for n in 512 100; do
            first "$ours" "$(mine "$2")" -d cpu -j "$threads" --cpu "$1" -t 0 --lookup 0 --json \
                --ids "$(seq $n | tr '\n' ' ')" -n $((n == 512 ? 1 : 33)) 2>/dev/null | tr , '\n' |
                sed -n 's/.*"\(prompt\|decode\)_tokens_per_s": \([0-9.]*\).*/\1 \2/p' |
                while read -r what rate; do
                    case $what$n in prompt512 | decode100) say ours "$1" "$2" "${what}_$n" "$rate" ;; esac
                done
        done
    else
        bench "$1" "$2"
    fi
    for what in "-p 512 -n 0" "-p 0 -n 24 -d $depths"; do
        first "$llama/$1/llama-bench" -m "$(gguf "$2")" -t "$threads" -r 1 $what -o jsonl 2>/dev/null |
            sed -n 's/.*"n_prompt": \([0-9]*\),.*"n_depth": \([0-9]*\),.*"avg_ts": \([0-9.]*\).*/\1 \2 \3/p' |
            while read -r prompt depth rate; do
                if [ "$prompt" = 0 ]; then say llama "$1" "$2" "decode_$depth" "$rate"
                else say llama "$1" "$2" "prompt_$prompt" "$rate"; fi
            done
    done
}
many() {
    [ "$1" = amx ] || return 0 # (serve takes the best instruction set)
    for n in 1 4 16; do
        requests $n >"$llama/requests.jsonl"
        rm -f "$llama/answers.jsonl" # (serve would continue it)
        first "$server" "$(mine "$2")" -d cpu -j "$threads" -z tokenizer.bin --batch "$llama/requests.jsonl" \
            -o "$llama/answers.jsonl" 2>&1 | sed -n "s/.* tokens in \([0-9.]*\) s,.*/\1/p" |
            while read -r s; do say ours "$1" "$2" "at_once_$n" "$(echo "$s" | awk -v n=$n '{print n * 64 / $1}')"; done
    done
    first "$llama/$1/llama-batched-bench" -m "$(gguf "$2")" -t "$threads" -c 2048 -npp 16 -ntg 64 -npl 1,4,16 \
        --output-format jsonl 2>/dev/null | sed -n 's/.*"pl": \([0-9]*\),.*"t": \([0-9.]*\),.*/\1 \2/p' |
        while read -r n s; do say llama "$1" "$2" "at_once_$n" "$(echo "$s" | awk -v n="$n" '{print n * 64 / $1}')"; done
}
turn=0
while [ $turn -lt "$turns" ]; do
    turn=$((turn + 1))
    for set in ${SETS:-avx2 avx512bf16 amx}; do
        for format in ${FORMATS:-bf16 int8 int4 q4_0 q4_k}; do
            for work in ${WORK:-one many}; do $work "$set" "$format"; done
            echo "turn $turn of $turns: $set $format, load $(cut -d' ' -f1 /proc/loadavg)" >&2
        done
    done
done

# ---- Medians, as a table of Markdown.
for format in bf16 int8 int4 q4_0 q4_k; do echo "size - $format size $(stat -c %s "$(mine $format)")"; done |
    sort -k2,4 -k1,1 -k5,5g "$results" - | awk '
    {key = $2 " " $3 " " $4; v[key, $1, ++n[key, $1]] = $5; if ($1 == "ours" && $4 != "read") rows[++all] = key}
    function median(key, who) {return v[key, who, int((n[key, who] + 1) / 2)]}
    END {
        print "| instructions | format | work | ours | llama.cpp | ratio | read share | n |\n|---|---|---|---|---|---|---|---|"
        for (i = 1; i <= all; i++) {
            key = rows[i]
            if (key == rows[i - 1] || !n[key, "llama"]) continue
            split(key, part, " ")
            share = ""; read = median(part[1] " " part[2] " read", "ours")
            if (part[3] ~ /^decode/ && read) { # keys and values: 28 layers of 2 x 1024 numbers of 2 bytes a position
                split(part[3], at, "_")
                share = sprintf("%.2f", (median("- " part[2] " size", "size") + at[2] * 114688) * median(key, "ours") / read / 1e9)
            }
            printf "| %s | %s | %s | %.1f | %.1f | %.2f | %s | %d, %d |\n", part[1], part[2], part[3], median(key, "ours"),
                median(key, "llama"), median(key, "ours") / median(key, "llama"), share, n[key, "ours"], n[key, "llama"]
        }
    }'
