"""Retrieval beside bm25s and rank_bm25, on the very same words: how often the passage that holds an answer is found.

    python -m venv venv && venv/bin/pip install bm25s rank_bm25
    make build/bench_retrieval
    venv/bin/python tests/reference/peer_bm25.py build/bench_retrieval data/course/notes data/course/exam_qa.jsonl ...

The program cuts passages and questions into words and says which passages hold each answer; ours is what it prints for
`recall`. The packages get its words, with k1 = 1.2 and b = 0.75 as ours. Of equal scores the passage that comes first is
taken, everywhere. Ends with status 1 if ours finds less than the best of the others.
"""
import json, re, subprocess, sys

import bm25s, numpy, rank_bm25

program, files = sys.argv[1], sys.argv[2:]
data = json.loads(subprocess.run([program, "words", *files], check=True, capture_output=True, text=True).stdout)
passages, questions = data["passages"], data["questions"]
print(f"{len(passages)} passages, {len(questions)} questions; bm25s {bm25s.__version__}")


def measure(name, scores_of):
    first = five = 0
    reciprocal = 0.0
    for q in questions:
        scores = numpy.asarray(scores_of(q["words"]), dtype=numpy.float64)
        order = [p for p in numpy.argsort(-scores, kind="stable") if scores[p] != 0]
        rank = next((r for r, p in enumerate(order) if p in set(q["holds"])), None)
        if rank is not None:
            first, five, reciprocal = first + (rank < 1), five + (rank < 5), reciprocal + 1 / (rank + 1)
    n = len(questions)
    print(f"{name:24} recall@1 {100 * first / n:.2f}%, recall@5 {100 * five / n:.2f}%, MRR {reciprocal / n:.4f}")
    return reciprocal / n


def of_bm25s(method):
    index = bm25s.BM25(method=method, k1=1.2, b=0.75)
    index.index(passages, show_progress=False)
    known = index.vocab_dict
    return lambda words: index.get_scores([w for w in words if w in known]) if any(w in known for w in words) else numpy.zeros(len(passages))


okapi = rank_bm25.BM25Okapi(passages, k1=1.2, b=0.75)
best = max(measure("bm25s, lucene", of_bm25s("lucene")), measure("bm25s, robertson", of_bm25s("robertson")),
           measure("rank_bm25, BM25Okapi", okapi.get_scores))
ours = subprocess.run([program, "recall", *files], check=True, capture_output=True, text=True).stdout.strip().split("\n")[-1]
print("ours:", ours)
sys.exit(float(re.search(r"MRR ([0-9.]+)", ours)[1]) < round(best, 4))
