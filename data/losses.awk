# The losses of several runs as one SVG, with axes and a legend: lines are the training loss, smoothed over ten steps,
# dots the loss on held-out rows. Input: one line per run, trainer_log.jsonl TAB the values of its options.
#     awk -v header="rank alpha ..." -f losses.awk RUNS > loss.svg
function number(key) {
    if (!match(line, "\"" key "\": [-+.0-9e]+")) return -1
    return substr(line, RSTART + length(key) + 4, RLENGTH - length(key) - 4) + 0
}
function across(step) { return 60 + 500 * step / last }
function up(loss) { return 360 - 340 * loss / high }
function tick(range, k) { # a round distance between marks, for four to ten marks
    for (k = 1e-6; range / k > 10; k *= 10) {}
    return range / k > 5 ? k : range / k > 2 ? k / 2 : k / 5
}
BEGIN {
    FS = "\t"; columns = split(header, name, " ")
    colours = split("#05a #c30 #292 #a3a #d80 #077 #855 #555", colour, " ")
}
{
    runs++; split($2, value, " ")
    for (i = 1; i <= columns; i++) {of[runs, i] = value[i]; if (value[i] != of[1, i]) varies[i] = 1}
    mean = -1
    while ((getline line < $1) > 0) {
        step = number("current_steps"); held = number("eval_loss"); loss = number("loss")
        if (step > last) last = step
        if (held >= 0) dots[runs] = dots[runs] " " step " " held
        else {
            mean = mean < 0 ? loss : mean + (loss - mean) * 0.1
            points[runs] = points[runs] " " step " " mean
        }
        if (held > high) high = held
        if (mean > high) high = mean
    }
    close($1)
}
END {
    if (!last) {print "losses.awk: no step in the logs" > "/dev/stderr"; exit 1}
    height = 410 > 70 + 16 * runs ? 410 : 70 + 16 * runs
    for (i = 1; i <= columns; i++) # columns of the legend, which lists the options that differ
        if (varies[i] || runs == 1) {
            at[i] = 612 + legend
            legend += 16 + 7 * (length(name[i]) > 6 ? length(name[i]) : 6)
        }
    if (legend < 200) legend = 200
    printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" ", 612 + legend, height
    print "font-family=\"sans-serif\" font-size=\"12\">"
    print "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
    text = "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%g</text>\n"
    y = tick(high); high = y * int(high / y + 0.999999)
    for (v = 0; v <= high + y / 2; v += y)
        printf "<path d=\"M60 %.1fH560\" stroke=\"#ddd\"/>" text, up(v), 54, up(v) + 4, "end", v
    x = tick(last); if (x < 1) x = 1
    for (v = 0; v <= last; v += x)
        printf "<path d=\"M%.1f 360v5\" stroke=\"#555\"/>" text, across(v), across(v), 378, "middle", v
    print "<path d=\"M60 20V360H560\" fill=\"none\" stroke=\"#555\"/>"
    print "<text x=\"310\" y=\"398\" text-anchor=\"middle\">step</text>"
    print "<text x=\"18\" y=\"190\" text-anchor=\"middle\" transform=\"rotate(-90 18 190)\">loss</text>"
    print "<text x=\"580\" y=\"24\" fill=\"#555\">line: training; dots: held out</text>"
    for (i = 1; i <= columns; i++)
        if (at[i]) printf "<text x=\"%d\" y=\"44\" font-weight=\"bold\">%s</text>\n", at[i], name[i]
    for (r = 1; r <= runs; r++) {
        c = colour[(r - 1) % colours + 1]; dash = r > colours ? " stroke-dasharray=\"5 3\"" : ""
        n = split(points[r], p, " "); path = ""
        for (i = 1; i < n; i += 2) path = path sprintf("%.1f,%.1f ", across(p[i]), up(p[i + 1]))
        printf "<polyline points=\"%s\" fill=\"none\" stroke=\"%s\" stroke-width=\"1.5\"%s/>\n", path, c, dash
        n = split(dots[r], p, " ")
        for (i = 1; i < n; i += 2)
            printf "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", across(p[i]), up(p[i + 1]), c
        printf "<path d=\"M580 %dh20\" stroke=\"%s\" stroke-width=\"2\"%s/>\n", 42 + 16 * r, c, dash
        for (i = 1; i <= columns; i++)
            if (at[i]) printf "<text x=\"%d\" y=\"%d\">%s</text>\n", at[i], 46 + 16 * r, of[r, i]
    }
    print "</svg>"
}
