#!/usr/bin/env python3
"""Compiles every fenced ```cuda block of the notes with nvcc, parses every ```python block, checks the sections' length.

A block is a complete translation unit but for the standard headers, which are put before it. Blocks that hold wgmma,
TMA or clusters are compiled for sm_90a, those that launch kernels from the device with -rdc=true, all others for sm_80.
    python3 data/notes/check_code.py [file.md ...]
"""
import ast, pathlib, re, subprocess, sys, tempfile

HEADERS = "".join(f"#include <{h}>\n" for h in (
    "cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h", "cooperative_groups.h", "cstdint", "cstdio", "cfloat"))

bad = total = 0
here = pathlib.Path(__file__).parent
for md in [pathlib.Path(a) for a in sys.argv[1:]] or sorted(here.glob("*.md")):
    text = md.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    cjk = len(re.findall(r"[\u4e00-\u9fff]", prose))
    sections = re.split(r"^## ", text, flags=re.M)[1:]
    total += cjk
    print(f"{md.name}: {cjk} Chinese characters of prose, {len(text)} characters, {len(sections)} sections")
    for s in sections:
        if not 600 <= len(s) <= 1500:
            print(f"    {len(s):5} characters: {s.splitlines()[0]}")
    for n, (lang, code) in enumerate(re.findall(r"```(\w+)\n(.*?)```", text, flags=re.S), 1):
        if lang == "python":
            try:
                ast.parse(code)
            except SyntaxError as e:
                bad += 1
                print(f"    block {n}: {e}")
        elif lang == "cuda":
            sm = "90a" if re.search(r"wgmma|cp\.async\.bulk|cluster|mbarrier", code) else "89" if "e4m3" in code else "80"
            with tempfile.TemporaryDirectory() as d:
                src = pathlib.Path(d) / "block.cu"
                src.write_text(HEADERS + code)
                r = subprocess.run(["nvcc", "-std=c++17", "-c", "-Xcompiler", "-Wall", "-rdc=true", "-gencode",
                                    f"arch=compute_{sm},code=sm_{sm}", str(src), "-o", d + "/o"],
                                   capture_output=True, text=True)
                if r.returncode or "warning" in r.stderr:
                    bad += 1
                    print(f"    block {n} (sm_{sm}):\n{r.stderr}")
print(f"{total} Chinese characters of prose in all, {bad} bad blocks")
sys.exit(bad != 0)
