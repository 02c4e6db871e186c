# One table of several seeds: awk -f data/seeds.awk data/tiny/RESULTS.md, which has a table of each.
# Of each set of questions: the mean of each run, their mean, the lowest and the highest, and the 95% interval of the
# mean by Student's t ("-" where the runs do not differ). That says what other seeds would change, not what other
# questions would.
BEGIN {
    FS = " *[|] *"
    # 97.5% of Student's t, of 1 to 9 degrees of freedom
    split("12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262", student, " ")
}
/^[|] questions [|]/ {
    runs++
    for (i = 2; i < NF; i++) column[$i] = i
}
runs && /^[|] [^-]/ && !/^[|] questions [|]/ {
    if (runs == 1) row[++rows] = $2
    asked[$2] = $3
    for (name in column)
        if ($column[name] ~ /\[/) value[$2, name, runs] = substr($column[name], 1, index($column[name], " ") - 1)
}
function percent(x) { return x < 0 ? 0 : x > 100 ? 100 : x }
function line(label, name, i, x, sum, low, high, square, half, cells, interval) {
    if (value[label, name, 1] == "") return
    for (i = 1; i <= runs; i++) {
        x = value[label, name, i] + 0
        sum += x
        if (i == 1 || x < low) low = x
        if (i == 1 || x > high) high = x
        cells = cells (i > 1 ? ", " : "") sprintf("%.2f", x)
    }
    for (i = 1; i <= runs; i++) square += (value[label, name, i] - sum / runs) ^ 2
    interval = "-"
    if (low < high) {
        half = student[runs - 1] * sqrt(square / (runs - 1) / runs)
        interval = sprintf("[%.2f, %.2f]", percent(sum / runs - half), percent(sum / runs + half))
    }
    printf "| %s | %d | %s | %s | ", label, asked[label], name, cells
    printf "%.2f | %.2f to %.2f | %s |\n", sum / runs, low, high, interval
}
END {
    printf "| questions | rows | number | seeds 1 to %d | mean | range | 95%% interval of the mean |\n", runs
    print "|---|---|---|---|---|---|---|"
    for (i = 1; i <= rows; i++) {
        line(row[i], "ROUGE-L")
        line(row[i], "facts")
        line(row[i], "choice")
    }
}
