#!/usr/bin/env python3
"""Where the notes hold what a row says, and which training rows are near an exam row. Python's standard library.

    python3 data/course/facts.py OLD_NOTES      after the notes changed: moves the rows' evidence, chunks, chapters, and
                                                makes notes.jsonl, the notes in the chunks of `datagen chunk`

A row's `evidence` is FILE:FIRST-LAST, lines of a note: whole paragraphs of the section that `section` names. A
paragraph is what stands between blank lines outside fences; a fence of code is one. A line that names steps of the
laboratories ("> 实验：") stands in the place of a blank line and counts as one. OLD_NOTES is a folder with the
notes as they were when the rows were right (a git worktree has it); lines that only moved are found again, and a row
whose lines changed is named, to be read.
"""
import collections, difflib, glossary, json, math, os, pathlib, re, subprocess, sys, tempfile

HERE = pathlib.Path(__file__).resolve().parent
WORD = re.compile(r"[a-z_][a-z0-9_]+|\d[\d,.]*\d|\d")
HAN = re.compile(r"[\u4e00-\u9fff]+")
Paragraph = collections.namedtuple("Paragraph", "note section first last text")


def features(text):
    """Pairs of Chinese characters, words, numbers."""
    found = set(WORD.findall(text.lower().replace(",", "")))
    for run in HAN.findall(text):
        found.update(run[i:i + 2] for i in range(len(run) - 1))
    return found


def plain_notes(folder):
    """Copies of the notes without the lines that name laboratories; the other lines keep their numbers."""
    for path in sorted((HERE / "notes").glob("*.md")):
        text = re.sub(r"^> 实验：.*\n\Z", "", path.read_text(encoding="utf-8"), flags=re.M)
        copy = pathlib.Path(folder, path.name)
        copy.write_text(re.sub(r"^> 实验：.*", "", text, flags=re.M), encoding="utf-8")
        yield copy


def paragraphs():
    with tempfile.TemporaryDirectory() as folder:
        return [p for path in plain_notes(folder) for p in paragraphs_of(path)]


def paragraphs_of(path):
    found, section, first, kept, fence = [], "", 1, [], False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() + [""], 1):
        if line.startswith("#") and not fence:
            section = line.lstrip("# ")
        elif line.strip() or fence:
            first = first if kept else number
            kept.append(line)
            fence ^= line.startswith("```")
        if kept and not fence and (not line.strip() or line == "```"):
            found.append(Paragraph(path.name, section, first, first + len(kept) - 1, "\n".join(kept)))
            kept = []
    return found


def bare(text):
    return "".join(text.split())


def idf(documents):
    counts = collections.Counter(feature for document in documents for feature in document)
    return {feature: math.log(len(documents) / count) for feature, count in counts.items()}


class Notes:
    def __init__(self):
        self.all = paragraphs()
        self.features = [features(p.text) for p in self.all]
        self.idf = idf(self.features)

    def weight(self, some):
        return sum(self.idf.get(feature, 0) for feature in some)

    def between(self, note, first, last):
        """The paragraphs that lie within these lines, if they begin and end with whole ones."""
        found = [p for p in self.all if p.note == note and first <= p.first and p.last <= last]
        return found if found and found[0].first == first and found[-1].last == last else []


class Near:
    """Cosine of tf-idf (every feature counts once) between rows; the vectors of `rows` are searched."""
    def __init__(self, rows):
        self.rows = rows
        said = [features(row["instruction"] + " " + row["output"]) for row in rows]
        self.idf = idf(said)
        self.inverted = collections.defaultdict(list)
        for i, some in enumerate(said):
            norm = math.sqrt(sum(self.idf[f] ** 2 for f in some))
            for f in some:
                self.inverted[f].append((i, self.idf[f] / norm))

    def most(self, text, count):
        some = [f for f in features(text) if f in self.idf]
        norm = math.sqrt(sum(self.idf[f] ** 2 for f in some)) or 1
        score = collections.Counter()
        for f in some:
            for i, value in self.inverted[f]:
                score[i] += self.idf[f] / norm * value
        return [(value, self.rows[i]) for i, value in score.most_common(count)]


def chunk_rows(chunks):
    """notes.jsonl, of the chunks of `datagen chunk`."""
    return glossary.written({name: chunk[name] for name in ("id", "source", "chapter", "text")} for chunk in chunks)


def move(old_notes):
    """Rewrites evidence, chunk and chapter of all rows; prints the ids whose evidence was changed, not only moved."""
    notes, lines, where = Notes(), {}, {}
    for path in sorted((HERE / "notes").glob("*.md")):
        new, old = (re.sub(r"^> 实验：.*", "", p.read_text(encoding="utf-8"), flags=re.M).splitlines()
                    for p in (path, pathlib.Path(old_notes) / path.name))
        lines[path.name] = {}
        for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            for i in range(a, b):  # an edited line keeps its place in the block
                lines[path.name][i + 1] = (c + min(i - a, max(d - c - 1, 0)) + 1, tag == "equal")
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "chunks.jsonl")
        datagen = os.environ.get("DATAGEN", HERE.parents[1] / "datagen")
        subprocess.run([datagen, "chunk", *plain_notes(folder), "-o", out], check=True)
        chunks = glossary.rows(out)
        (HERE / "notes.jsonl").write_text(chunk_rows(chunks), encoding="utf-8")
    texts = [bare(chunk["text"]) for chunk in chunks]
    for i, p in enumerate(notes.all):
        where[i] = [n for n, text in enumerate(texts) if chunks[n]["source"] == p.note and bare(p.text) in text]
    for name in glossary.SPLITS:
        path = HERE / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for row in rows:
            note, span = row["evidence"].split(":")
            begin, end = map(int, span.split("-"))
            old = [lines[note][i] for i in range(begin, end + 1)]
            inside = [i for i, p in enumerate(notes.all)
                      if p.note == note and p.first <= old[-1][0] and old[0][0] <= p.last]
            if not inside or not all(same for _, same in old):
                print(f"read {row['id']}: its evidence was edited")
            if inside:
                first, last = notes.all[inside[0]], notes.all[inside[-1]]
                row["section"], row["evidence"] = first.section, f"{note}:{first.first}-{last.last}"
                count = collections.Counter(n for i in inside for n in where[i])
                best = max(count, key=lambda n: (count[n], -n))
                row["chunk"], row["chapter"] = chunks[best]["id"], chunks[best]["chapter"]
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    move(sys.argv[1])
