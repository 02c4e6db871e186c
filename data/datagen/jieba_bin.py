#!/usr/bin/env python3
"""Makes data/datagen/jieba.bin: jieba's dictionary and its hidden Markov model, packed for score.h.

    python3 data/datagen/jieba_bin.py JIEBA_FOLDER data/datagen/jieba.bin

JIEBA_FOLDER is the installed package: /usr/lib/python3/dist-packages/jieba of Debian's python3-jieba, or
site-packages/jieba after `pip install jieba==0.42.1` (the same files, byte for byte). Needs the standard
library only and runs none of the package's code: dict.txt is text, the tables are literals. Takes 5 seconds.

The format is described in score.h. Left out is what segmentation cannot see: the parts of speech, and words
and characters that cannot stand in a block (the dictionary has one such word, the tables one character).
"""
import ast
import struct
import sys
from pathlib import Path

FIRST, LAST = 0x4E00, 0x9FD5            # the Chinese characters that jieba knows
STATES = "BEMS"                         # in this order the larger index wins a tie, as the larger letter does
NEVER = -3.14e100                       # jieba's logarithm of 0
LAST_SIBLING, INNER, NONE = 1 << 15, 1 << 31, 0xFFFF


def label(c):
    """The number of a character inside the file; None if it never stands in a block."""
    if FIRST <= ord(c) <= LAST:
        return ord(c) - FIRST + 128
    return ord(c) if c.isascii() and (c.isalnum() or c in "+#&._%-") else None


def read_words(path):
    """word -> frequency (of equal words the last one counts), and the sum of the frequencies of all lines."""
    words, total = {}, 0
    for line in path.read_text(encoding="utf-8").splitlines():
        word, frequency = line.strip().split(" ")[:2]
        words[word] = int(frequency)
        total += int(frequency)
    return words, total


def read_table(path):
    return ast.literal_eval(path.read_text(encoding="utf-8").split("P=", 1)[1])


def trie_nodes(words, number):
    """The trie's nodes level by level, siblings side by side: the children of the first node that has any
    come first, then those of the second, and so on. The root is no node."""
    root = {}                           # label -> [frequency, children]
    for word, frequency in words.items():
        children = root
        for c in word:
            node = children.setdefault(label(c), [0, {}])
            children = node[1]
        node[0] = frequency
    nodes, level, depth = [], [root], 0
    while level:
        below = []
        for siblings in level:
            for i, (l, (frequency, children)) in enumerate(sorted(siblings.items())):
                node = l | number[frequency] << 16
                node |= LAST_SIBLING if i + 1 == len(siblings) else 0
                if children:
                    node |= INNER
                    below.append(children)
                nodes.append(node)
        level, depth = below, depth + 1
    return nodes, depth


def main(folder, out):
    folder = Path(folder)
    words, total = read_words(folder / "dict.txt")
    words = {w: f for w, f in words.items() if f and None not in map(label, w)}
    frequencies = sorted({0, *words.values()})          # number 0: no word ends here
    nodes, depth = trie_nodes(words, {f: i for i, f in enumerate(frequencies)})
    assert len(frequencies) < 1 << 15 and total < 1 << 63

    tables = [folder / "finalseg" / f"prob_{name}.py" for name in ("start", "trans", "emit")]
    start, trans, emit = map(read_table, tables)
    probabilities = sorted({p for table in emit.values() for p in table.values()})
    number = {p: i for i, p in enumerate(probabilities)}
    emitted = sorted({c for table in emit.values() for c in table if FIRST <= ord(c) <= LAST})
    assert len(probabilities) < NONE

    header = struct.pack("<8s6IQ", b"qwen3jba", 1, len(nodes), depth, len(frequencies), len(emitted),
                         len(probabilities), total)
    hmm = [start[a] for a in STATES] + [trans[a].get(b, NEVER) for a in STATES for b in STATES]
    data = header + struct.pack(f"<{20 + len(probabilities)}d", *hmm, *probabilities)
    data += struct.pack(f"<{len(frequencies) + len(nodes)}I", *frequencies, *nodes)
    for c in emitted:
        data += struct.pack("<5H", label(c), *(number[emit[s][c]] if c in emit[s] else NONE for s in STATES))
    Path(out).write_bytes(data)
    print(f"{out}: {len(words)} words, {len(nodes)} nodes, {len(emitted)} characters, {len(data)} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
