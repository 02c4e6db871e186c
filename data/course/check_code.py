#!/usr/bin/env python3
"""Check the code and the figures of rows and notes: `make -C data check` runs it. Python's standard library, g++, nvcc.

    python3 data/course/check_code.py [--no-nvcc] [ID ...]

code_runs.txt has a run for each row of HARD with code or a computed figure: a line `## ID`, lines `fill: TEXT` (what goes
into the gaps `____` of the question's code, in their order), code of its own up to a line `---`, and the statements of
a main. The unit is the row's code (the ```cuda blocks of question and answer), that code, and main; g++ compiles it
with tests/emulate/emulate.h and runs it. It must end with 0, and every text that it `says` must stand in the answer. Units are put
into one program, each in a namespace, and each runs in a process of its own; where a program does not compile, its units
are compiled one by one. nvcc compiles the rows' code for sm_80.

chapters_runs.txt has the same for the rows of CHAPTERS, and notes_runs.txt runs of the notes' own code,
`## FILE FUNCTION`: the block that defines it, less the functions with PTX (tests/emulate/tensor.h has theirs) and with launches.
"""
import concurrent.futures, pathlib, re, shutil, subprocess, sys, tempfile
import check_notes, glossary

HERE = pathlib.Path(__file__).resolve().parent
COMPILE = ["g++", "-std=c++17", "-O1", "-w"]
HARD = ("train_hard", "dev", "exam_hard", "extra_train", "extra_dev")
TOGETHER = 40  # units in a program
CHAPTERS = ("chapters_train", "chapters_exam", "chapters_hard", "chapters_dev")
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


def space(id):
    return "row_" + re.sub(r"\W", "_", id)


def for_cpu(code):
    """Launches of host code and dynamic shared memory, as emulate.h has them."""
    dynamic = r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];"
    code = re.sub(dynamic, r"\1* const \2 = (\1*)dynamic_shared;", code)
    return re.sub(r"(\w+(?:<[\w, ]+>)?)<<<(.*?)>>>\((.*?)\);", r"start_kernel([&] { \1(\3); }, \2);", code, flags=re.S)


def emulated(folder, units, header="tests/emulate/emulate.h"):
    """The faults of units: (id, code, before, main, answer)."""
    name = space(units[0][0])
    source, program = pathlib.Path(folder, name + ".cpp"), pathlib.Path(folder, name)
    text = f'#include "{header}"\n'
    for id, code, before, main, _ in units:
        text += check_notes.in_namespace(space(id), for_cpu(f"{code}\n{before}\nvoid run_() {{\n{main}\n}}\n"))
    text += "int main(int, char** argv) {\n"
    for id, *_ in units:
        text += f'    if (!std::strcmp(argv[1], "{id}")) {space(id)}::run_();\n'
    source.write_text(text + "}\n", encoding="utf-8")
    made = subprocess.run([*COMPILE, "-I", folder, source, "-o", program], capture_output=True, text=True)
    if made.returncode and len(units) > 1:
        return [fault for unit in units for fault in emulated(folder, [unit])]
    if made.returncode:
        return [f"{units[0][0]}: does not compile:\n{made.stderr[:1000]}"]
    found = []
    for id, _, _, _, answer in units:
        try:
            done = subprocess.run([program, id], capture_output=True, text=True, timeout=20)
        except subprocess.TimeoutExpired:
            found.append(f"{id}: runs for more than 20 s")
            continue
        missing = [line for line in done.stdout.splitlines() if bare(line) not in bare(answer)]
        if done.returncode:
            found.append(f"{id}: {done.stdout.strip()} (status {done.returncode})")
        elif missing:
            found.append(f"{id}: its answer lacks what the run says: {missing}")
    return found


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
    return kept


def main():
    rows = {row["id"]: row for name in HARD + CHAPTERS for row in glossary.rows(HERE / f"{name}.jsonl")}
    wanted = [arg for arg in sys.argv[1:] if not arg.startswith("--")]
    blocks, faults, sources, units, jobs = runs("notes_runs"), [], "", [], []
    all_runs = {**runs(), **runs("chapters_runs")}
    faults += [f"{id}: a run without a row" for id in all_runs if id not in rows]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:
        shutil.copytree(HERE / "../../tests/emulate", folder + "/tests/emulate")
        subprocess.run([*COMPILE, "-x", "c++-header", folder + "/tests/emulate/emulate.h"], check=True)  # read once, not for each row
        for id, row in rows.items():
            fills, before, body = all_runs.get(id, ([], "", ""))
            code = code_of(row, fills)
            if code and id not in all_runs:
                faults.append(f"{id}: code without a run")
            if "____" in code:
                faults.append(f"{id}: a gap is left")
            faults += [f"{id}: its answer lacks the fill {fill}" for fill in fills if bare(fill) not in bare(row["output"])]
            if code:
                sources += check_notes.in_namespace(space(id), code)
            if id in all_runs and (not wanted or id in wanted):
                units.append((id, code, before, body, row["output"]))
        jobs = [pool.submit(emulated, folder, units[at:at + TOGETHER]) for at in range(0, len(units), TOGETHER)]
        for id, (_, before, body) in blocks.items():
            if not wanted or id in wanted:
                unit = (id, PRODUCT + before + note_code(*id.split()), "", body.replace("RANDOM_GRAPH", RANDOM_GRAPH), "")
                jobs.append(pool.submit(emulated, folder, [unit], "tests/emulate/tensor.h"))
        faults += [fault for job in jobs for fault in job.result()]
    if "--no-nvcc" not in sys.argv:
        said = check_notes.compiler_says("80", sources)
        faults += [said] if said else []
    for fault in faults:
        print("fault:", fault)
    with_code = sum("```cuda" in row["instruction"] + row["output"] for row in rows.values())
    print(f"{len(rows)} hard and development rows and rows of chapters 16 to 23: {with_code} with code, {len(all_runs)} runs; "
          f"{len(blocks)} of the notes' code; {len(faults)} faults")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
