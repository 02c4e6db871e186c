#!/bin/sh
# One row of a Markdown table: what a model answers to questions, beside the answers that stand there.
#     data/measure.sh LABEL QUESTIONS.jsonl ANSWERS.jsonl MODEL [qwen3's options]
#     data/measure.sh LABEL QUESTIONS.jsonl ANSWERS.jsonl         the same for the questions, as if they were answers
# Columns: label, rows, answers that ended by themselves, loss, then ROUGE-1, ROUGE-2, ROUGE-L and BLEU-4 (0 to 100),
# each with its 95% interval. ANSWERS.jsonl is made if it is not there; stopped, the same command goes on.
# PROGRAMS names the folder of qwen3 and datagen, where it is not the repository's.
set -eu
export LC_ALL=C
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
bin=${PROGRAMS:-$root}
[ $# -ge 3 ] || { sed -n '2,4s/^# \{0,1\}//p' "$0" >&2; exit 1; }
label=$1 questions=$2 answers=$3
shift 3
[ $# -eq 0 ] || [ -e "$answers" ] || "$bin/qwen3" "$@" --eval "$questions" -o "$answers" >/dev/null
scores=$("$bin/datagen" score "$answers" "$questions" --dict "$root/data/datagen/jieba.bin")
printf '| %s |' "$label"
if [ $# -eq 0 ]; then
    printf ' %d | - | - |' "$(grep -c . "$questions")"
else
    # (In a JSON string a quote has a backslash, so what is looked for is never part of an answer.)
    awk '
    function number(key) { return match($0, "\"" key "\": [-+.0-9e]+") ? substr($0, RSTART + length(key) + 4) + 0 : 0 }
    {nll += number("nll"); tokens += number("tokens"); ended += /"finish": "stop"/}
    END {printf " %d | %d | %s |", NR, ended, tokens ? sprintf("%.4f", nll / tokens) : "-"}' "$answers"
fi
printf '%s\n' "$scores" | awk -F '[][ ,]+' -v first="$(($# ? 2 : 8))" '
/^(rouge|bleu)-/ {printf " %.2f [%.2f, %.2f] |", $first, $(first + 1), $(first + 2)}
END {print ""}'
