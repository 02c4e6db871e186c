#!/usr/bin/env python3
"""The table that a laboratory prints, as a picture, and in the pages of docs/. Python's standard library only.

    lab/matmul > build/lab/matmul.txt
    python3 lab/plot.py build/lab/matmul.txt docs/lab-matmul.svg     draws the picture (light and dark)
    python3 lab/plot.py build/lab/matmul.txt docs/lab.md             fills the page's cells in the row of each step

`make lab-plots` does both for every laboratory. A table without a time (no GPU) ends with 1, and nothing is written.
"""
import html
import os
import re
import sys

ROW = re.compile(r"^ *(\d+)  (\S.{21,}?) (\S.*?) +([\d.]+) us +([\d.]+) (GB/s|TFLOPS) +([\d.]+)% +([\d.]+%|-)  (\S+)$")
LEFT_OUT = re.compile(r"^ *(\d+)  (\S.{21,}?) (needs sm_\S+|WRONG: .*)$")
WIDTH, LINE, LEFT, RIGHT = 920, 26, 210, 270  # of the picture; of a step; beside the bars
STYLE = """
svg{font:13px -apple-system,'Segoe UI','Noto Sans',sans-serif}
text{fill:#1f2328}rect.page{fill:#fff}.dim{fill:#59636e}.bar{fill:#0969da}.last{fill:#1a7f37}
path{fill:none;stroke:#d1d9e0}.library{stroke:#bc4c00;stroke-width:2}.mark{fill:#bc4c00}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}rect.page{fill:#0d1117}.dim{fill:#9198a1}.bar{fill:#58a6ff}.last{fill:#3fb950}
path{stroke:#3d444d}.library{stroke:#f0883e}.mark{fill:#f0883e}}
"""


def read(path):
    """The laboratory's name, the rest of its first line, and its steps as dictionaries."""
    with open(path, encoding="utf-8") as file:
        lines = file.read().split("\n")
    name, _, about = lines[0].partition(": ")
    steps = []
    for line in lines:
        if found := ROW.match(line):
            number, step, adds, time, rate, unit, share, library, error = found.groups()
            steps.append(dict(number=int(number), name=step.strip(), adds=adds, time=float(time), rate=float(rate),
                              unit=unit.replace("TFLOPS", "TFLOP/s"), share=float(share), error=error,
                              library=None if library == "-" else float(library[:-1])))
        elif found := LEFT_OUT.match(line):
            steps.append(dict(number=int(found[1]), name=found[2].strip(), time=None, why=found[3].split(":")[0]))
    if not any(step["time"] for step in steps):
        sys.exit(f"{path}: no step with a time in it: the laboratory must have run on a GPU")
    return name, about, steps


def time_of(step):
    us = step["time"]
    return f"{us / 1000:.2f} ms" if us >= 1000 else f"{us:.1f} us"


def draw(name, about, steps):
    """A bar for each step: its rate's share of the ceiling; a mark where the library's is."""
    timed = [step for step in steps if step["time"]]
    # (a rate above the ceiling is possible: what fits a cache, or wgmma beside mma.sync)
    library = {step["number"]: step["share"] / step["library"] * 100 for step in timed if step["library"]}
    high = max([100, *library.values(), *(step["share"] for step in timed)])
    best = max(step["share"] for step in timed)
    height = 74 + LINE * len(steps)

    def across(share):
        return LEFT + (WIDTH - LEFT - RIGHT) * share / high

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"><style>{STYLE}</style>',
           f'<rect class="page" width="{WIDTH}" height="{height}"/>',
           f'<text x="16" y="24" font-weight="bold">{html.escape(name)}</text>',
           f'<text class="dim" x="{LEFT}" y="24">{html.escape(about)}: share of the ceiling</text>']
    for share in range(0, 101, 25):
        out.append(f'<path d="M{across(share):.1f} 38V{height - 24}"/><text class="dim" x="{across(share):.1f}" '
                   f'y="{height - 8}" text-anchor="middle">{share}%</text>')
    for i, step in enumerate(steps):
        y = 42 + LINE * i
        out.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{step["number"]} {html.escape(step["name"])}'
                   '</text>')
        if not step["time"]:
            out.append(f'<text class="dim" x="{LEFT + 6}" y="{y + 15}">{html.escape(step["why"])}</text>')
            continue
        colour, width = "last" if step["share"] == best else "bar", max(across(step["share"]) - LEFT, 1)
        out.append(f'<rect class="{colour}" x="{LEFT}" y="{y + 3}" width="{width:.1f}" height="{LINE - 8}"/>')
        if step["number"] in library:
            out.append(f'<path class="library" d="M{across(library[step["number"]]):.1f} {y}v{LINE - 2}"/>')
        figures = f"{time_of(step)} · {step['rate']:.1f} {step['unit']} · {step['share']:.1f}%"
        out.append(f'<text x="{WIDTH - RIGHT + 8}" y="{y + 15}">{figures}</text>')
    if library:
        out.append(f'<text class="mark" x="{WIDTH - RIGHT + 48}" y="{height - 8}">|</text>'
                   f'<text class="dim" x="{WIDTH - RIGHT + 56}" y="{height - 8}">the library in the same run</text>')
    return "\n".join(out) + "\n</svg>\n"


def fill(page, name, steps):
    """The page with the last cell of each step's row filled, and the picture above the laboratory's table."""
    rows = {f"{step['number']} {step['name']}": step for step in steps}
    inside, filled, lines = False, 0, page.split("\n")
    for i, line in enumerate(lines):
        if line.startswith(("## ", "**")):
            inside = line == f"## {name}" or line.startswith(f"**{name}.**")
        cells = line.split(" | ")
        if not inside or len(cells) < 3 or not line.startswith("| "):
            continue
        if cells[0] == "| step":
            picture = f"![{name}: each step's share of the ceiling](lab-{name}.svg)"
            if picture not in lines:
                lines[i] = f"{picture}\n\n{line}"
        elif step := rows.get(cells[0][2:]):
            words = step.get("why")
            if step["time"]:
                words = f"{time_of(step)}, {step['rate']:.1f} {step['unit']}, {step['share']:.1f}%"
                words += f"; of the library's {step['library']:.1f}%" if step["library"] else ""
            lines[i], filled = " | ".join(cells[:-1] + [words + " |"]), filled + 1
    return "\n".join(lines), filled


def write(path, text):
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".tmp", path)


def main():
    if len(sys.argv) < 3:
        sys.exit("usage: python3 lab/plot.py TABLE PICTURE.svg|PAGE.md ...")
    name, about, steps = read(sys.argv[1])
    for path in sys.argv[2:]:
        if path.endswith(".svg"):
            write(path, draw(name, about, steps))
        else:
            with open(path, encoding="utf-8") as file:
                page = file.read()
            text, filled = fill(page, name, steps)
            if filled:
                write(path, text)
                print(f"{path}: {filled} of {name}'s {len(steps)} steps")


if __name__ == "__main__":
    try:
        main()
    except OSError as problem:
        sys.exit(f"{problem.filename}: {problem.strerror}")
