#!/usr/bin/env python3
"""Check the code and the figures of the hard rows: `make -C data check` runs it. Python's standard library, g++, nvcc.

    python3 data/course/check_code.py [--no-nvcc] [ID ...]

code_runs.txt has a run for each row of HARD with code or a computed figure: a line `## ID`, lines `fill: TEXT` (what goes
into the gaps `____` of the question's code, in their order), code of its own up to a line `---`, and the statements of
a main. The unit is the row's code (the ```cuda blocks of question and answer), that code, and main; g++ compiles it
with emulate.h and runs it. It must end with 0, and every text that it `says` must stand in the answer. nvcc compiles
the row's code for sm_80.
"""
import concurrent.futures, pathlib, re, shutil, subprocess, sys, tempfile
import check_notes, glossary

HERE = pathlib.Path(__file__).resolve().parent
COMPILE = ["g++", "-std=c++17", "-O1", "-w"]
HARD = ("train_hard", "dev", "exam_hard")


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


def emulated(folder, id, code, before, main, answer):
    """A fault, or None."""
    source, program = pathlib.Path(folder, id + ".cpp"), pathlib.Path(folder, id)
    source.write_text(f'#include "emulate.h"\n{code}\n{before}\nint main() {{\n{main}\n}}\n', encoding="utf-8")
    made = subprocess.run([*COMPILE, source, "-o", program], capture_output=True, text=True)
    if made.returncode:
        return f"{id}: does not compile:\n{made.stderr[:1000]}"
    done = subprocess.run([program], capture_output=True, text=True, timeout=20)
    if done.returncode:
        return f"{id}: {done.stdout.strip()} (status {done.returncode})"
    missing = [text for text in done.stdout.splitlines() if bare(text) not in bare(answer)]
    return f"{id}: its answer lacks what the run says: {missing}" if missing else None


def main():
    rows = {row["id"]: row for name in HARD for row in glossary.rows(HERE / f"{name}.jsonl")}
    wanted = [arg for arg in sys.argv[1:] if not arg.startswith("--")]
    all_runs, faults, sources, jobs = runs(), [], "", []
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
                sources += check_notes.in_namespace("row_" + re.sub(r"\W", "_", id), code)
            if id in all_runs and (not wanted or id in wanted):
                jobs.append(pool.submit(emulated, folder, id, code, before, body, row["output"]))
        faults += [job.result() for job in jobs if job.result()]
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
