#!/usr/bin/env python3
"""Check the code and the figures of rows and notes: `make -C data check` runs it. Python's standard library, g++, nvcc.

    python3 data/course/check_code.py [--no-nvcc] [ID ...]

code_runs.txt has a run for each row of HARD with code or a computed figure: a line `## ID`, lines `fill: TEXT` (what goes
into the gaps `____` of the question's code, in their order), code of its own up to a line `---`, and the statements of
a main. The unit is the row's code (the ```cuda blocks of question and answer), that code, and main; g++ compiles it
with emulate.h and runs it. It must end with 0, and every text that it `says` must stand in the answer. nvcc compiles
the row's code for sm_80.

chapters_runs.txt has the same for the computed figures of CHAPTERS; those without code are one program. notes_runs.txt
has runs of the notes' own code, `## FILE FUNCTION`: the block that defines it, less the functions with PTX
(emulate_tensor.h has theirs) and with launches.
"""
import concurrent.futures, pathlib, re, shutil, subprocess, sys, tempfile
import check_notes, glossary

HERE = pathlib.Path(__file__).resolve().parent
COMPILE = ["g++", "-std=c++17", "-O1", "-w"]
HARD = ("train_hard", "dev", "exam_hard")
CHAPTERS = ("chapters_train", "chapters_exam")
# What several runs of notes begin with: a graph of random edges, and a loop over the levels of a frontier queue.
RANDOM_GRAPH = """const int V = 300; std::vector<int> ptr(V + 1), dst, level(V, -1), want(V, -1); unsigned r = 1;
for (int u = 0; u < V; u++) { ptr[u] = dst.size(); int n = u % 29 ? (r = r * 1664525u + 1013904223u) >> 30 : 90;
for (int e = 0; e < n; e++) dst.push_back((r = r * 1664525u + 1013904223u) / 65536 % V); } ptr[V] = dst.size();
want[0] = level[0] = 0; for (int d = 0; d < V; d++) for (int u = 0; u < V; u++) if (want[u] == d)
for (int e = ptr[u]; e < ptr[u + 1]; e++) if (want[dst[e]] < 0) want[dst[e]] = d + 1;
auto bfs = [&](auto one_level) { std::vector<int> in = {0}, out(V); for (int d = 0; !in.empty(); d++) { int count = 0;
one_level((int)in.size(), d, in.data(), out.data(), &count); in.assign(out.begin(), out.begin() + count); }
return level == want && !stuck; };"""
# A product of small whole numbers, which every order of the sums gives exactly.
PRODUCT = """#define PRODUCT(m, n, k) const int M = m, N = n, K = k; std::vector<__nv_bfloat16> A(M * K), B(N * K); \
std::vector<float> D(M * N, -1), W(M * N); unsigned r = 1; \
auto next = [&] { return (int)((r = r * 1664525u + 1013904223u) >> 28) - 8; }; \
for (auto& x : A) x = __float2bfloat16(next()); for (auto& x : B) x = __float2bfloat16(next()); \
for (int i = 0; i < M; i++) for (int j = 0; j < N; j++) for (int p = 0; p < K; p++) \
W[i * N + j] += __bfloat162float(A[i * K + p]) * __bfloat162float(B[j * K + p]);
"""


def runs(name="code_runs"):
    found = {}
    for part in re.split(r"^## ", (HERE / f"{name}.txt").read_text(encoding="utf-8"), flags=re.M)[1:]:
        id, text = part.split("\n", 1)
        assert id not in found, f"{id} is there twice"
        fills = re.findall(r"^fill: (.*)$", text, re.M)
        text = re.sub(r"^fill: .*\n", "", text, flags=re.M)
        before, main = text.split("---\n", 1) if re.search(r"^---$", text, re.M) else ("", text)
        found[id] = fills, before, main
    return found


def code_of(row, fills):
    code = "".join(re.findall(r"```cuda\n(.*?)```", row["instruction"] + "\n" + row["output"], re.S))
    for fill in fills:
        code = code.replace("____", fill, 1)
    return code


def bare(text):
    return "".join(text.replace(",", "").split())


