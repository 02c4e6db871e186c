#!/usr/bin/env python3
"""Check the code and the figures of the hard rows: `make -C data check` runs it. Python's standard library, g++, nvcc.

    python3 data/course/check_code.py [--no-nvcc] [ID ...]

code_runs.txt has a run for each row of HARD with code or a computed figure: a line `## ID`, lines `fill: TEXT` (what goes
into the gaps `____` of the question's code, in their order), code of its own up to a line `---`, and the statements of
a main. The unit is the row's code (the ```cuda blocks of question and answer), that code, and main; g++ compiles it
with emulate.h and runs it. It must end with 0, and every text that it `says` must stand in the answer. Units are put
into one program, each in a namespace, and each runs in a process of its own; where a program does not compile, its units
are compiled one by one. nvcc compiles the rows' code for sm_80.
"""
import concurrent.futures, pathlib, re, shutil, subprocess, sys, tempfile
import check_notes, glossary

HERE = pathlib.Path(__file__).resolve().parent
COMPILE = ["g++", "-std=c++17", "-O1", "-w"]
HARD = ("train_hard", "dev", "exam_hard")
TOGETHER = 40  # units in a program


def runs():
    found = {}
    for part in re.split(r"^## ", (HERE / "code_runs.txt").read_text(encoding="utf-8"), flags=re.M)[1:]:
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
    code = re.sub(r"extern __shared__ ([\w ]+?) (\w+)\[\];", r"\1* \2 = (\1*)dynamic_shared;", code)
    return re.sub(r"(\w+(?:<[\w, ]+>)?)<<<(.*?)>>>\((.*?)\);", r"start_kernel([&] { \1(\3); }, \2);", code, flags=re.S)


def emulated(folder, units):
    """The faults of units: (id, code, before, main, answer)."""
    name = space(units[0][0])
    source, program = pathlib.Path(folder, name + ".cpp"), pathlib.Path(folder, name)
    text = '#include "emulate.h"\n'
    for id, code, before, main, _ in units:
        text += check_notes.in_namespace(space(id), for_cpu(f"{code}\n{before}\nvoid run_() {{\n{main}\n}}\n"))
    text += "int main(int, char** argv) {\n"
    for id, *_ in units:
        text += f'    if (!std::strcmp(argv[1], "{id}")) {space(id)}::run_();\n'
    source.write_text(text + "}\n", encoding="utf-8")
    made = subprocess.run([*COMPILE, source, "-o", program], capture_output=True, text=True)
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


def main():
    rows = {row["id"]: row for name in HARD for row in glossary.rows(HERE / f"{name}.jsonl")}
    wanted = [arg for arg in sys.argv[1:] if not arg.startswith("--")]
    all_runs, faults, sources, units = runs(), [], "", []
    faults += [f"{id}: a run without a row" for id in all_runs if id not in rows]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:
        shutil.copy(HERE / "emulate.h", folder)
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
                sources += check_notes.in_namespace(space(id), code)
            if id in all_runs and (not wanted or id in wanted):
                units.append((id, code, before, body, row["output"]))
        jobs = [pool.submit(emulated, folder, units[at:at + TOGETHER]) for at in range(0, len(units), TOGETHER)]
        faults += [fault for job in jobs for fault in job.result()]
    if "--no-nvcc" not in sys.argv:
        said = check_notes.compiler_says("80", sources)
        faults += [said] if said else []
    for fault in faults:
        print("fault:", fault)
    with_code = sum("```cuda" in row["instruction"] + row["output"] for row in rows.values())
    print(f"{len(rows)} hard and development rows: {with_code} with code, {len(all_runs)} runs, {len(faults)} faults")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
