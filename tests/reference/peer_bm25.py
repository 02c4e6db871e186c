"""Retrieval beside bm25s and rank_bm25, on the very same words: how often the passage that holds an answer is found.

    python -m venv venv && venv/bin/pip install bm25s rank_bm25
    make build/bench_retrieval
    venv/bin/python tests/reference/peer_bm25.py build/bench_retrieval data/course/notes data/course/exam_qa.jsonl ...

Rows of a Markdown table: for each file of questions, and for all of them, each program's recall@1, recall@5 and MRR
with 95% intervals (bootstrap over questions, percentiles of 1,000 resamples), and the difference of its MRR to ours on
the same resamples. The program cuts passages and questions into words, and says which passages hold each answer and at
which rank it finds the first of them itself. The packages get its words, with k1 = 1.2 and b = 0.75 as ours. Of equal
scores the passage that comes first is taken, everywhere. Ends with status 1 if over all questions another one is shown
to find more: the interval of its difference lies above zero.
"""
import json, os, subprocess, sys

import bm25s, numpy, rank_bm25

RESAMPLES = 1000
program, notes, files = sys.argv[1], sys.argv[2], sys.argv[3:]


def read(paths):
    return json.loads(subprocess.run([program, "words", notes, *paths], check=True, capture_output=True, text=True).stdout)


def ranks(questions, scores_of):
    """Of each question the rank of the first passage that holds its answer; 0: none was found."""
    for q in questions:
        scores = numpy.asarray(scores_of(q["words"]), dtype=numpy.float64)
        order = [p for p in numpy.argsort(-scores, kind="stable") if scores[p] != 0]
        yield next((r for r, p in enumerate(order, 1) if p in set(q["holds"])), 0)


def values(ranks):
    """Of each question what recall@1, recall@5 (in percent) and MRR are the means of."""
    r = numpy.array(list(ranks), dtype=float)
    return numpy.stack([100.0 * (r == 1), 100.0 * ((r >= 1) & (r <= 5)), numpy.where(r > 0, 1 / numpy.maximum(r, 1), 0)])


def interval(x, drawn):
    means = numpy.sort(x[drawn].mean(axis=1))
    return means[RESAMPLES // 40], means[RESAMPLES - 1 - RESAMPLES // 40]


def rows(name, questions, systems):
    drawn = numpy.random.default_rng(0).integers(0, len(questions), (RESAMPLES, len(questions)))
    ours = values(q["rank"] for q in questions)
    behind = False
    for system, scores_of in systems.items():
        v = values(ranks(questions, scores_of)) if scores_of else ours
        cells = []
        for x, digits in zip(v, (1, 1, 3)):
            low, high = interval(x, drawn)
            cells.append(f"{x.mean():.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]")
        if scores_of:
            low, high = interval(v[2] - ours[2], drawn)
            cells.append(f"{(v[2] - ours[2]).mean():+.3f} [{low:+.3f}, {high:+.3f}]")
            behind = behind or low > 0
        else:
            cells.append("")
        print(f"| {name} | {len(questions)} | {system} | " + " | ".join(cells) + " |")
    return behind


def of_bm25s(passages, method):
    index = bm25s.BM25(method=method, k1=1.2, b=0.75)
    index.index(passages, show_progress=False)
    known = index.vocab_dict
    return lambda words: index.get_scores([w for w in words if w in known]) if any(w in known for w in words) else numpy.zeros(len(passages))


parts = [read([path]) for path in files]
passages = parts[0]["passages"]
systems = {"ours": None, 'bm25s, "lucene"': of_bm25s(passages, "lucene"), 'bm25s, "robertson"': of_bm25s(passages, "robertson"),
           "rank_bm25, BM25Okapi": rank_bm25.BM25Okapi(passages, k1=1.2, b=0.75).get_scores}
print(f"{len(passages)} passages; bm25s {bm25s.__version__}", file=sys.stderr)
print("| questions | number | | recall@1 | recall@5 | MRR | MRR less ours |\n|---|---|---|---|---|---|---|")
for path, part in zip(files, parts):
    behind = rows(os.path.basename(path).removesuffix(".jsonl"), part["questions"], systems)
if len(files) > 1:
    behind = rows("all", [q for part in parts for q in part["questions"]], systems)
sys.exit(int(behind))
