#!/usr/bin/env python3
"""The picture in the README: a recorded session of ./qwen3 as an SVG. Python's standard library only.

    python3 docs/session.py record     runs the session below in a terminal, and writes docs/session.cast
    python3 docs/session.py svg        draws docs/session.svg from docs/session.cast

session.cast is asciinema's format, asciicast 2: a line of JSON for the terminal, then a line [seconds, "o", output] or
[seconds, "i", typed] for each event. The picture shows what the terminal showed, at the recorded times; pauses of more
than PAUSE seconds are cut, and what was typed is bold. Viewers without animation show the whole session."""
import fcntl, json, os, pty, select, struct, sys, tempfile, termios, time, unicodedata
from html import escape

HERE = os.path.dirname(os.path.abspath(__file__))
CAST, SVG = os.path.join(HERE, "session.cast"), os.path.join(HERE, "session.svg")
COLUMNS, ROWS = 96, 40
TYPED = ['./qwen3 data/tiny/model.bin -s 1 -i "什么是 warp？"', "./qwen3 data/tiny/model.bin -s 1",
         "What is a warp?", "What is shared memory?", "/stats", "/exit"]
PAUSE = 1.2                                   # seconds
CELL, LINE, MARGIN, TITLE = 8.4, 20, 18, 34   # pixels; 8.4 is the advance of 14 px monospace


# ---- Recording

def record():
    home = tempfile.TemporaryDirectory()
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(os.path.dirname(HERE))
        os.execve("/bin/sh", ["sh"], {"PATH": os.environ["PATH"], "HOME": home.name, "TERM": "xterm-256color",
                                      "LANG": "C.UTF-8", "PS1": "$ "})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    began, events, pending = time.time(), [], b""

    def watch(quiet):
        """What is shown, until nothing has come for `quiet` seconds."""
        nonlocal pending
        while select.select([terminal], [], [], quiet)[0]:
            try:
                pending += os.read(terminal, 65536)
            except OSError:
                return
            text = pending.decode("utf-8", "ignore")       # a character may be cut at the end
            pending = pending[len(text.encode()):]
            events.append([round(time.time() - began, 3), "o", text])

    watch(0.5)
    for line in TYPED:
        for i, letter in enumerate(line):
            events.append([round(time.time() - began, 3), "i", letter])
            os.write(terminal, letter.encode())
            watch(0.05 + 0.03 * (i * 7 % 3))               # a hand is not quite even
        os.write(terminal, b"\r")
        watch(1.5)
    os.close(terminal)
    os.waitpid(child, 0)
    with open(CAST, "w", encoding="utf-8") as out:
        header = {"version": 2, "width": COLUMNS, "height": ROWS, "timestamp": int(began)}
        for row in [header] + events:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


# ---- The terminal: as much of one as the session needs; anything else is an error, so that no picture is wrong

class Screen:
    def __init__(self, columns):
        self.columns, self.cells = columns, {}             # (row, column): (character, style, time)
        self.row = self.column = 0
        self.style = ""

    def put(self, letter, style, now):
        width = 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        if self.column + width > self.columns:
            self.row, self.column = self.row + 1, 0
        if self.cells.get((self.row, self.column), ("",))[:2] != (letter, style):
            self.cells[self.row, self.column] = (letter, style, now)
        self.column += width

    def erase(self, first, last):
        for column in range(first, last):
            self.cells.pop((self.row, column), None)

    def sequence(self, parameters, final):
        number = int(parameters) if parameters.isdigit() else 1
        if parameters.startswith("?") and final in "hl":   # modes, such as bracketed paste
            return
        if final == "m":
            names = {"": "", "0": "", "1": "bold", "2": "dim", "22": "", "39": "", "31": "red", "32": "green",
                     "33": "yellow", "34": "blue", "35": "magenta", "36": "cyan"}
            self.style = " ".join(filter(None, (names[p] for p in parameters.split(";"))))
        elif final == "K" and parameters in ("", "0"):
            self.erase(self.column, self.columns)
        elif final == "J" and parameters in ("", "0"):
            self.erase(self.column, self.columns)
            for place in [p for p in self.cells if p[0] > self.row]:
                del self.cells[place]
        elif final == "A":
            self.row = max(0, self.row - number)
        elif final == "C":
            self.column = min(self.columns - 1, self.column + number)
        elif final == "D":
            self.column = max(0, self.column - number)
        elif final == "G":
            self.column = number - 1
        else:
            sys.exit(f"session.py: the sequence ESC [ {parameters}{final} is not known here")

    def write(self, text, now, echo=False):
        i = 0
        while i < len(text):
            letter = text[i]
            i += 1
            if letter == "\x1b":
                if text[i:i + 1] != "[":
                    sys.exit(f"session.py: the sequence ESC {text[i:i + 1]!r} is not known here")
                end = i + 1
                while not text[end].isalpha():
                    end += 1
                self.sequence(text[i + 1:end], text[end])
                i = end + 1
            elif letter == "\r":
                self.column = 0
            elif letter == "\n":
                self.row += 1
            elif letter == "\b":
                self.column = max(0, self.column - 1)
            elif letter.isprintable():
                self.put(letter, "bold" if echo else self.style, now)
            else:
                sys.exit(f"session.py: the character {letter!r} is not known here")


