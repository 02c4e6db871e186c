#!/bin/sh
# Rows of a Markdown table: what a model answers to questions, beside the answers that stand there.
#     data/measure.sh LABEL QUESTIONS.jsonl ANSWERS.jsonl MODEL [qwen3's options]
#     data/measure.sh LABEL QUESTIONS.jsonl ANSWERS.jsonl         the same for the questions, as if they were answers
#     data/measure.sh LABEL QUESTIONS.jsonl ANSWERS.jsonl --nearest TRAIN.jsonl   ... for the nearest training answers
#     data/measure.sh --header LABEL                              the table's head
# Columns: label, rows, answers that ended by themselves, loss, then what `datagen score` gives (docs/data.md), 0 to 100,
# each with its 95% interval and the number of rows that have it; "-" where no row has.
# ANSWERS.jsonl is made if it is not there; stopped, the same command goes on.
# PROGRAMS names the folder of qwen3 and datagen, where it is not the repository's.
set -eu
export LC_ALL=C
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
bin=${PROGRAMS:-$root}
if [ $# -eq 2 ] && [ "$1" = --header ]; then
    printf '| %s | rows | ended | loss | ROUGE-1 | ROUGE-2 | ROUGE-L | ' "$2"
    printf 'BLEU-4 (characters) | BLEU-4 (words) | facts | choice |\n|%s---|---|---|---|---|---|---|---|---|---|---|\n' \
        "$(printf '%s' "$2" | tr -cd '|' | sed 's/|/---|/g')" # (a label may span several columns)
    exit
fi
[ $# -ge 3 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 1; }
label=$1 questions=$2 answers=$3
shift 3
first=3 train='' # column of the first mean in a row of scores
if [ $# -eq 0 ]; then first=6
elif [ "$1" = --nearest ]; then first=9 train=${2:?--nearest: a file is expected}
else [ -e "$answers" ] || "$bin/qwen3" "$@" --eval "$questions" -o "$answers" >/dev/null; fi
scores=$("$bin/datagen" score "$answers" "$questions" --dict "$root/data/datagen/jieba.bin" ${train:+--train "$train"})
printf '| %s |' "$label"
if [ $first -gt 3 ]; then
    printf ' %d | - | - |' "$(grep -c . "$questions")"
else
    # (In a JSON string a quote has a backslash, so these patterns never match inside an answer.)
    awk '
    function number(key) { return match($0, "\"" key "\": [-+.0-9e]+") ? substr($0, RSTART + length(key) + 4) + 0 : 0 }
    {nll += number("nll"); tokens += number("tokens"); ended += /"finish": "stop"/}
    END {printf " %d | %d | %s |", NR, ended, tokens ? sprintf("%.4f", nll / tokens) : "-"}' "$answers"
fi
printf '%s\n' "$scores" | awk -F '[][ ,]+' -v first=$first '
BEGIN {n = split("rouge-1 rouge-2 rouge-l bleu-4-char bleu-4-word facts choice", name, " ")}
/^(rouge|bleu|facts|choice)[-a-z0-9]* +[0-9]+ +[-0-9.]+ \[/ {
    cell[$1] = sprintf("%.2f [%.2f, %.2f] (%d)", $first, $(first + 1), $(first + 2), $2)
}
END {
    for (i = 1; i <= n; i++) printf " %s |", name[i] in cell ? cell[name[i]] : "-"
    print ""
}'
