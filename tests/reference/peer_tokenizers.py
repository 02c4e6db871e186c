"""What bench_tokenizer.cpp measures, of the package `tokenizers`: one thread, called in two ways.

    python tests/reference/peer_tokenizers.py tokenizer.json TEXT_FILE...
"""
import os
import sys
import time

os.environ["RAYON_NUM_THREADS"] = "1"  # before the import
from tokenizers import Tokenizer  # noqa: E402

tokenizer = Tokenizer.from_file(sys.argv[1])
for path in sys.argv[2:]:
    data = open(path, newline="").read()
    lines, size = data.splitlines(keepends=True), len(data.encode()) / 1e6
    for name, texts in (("whole text", [data]), ("line by line", lines)):
        best = 1e9
        for _ in range(2):
            start = time.process_time()
            for text in texts:
                tokenizer.encode(text, add_special_tokens=False)
            best = min(best, time.process_time() - start)
        print(f"{os.path.basename(path):<14} {size:6.1f} MB  {name:<12}  encode {size / best:6.1f} MB/s")
