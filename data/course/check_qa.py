#!/usr/bin/env python3
"""Check the questions and answers in this folder; `make -C data check` runs it. Python's standard library only.

    python3 data/course/check_qa.py [--pairs]

What is checked: fields, lengths, shares; a fact is on one side of a split only; the evidence of a row is in the section
of the notes that it names; nothing in the exam or the development split is like a training row (as `datagen split`
measures it, paraphrases counted, and by tf-idf: every pair nearer than NEAR was read, and pairs_read.tsv says why it is
none); key facts stand in their answers, by `datagen score`; choices are about the fact of the row they come from; one
Chinese term for one thing, its English behind the whole word, Chinese punctuation; the default model's greetings propose
questions that it has learnt; `datagen filter` passes the rows as they are; notes.jsonl is of these notes; the card's
table counts right. --pairs prints each exam row with its nearest training rows.
Environment: DATAGEN names the program (default ./datagen in the repository's root).
"""
import collections, json, os, pathlib, re, subprocess, sys, tempfile
import facts, glossary

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DATAGEN = os.environ.get("DATAGEN", ROOT / "datagen")
FIELDS = ["instruction", "input", "output", "id", "chunk", "chapter", "difficulty", "fact_id", "section", "evidence"]
HARD = ("train_hard", "exam_hard", "dev")  # (check_code.py runs their code, and their figures)
CHAPTERS = ("chapters_train", "chapters_exam")  # (of chapters 16 to 23: check_code.py runs their figures)
CHAPTERS_HARD = ("chapters_hard", "chapters_dev")  # (of the same; code is long)
EXTRA = ("extra_train", "extra_dev")  # (of all chapters; as the hard ones)
MORE_CHOICES = ("mc_chapters_hard", "mc_more_seen", "mc_extra_seen", "mc_extra_dev")
MORE = {"exam_qa": ["facts"], "exam_hard": ["facts"], "train_hard": ["facts"], "dev": ["facts"],
        **{name: ["facts"] for name in CHAPTERS + CHAPTERS_HARD + EXTRA},
        **{name: ["choices", "choice"]
           for name in ("mc_exam", "mc_seen", "mc_chapters", "mc_chapters_seen", *MORE_CHOICES)}}
NEAR = 0.27   # cosine of an exam row and a training row from which the pair is read
SHARE = 0.12  # of what a Chinese row says, weighed by idf, stands in its evidence at least
limits = {name: float(value) for name, value in re.findall(r"^([a-z_.]+) +([0-9.]+)",
          (ROOT / "data/datagen/limits.txt").read_text(), re.M)}
HARD_ID = re.compile(rb'"id": "\d\d-[hyd]')
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
faults = 0


def need(condition, fault):
    global faults
    if not condition:
        faults += 1
        print("fault:", fault)


def rows_of(name):
    rows = glossary.rows(HERE / f"{name}.jsonl")
    for row in rows:
        label = f"{name}: {row.get('id')}"
        need(list(row) == FIELDS + MORE.get(name, []) and all(isinstance(row[field], str) for field in FIELDS),
             f"{label}: its fields")
        need(60 <= len(row["output"]) <= 400 or "choice" in row, f"{label}: an answer of {len(row['output'])} characters")
        need(row["difficulty"] in ("easy", "medium", "hard"), f"{label}: difficulty {row['difficulty']}")
        need(re.fullmatch(r"\d\d-[a-z0-9]+(-[a-z0-9]+)*", row["fact_id"]), f"{label}: fact {row['fact_id']}")
    return rows


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
        known = {row["fact_id"] for row in rows}
        in_english = sum(glossary.is_english(row["instruction" if "choice" in row else "output"]) for row in rows)
        print(f"{name}: {len(rows)} rows, {in_english} in English, {len(known)} facts")


def check_card(names, sets):
    """The card's table: rows, facts, English ones, easy, medium and hard of each file."""
    card = (HERE / "README.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\|.*\| `(\w+)\.jsonl` \| ([\d, |]+) \| [^|]+ \|$", card, re.M))
    for name, rows in zip(names, sets):
        count = collections.Counter(row["difficulty"] for row in rows)
        english = sum(glossary.is_english(row["instruction" if "choice" in row else "output"]) for row in rows)
        true = (f"{len(rows):,} | {len({row['fact_id'] for row in rows}):,} | {english} | "
                f"{count['easy']}, {count['medium']}, {count['hard']}")
        need(told.get(name) == true, f"README.md: {name}: {told.get(name)}, and not {true}")


def words(text):
    """As datagen's ROUGE-L: a CJK character, or a lower-cased word of anything else."""
    return WORD.findall(text.lower())


