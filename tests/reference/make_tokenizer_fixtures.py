"""Makes the tokenizer's fixtures in tests/fixtures: tiny/ and odd/ (small tokenizers of its own) and
tokenizer_vectors.json (what `tokenizers` says about them and about Qwen3's). Run from the repository's root:

    python tests/reference/make_tokenizer_fixtures.py HF_DIR   (a folder with Qwen3's tokenizer.json; two minutes)
"""
import json
import os
import struct
import subprocess
import sys

from tokenizers import Tokenizer, models, normalizers, trainers

QWEN = os.path.join(sys.argv[1], "tokenizer.json")
TINY = "tests/fixtures/tiny"
ODD = "tests/fixtures/odd"
OUT = "tests/fixtures/tokenizer_vectors.json"

# ------------------------------------------------------------------------------------------- tiny tokenizer

TEXT = """
A GPU is a machine for doing the same thing to a great many numbers at once. Where a processor of the usual
kind has a few cores that are clever, a GPU has thousands of lanes that are not: a warp of thirty-two threads
reads one instruction and runs it together, and when two threads of a warp want to go different ways, the warp
goes both ways, one after the other. A block of threads shares a small and fast memory, and a grid of blocks
covers the whole problem. The threads of a block can wait for each other; the blocks of a grid should not.

What is the difference between latency and bandwidth? Latency is the time that one request takes; bandwidth is
how many bytes arrive in one second. A GPU hides its latency by having other warps to run while one warp waits
for memory. So the first question about a kernel is not how many operations it does, but how many bytes it has
to move: if every number that is read is used only once, the memory is the limit, and no clever arithmetic will
make the kernel faster. A matrix product of large matrices is the other case. Each number is used many times,
and the tensor cores are the limit. The roofline model says this in one picture.

Threads that follow each other should read words that follow each other: then one transaction serves the whole
warp, and we say that the access is coalesced. Shared memory has thirty-two banks, and two lanes that want two
different words of the same bank have to wait for one another. Registers are the fastest memory of all, but a
thread that takes too many of them leaves room for fewer threads. That is called occupancy, and more of it is
not always better. An atomic operation lets many threads add to one number, in an order that nobody knows.

The cache line is 128 bytes long; a page of the key and value cache holds 16 tokens; 2, 4, 8, 16, 32, 64 and 256
are good sizes. In 2023, 2024 and 2025 the models grew, and it's easy to forget that they're still only made of
products, sums and a few exponentials. We don't need more. I'll show you what I've seen, and you'd say the same.

GPU 是一种同时对大量数据做相同计算的处理器。普通的处理器只有几个聪明的核心，而 GPU 有成千上万个简单的线程。三十二个线程组成一个线程束，
它们读取同一条指令，一起执行。如果同一个线程束里的线程要走不同的分支，那么线程束就要把两条路都走一遍。线程块里的线程共享一块又小又快的内存，
叫做共享内存；许多线程块组成一个网格，覆盖整个问题。

什么是延迟，什么是带宽？延迟是一次请求需要的时间，带宽是每秒钟可以读取多少字节。当一个线程束等待内存的时候，GPU 运行别的线程束，
这样就把延迟隐藏起来了。所以，看一个核函数，首先要问的不是它做多少次计算，而是它要读写多少数据。如果每个数只用一次，那么内存就是瓶颈；
如果每个数用很多次，例如大矩阵的乘法，那么计算就是瓶颈。

相邻的线程应该读取相邻的数据，这叫做合并访问。共享内存有三十二个存储体，如果两个线程同时访问同一个存储体里的不同数据，就要排队等待。
寄存器是最快的内存，但是一个线程用的寄存器太多，能同时运行的线程就会变少。问题：什么是张量核心？回答：张量核心是专门做矩阵乘法的计算单元。

__global__ void add(float* out, const float* a, const float* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}

for (int k = 0; k < K; k++) {
    sum += a[i * K + k] * b[k * N + j];   // a row of a, a column of b
}
"""


