#!/usr/bin/env python3
"""One Chinese term for one thing: glossary.tsv applied to the notes and the rows, and checked.

    python3 data/course/glossary.py [--apply]

It holds in the notes, and in questions and answers of all rows. Left as they are: code but for its comments, `code`,
and English in brackets, (warp). The questions in other words (paraphrases.jsonl, rephrased*.jsonl) keep what a user may
call a thing. Every section of the notes says the English of the most frequent terms behind them, in brackets: behind
the whole word, and once. Punctuation between Chinese characters has full width, in comments of code, too.
"""
import json, pathlib, re, sys

HERE = pathlib.Path(__file__).resolve().parent
CJK = re.compile("[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef“”‘’]")
LATIN = re.compile("[A-Za-z]")
HAN = re.compile(r"[\u4e00-\u9fff]")
SPLITS = ("gpu_qa", "train_hard", "english_train", "dev", "exam_qa", "exam_hard", "mc_exam", "mc_seen", "rephrased_qa",
          "rephrased_more_qa", "english_test", "chapters_train", "chapters_exam", "mc_chapters", "mc_chapters_seen",
          "chapters_hard", "chapters_dev", "mc_chapters_hard", "mc_more_seen", "extra_train", "extra_dev", "mc_extra_seen",
          "mc_extra_dev")
ENGLISH = {"BF16", "FP16", "FP32", "FP64"}  # these hold in English sentences, too
GLOSSED = {"核函数", "线程束", "屏障", "存储体", "脊点", "归约", "词元"}  # in every section
# words that hold one of these: their English stands behind the whole word
WHOLE = ("线程束组", "线程束调度器", "存储体冲突", "归约维", "归约散布", "全归约", "分段归约", "持久核函数", "簇屏障")
# what is never looked at: fences (their comments are, below), `code`, and brackets without a Chinese character
KEPT = re.compile(r"(```.*?^```|`[^`\n]*`|\([^()\u4e00-\u9fff]*\)|（[^（）\u4e00-\u9fff]*）)", re.S | re.M)
# punctuation of half width that a Chinese character touches; a blank behind it is a tuple's: (行, 列)
HALF = re.compile(r"(?<=[\u4e00-\u9fff”」）])[,;:?!](?! )|[,;:?!](?=[\u4e00-\u9fff“「（])"
                  r"|(?<=[\u4e00-\u9fff])\(|\)(?=[\u4e00-\u9fff])|(?<=[\u4e00-\u9fff])\.(?!\w)")
COMMENT = re.compile(r"(?://|# )[^\n]*[\u4e00-\u9fff][^\n]*")


def read():
    lines = (HERE / "glossary.tsv").read_text(encoding="utf-8").splitlines()
    return [(term, english, [word(v) for v in variants.split(" | ")])
            for term, english, variants in (line.split("\t") for line in lines if line[0] != "#")]


def word(variant):
    """A pattern; a Latin word stands alone."""
    if LATIN.match(variant):
        alone = "" if variant[-1].isdigit() else "(?! ?[A-Za-z])"  # but "warp scheduler" is English, and stays
        return re.compile(rf"( ?)(?<![\w-]){variant}(?![\w-]){alone}( ?)")
    return re.compile(f"(){variant}()")


def replaced(text, term, pattern):
    """Chinese characters touch each other; a blank stands between one and a Latin letter."""
    def one(found):
        before, after = text[:found.start()][-1:], text[found.end():][:1]
        left, right = found.group(1), found.groups()[-1]
        if LATIN.match(term):
            return (" " if HAN.match(before) else left) + term + (" " if HAN.match(after) else right)
        return ("" if CJK.match(before or "，") else left) + term + ("" if CJK.match(after or "，") else right)
    return pattern.sub(one, text)


def mended(text, terms, chinese=True):
    def plain(part, everything):
        for term, _, patterns in terms:
            for pattern in patterns if everything or term in ENGLISH else []:
                part = replaced(part, term, pattern)
        return part

    def kept(part):
        if part.startswith("```"):
            return COMMENT.sub(lambda found: plain(found.group(), chinese), part)
        return part if part.startswith("`") else plain(part, False)

    parts = KEPT.split(text)  # every second one is kept; a mark stands for it, so that neighbours are seen across it
    whole = plain("\x00".join(parts[::2]), chinese)
    whole = re.sub("\x00", lambda found, pieces=iter(parts[1::2]): kept(next(pieces)), whole)
    return re.sub(r"([A-Za-z-]+)（\1）", r"\1", re.sub(r"([A-Za-z-]+)（\1）(?=[\u4e00-\u9fff])", r"\1 ", whole))