def rouge_l(a, b):
    """F1 of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return 2 * row[-1] / (len(a) + len(b)) if a and b else 0


def alike(question, others):
    """The first of the other questions whose ROUGE-L reaches the limit. Common words bound it: counted first."""
    near, mine, bag = limits["filter.rouge"], words(question), collections.Counter(words(question))
    for text, other, counts in others:
        common = sum(min(count, counts[word]) for word, count in bag.items())
        if 2 * common >= near * (len(mine) + len(other)) and rouge_l(mine, other) >= near:
            return text
    return None


def counted(questions):
    return [(text, words(text), collections.Counter(words(text))) for text in questions]


def ngrams(row, n):
    """Of question and answer, as datagen's: case and blanks do not count."""
    text = "".join((row["instruction"] + row["output"]).lower().split())
    return [text[i:i + n] for i in range(len(text) - n + 1)]


def check_leaks(train, exam, paraphrases):
    n = int(limits["split.ngram"])
    there = {gram for row in train for gram in ngrams(row, n)}
    questions = counted([row["instruction"] for row in train] + [text for _, text in paraphrases])
    for row in exam:
        grams = ngrams(row, n)
        share = sum(gram in there for gram in grams) / len(grams)
        need(share <= limits["split.leak_share"], f"{row['id']}: {share:.2f} of its n-grams stand in training rows")
        other = alike(row["instruction"], questions)
        need(other is None, f"{row['id']}: its question is like {other!r}")


def check_pairs(train, exam, found):
    """tf-idf over question and answer. A near pair of other facts has been read."""
    near, read = facts.Near(train), pairs_read()
    for row in exam:
        for value, other in near.most(row["instruction"] + " " + row["output"], 3):
            pair = f"{row['id']} {other['id']}"
            if "--pairs" in sys.argv:
                print(f"{value:.2f} {pair}", row["instruction"], f"{other['instruction']} => {other['output'][:100]!r}",
                      sep="\n    ")
            if value >= NEAR:
                found.add(pair)
                need(pair in read, f"{pair}: near ({value:.2f}), and not in pairs_read.tsv")


def pairs_read():
    lines = (HERE / "pairs_read.tsv").read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t", 1) for line in lines if line[0] != "#")


def check_key_facts(names):
    """datagen's own rule, by letting the references answer."""
    for name in names:
        path = HERE / f"{name}.jsonl"
        said = subprocess.run([DATAGEN, "score", path, path, "--json", "--dict", ROOT / "data/datagen/jieba.bin"],
                              check=True, capture_output=True, text=True).stdout
        scores = json.loads(said)
        for metric in ("facts", "choice"):
            got = scores["answers"].get(metric)
            need(got is None or got["low"] == got["mean"] == 100 or metric == "choice" and got["mean"] == 100,
                 f"{name}: its own answers have {metric} {got}")
        if "facts" in scores["answers"]:
            print(f"{name}: {scores['answers']['facts']['rows']} rows with key facts, "
                  f"{scores['question']['facts']['mean']:.1f}% of which the questions tell")


def check_choices(name, rows, of):
    """A question with choices is about a row: its fact, evidence and difficulty are the row's."""
    letters, longest = collections.Counter(row["choice"] for row in rows), 0
    for row in rows:
        source = of.get(row["id"][:-1])
        need(source and all(row[field] == source[field] for field in FIELDS[4:]), f"{name}: {row['id']}: not its row's fact")
        lines, options = row["input"].splitlines(), row["choices"]
        need(len(set(options)) == len(options) == 4, f"{name}: {row['id']}: its choices")
        need(lines[:4] == [f"{letter}. {text}" for letter, text in zip("ABCD", options)] and len(lines) == 5,
             f"{name}: {row['id']}: its choices as they are asked")
        right = options["ABCD".index(row["choice"])]
        need(row["output"] == f"{row['choice']}. {right}", f"{name}: {row['id']}: its answer")
        longest += all(len(right) > len(text) for text in options if text != right)
    need(max(letters.values()) - min(letters.values()) <= 2, f"{name}: letters {letters}")
    print(f"{name}: {len(rows)} questions; always the longest choice would be right in {100 * longest / len(rows):.0f}%")


def check_facts(sides):
    """One fact, one side: (name, rows) to learn from and (name, rows) to be asked."""
    for (learnt, train), (asked, test) in sides:
        there = collections.defaultdict(list)
        for row in train:
            there[row["fact_id"]].append(row["id"])
        for row in test:
            need(row["fact_id"] not in there, f"{asked}: {row['id']}: the fact {row['fact_id']} is in {learnt}: "
                 f"{', '.join(there.get(row['fact_id'], []))}")


