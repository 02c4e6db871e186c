"""Makes data/datagen/unicode.txt: what Unicode means to the `tokenizers` package, asked of the package itself.

    python data/datagen/unicode.py > data/datagen/unicode.txt          (needs `tokenizers`; takes 15 seconds)

Its regex engine and its normaliser carry their own tables, of two Unicode versions; Python's unicodedata
is a third one. So nothing here is looked up: every code point is put through the public API.

  classes      Split(Regex) cuts the string of all code points into runs of \\p{L}, \\p{N} and \\s.
  decompose    NFD of every single code point (Hangul follows a formula and is left out).
  order        Two marks x, y with combining classes cx > cy > 0 come out of NFD as y, x, all others stay.
               So x is a mark if it moves beside U+0334 or U+0345 (whose classes differ): one of the two
               always shows it. Testing all pairs of marks then sorts them; only the order of the classes
               matters to NFC, and they are numbered 1, 2, 3, ... here.
  compose      NFC of every pair of a possible first and a possible second code point.
"""
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
LOW, HIGH = "\u0334", "\u0345"  # overlay, class 1; iota below, class 240
nfc, nfd = normalizers.NFC().normalize_str, normalizers.NFD().normalize_str


def members(regex):
    cut = pre_tokenizers.Split(Regex(f"[^{regex}]+"), "removed")
    return [ord(c) for run, _ in cut.pre_tokenize_str("".join(map(chr, CODE_POINTS))) for c in run]


def ranges(code_points):
    out = []
    for c in sorted(code_points):
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return [f"{a:X}" if a == b else f"{a:X}-{b:X}" for a, b in out]


def is_hangul(c):
    return 0xAC00 <= c < 0xAC00 + 11172


def mark_order():
    marks = [c for c in map(chr, CODE_POINTS)
             if nfd(c) == c and (nfd(c + LOW) != c + LOW or nfd(HIGH + c) != HIGH + c)]
    assert LOW in marks and HIGH in marks
    passed = {x: sum(nfd(x + y) == y + x for y in marks) for x in marks}  # marks of a lower class
    number = {n: i + 1 for i, n in enumerate(sorted(set(passed.values())))}
    order = {x: number[passed[x]] for x in marks}
    for x in marks:
        for y in marks:  # the numbers say what the package does
            assert nfd(x + y) == (y + x if order[x] > order[y] else x + y), (x, y)
    return order


def compositions(decomposed):
    firsts = {d[0] for d in decomposed.values()} | set(decomposed)
    seconds = {c for d in decomposed.values() for c in d[1:]}
    firsts = sorted(a for a in firsts if nfc(a) == a)
    seconds = sorted(b for b in seconds if nfc(b) == b)
    pairs = {}
    for a in firsts:
        for b in seconds:
            c = nfc(a + b)
            if len(c) == 1 and nfd(a + b) == nfd(a) + b:  # not: b slipped under a mark of a
                assert c not in pairs
                pairs[c] = (a, b)
    for c in decomposed:  # every composite that NFC leaves alone was found
        assert (nfc(c) == c) == (c in pairs), hex(ord(c))
    return pairs


def section(name, entries):
    print(f"\n[{name}] {len(entries)}")
    line = ""
    for e in entries:
        if len(line) + len(e) > 108:
            print(line.rstrip())
            line = ""
        line += e + " "
    print(line.rstrip())


def text(s):
    return "+".join(f"{ord(c):X}" for c in s)


decomposed = {chr(c): nfd(chr(c)) for c in CODE_POINTS if not is_hangul(c) and nfd(chr(c)) != chr(c)}
order = mark_order()
pairs = compositions(decomposed)

print(f"""# Unicode as the Python package `tokenizers` {tokenizers.__version__} has it. Made by data/datagen/unicode.py.
# All code points are hexadecimal. L, N, S: ranges of \\p{{L}}, \\p{{N}}, \\s in its regex engine. orderN:
# combining marks of the N-th lowest canonical combining class. decompose: X=A+B+...: full canonical
# decomposition. compose: X=A+B: primary composites. Hangul syllables (AC00-D7A3) follow Unicode's formula and
# are in neither of the two.""")
section("L", ranges(members(r"\p{L}")))
section("N", ranges(members(r"\p{N}")))
section("S", ranges(members(r"\s")))
for n in sorted(set(order.values())):
    section(f"order{n}", ranges(ord(c) for c in order if order[c] == n))
section("decompose", [f"{ord(c):X}={text(d)}" for c, d in sorted(decomposed.items())])
section("compose", [f"{ord(c):X}={text(ab)}" for c, ab in sorted(pairs.items())])
