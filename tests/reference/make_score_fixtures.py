#!/usr/bin/env python3
"""Writes tests/fixtures/score: what jieba, rouge_chinese, nltk, sacrebleu and others make of many texts.

    pip install jieba==0.42.1 rouge_chinese==1.0.3 rouge-score==0.1.2 nltk sacrebleu==2.6.0 scikit-learn statsmodels
    make_score_fixtures.py

material.json     {"odd": characters, "items": words and sentences}: what the lines below are made of
cuts.json         [{"text", "cut": jieba's words, "words": what rouge_chinese counts}]: lines chosen by hand
blank.json        all white space, as code points
lines.u32         for 10,000 lines two little-endian u32 each: hashes of jieba's words and of rouge_chinese's.
                  The lines are drawn from material.json by line() below; test_score.cpp draws the same.
answers.jsonl     rows as `qwen3 --eval` writes them, some with a think block
reference.jsonl   Alpaca and messages
expected.json     for each row and each of "compat" (all words) and "plain" (no blank ones) the fractions
                  [ROUGE-1, ROUGE-2, ROUGE-L, BLEU-4]; those of the question as answer; and the means of all
                  in percent, as LLaMA-Factory computes them
measures.json     "bleu": [{"hypothesis", "reference", "words": sacrebleu's 13a of the first, "bleu": of sentence_score}];
                  "nearest": {"train", "ask": questions, "found": [[row, cosine]]} by scikit-learn's TfidfVectorizer
                  over jieba's words; "wilson": [[right, of, low, high]] by statsmodels
rouge_score.json  "chosen": [{"hypothesis", "reference", "f"}]; "drawn": the f of 400 pairs that rouge_score_pair() draws
                  from material.json, and test_score.cpp draws the same. f: rouge_score's rougeL over jieba's words
fuzz/jieba/       beside fixtures/score: a tiny jieba.bin and some texts, as seeds

The sentences below were written for this file.
"""
import json
import logging
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jieba
import numpy
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from rouge_chinese import Rouge
from rouge_chinese.rouge_score import _split_into_words
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU
from sklearn.feature_extraction.text import TfidfVectorizer
from statsmodels.stats.proportion import proportion_confint

TESTS = Path(__file__).resolve().parents[1]
OUT = TESTS / "fixtures" / "score"
SEEDS = TESTS / "fixtures" / "fuzz" / "jieba"
LINES = 10000

SENTENCES = """线程束是GPU调度的基本单位，由32个线程组成。
共享内存位于芯片上，延迟远低于全局内存。
如果同一个线程束里的线程走了不同的分支，就会发生分支发散。
合并访存要求相邻线程访问相邻地址，这样一次事务就能取回128字节。
__syncthreads()会等待线程块里的所有线程到达同一点。
流多处理器的寄存器数量有限，寄存器用得太多会降低占用率。
矩阵乘法可以分块：每个线程块计算C的一个子矩阵，把A和B的小块读入共享内存。
原子操作保证读、改、写不被打断，但争用激烈时很慢。
CUDA 12.4 支持 sm_90a，H100 的显存带宽约为 3.35 TB/s。
用 nvcc -O3 -arch=sm_80 编译，然后运行 ./a.out --n 1024。
混合精度训练用bf16做前向和反向，用fp32保存主权重。
学习率先预热10%，再按余弦曲线降到0。
今天天气真好，我们去颐和园划船吧！
他说：“明天再说。”然后就走了……
你吃饭了吗？还没有？那一起去吧。
研究生命的起源是一件很难的事情。
南京市长江大桥于1968年建成通车。
结婚的和尚未结婚的都请到这边登记。
乒乓球拍卖完了，下雨天留客天留我不留。
小王的手机号是13800138000，邮箱是xiaowang_01@example.com。
圆周率约等于3.14159，增长了12.5%，比去年高0.8个百分点。
欧阳锋和慕容复在襄阳城外大战三百回合。
魑魅魍魉，饕餮盛宴，龘龘龖龖。
首先，分配设备内存；其次，拷贝数据；最后，启动核函数。
Attention is all you need, but memory bandwidth is what you get.
The quick brown fox doesn't jump over x86-64 or C++17.
for (int i = 0; i < n; i++) y[i] = a * x[i] + y[i];
def f(x): return x**2 + 1.5e-3 if x else None
见图3.2和第5章，参考文献[12]、[13]。
他花了￥99.9买了一本《深入理解计算机系统》。
等等......这是什么.......不对............
- 第一点：正确性
- 第二点：性能
1. 初始化
2. 计算
3. 释放""".split("\n")