def learn(text, size):
    """A tokenizer.json with Qwen's pipeline and added tokens, and a vocabulary of `size` tokens."""
    qwen, pipeline = json.load(open(QWEN, encoding="utf-8")), Tokenizer.from_file(QWEN)
    learner = Tokenizer(models.BPE())
    learner.normalizer, learner.pre_tokenizer = normalizers.NFC(), pipeline.pre_tokenizer
    alphabet = [name for name, i in qwen["model"]["vocab"].items() if i < 256]
    learner.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=size, show_progress=False, initial_alphabet=sorted(alphabet)))
    learnt = json.loads(learner.to_str())["model"]
    assert len(learnt["vocab"]) == size
    return dict(qwen, model=dict(qwen["model"], vocab=learnt["vocab"], merges=learnt["merges"]))


def write_tokenizer(folder, tokenizer):
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/tokenizer.json", "w", encoding="utf-8") as f:
        json.dump(tokenizer, f, ensure_ascii=False, indent=0)
        f.write("\n")
    command = [sys.executable, "-I", "-S", "export.py", "--tokenizer", folder, f"{folder}/tokenizer.bin"]
    subprocess.run(command, check=True)


def make_tiny():
    """Qwen's special tokens after 974 tokens learnt from TEXT: 1,000 in all."""
    added = json.load(open(QWEN, encoding="utf-8"))["added_tokens"]
    tiny = learn(TEXT, 1000 - len(added))
    tiny["added_tokens"] = [dict(token, id=1000 - len(added) + i) for i, token in enumerate(added)]
    write_tokenizer(TINY, tiny)


def make_odd():
    """What no training makes, but the format allows: merges in an order that uses tokens before it makes them,
    so that some tokens are not reached even from their own text; added tokens that begin with each other, the
    shorter first; one that is in the vocabulary too; merges written as one string; U+017F before a letter."""
    odd = learn(TEXT + "\u017fst\n" * 20, 700)
    random, merges = splitmix64(5), odd["model"]["merges"]
    for i in range(len(merges) - 1, 0, -1):
        k = (next(random) >> 32) % (i + 1)
        merges[i], merges[k] = merges[k], merges[i]
    odd["model"]["merges"] = [" ".join(pair) for pair in merges]
    vocab = odd["model"]["vocab"]
    names = ["<x", "<x>", "<x>y", "x>y", "<think>", "<|im_end|>", "線程", "é—"]
    like = odd["added_tokens"][0]
    odd["added_tokens"] = [dict(like, content=name, id=700 + i, special=i % 2 == 0)
                           for i, name in enumerate(names)]
    odd["added_tokens"].append(dict(like, content="st", id=vocab["st"], special=False))
    write_tokenizer(ODD, odd)


# ------------------------------------------------------------------------------------------------- vectors

