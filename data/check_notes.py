#!/usr/bin/env python3
"""Check data/notes: every ```cuda block compiles, every section can stand alone, and how long it all is.

    python3 data/check_notes.py [--no-compile] [--emit build/notes.cuh] [file.md ...]

A block is compiled alone with `nvcc -arch sm_80 -c`, after the includes below. --emit writes all blocks into one
header, each in a namespace called after its first function, for lab/notes_01_08.cu to run what the reader sees.
"""
import pathlib, re, subprocess, sys, tempfile

PRELUDE = ("#include <cuda_runtime.h>\n#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
           "#include <cstdio>\n#include <cstdlib>\n#include <cmath>\n#include <cstring>\n")
DANGLING = ["如上", "如图", "上文", "(?<!上)下文", "前文", "上述", "上一节", "下一节", "本章", "前一章", "后面的章", "见第", "前面说", "上面的", "下面的"]
HAN = re.compile(r"[\u4e00-\u9fff]")

def blocks(text):
    return re.findall(r"^```cuda\n(.*?)^```", text, re.S | re.M)

def name_of(code):
    for line in code.splitlines():
        if re.match(r"(__global__|__device__|__host__|template <|void|float|double|unsigned|int|long|cudaError_t)", line):
            m = re.search(r"(\w+)\(", re.sub(r"__launch_bounds__\(.*?\)", "", line))
            if m:
                return m.group(1)
    raise SystemExit("a block without a function:\n" + code)

def main():
    args = sys.argv[1:]
    emit = args[args.index("--emit") + 1] if "--emit" in args else None
    files = [pathlib.Path(a) for a in args if a.endswith(".md")]
    files = files or sorted(pathlib.Path(__file__).parent.joinpath("notes").glob("*.md"))
    bad, out, total = 0, ["#pragma once\n" + PRELUDE], 0
    for f in files:
        text = f.read_text(encoding="utf-8")
        codes = blocks(text)
        prose = re.sub(r"^```.*?^```\n?", "", text, flags=re.S | re.M)
        han = len(HAN.findall(prose))
        total += han
        print(f"{f.name}: {han} Chinese characters of prose, {len(prose)} of prose in all, {len(text)} with code, "
              f"{prose.count(chr(10) + '## ')} sections, {len(codes)} blocks")
        for s in re.split(r"^## ", prose, flags=re.M)[1:]:
            title, body = s.split("\n", 1)
            n = len(body.strip())
            if not 600 <= n <= 1500:
                print(f"  {title}: {n} characters"); bad += 1
        for w in DANGLING:
            for m in re.finditer(w, prose):
                print(f"  leans on other text: …{prose[max(0, m.start() - 12):m.end() + 12]!r}"); bad += 1
        for line in text.splitlines():
            if len(line) > 120 and not HAN.search(line):
                print("  long code line:", line); bad += 1
        for code in codes:
            name = name_of(code)
            includes = "".join(re.findall(r"^#include.*\n", code, re.M))
            rest = re.sub(r"^#include.*\n", "", code, flags=re.M)
            undefs = "".join(f"#undef {d}\n" for d in re.findall(r"^#define (\w+)", code, re.M))
            out.append(f"// {f.name}\n{includes}namespace b_{name} {{\n{rest}}}\n{undefs}")
            if "--no-compile" in args:
                continue
            with tempfile.TemporaryDirectory() as d:
                src = pathlib.Path(d, "b.cu")
                src.write_text(PRELUDE + code, encoding="utf-8")
                r = subprocess.run(["nvcc", "-std=c++17", "-arch", "sm_80", "-Werror", "all-warnings", "-c", str(src), "-o", str(pathlib.Path(d, "b.o"))],
                                   capture_output=True, text=True)
                if r.returncode:
                    print(f"  {name} does not compile:\n{r.stdout}{r.stderr}"); bad += 1
    print(f"{total} Chinese characters in {len(files)} files")
    if emit:
        p = pathlib.Path(emit); p.parent.mkdir(parents=True, exist_ok=True)
        p.write_text("".join(out), encoding="utf-8")
    return 1 if bad else 0

sys.exit(main())