def emulated(folder, id, code, before, main, answer, header="emulate.h"):
    """A fault, or None."""
    source, program = pathlib.Path(folder, id + ".cpp"), pathlib.Path(folder, id)
    source.write_text(f'#include "{header}"\n{code}\n{before}\nint main() {{\n{main}\n}}\n', encoding="utf-8")
    made = subprocess.run([*COMPILE, source, "-o", program], capture_output=True, text=True)
    if made.returncode:
        return f"{id}: does not compile:\n{made.stderr[:1000]}"
    try:
        done = subprocess.run([program], capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return f"{id}: does not end: a thread waits for what never comes"
    if done.returncode:
        return f"{id}: {done.stdout.strip()} (status {done.returncode})"
    missing = [text for text in done.stdout.splitlines() if bare(text) not in bare(answer)]
    return f"{id}: its answer lacks what the run says: {missing}" if missing else None


def note_code(file, function):
    """The block that defines the function, as the CPU can run it."""
    text = (HERE / "notes" / file).read_text(encoding="utf-8")
    blocks = [code for code in re.findall(r"^```cuda\n(.*?)^```", text, re.S | re.M)
              if re.search(rf"^[^/ ].*\b{function}\(", code, re.M)]
    assert blocks, f"{file}: no {function}"
    parts, kept = [[]], ""
    for line in blocks[0].splitlines(keepends=True):
        parts[-1].append(line)
        if re.match(r"\S.*[;}]$", line) or re.match(r"};?$", line):
            parts.append([])
    for part in map("".join, parts):
        if not re.search("asm volatile|<<<|cudaGetDriver|cudaLaunch", part):
            kept += re.sub(r"#include.*\n|(?<=    )__device__ ", "", part)
    dynamic = r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];"
    return re.sub(dynamic, r"\1* const \2 = (\1*)shared_room;", kept)


def together(folder, rows, figures):
    """Runs without code, in one program: the faults."""
    source, program = pathlib.Path(folder, "figures.cpp"), pathlib.Path(folder, "figures")
    named = {id: "row_" + re.sub(r"\W", "_", id) for id in figures}
    functions = "".join(f"static void {named[id]}() {{ {main} }}\n" for id, (_, _, main) in figures.items())
    calls = "".join(f'puts("## {id}"); {named[id]}();\n' for id in figures)
    source.write_text(f'#include "emulate.h"\n{functions}int main() {{\n{calls}}}\n', encoding="utf-8")
    subprocess.run([*COMPILE, source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    said = {part.split("\n", 1)[0]: part.splitlines()[1:] for part in done.stdout.split("## ")[1:]}
    return [f"{id}: not run, or a check of it fails: {said.get(id)}" for id in figures if id not in said or
            any(line.startswith("FALSE") for line in said[id])] + \
           [f"{id}: its answer lacks what the run says: {line}" for id, lines in said.items() for line in lines
            if not line.startswith("FALSE") and bare(line) not in bare(rows[id]["output"])]


def main():
    rows = {row["id"]: row for name in HARD for row in glossary.rows(HERE / f"{name}.jsonl")}
    chapters = {row["id"]: row for name in CHAPTERS for row in glossary.rows(HERE / f"{name}.jsonl")}
    wanted = [arg for arg in sys.argv[1:] if not arg.startswith("--")]
    all_runs, figures, blocks, faults, sources, jobs = runs(), runs("chapters_runs"), runs("notes_runs"), [], "", []
    rows.update({id: row for id, row in chapters.items() if "```cuda" in row["instruction"] + row["output"]})
    all_runs.update({id: figures.pop(id) for id in rows if id in figures})
    faults += [f"{id}: a run without a row" for id in figures if id not in chapters]
    faults += [f"{id}: a run without a row" for id in all_runs if id not in rows]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:
        for header in ("emulate.h", "emulate_tensor.h"):
            shutil.copy(HERE / header, folder)
        subprocess.run([*COMPILE, "-x", "c++-header", folder + "/emulate.h"], check=True)  # read once, not for each row
        for id, row in rows.items():
            fills, before, body = all_runs.get(id, ([], "", ""))
            code = code_of(row, fills)
            if code and id not in all_runs:
                faults.append(f"{id}: code without a run")
            if "____" in code:
                faults.append(f"{id}: a gap is left")
            faults += [f"{id}: its answer lacks the fill {fill}" for fill in fills if bare(fill) not in bare(row["output"])]
            if code:
                sources += check_notes.in_namespace("row_" + re.sub(r"\W", "_", id), code)
            if id in all_runs and (not wanted or id in wanted):
                jobs.append(pool.submit(emulated, folder, id, code, before, body, row["output"]))
        for id, (_, before, body) in blocks.items():
            if not wanted or id in wanted:
                body = body.replace("RANDOM_GRAPH", RANDOM_GRAPH)
                code = PRODUCT + before + note_code(*id.split())
                jobs.append(pool.submit(emulated, folder, id.replace(" ", "_"), code, "", body, "", "emulate_tensor.h"))
        if not wanted:
            faults += together(folder, chapters, figures)
        faults += [job.result() for job in jobs if job.result()]
    if "--no-nvcc" not in sys.argv:
        said = check_notes.compiler_says("80", sources)
        faults += [said] if said else []
    for fault in faults:
        print("fault:", fault)
    with_code = sum("```cuda" in row["instruction"] + row["output"] for row in rows.values())
    print(f"{len(rows)} hard and development rows: {with_code} with code, {len(all_runs)} runs; {len(figures)} runs of "
          f"the figures of chapters 16 to 23, {len(blocks)} of their notes' code; {len(faults)} faults")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
