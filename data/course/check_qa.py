#!/usr/bin/env python3
"""Check the questions and answers in this folder; `make -C data check` runs it. Python's standard library only.

    python3 data/course/check_qa.py

`datagen filter` with our list of terms must pass gpu_qa.jsonl and exam_qa.jsonl as they are, and no chunk may be on both
sides. What the sides share is measured as `datagen split` does it, with its limits: an exam row leaks if half of its
13-character n-grams stand in training rows, or if its question has a ROUGE-L of 0.7 or more to one there.
"""
import collections, json, pathlib, re, subprocess, sys, tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FIELDS = ["instruction", "input", "output", "id", "chunk", "chapter", "difficulty"]
limits = {line.split()[0]: float(line.split()[1]) for line in (ROOT / "data/datagen/limits.txt").read_text().splitlines()
          if line.strip() and line[0] != ";"}
faults = 0


def need(condition, fault):
    global faults
    if not condition:
        faults += 1
        print("fault:", fault)


def rows_of(name):
    rows = [json.loads(line) for line in (HERE / name).read_text(encoding="utf-8").splitlines()]
    for row in rows:
        need(list(row) == FIELDS and all(isinstance(row[field], str) for field in FIELDS), f"{name}: fields of {row.get('id')}")
        need(60 <= len(row["output"]) <= 400, f"{name}: {row['id']}: an answer of {len(row['output'])} characters")
        need(row["difficulty"] in ("easy", "medium", "hard"), f"{name}: {row['id']}: difficulty {row['difficulty']}")
    return rows


def is_english(text):
    return len(re.findall(r"[\u4e00-\u9fff]", text)) < 0.05 * len(text)


def table(names, sets):
    """Rows by chapter (the note's number, with which an id begins) and difficulty, as Markdown."""
    print("| chapter | " + " | ".join(f"{name}: easy | medium | hard" for name in names) + " |")
    print("|---" * (1 + 3 * len(names)) + "|")
    for chapter in sorted({row["id"][:2] for rows in sets for row in rows}) + ["all"]:
        cells = [chapter]
        for rows in sets:
            count = collections.Counter(row["difficulty"] for row in rows if chapter in ("all", row["id"][:2]))
            cells += [str(count[level]) for level in ("easy", "medium", "hard")]
        print("| " + " | ".join(cells) + " |")
    for name, rows in zip(names, sets):
        print(f"{name}: {len(rows)} rows, {sum(is_english(row['output']) for row in rows)} answered in English")


def words(text):
    """As datagen's ROUGE-L: a CJK character, or a lower-cased word of anything else."""
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+", text.lower())


def rouge_l(a, b):
    """F1 of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return 2 * row[-1] / (len(a) + len(b)) if a and b else 0


def ngrams(row, n):
    """Of question and answer, as datagen's: case and blanks do not count."""
    text = "".join((row["instruction"] + row["output"]).lower().split())
    return [text[i:i + n] for i in range(len(text) - n + 1)]


def leaks(train, exam):
    n, near = int(limits["split.ngram"]), limits["filter.rouge"]
    there = {gram for row in train for gram in ngrams(row, n)}
    questions = [words(row["instruction"]) for row in train]
    found = []
    for row in exam:
        grams, question = ngrams(row, n), words(row["instruction"])
        share = sum(gram in there for gram in grams) / len(grams)
        most = max((rouge_l(question, other), -i) for i, other in enumerate(questions)
                   if 2 * min(len(question), len(other)) >= near * (len(question) + len(other)))
        if share > limits["split.leak_share"] or most[0] >= near:
            found.append(f"{row['id']}: {share:.2f} of its n-grams, ROUGE-L {most[0]:.2f} to {train[-most[1]]['id']}")
    return found


train, exam, rephrased = rows_of("gpu_qa.jsonl"), rows_of("exam_qa.jsonl"), rows_of("rephrased_qa.jsonl")
english, english_test = rows_of("english_train.jsonl"), rows_of("english_test.jsonl")
table(["gpu_qa", "exam_qa"], [train, exam])
table(["rephrased_qa", "english_train", "english_test"], [rephrased, english, english_test])

need(len(train) >= 1000 and len(exam) == 193 and len(rephrased) == 30, "the numbers of rows")
for name, rows in (("gpu_qa", train), ("exam_qa", exam)):
    for level, share in (("easy", 0.5), ("medium", 0.3), ("hard", 0.2)):
        got = sum(row["difficulty"] == level for row in rows) / len(rows)
        need(abs(got - share) < 0.02, f"{name}: {100 * got:.1f}% {level}")
every = train + exam + rephrased + english + english_test
need(len({row["id"] for row in every}) == len(every), "an id is there twice")
need(not {row["chunk"] for row in exam} & {row["chunk"] for row in train + english + english_test}, "a chunk on both sides")
answers = {row["id"]: row["output"] for row in train}
need(all(answers.get(row["id"][:-1]) == row["output"] for row in rephrased), "a rephrased row without its training row")
questions = {row["instruction"] for row in train + english}
need(not questions & {row["instruction"] for row in rephrased + english_test}, "a test question stands in the training rows")

found = leaks(train, exam)
print(f"{len(found)} of {len(exam)} exam rows leak", *found, sep="\n  ")
need(len(found) <= limits["split.leak_rows"] * len(exam), "leakage")

with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder)
    both = (HERE / "gpu_qa.jsonl").read_bytes() + (HERE / "exam_qa.jsonl").read_bytes()
    (path / "qa.jsonl").write_bytes(both)
    datagen = ROOT / "datagen"
    subprocess.run([datagen, "chunk", *sorted((HERE / "notes").glob("*.md")), "-o", path / "chunks.jsonl"], check=True)
    subprocess.run([datagen, "filter", path / "qa.jsonl", "--chunks", path / "chunks.jsonl",
                    "--terms", ROOT / "data/datagen/terms.txt", "-o", path / "clean.jsonl"], check=True)
    need((path / "clean.jsonl").read_bytes() == both, "datagen filter changes the rows")
print("clean" if not faults else f"{faults} faults")
sys.exit(faults > 0)
