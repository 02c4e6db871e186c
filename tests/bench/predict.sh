#!/bin/sh
# Seconds of one POST /predict with N questions beside `serve --batch` of the same questions, which it should equal.
#     tests/bench/predict.sh MODEL [option of serve ...]      (SIZES="193 358 1074" ROUNDS=3 PORT=8123)
# The questions are those of data/course/gpu_qa.jsonl, from the first on and around. Both take greedy answers of at most
# 384 tokens without thinking. A round before the printed ones warms the server up. Output: `predict N seconds` and
# `batch N seconds tok/s`, a line a round.
set -eu
model=$1; shift
port=${PORT:-8123} here=$(dirname -- "$0")/../.. out=$(mktemp -d)
trap 'kill "$server" 2>/dev/null; rm -rf "$out"' EXIT
question='s/^{"instruction": \("\([^"\\]\|\\.\)*"\), "input": .*/\1/p'
sed -n "$question" "$here/data/course/gpu_qa.jsonl" >"$out/questions"

"$here/serve" "$model" "$@" -P "$port" >/dev/null 2>"$out/log" & server=$!
until curl -sf -o "$out/health" "http://127.0.0.1:$port/"; do
    kill -0 $server || { cat "$out/log" >&2; exit 1; }
    sleep 0.2
done
for n in ${SIZES:-193 358 1074}; do
    awk -v n="$n" '{ q[NR] = $0 } END { for (i = 0; i < n; i++) print q[i % NR + 1] }' "$out/questions" >"$out/asked"
    awk 'BEGIN { printf "{\"prompt\": [" } { printf "%s%s", (NR > 1 ? ", " : ""), $0 } END { print "]}" }' "$out/asked" \
        >"$out/list.$n"
    awk '{ printf "{\"custom_id\": \"%d\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\", \"body\": ", NR
           printf "{\"messages\": [{\"role\": \"user\", \"content\": %s}], \"max_tokens\": 384, \"temperature\": 0, ", $0
           print "\"chat_template_kwargs\": {\"enable_thinking\": false}}}" }' "$out/asked" >"$out/batch.$n"
    for round in $(seq 0 "${ROUNDS:-3}"); do
        seconds=$(curl -sf -o "$out/answers" -w '%{time_total}' -H 'Content-Type: application/json' \
            -d @"$out/list.$n" "http://127.0.0.1:$port/predict")
        [ "$round" = 0 ] || echo "predict $n $seconds"
    done
done
kill $server
wait $server || :
for n in ${SIZES:-193 358 1074}; do
    for round in $(seq 1 "${ROUNDS:-3}"); do
        rm -f "$out/answers"
        "$here/serve" "$model" "$@" --batch "$out/batch.$n" -o "$out/answers" 2>"$out/log"
        tr '\r' '\n' <"$out/log" | sed -n 's/.* tokens in \([0-9.]*\) s, \([0-9.]*\) tok.*/batch '"$n"' \1 \2/p'
    done
done