# ---- The picture

STYLE = """
svg{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Noto Sans Mono CJK SC',monospace}
text{fill:#1f2328;white-space:pre;animation:show 1ms both}
rect{fill:#fff;stroke:#d1d9e0}
.title,.dim{fill:#59636e}.bold{font-weight:bold}
.red{fill:#cf222e}.green{fill:#1a7f37}.yellow{fill:#9a6700}.blue{fill:#0969da}.magenta{fill:#8250df}.cyan{fill:#1b7c83}
@keyframes show{from{visibility:hidden}}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}rect{fill:#0d1117;stroke:#3d444d}
.title,.dim{fill:#9198a1}
.red{fill:#ff7b72}.green{fill:#3fb950}.yellow{fill:#d29922}.blue{fill:#58a6ff}.magenta{fill:#bc8cff}.cyan{fill:#39c5cf}}
@media(prefers-reduced-motion:reduce){text{animation:none}}
"""


def runs(cells):
    """Neighbours in a row of one style and width that appeared together: [row, column, width, text, style, time]."""
    found = []
    for (row, column), (letter, style, now) in sorted(cells.items()):
        width = 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        last = found[-1] if found else None
        if last and last[0] == row and last[1] + last[2] * len(last[3]) == column and last[2] == width \
                and last[4] == style and abs(now - last[5]) < 0.06:
            last[3] += letter
        elif letter != " ":
            found.append([row, column, width, letter, style, now])
    return found


def svg():
    with open(CAST, encoding="utf-8") as file:
        header, *events = [json.loads(line) for line in file]
    screen, now, before, typed = Screen(header["width"]), 0.0, 0.0, ""
    for at, kind, text in events:
        now += min(at - before, PAUSE)
        before = at
        if kind == "o":
            screen.write(text, now, echo=text == typed)
        typed = text if kind == "i" else ""
    found = runs(screen.cells)
    width = round(header["width"] * CELL + 2 * MARGIN)
    height = TITLE + (max(run[0] for run in found) + 1) * LINE + MARGIN
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
             f' height="{height}" role="img">',
             "<title>A recorded session of ./qwen3 with the default model, on a CPU</title>",
             f"<style>{STYLE}</style>",
             f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
             f'<text class="title" x="{width / 2:g}" y="22" text-anchor="middle">'
             'a recorded session, without a GPU</text>']
    for row, column, cells, text, style, appeared in found:
        text = text.rstrip()
        x, y = MARGIN + column * CELL, TITLE + row * LINE + 14
        lines.append(f'<text x="{x:.5g}" y="{y}"' + (f' class="{style}"' if style else "")
                     + (f' textLength="{cells * len(text) * CELL:.5g}"' if len(text) > 1 else "")
                     + f' style="animation-delay:{appeared:.2f}s">{escape(text, quote=False)}</text>')
    with open(SVG, "w", encoding="utf-8") as out:
        out.write("\n".join(lines) + "\n</svg>\n")


if __name__ == "__main__":
    commands = {"record": record, "svg": svg}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]]()
