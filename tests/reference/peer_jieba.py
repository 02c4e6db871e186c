#!/usr/bin/env python3
"""jieba on the texts of bench_jieba.cpp: MB/s of CPU time, and whether both cut the same words.

    bench_jieba.py build/bench_jieba FILE...          from the repository's root; needs jieba 0.42.1
"""
import logging
import subprocess
import sys
import time
from pathlib import Path

import jieba

jieba.setLogLevel(logging.CRITICAL)
jieba.initialize()
for path in sys.argv[2:]:
    text = Path(path).read_bytes()
    lines = text.decode().removesuffix("\n").split("\n")
    start = time.process_time()
    cut = [list(jieba.cut(line)) for line in lines]
    seconds = time.process_time() - start
    ours = subprocess.run([sys.argv[1], "--cut", path], capture_output=True, check=True).stdout
    ours = ours.decode().removesuffix("\n").split("\n")
    assert len(ours) == len(lines)
    different = sum("".join(w + "\x01" for w in words) != other for words, other in zip(cut, ours))
    print(f"{path}: jieba {len(text) / 1e6 / seconds:.2f} MB/s; {different} of {len(lines)} lines differ")