def is_english(text):
    prose = re.sub("```.*?```", "", text, flags=re.S)
    return len(HAN.findall(prose)) < 0.05 * len(prose)


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def written(some):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in some)


def alone(text):
    """The text without the words of WHOLE; all else keeps its place."""
    return re.sub("|".join(WHOLE), lambda found: "\x00" * len(found.group()), text)


def around(text, found):
    return " ".join(text[max(found.start() - 6, 0):found.end() + 6].split())


def bad_glosses(text, terms):
    """English in brackets that splits a word, 线程束（warp）组; that is of a part, 全归约（reduction）; that a bracket follows."""
    text = KEPT.sub(lambda found: "\x00" if found.group()[0] == "`" else found.group(), text)
    patterns = [r"(?<=[\u4e00-\u9fff])[（(][A-Za-z][A-Za-z ,-]+[）)][（(]"]
    for name in WHOLE:
        for term, english, _ in terms:
            if term in GLOSSED and term in name:
                before, after = name.split(term)
                patterns.append(f"{before}{term} ?[（(]{english}s?[）)]{after}")
    return [around(text, found) for p in patterns for found in re.finditer(p, text)]


def half_width(text):
    def comments(found):
        return "\x00".join(COMMENT.findall(found.group())) if found.group().startswith("```") else "\x00"

    text = re.sub(r"```.*?^```|`[^`\n]*`", comments, text, flags=re.S | re.M)
    return [around(text, found) for found in HALF.finditer(text)]


def glossed(text, terms):
    """In every section the English of a term stands behind it once, at least; else it is put behind the first."""
    sections = re.split(r"(?=^## )", text, flags=re.M)
    for n, section in enumerate(sections):
        for term, english, _ in terms:
            if term not in GLOSSED or term not in alone(section):
                continue
            if re.search(rf"{term}[^()（）\n]{{0,6}}[（(]{english}", section):
                continue
            parts = re.split(r"(^```.*?^```$|^#[^\n]*$)", section, flags=re.S | re.M)  # fences and headings
            at = next((i for i in range(0, len(parts), 2) if term in alone(parts[i])), None)
            if at is not None:
                end = alone(parts[at]).index(term) + len(term)
                parts[at] = parts[at][:end] + f"（{english}）" + parts[at][end:]
                section = "".join(parts)
        sections[n] = section
    return "".join(sections)


def faults(apply=False):
    terms, found = read(), []
    for path in sorted((HERE / "notes").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        better = glossed(mended(text, terms), terms)
        if better != text:
            found.append(path.name)
            if apply:
                path.write_text(better, encoding="utf-8")
        found += [f"{path.name}: a gloss: {part}" for part in bad_glosses(text, terms)]
        found += [f"{path.name}: half-width punctuation: {part}" for part in half_width(text)]
    for name in SPLITS:
        path = HERE / f"{name}.jsonl"
        some, changed = rows(path), []
        for row in some:
            for field in ("instruction", "output", "chapter"):
                if name.startswith("rephrased") and field == "instruction":
                    continue
                better = mended(row[field], terms, not is_english(row[field]))
                if better != row[field]:
                    row[field] = better
                    changed.append(f"{name}: {row['id']}: {field}")
            for text in (row["instruction"], row["input"], row["output"]):
                found += [f"{name}: {row['id']}: a gloss: {part}" for part in bad_glosses(text, terms)]
                found += [f"{name}: {row['id']}: half-width punctuation: {part}" for part in half_width(text)]
        found += changed
        if apply and changed:
            path.write_text(written(some), encoding="utf-8")
    return found


if __name__ == "__main__":
    told = faults("--apply" in sys.argv)
    print(*told, f"{len(told)} {'mended' if '--apply' in sys.argv else 'faults'}", sep="\n")
    sys.exit(bool(told) and "--apply" not in sys.argv)
