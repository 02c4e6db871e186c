#!/usr/bin/env python3
"""Check data/course/notes: the code compiles, every section can stand alone, and how long it all is.

    python3 data/course/check_notes.py [--no-compile] [--emit FILE] [file.md ...]

Each ```cuda block goes into a namespace called after its first function, and the blocks into one file for each
architecture that they need: sm_90a if a block holds wgmma, bulk copies, clusters or mbarriers, sm_89 if it holds FP8,
else sm_80; nvcc compiles these. A ```python block is parsed. --emit writes the blocks of chapters 1 to 8 as a header:
tests/gpu/test_notes.cpp runs them against plain loops.
"""
import ast, collections, concurrent.futures, os, pathlib, re, subprocess, sys, tempfile

PRELUDE = "".join(f"#include <{name}>\n" for name in (
    "cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "cooperative_groups.h",
    "cfloat", "cmath", "cstdint", "cstdio", "cstdlib", "cstring"))
DECLARED = pathlib.Path(__file__).resolve().parent / "declared"  # what is used of MPI and NCCL
FUNCTION = r"(__global__|__device__|__host__|template <|void|float|double|unsigned|int|long|bool|cudaError_t)"
# a section is read without what stands around it
DANGLING = r"如上|(?<!例)如图|上文|(?<!上)下文|前文|上述|上一节|下一节|本章|前一章|后面的章|见第|前面说"
HAN = re.compile(r"[\u4e00-\u9fff]")


def name_of(code):
    for line in code.splitlines():
        if re.match(FUNCTION, line):
            if found := re.search(r"(\w+)\(", re.sub(r"__launch_bounds__\(.*?\)", "", line)):
                return found.group(1)
    sys.exit("a block without a function:\n" + code)


def in_namespace(name, code):
    includes = "".join(re.findall(r"^#include.*\n", code, re.M))
    rest = re.sub(r"^#include.*\n", "", code, flags=re.M)
    undefs = "".join(f"#undef {name}\n" for name in re.findall(r"^#define (\w+)", code, re.M))
    return f"{includes}namespace {name} {{\n{rest}}}\n{undefs}"


def architecture(code):
    return "90a" if re.search(r"wgmma|cp\.async\.bulk|cluster|mbarrier", code) else "89" if "e4m3" in code else "80"


def compiler_says(sm, source):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, f"notes_{sm}.cu")
        path.write_text(PRELUDE + source, encoding="utf-8")
        run = subprocess.run(["nvcc", "-std=c++17", "-rdc=true", "-gencode", f"arch=compute_{sm},code=sm_{sm}", "-Werror",
                              "all-warnings", "-Xcompiler", "-Wall,-Werror", "-I", DECLARED,
                              "-c", path, "-o", folder + "/notes.o"],
                             capture_output=True, text=True)
        return run.stdout + run.stderr if run.returncode else ""


def main():
    args = sys.argv[1:]
    emit = args[args.index("--emit") + 1] if "--emit" in args else None
    files = [pathlib.Path(arg) for arg in args if arg.endswith(".md")]
    files = files or sorted(pathlib.Path(__file__).parent.joinpath("notes").glob("*.md"))
    bad, header, total, sources = 0, "#pragma once\n" + PRELUDE, 0, collections.defaultdict(str)
    names = collections.Counter()

    def fault(text):
        nonlocal bad
        bad += 1
        print("  " + text)

    for file in files:
        text = file.read_text(encoding="utf-8")
        fence = re.compile(r"^```(\w*)\n(.*?)^```\n?", re.S | re.M)
        blocks = fence.findall(text)
        prose = fence.sub("", text)
        total += len(HAN.findall(prose))
        print(f"{file.name}: {len(HAN.findall(prose))} Chinese characters of prose, {len(prose)} of prose in all, "
              f"{len(text)} with code, {text.count(chr(10) + '## ')} sections, {len(blocks)} blocks")
        for section in re.split(r"^## ", text, flags=re.M)[1:]:
            if len(section) < 600 or len(fence.sub("", section)) > 1500:
                fault(f"{section.splitlines()[0]}: {len(section)} characters, {len(fence.sub('', section))} of prose")
        for found in re.finditer(DANGLING, prose):
            fault(f"leans on other text: {prose[max(0, found.start() - 12):found.end() + 12]!r}")
        for line in text.splitlines():
            if len(line) > 120 and not HAN.search(line):
                fault("long line of code: " + line)
        for language, code in blocks:
            if language == "python":
                try:
                    ast.parse(code)
                except SyntaxError as error:
                    fault(f"{error}:\n{code}")
            elif language == "cuda":
                chapter = file.name[:2]
                name = ("b_" if chapter < "09" else f"b{chapter}_") + name_of(code)
                names[name] += 1  # (several blocks of a chapter may begin with the same helper)
                block = in_namespace(name if names[name] == 1 else f"{name}_{names[name]}", code)
                if chapter < "09":
                    header += f"// {file.name}\n" + block
                sources[architecture(code)] += f'#line 1 "{file.name}: {name_of(code)}"\n' + block
    if "--no-compile" not in args:
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for said in pool.map(compiler_says, sources.keys(), sources.values()):
                if said:
                    fault("does not compile:\n" + said)
    print(f"{total} Chinese characters in {len(files)} files, {bad} faults")
    if emit:
        pathlib.Path(emit).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(emit).write_text(header, encoding="utf-8")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