def check_evidence(rows, chunks):
    notes = facts.Notes()
    for row in rows:
        found = re.fullmatch(r"(\d\d-[a-z0-9-]+\.md):(\d+)-(\d+)", row["evidence"])
        inside = found and notes.between(found[1], int(found[2]), int(found[3]))
        if not inside or {p.section for p in inside} != {row["section"]} or found[1][:2] != row["id"][:2]:
            need(False, f"{row['id']}: evidence {row['evidence']} in {row['section']}")
            continue
        said = facts.features(row["instruction"] + " " + row["output"]) & notes.idf.keys()
        chunk = chunks.get(row["chunk"], "")
        share = notes.weight(said & facts.features(" ".join(p.text for p in inside))) / notes.weight(said)
        need(share >= SHARE or glossary.is_english(row["output"]) or re.search("-[hyd]", row["id"]),
             f"{row['id']}: {share:.2f} of it is in its evidence")  # (a hard row applies what stands there)
        need(any(facts.bare(p.text) in chunk for p in inside), f"{row['id']}: evidence out of its chunk")


def check_greetings(train, exam):
    """The default model's rows for everything else: the questions that they propose are of the course, or ask for a
    defined term in one of wordings.txt's wordings."""
    rows = glossary.rows(ROOT / "data/tiny/greetings.jsonl")
    learnt, asked = ({row["instruction"] for row in some} for some in (train, exam))
    defined = set()
    wordings = [line.split("\t") for line in (ROOT / "data/tiny/wordings.txt").read_text(encoding="utf-8").splitlines()]
    for term in glossary.rows(ROOT / "data/tiny/definitions.jsonl"):
        for language, wording in wordings:
            defined.update(wording.replace("{}", name).replace(" ", "") for name in term["names_" + language])
    turns = {str(row.get("history")) + row["instruction"] for row in rows}
    need(len(turns) == len({row["id"] for row in rows}) == len(rows), "greetings: a question or an id is there twice")
    need(not {row["instruction"] for row in rows} & (learnt | asked), "greetings: a question of the course")
    for row in rows:
        for text in [row["output"]] + [answer for _, answer in row.get("history", [])]:
            proposed = re.findall(r'“(.*?)”|"(.*?)"', text)
            need(all((a or b) in learnt or (a or b).replace(" ", "") in defined for a, b in proposed),
                 f"greetings: {row['id']}: what was not learnt: {text}")
    print(f"greetings: {len(rows)} rows, {sum(glossary.is_english(row['output']) for row in rows)} of them English")


def check_filter():
    """datagen's own rules; and the chunks, by id."""
    with tempfile.TemporaryDirectory() as folder:
        qa, chunks, clean = (pathlib.Path(folder, name) for name in ("qa.jsonl", "chunks.jsonl", "clean.jsonl"))
        both = (HERE / "gpu_qa.jsonl").read_bytes() + (HERE / "exam_qa.jsonl").read_bytes()
        qa.write_bytes(both)
        subprocess.run([DATAGEN, "chunk", *facts.plain_notes(folder), "-o", chunks], check=True)
        subprocess.run([DATAGEN, "filter", qa, "--chunks", chunks, "--terms", ROOT / "data/datagen/terms.txt",
                        "-o", clean], check=True)
        need(clean.read_bytes() == both, "datagen filter changes the rows")
        # The hard rows compute what stands in no chunk, code is long, and some are arithmetic without a term.
        both = b"".join((HERE / f"{name}.jsonl").read_bytes() for name in HARD + EXTRA)
        qa.write_bytes(both)
        subprocess.run([DATAGEN, "filter", qa, "--chunks", chunks, "--terms", ROOT / "data/datagen/terms.txt",
                        "--skip", "grounding,length,terms", "-o", clean], check=True)
        need(clean.read_bytes() == both, "datagen filter changes the hard rows")
        # English answers to Chinese notes have few words in common with them, and worked figures stand in no chunk.
        lines = [line for name in CHAPTERS + CHAPTERS_HARD
                for line in (HERE / f"{name}.jsonl").read_bytes().splitlines(True)]
        for skip, hard in (("grounding,terms", False), ("grounding,length,terms", True)):
            both = b"".join(line for line in lines if hard == bool(HARD_ID.search(line)))
            qa.write_bytes(both)
            subprocess.run([DATAGEN, "filter", qa, "--chunks", chunks, "--skip", skip, "-o", clean], check=True)
            need(clean.read_bytes() == both, "datagen filter changes the rows of chapters 16 to 23")
        made = glossary.rows(chunks)
        need(facts.chunk_rows(made) == (HERE / "notes.jsonl").read_text(encoding="utf-8"), "notes.jsonl: not these notes")
        return {chunk["id"]: facts.bare(chunk["text"]) for chunk in made}