TEXTS = [
    "", " ", "a", "The quick brown fox jumps over the lazy dog.",
    "Hello, world! It's 2024-05-17, 12:30:59.999.",
    "你好，世界！今天天气怎么样？我们去公园散步吧。", "GPU 是什么？它和 CPU 有什么区别？（简答）", "繁體中文與简体中文，全角ＡＢＣ１２３。",
    "日本語のテキスト、ひらがなとカタカナ。か\u3099き\u309a",
    "한국어 문장입니다. \u1112\u1161\u11ab\u1100\u1173\u11af \uac00\u11a8 \uac00\u11a7 \u1100\u1161\u11c3",
    "مرحبا بالعالم، كيف حالك؟ بِسْمِ ٱللَّٰهِ", "สวัสดีชาวโลก กำลังทำอะไรอยู่",
    "नमस्ते दुनिया, क्या हाल है? क\u093c \u0958 १२३", "Привет, мир! Ёлка е\u0308",
    "Γειά σου Κόσμε ά α\u0301 ᾂ α\u0345\u0300\u0313", "שָׁלוֹם עוֹלָם \ufb2a",
    "Tiếng Việt: e\u0302\u0301 e\u0323\u0302 ê\u0323 \u1ec7",
    "😀😃 👨‍👩‍👧‍👦 🏳️‍🌈 🇨🇳🇩🇪🇫 👍🏽 1️⃣ ☃️",
    "a\u0301 e\u0301\u0323 o\u0328\u0304 A\u030a \u212b \u2126 \u1e9b\u0323 \u0344 \u0f73\u0f71",
    "\u0301 \u0323\u0301 x\u0345\u0301\u0323\u0334 \u0301\u0301", "ﬀ ﬁ Ǆ ½ ² Ⅷ ① ㎏ \ufdfa",
    "\u2000\u2001\u0340\u0341\u0374\u037e\u0387",
    "def f(x: int) -> int:\n    return x ** 2 + 1  # square\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * c[i]; }\r\n\r\n// done\r\n",
    "<html><body class=\"x\">&amp;</body></html>",
    "SELECT * FROM t WHERE a='b' AND c<>'d';", "$\\frac{1}{2}\\sum_{i=0}^{n} x_i^2$",
    "http://example.com/a?b=c&d=%20e#f",
    "  two", "   three", "tab\ttab", "\t\tx", " \t \n x", "\n\n\n", "a\n", "a \n", "a  \n  b", "\r", "\r\n",
    "a\r\nb", " \r\n ", "\n \n ", "x\n\n  \n\ty",
    "\u3000\u3000全角", "\u3000\u3000!", "a\u00a0b", "\u00a0\u00a0b", "a\u2028b\u2029c", "a\u0085b",
    "\x0b\x0c\x1c\x1f", "\u200b\u200b a", "\ufeffBOM",
    "   ", "     !", "     1", "     a", "!  ", "!\n\n", "! \n", "...\r\n\r\n...", " !\n !", "-\n-",
    "user\n\nx",
    "I'm you're he's she'd we'll they've don't", "I'M YOU'RE HE'S SHE'D WE'LL THEY'VE DON'T",
    "'s't're've'm'll'd", "''s", "'\u017f x'\u017fy", "'\u017ft",
    "'S'T'rE'Ve'lL'L'r'v", " 's", "\n's", "1's", "'sam 'tis 'really", "rock'n'roll", "\u2019s it\u2019s",
    "'\u212a", "o'clock", "'l", "'", "a'", "'re",
    "1234567890", "3.14159", "0x1F", "1,000,000", "٣٤٥", "一二三", "Ⅻ", "x1y2", "1a", "a1", "1 2", "१२",
    "\U0001d7d8\U0001d7d9",
    "\x00", "\x00\x01\x02", "\x7f", "\ufffd", "\ufffd\ufffd", "\uffff", "\U0010ffff", "\U000e0001\U000e0061",
    "\ue000", "\U0001f1e6", "\U00020000\U0002a6d6",
    "\ufa0e\ufa10\uf900", "\U0002f800", "\U0001109a \U00011099\U000110ba", "\U0001d15e",
    "\u0cca\u0cc6\u0cc2\u0cd5", "\u0dd9\u0dcf\u0dca",
    "a" * 300, "ab" * 200, " " * 300, "\n" * 300, "!" * 300, "=" * 64 + "\n" + "-" * 63, "中" * 100, "é" * 100,
    "e\u0301" * 100, "\u0301" * 100, "😀" * 60,
    "<x><x>y<x>yx>y<x <xx> éé— 線程 stand last", "'\u017fst x'\u017fst", "Lorem" + " ipsum dolor sit amet" * 20,
    "supercalifragilisticexpialidocious antidisestablishmentarianism " * 3,
    "我喜欢吃苹果和香蕉也喜欢在周末的时候去图书馆看书学习新的知识" * 4, "The GPU(图形处理器) has 80GB显存，速度为3.35TB/s。",
]