CHOSEN = SENTENCES + [
    "", " ", "\n", "\r\n", "a", "好", "好\n", "\n好", "\n\n好", "好\n\n好", "好\r\n\r\n好", "好\r\r好", "\r\n好",
    "\r\n\r\n好", "好。\n好", "好。好", "好？\n\n！好", "好？ ", "ab?\ncd", "......", "......\n好", "......好", ".......好", "....... 好",
    "............", "............ 好", ".............", "............. 好", "..................好", "+-+-",
    "-%", "%", "3.14%", "3.%", "3..14", "a.5b%c", "1.2.3", "\u3000\u3000首行缩进", "a\u00a0b", "a\u0085\u0085b",
    "a\n\u3000\nb", "\u4dff\u4e00\u9fd5\u9fd6", "𠀀好𠀀", "😀👍🏽好", "的的的的的", "AT&T和c++", "e.g.这样", "他来到了网易杭研大厦",
    "小明硕士毕业于中国科学院计算所，后在日本京都大学深造", "永和服装饰品有限公司",
    "工信处女干事每月经过下属科室都要亲口交代24口交换机等技术性器件的安装工作"]

ODD = ("+#&._%-.%$@!?！？。……”’“‘,，、()（）·∶\t\r\n\n \u3000\u00a0\u0085\x0b\x0c\x1c\x1f\x00\x7f\u2028\u200a\u200b"
       "\u1680\ufeff\u3400\u4dff\u4e00\u4e01\u9fd4\u9fd5\u9fd6\u9fff\uf900éßＡａ１٣ａ的是了一不在€￥"
       "\U00020000\U0001f600\U0010ffff")


class Draw:
    """A linear congruential generator (Knuth's MMIX); draws come from its high half."""
    def __init__(self, state):
        self.state = state

    def below(self, n):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 32) * n >> 32


def line(draw, material):
    """test_score.cpp says the same in C++."""
    odd, items = material["odd"], material["items"]
    out = ""
    for _ in range(1 + draw.below(20)):
        kind = draw.below(16)
        item = items[draw.below(len(items))]
        if kind < 8:
            out += item
        elif kind < 10:             # a part
            begin = draw.below(len(item))
            out += item[begin:begin + 1 + draw.below(3)]
        elif kind < 12:             # backwards
            out += item[::-1]
        elif kind == 12:
            out += chr(0x4E00 + draw.below(0x9FD6 - 0x4E00))
        elif kind == 13:
            c = odd[draw.below(len(odd))]
            out += c * (1 + draw.below(14))
        elif kind == 14:
            for _ in range(1 + draw.below(8)):
                out += chr(0x20 + draw.below(95))
        else:
            c = draw.below(0x110000)
            out += "x" if 0xD800 <= c < 0xE000 else chr(c)
    return out


def fnv1a(words):
    """FNV-1a of the words, each followed by a byte that UTF-8 does not have, folded to 32 bits."""
    h = 0xCBF29CE484222325
    for b in b"".join(w.encode() + b"\xff" for w in words):
        h = (h ^ b) * 0x100000001B3 % 2**64
    return h >> 32 ^ h & 0xFFFFFFFF


def cut(text):
    return list(jieba.cut(text))


def rouge_words(cut_text):
    """The words that Rouge.get_scores makes of a text before it counts."""
    lines = [" ".join(s.split()) for s in Rouge().cut_sent(" ".join(cut_text)) if len(s) > 0]
    return _split_into_words(lines)


