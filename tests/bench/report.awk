# report.md and report.json from the outputs that report.sh keeps: awk -v form=md|json -f report.awk FILES
# FILES, told apart by their names: machine.tsv (name, tab, value) and bench.json (qwen3 --bench --json) first, then
# serve-nano.jsonl, serve-exam.jsonl (answers, and serve's last line), lora-ROWSxTOKENS.jsonl (a trainer_log.jsonl). A
# missing one is a row less.
#
# Each row's ceiling is a rate, too: that of a program which reads or multiplies at the rates that --bench measured, and
# does nothing more than it must. Its bytes and FLOP, of the 0.6B's shape in bf16:
BEGIN {
    L = 28; C = 1024; H = 16; K = 8; D = 128; F = 3072; V = 151936; RANK = 32
    head = V * C
    body = L * (2 * C * H * D + 2 * C * K * D + 3 * C * F) # numbers of a layer's matrices, times layers
    adapters = RANK * L * (2 * (C + H * D) + 2 * (C + K * D) + 3 * (C + F))
    weights = 2 * (body + head)                            # bytes that a step reads
    key = 2 * 2 * L * K * D                                # bytes of a token's keys and values
    pair = 4 * L * H * D                                   # FLOP of a token and a key
}
function number(text, name) { # of a JSON field; 0 without it
    if (!match(text, "\"" name "\": *[-+.0-9e]+")) return 0
    return substr(text, RSTART + length(name) + 3, RLENGTH - length(name) - 3) + 0
}
function row(name, rate, ceiling, bound) {
    n++
    work[n] = name; rates[n] = rate; ceilings[n] = ceiling; bounds[n] = bound
}
FNR == 1 { file = FILENAME; sub(/.*\//, "", file); sub(/\.[a-z]*$/, "", file) }
file == "machine" {
    at = index($0, "\t")
    name = substr($0, 1, at - 1); value = substr($0, at + 1)
    if (name == "failed") failed[++failures] = value
    else if (value != "" && value !~ /^\[/) { order[++facts] = name; fact[name] = value } # ("[N/A]" of nvidia-smi)
}
# Bytes per token over the read bandwidth; FLOP per token over the multiply rate. A share is --bench's own.
file == "bench" {
    cpu = /"device": "cpu"/
    read = number($0, "read_GBps") * 1e9; multiply = number($0, "multiply_GFLOPs") * 1e9
    count = split($0, part, /"work": /)
    for (i = 2; i <= count; i++) {
        rate = number(part[i], "tokens_per_s")
        decode = part[i] ~ /^"decode"/
        share = number(part[i], decode ? "read_share" : "multiply_share")
        row((decode ? "decode at " : "prompt of ") number(part[i], "position"), rate, share ? rate / share : 0,
            decode ? "read" : "multiply")
    }
}
# A batch: every step reads the weights, and there are no fewer steps than the longest answer has tokens, and than all
# of them in so many slots need; a token reads the keys before it. Every token that was not cached is multiplied. The
# longer one of reading and multiplying is the floor.
file ~ /^serve-/ && /"completion_tokens"/ {
    p = number($0, "prompt_tokens"); a = number($0, "completion_tokens"); c = number($0, "cached_tokens")
    asked[file]++
    out[file] += a
    if (a > longest[file]) longest[file] = a
    past = (a - 1) * (p + (a - 2) / 2)
    keys[file] += past
    flop[file] += 2 * body * (p - c + a - 1) + 2 * head * a + pair * ((p * (p - 1) - c * (c - 1)) / 2 + past)
}
file ~ /^serve-/ && / tokens in [0-9.]+ s/ {
    match($0, /[0-9]+ errors/)
    errors = substr($0, RSTART, RLENGTH) + 0
    if (errors > 0) failed[++failures] = file ": " errors " requests were answered by an error"
    match($0, / tokens in [0-9.]+ s/)
    time = substr($0, RSTART + 11) + 0
    slots = cpu ? 16 : 256
    steps = longest[file] * slots > out[file] ? longest[file] : out[file] / slots
    reading = read ? (weights * steps + key * keys[file]) / read : 0
    multiplying = multiply ? flop[file] / multiply : 0
    floor = reading > multiplying ? reading : multiplying
    if (time > 0) row("serve " substr(file, 7) ", " asked[file] " requests", out[file] / time,
                      floor ? out[file] / floor : 0, reading > multiplying ? "read" : "multiply")
}
# Training, from the fifth step on where there are ten, else from the first: products forward and by their input, those
# of adapters by their numbers, too; attention's backward takes 2.5 of its forward.
file ~ /^lora-/ {
    tokens = number($0, "total_tokens"); at = tokens / (number($0, "throughput") + 1e-9)
    lines = FNR
    if (FNR == 1) { first_tokens = tokens; first_at = at }
    if (FNR == 5) { fifth_tokens = tokens; fifth_at = at }
    if (FNR >= 10) { first_tokens = fifth_tokens; first_at = fifth_at }
    split(substr(file, 6), size, "x")
    name = "LoRA " size[1] " x " size[2]
    rate = at > first_at ? (tokens - first_tokens) / (at - first_at) : 0
    if (FNR == 1) {
        row(name, 0, multiply / (4 * (body + head) + 6 * adapters + 3.5 * pair * (size[2] + 1) / 2), "multiply")
        place[file] = n
    }
    rates[place[file]] = rate
    work[place[file]] = name (fact[file] ~ /recompute|accum/ ? ", " fact[file] : "")
}
function grouped(x,    text) { # 12,345; below 1,000 three digits
    if (x < 999.5) return sprintf(x < 9.995 ? "%.2f" : x < 99.95 ? "%.1f" : "%.0f", x)
    text = sprintf("%.0f", x)
    for (x = length(text) - 3; x > 0; x -= 3) text = substr(text, 1, x) "," substr(text, x + 1)
    return text
}
function percent(i) { return ceilings[i] ? sprintf("%.0f%%", 100 * rates[i] / ceilings[i]) : "-" }
function quoted(text) {
    gsub(/\\/, "\\\\", text); gsub(/"/, "\\\"", text); gsub(/[^ -~]/, "?", text)
    return "\"" text "\""
}
function cell(pattern,    i) { # of the line for docs/cards.md
    for (i = 1; i <= n; i++) if (work[i] ~ pattern && rates[i]) return grouped(rates[i]) " (" percent(i) ")"
    return "-"
}
END {
    if (form == "json") {
        printf "{\n  \"machine\": {"
        for (i = 1; i <= facts; i++) {
            value = fact[order[i]]
            printf "%s\n    %s: %s", (i > 1 ? "," : ""), quoted(order[i]),
                value ~ /^(0|[1-9][0-9]*)(\.[0-9]+)?$/ ? value : quoted(value)
        }
        printf "\n  },\n  \"read_GBps\": %.1f, \"multiply_TFLOPs\": %.3f,\n  \"rows\": [", read / 1e9, multiply / 1e12
        for (i = 1; i <= n; i++) {
            printf "%s\n    {\"work\": %s, \"tokens_per_s\": %.8g, ", (i > 1 ? "," : ""), quoted(work[i]), rates[i]
            printf "\"ceiling_tokens_per_s\": %.8g, \"bound\": \"%s\", ", ceilings[i], bounds[i]
            printf "\"share\": %.6f}", ceilings[i] ? rates[i] / ceilings[i] : 0
        }
        printf "\n  ],\n  \"failed\": ["
        for (i = 1; i <= failures; i++) printf "%s\n    %s", (i > 1 ? "," : ""), quoted(failed[i])
        print failures ? "\n  ]\n}" : "]\n}"
        exit
    }
    card = cpu || !("gpu" in fact) ? fact["cpu"] ", " fact["cores"] " cores" : fact["gpu"]
    print "# " card "\n\nQwen3-0.6B's shape, random weights, bf16. Ceilings measured in the same run: read"
    print grouped(read / 1e9) " GB/s, multiply " grouped(multiply / 1e12) " TFLOP/s.\n"
    print "| work | tok/s | ceiling, tok/s | share | bound by |\n|---|---|---|---|---|"
    for (i = 1; i <= n; i++) {
        printf "| %s | %s | %s | ", work[i], grouped(rates[i]), ceilings[i] ? grouped(ceilings[i]) : "-"
        print percent(i) " | " bounds[i] " |"
    }
    for (i = 1; i <= failures; i++) print (i == 1 ? "\nNot measured:\n\n" : "") "- " failed[i]
    print "\n| | |\n|---|---|"
    for (i = 1; i <= facts; i++) if (order[i] !~ /^lora-/) print "| " order[i] " | " fact[order[i]] " |"
    print "\nThe line for docs/cards.md:\n"
    printf "| %s | %s | %s |", card, grouped(read / 1e9), grouped(multiply / 1e12)
    columns = split("decode at [01]$;decode at 2048$;prompt of 512$;prompt of 2048$;serve nano;serve exam;" \
                    "LoRA 1?[16] x;LoRA 64 x", column, ";")
    for (i = 1; i <= columns; i++) printf " %s |", cell(column[i])
    print " " (cpu ? fact["compiler"] : fact["driver"] ", " fact["nvcc"]) " | " \
        substr(fact["date"], 1, 10) ", " fact["commit"] " |"
}