def main():
    names = ("gpu_qa", "exam_qa", "rephrased_qa", "english_train", "english_test", "rephrased_more_qa", "train_hard",
             "exam_hard", "dev", "mc_exam", "mc_seen", *CHAPTERS, "mc_chapters", "mc_chapters_seen", *CHAPTERS_HARD,
             *MORE_CHOICES[:2], *EXTRA, *MORE_CHOICES[2:])
    sets = [rows_of(name) for name in names]
    (train, exam, rephrased, english, english_test, more, hard, exam_hard, dev, mc_exam, mc_seen, chapters,
     exam_chapters, mc_chapters, mc_chapters_seen, chapters_hard, chapters_dev, mc_chapters_hard, mc_more_seen,
     extra, extra_dev, mc_extra, mc_extra_dev) = sets
    for at in range(0, len(names), 3):
        table(names[at:at + 3], sets[at:at + 3])
    check_card(names, sets)
    need(len(train) >= 1000 and len(exam) >= 193 and len(rephrased) == 30 and len(more) == 300, "the numbers of rows")
    for name, rows in (("gpu_qa", train), ("exam_qa", exam)):
        for level, share in (("easy", 0.5), ("medium", 0.3), ("hard", 0.2)):
            got = sum(row["difficulty"] == level for row in rows) / len(rows)
            need(abs(got - share) < 0.02, f"{name}: {100 * got:.1f}% {level}")
    every = [row for rows in sets for row in rows]
    need(len({row["id"] for row in every}) == len(every), "an id is there twice")

    by_id = {row["id"]: row for row in train}
    for row in rephrased + more:
        of = by_id.get(row["id"][:-1])
        need(of and all(row[field] == of[field] for field in FIELDS if field not in ("instruction", "id")),
             f"{row['id']}: not its training row in other words")
    questions = {row["instruction"] for row in train + english}
    need(not questions & {row["instruction"] for row in rephrased + more + english_test}, "a test question is trained")
    need(len({row["fact_id"] for row in more}) == len(more), "rephrased_more_qa: a fact is asked twice")
    paraphrases = [tuple(row.values()) for row in glossary.rows(HERE / "paraphrases.jsonl")]
    need(all(len(row) == 2 and row[0] in by_id for row in paraphrases), "a paraphrase without its training row")
    asked = counted(row["instruction"] for row in rephrased + more)
    for id, text in paraphrases:
        need(alike(text, asked) is None, f"{id}: a paraphrase is like a rephrased question: {text}")
    trained = counted(row["instruction"] for row in train + hard)
    for row in more:
        other = alike(row["instruction"], trained)
        need(other is None, f"{row['id']}: like the trained question {other!r}")

    learnt, exams = train + english + hard + chapters + extra, exam + exam_hard + exam_chapters + chapters_hard
    all_dev = dev + chapters_dev + extra_dev
    check_facts([(("training rows", learnt), ("the exams", exams + mc_exam + mc_chapters + mc_chapters_hard)),
                 (("training rows", learnt), ("dev", all_dev)), (("the exams", exams), ("dev", all_dev)),
                 (("english_train", english), ("english_test", english_test))])
    check_leaks(learnt, exams + all_dev, paraphrases)
    found = set()
    # (The words of the later chapters are weighed apart: one set of rows does not move the other's pairs.)
    check_pairs(train + english + hard, exam + exam_hard + dev, found)
    check_pairs(exam + exam_hard, dev, found)
    check_pairs(chapters, exams + dev + chapters_dev, found)
    check_pairs(train + english + hard, exam_chapters + chapters_hard + chapters_dev, found)
    check_pairs(exam_chapters + chapters_hard, chapters_dev, found)
    check_pairs(extra, exams + all_dev, found)
    check_pairs(train + english + hard + chapters, extra_dev, found)
    check_pairs(exams, extra_dev, found)
    need(found >= set(pairs_read()), f"pairs_read.tsv has what is not near: {sorted(set(pairs_read()) - found)}")
    print(f"{len(found)} pairs of rows on two sides are near; the nearest rows of each exam row: --pairs")
    check_choices("mc_exam", mc_exam, {row["id"]: row for row in exam})
    check_choices("mc_seen", mc_seen, by_id)
    check_choices("mc_chapters", mc_chapters, {row["id"]: row for row in exam_chapters})
    check_choices("mc_chapters_seen", mc_chapters_seen, {row["id"]: row for row in chapters})
    check_choices("mc_chapters_hard", mc_chapters_hard, {row["id"]: row for row in chapters_hard})
    check_choices("mc_more_seen", mc_more_seen, {row["id"]: row for row in chapters + hard})
    check_choices("mc_extra_seen", mc_extra, {row["id"]: row for row in extra})
    check_choices("mc_extra_dev", mc_extra_dev, {row["id"]: row for row in extra_dev})
    check_key_facts(name for name in names if name in MORE)
    check_evidence([row for row in every if "choice" not in row], check_filter())
    check_greetings(train, exam)
    for fault in glossary.faults():
        need(False, "glossary: " + fault)
    print("clean" if not faults else f"{faults} faults")
    return faults > 0


if __name__ == "__main__":
    sys.exit(main())