def scores(hypothesis, reference, plain):
    """[ROUGE-1, ROUGE-2, ROUGE-L, BLEU-4] by the calls LLaMA-Factory's metric makes."""
    h, r = cut(hypothesis), cut(reference)
    if plain:
        h, r = ([w for w in words if not w.isspace()] for words in (h, r))
        assert "" not in rouge_words(h) + rouge_words(r) or not h or not r
    if not "".join(h).strip() or not "".join(r).strip():
        f = [0.0, 0.0, 0.0]
    else:
        all_scores = Rouge().get_scores(" ".join(h), " ".join(r))[0]
        f = [all_scores[name]["f"] for name in ("rouge-1", "rouge-2", "rouge-l")]
    bleu = sentence_bleu([list(reference)], list(hypothesis), smoothing_function=SmoothingFunction().method3)
    return f + [float(bleu)]


def paragraphs(rng, n):
    between = ["", "", "", "\n", "\n\n", " ", "\n\n\n"]
    return "".join(rng.choice(SENTENCES) + rng.choice(between) for _ in range(n))


def spoiled(rng, text):
    """An answer that is near to it: parts go, move and come."""
    parts = [text[i:i + 7] for i in range(0, len(text), 7)]
    for _ in range(rng.randint(0, 1 + len(parts) // 2)):
        i = rng.randrange(len(parts))
        action = rng.randrange(4)
        if action == 0 and len(parts) > 1:
            del parts[i]
        elif action == 1:
            parts.insert(i, rng.choice(SENTENCES))
        elif action == 2:
            parts[i] = rng.choice(["\n\n", " ", "。", "……", parts[i][::-1], parts[0]])
        else:
            j = rng.randrange(len(parts))
            parts[i], parts[j] = parts[j], parts[i]
    return "".join(parts)


def pairs(rng):
    """(answer, reference)"""
    same = "共享内存位于芯片上。\n\n它很快。"
    out = [("", same), (" \n\n ", same), (same, same), ("好", same), ("共", "共"), ("共享", "共享"), ("ab", "共享内存"),
           ("\n\n\n" + same, same), (same + "\n\n\n", same), ("......\n......\n\n好", ".......\n\n\n好"),
           ("abcd", "abcde"), ("的" * 300, "的" * 100 + "地" * 100), (same, "\n"), ("it is it is it", "it is")]
    for _ in range(100):
        reference = paragraphs(rng, rng.randint(1, 6))
        out.append((spoiled(rng, reference), reference))
    out.append((paragraphs(rng, 6), paragraphs(rng, 6)))
    long = paragraphs(rng, 40)
    return out + [(spoiled(rng, long), long)]


def write_json(name, value, **options):
    (OUT / name).write_text(json.dumps(value, ensure_ascii=False, **options) + "\n", encoding="utf-8")


ENGLISH = """A warp has 32 threads, which share one instruction at a time.
Shared memory is on chip: its latency is far below that of global memory.
If threads of a warp take different branches, both run one after the other (divergence).
The H100 moves 3.35 TB/s, so 1,024 bytes take about 0.3 ns; the A100's 1.5 TB/s are less.
Don't use `-G` for profiling; -lineinfo doesn't slow the kernel.
for (int i = 0; i < n; i++) y[i] = a * x[i] + y[i];
x86-64, C++17, sm_90a, 2-3 times, 10^-6, 1.2.3, .5 and 5.
He said "use &quot;float4&quot; &amp; aligned pointers" &lt;always&gt; ...
The grid is 2^31-1 blocks wide at most, y and z have 65,535.""".split("\n")
ODD_ENGLISH = ["", " ", "a", "warp", ".", "..", "a..b", ",,5", "5,,", "1,2", "3.-4", "7-", "-7", "a-b", "a-\nb", "end-\n",
               "<skipped>x", "&amp;lt;", "it's", "caf\u00e9.\u00e9,9\u00e9", "a\u00a0b\u3000c\u2009", "{a}[b]~^_`@", "\t\x1c\x85x"]


def write_measures(rng):
    metric, bleu = BLEU(effective_order=True), []
    texts = ENGLISH + ODD_ENGLISH + [" ".join(rng.sample(ENGLISH, 3)) for _ in range(20)]
    for i, reference in enumerate(texts):
        words = reference.split(" ")
        rng.shuffle(words)
        for hypothesis in {reference, " ".join(words), " ".join(reference.split(" ")[: 1 + i % 7]), rng.choice(texts)}:
            bleu.append({"hypothesis": hypothesis, "reference": reference,
                         "words": metric._preprocess_segment(hypothesis).split(" "),
                         "bleu": metric.sentence_score(hypothesis, [reference]).score / 100})
    bleu.sort(key=lambda case: (case["reference"], case["hypothesis"]))

    def analyzer(text):
        return [word.lower() for word in cut(text) if not word.isspace()]

    train = [s + t for s in SENTENCES for t in ("", "为什么？", " Why is that so?")] + ENGLISH
    ask = [spoiled(rng, text) for text in rng.sample(train, 60)]
    vectorizer = TfidfVectorizer(analyzer=analyzer)
    near = (vectorizer.fit_transform(train) @ vectorizer.transform(ask).T).toarray()
    found = []
    for column in near.T:
        if numpy.sum(column > column.max() - 1e-6) == 1:     # of equally near ones rounding decides
            found.append([int(column.argmax()), float(column.max())])
        else:
            found.append(None)
    ask, found = zip(*[(a, f) for a, f in zip(ask, found) if f])
    wilson = [[k, n, *(100 * float(x) for x in proportion_confint(k, n, method="wilson"))]
              for k, n in ((0, 1), (1, 1), (0, 40), (40, 40), (10, 40), (77, 300), (299, 300))]
    write_json("measures.json", {"bleu": bleu, "nearest": {"train": train, "ask": ask, "found": found}, "wilson": wilson},
               indent=0)


# (The lower case of these two is, or has, a letter of ASCII.)
KELVIN, DOTTED = "\u212a", "\u0130"
ROUGE_SCORE_CHOSEN = [
    ("", ""), ("a", ""), ("共享内存很快", "共享内存很快"), ("共享内存有 227 KB", "全局内存有 227 kb"), ("A-b_c.D", "a b c d"),
    ("3.14%", "3 14"), ("c++ 和 C#", "c"), ("T恤", "t"), ("__syncthreads()会等待", "等待 SyncThreads"), ("10" + KELVIN, "10k"),
    (KELVIN + "elvin", "k elvin"), (DOTTED + "d", "i d"), (DOTTED + "d", "id"), ("é caf\u00e9", "caf"), ("ＡＢ１", "ab1"),
    ("Running runs", "run run"), ("\u0661\u0662 x\u00b2", "x"), ("a b a b a", "b a b"), ("x\n\ny......z", "x y z")]


def rouge_score_pair(draw, material):
    """test_score.cpp says the same in C++."""
    a, b, c = ("".join(line(draw, material) for _ in range(5)) for _ in range(3))
    return [(a + b, a + c), (a + b, b + a), (a, c), (a + b + a, b + c)][draw.below(4)]


def write_rouge_score(material):
    scorer = RougeScorer(["rougeL"], use_stemmer=False)

    def f(hypothesis, reference):
        hypothesis, reference = (" ".join(cut(text)) for text in (hypothesis, reference))
        return scorer.score(reference, hypothesis)["rougeL"].fmeasure

    chosen = [{"hypothesis": h, "reference": r, "f": f(h, r)} for h, r in ROUGE_SCORE_CHOSEN]
    draw = Draw(5)
    drawn = [f(*rouge_score_pair(draw, material)) for _ in range(400)]
    write_json("rouge_score.json", {"chosen": chosen, "drawn": drawn})


def write_seeds(folder):
    """A jieba.bin of few words: the real one's code, on a small dictionary and tables."""
    words = ["中国 34488", "中 243191", "国 41213", "中国人 100", "c++ 3", "T恤 5", "的 318825", "在 200000", "大学 500"]
    table = {"B": {"中": -1.5, "国": -2.0}, "E": {"国": -1.0}, "M": {"学": -3.0}, "S": {"的": -0.5, "在": -4.0}}
    package = Path(jieba.__file__).parent
    (folder / "finalseg").mkdir()
    (folder / "dict.txt").write_text("".join(w + " n\n" for w in words), encoding="utf-8")
    for name in ("start", "trans"):
        shutil.copy(package / "finalseg" / f"prob_{name}.py", folder / "finalseg")
    (folder / "finalseg" / "prob_emit.py").write_text(f"P={table}", encoding="utf-8")
    SEEDS.mkdir(parents=True, exist_ok=True)
    script = TESTS.parent / "data/datagen/jieba_bin.py"
    subprocess.run([sys.executable, script, folder, SEEDS / "tiny"], check=True)
    for i, text in enumerate(["小明来到了南京市长江大桥，3.14%的C++...", "的的 \r\n\u3000AT&T.......", "\u9fd5\u9fd6龘𠀀\x00"]):
        (SEEDS / f"text{i}").write_text(text, encoding="utf-8", newline="")


def main():
    jieba.setLogLevel(logging.CRITICAL)
    OUT.mkdir(parents=True, exist_ok=True)
    rng = random.Random(20261121)

    words = {}
    for entry in (Path(jieba.__file__).parent / "dict.txt").read_text(encoding="utf-8").splitlines():
        word, frequency = entry.split(" ")[:2]
        words[word] = int(frequency)
    frequent = sorted(words, key=lambda w: (-words[w], w))[:1500]
    items = SENTENCES + frequent + rng.sample(sorted(words), 3000)
    material = {"odd": ODD, "items": items}
    write_json("material.json", material)

    cases = [{"text": t, "cut": cut(t), "words": rouge_words(cut(t))} for t in CHOSEN]
    write_json("cuts.json", cases, indent=0)
    write_json("blank.json", [c for c in range(0x110000) if chr(c).isspace()])

    draw, hashes = Draw(1), []
    for _ in range(LINES):
        pieces = cut(line(draw, material))
        hashes += [fnv1a(pieces), fnv1a(rouge_words(pieces))]
    (OUT / "lines.u32").write_bytes(b"".join(h.to_bytes(4, "little") for h in hashes))

    answers, references, rows = [], [], []
    for i, (answer, reference) in enumerate(pairs(rng)):
        question = rng.choice(SENTENCES)[:12] + "是什么意思？"
        rows.append({"compat": scores(answer, reference, False), "plain": scores(answer, reference, True),
                     "question": scores(question, reference, True)})
        thoughts = ["", "", "\n\n", "\n" + rng.choice(SENTENCES) + "\n"]
        thought = f"<think>{thoughts[i % 4]}</think>\n\n" if thoughts[i % 4] else ""
        if answer[:1].isspace():
            thought = ""    # it would take the white space with it
        answers.append({"index": i, "id": f"row-{i}", "question": question, "reference": reference,
                        "answer": thought + answer, "finish": "stop"})
        if i % 3:
            references.append({"id": f"row-{i}", "instruction": question, "input": "", "output": reference})
        else:
            messages = [{"role": "system", "content": "你是助教。"}, {"role": "user", "content": question},
                        {"role": "assistant", "content": reference}]
            references.append({"id": f"row-{i}", "messages": messages})
    mean = {kind: [sum(round(r[kind][m] * 100, 4) for r in rows) / len(rows) for m in range(4)]
            for kind in ("compat", "plain", "question")}
    write_json("expected.json", {"mean": mean, "rows": rows})
    for name, objects in ("answers.jsonl", answers), ("reference.jsonl", references):
        text = "".join(json.dumps(o, ensure_ascii=False) + "\n" for o in objects)
        (OUT / name).write_text(text, encoding="utf-8")

    write_measures(random.Random(20261122))
    write_rouge_score(material)
    with tempfile.TemporaryDirectory() as folder:
        write_seeds(Path(folder))


if __name__ == "__main__":
    main()
