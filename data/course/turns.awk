# Conversations out of single questions: awk -f turns.awk gpu_qa.jsonl ... Each row once more as the last question of a
# conversation, after one other row or two (in turn), which lie far apart in the files and do not repeat it.
{
    row[NR] = $0
    match($0, /"instruction": "([^"\\]|\\.)*"/)
    question[NR] = substr($0, RSTART + 15, RLENGTH - 15)
    match($0, /"output": "([^"\\]|\\.)*"/)
    answer[NR] = substr($0, RSTART + 10, RLENGTH - 10)
}
function turn(i, step, j) {
    j = (i * step + 7) % NR + 1
    return j == i ? turn(i + 1, step) : "[" question[j] ", " answer[j] "]"
}
END {
    for (i = 1; i <= NR; i++) {
        history = turn(i, 389)
        if (i % 2) history = turn(i, 211) ", " history
        print substr(row[i], 1, length(row[i]) - 1) ", \"history\": [" history "]}"
    }
}