def texts_of(tokenizer):
    """The texts above, and each added token alone, in text, doubled, cut and mixed."""
    out = list(TEXTS)
    names = [t.content for _, t in sorted(tokenizer.get_added_tokens_decoder().items())]
    for name in names:
        out += [name, f"a {name} b", name + name, f" {name}\n{name}", name[:-1], name[1:], name[:-1] + name,
                f"<{name}>",
                f"e{name}\u0301", f"'{name}s", name.upper()]
    out.append("".join(names))
    out.append("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    return out


# Random texts. The C++ test makes the same ones: splitmix64 from the text's number; 1 to 24 items; each is a
# snippet (one time in four) or 1 to 3 characters of a range.
SNIPPETS = ["'s", "'S", "'\u017f", "'re", "'VE", "'ll", "'d", "'", " ", " ", "  ", "\n", "\r\n", "\t",
            "\u3000", "\u00a0", "\u0301", "\u0323", "\u0345",
            "\u200d", "\ufe0f", " the", "ing", " of", "你好", "，", "12", "!", "<|im_end|>", "<think>",
            "</think>", "<|im_start|>", "<|im_start|", "|>", "<tool_call>"]
RANGES = [(0x20, 0x7E), (0x61, 0x7A), (0x61, 0x7A), (0x00, 0x1F), (0xA0, 0x24F), (0x300, 0x36F),
          (0x370, 0x52F), (0x590, 0x77F), (0x900, 0xDFF),
          (0xE00, 0xFFF), (0x1100, 0x11FF), (0x1AB0, 0x1DFF), (0x1E00, 0x1FFF), (0x2000, 0x206F),
          (0x2070, 0x2BFF), (0x3000, 0x30FF),
          (0x4E00, 0x9FFF), (0x4E00, 0x5FFF), (0xAC00, 0xD7A3), (0xF900, 0xFBFF), (0xFC00, 0xFFFF),
          (0x10000, 0x1FFFF), (0x11000, 0x116FF),
          (0x1D100, 0x1D7FF), (0x1F1E6, 0x1F9FF), (0x20000, 0x2FFFF), (0xE0000, 0xE01FF), (0x0, 0xD7FF),
          (0xE000, 0x10FFFF)]
MASK = (1 << 64) - 1


def splitmix64(seed):
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        z = ((seed ^ seed >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        yield z ^ z >> 31


def random_text(number):
    random = splitmix64(number)
    below = lambda n: (next(random) >> 32) % n
    out = []
    for _ in range(1 + below(24)):
        if below(4) == 0:
            out.append(SNIPPETS[below(len(SNIPPETS))])
        else:
            first, last = RANGES[below(len(RANGES))]
            out += [chr(first + below(last - first + 1)) for _ in range(1 + below(3))]
    return "".join(out)


def long_word(number):
    random = splitmix64(number)
    below = lambda n: (next(random) >> 32) % n
    out = []
    for _ in range(10 + number % 120):
        kind = below(4)
        out.append(chr(0x4E00 + below(0x1000)) if kind == 0 else chr(0x410 + below(64)) if kind == 1
                   else "etaoinshrdlu"[below(12)])
    return "".join(out)


def code_point_text(c):
    """A code point where its kind and its behaviour under NFC show."""
    return f"x{chr(c)}y {chr(c)}\u0301\n!{chr(c)}\n"


CODE_POINTS = [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1000)]


def random_ids(number, size):
    random = splitmix64(number)
    return [(next(random) >> 32) % (size + 2) for _ in range(1 + number % 8)]  # two ids that do not exist


def random_bytes(number):
    """Mostly lead and continuation bytes, so that every kind of broken character comes up."""
    random = splitmix64(number)
    out = bytearray()
    for _ in range(1 + number % 12):
        r = next(random) >> 32
        out.append([r >> 8 & 0xFF, 0x80 | r >> 8 & 0x3F, 0x80 | r >> 8 & 0x3F, 0xE0 | r >> 8 & 0x1F][r % 4])
    return bytes(out)


class Fnv:
    def __init__(self):
        self.h = 0xCBF29CE484222325

    def add(self, data):
        h = self.h
        for b in data:
            h = ((h ^ b) * 0x100000001B3) & MASK
        self.h = h

    def __str__(self):
        return f"{self.h:016x}"


def hash_encodings(tokenizer, texts):
    """FNV-1a 64 over each text's ids and -1 as 32-bit numbers; and over its decoded text and a zero."""
    ids_hash, text_hash = Fnv(), Fnv()
    for ids in (e.ids for e in tokenizer.encode_batch(list(texts), add_special_tokens=False)):
        ids_hash.add(struct.pack(f"<{len(ids) + 1}i", *ids, -1))
        text_hash.add(tokenizer.decode(ids, skip_special_tokens=False).encode() + b"\0")
    return [str(ids_hash), str(text_hash)]


def hash_decodings(tokenizer, sequences):
    full, plain = Fnv(), Fnv()
    for ids in sequences:
        full.add(tokenizer.decode(ids, skip_special_tokens=False).encode() + b"\0")
        plain.add(tokenizer.decode(ids, skip_special_tokens=True).encode() + b"\0")
    return [str(full), str(plain)]


BROKEN = [b"\x80", b"\xff", b"a\xffb", b"\xc0\x80", b"\xc1\xbf", b"\xc2", b"\xc2a", b"\xe0\x80\x80",
          b"\xe0\xa0", b"\xe0\xa0a", b"\xed\xa0\x80",
          b"\xed\x9f", b"\xef\xbf", b"\xf0\x80\x80\x80", b"\xf0\x90\x80", b"\xf0\x9f\x98",
          b"\xf0\x9f\x98\xf0\x9f\x98\x80", b"\xf4\x90\x80\x80",
          b"\xf4\x8f\xbf", b"\xf5\x80\x80\x80", b"\xf8\x88\x80\x80\x80", b"\xe4\xbd\xa0\xe5\xa5",
          b"\xe4\xbd\xe5\xa5\xbd", b"<|im_end|\xff>",
          b"\xe4<|im_end|>\xbd\xa0", b"e\xcc", b"e\xcc\x81\xcc", b" \xff ", b"'\xc5",
          b"\xed\xa0\xbd\xed\xb8\x80", b"\xfe\xff\x00a"]


def about(path, n_random):
    tokenizer = Tokenizer.from_file(path)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    size = tokenizer.get_vocab_size()
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    out = {"size": size, "added": [[i, token.content, token.special] for i, token in added]}
    texts = texts_of(tokenizer)
    out["encode"] = [[text, encode(text)] for text in texts]
    repaired = [data.decode(errors="replace") for data in BROKEN]
    out["broken"] = [[data.hex(), text, encode(text)] for data, text in zip(BROKEN, repaired)]
    step = n_random // 10
    out["random"] = [[first, step, *hash_encodings(tokenizer, map(random_text, range(first, first + step)))]
                     for first in range(0, n_random, step)]
    out["long_words"] = hash_encodings(tokenizer, map(long_word, range(3000)))
    out["code_points"] = hash_encodings(tokenizer, map(code_point_text, CODE_POINTS))
    out["single"] = hash_decodings(tokenizer, ([i] for i in range(size)))
    out["sequences"] = hash_decodings(tokenizer, (random_ids(n, size) for n in range(20000)))
    return out


def make_vectors():
    h = Fnv()
    for n in range(50000):
        h.add(random_bytes(n).decode(errors="replace").encode() + b"\0")
    vectors = {"snippets": SNIPPETS, "ranges": RANGES, "random_bytes": str(h),
               "qwen3": about(QWEN, 100000), "tiny": about(f"{TINY}/tokenizer.json", 20000),
               "odd": about(f"{ODD}/tokenizer.json", 20000)}
    with open(OUT, "w", encoding="utf-8") as f:
        json.dump(vectors, f, ensure_ascii=True, separators=(",", ":"))
        f.write("\n")


def make_fuzz_seed():
    """A tokenizer.bin of 4 kB, for the fuzzer of its loader: 256 bytes, two merges, three added tokens."""
    texts = [bytes([b]) for b in range(256)] + [b"th", b"the", b"<think>", b"<|x|>", "é".encode()]
    flags = bytes([9] * 258 + [2, 6, 2])
    offsets = [sum(map(len, texts[:i])) for i in range(len(texts) + 1)]
    merges = [116, 104, 256, 256, 101, 257]
    ranges = [0x09, 0x0D, 3, 0x20, 0x20, 3, 0x30, 0x39, 2, 0x41, 0x5A, 1, 0x61, 0x7A, 1, 0x301, 0x301, 8,
              0x345, 0x345, 12, 0x1161, 0x1175, 63 << 2 | 1, 0x2126, 0x2126, 63 << 2 | 1, 0x4E00, 0x9FFF, 1]
    decompose = [0xE9, 0x65, 0x301, 0, 0, 0x2126, 0x3A9, 0, 0, 0]
    words = [1, len(texts), 2, offsets[-1], len(ranges) // 3, 2, 1, *offsets, *merges, *ranges, *decompose,
             0x65, 0x301, 0xE9]
    os.makedirs("tests/fixtures/fuzz/tokenizer_file", exist_ok=True)
    with open("tests/fixtures/fuzz/tokenizer_file/small", "wb") as f:
        f.write(b"qwen3tok" + struct.pack(f"<{len(words)}I", *words) + flags + b"".join(texts))


make_tiny()
make_odd()
make_fuzz_seed()
make_vectors()
