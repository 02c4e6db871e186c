# Training rows with their questions in other words: awk -f paraphrase.awk paraphrases.tsv gpu_qa.jsonl
# paraphrases.tsv has a row's id and a question as it stands in JSON; a row keeps everything but its question.
FILENAME ~ /tsv$/ {
    tab = index($0, "\t")
    id = substr($0, 1, tab - 1)
    question[id, ++count[id]] = substr($0, tab + 1)
    next
}
{
    match($0, /"id": "[^"]*"/)
    id = substr($0, RSTART + 7, RLENGTH - 8)
    rest = substr($0, index($0, "\", \"input\": "))
    for (i = 1; i <= count[id]; i++) print "{\"instruction\": \"" question[id, i] rest
}
