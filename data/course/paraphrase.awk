# Training rows with their questions in other words: awk -f paraphrase.awk paraphrases.jsonl gpu_qa.jsonl
# A line of paraphrases.jsonl is {"id": "...", "instruction": "..."}; a row keeps everything but its question.
{
    match($0, /"id": "[^"]*"/)
    id = substr($0, RSTART + 7, RLENGTH - 8)
}
FILENAME ~ /paraphrases/ {
    start = RSTART + RLENGTH + length(", \"instruction\": \"")
    question[id, ++count[id]] = substr($0, start, length($0) - start - 1)
    next
}
{
    rest = substr($0, index($0, "\", \"input\": "))
    for (i = 1; i <= count[id]; i++) print "{\"instruction\": \"" question[id, i] rest
}
