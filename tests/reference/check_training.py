#!/usr/bin/env python3
"""The page of train_lora --watch (train/page) and report.html in a real browser, during a real run of the default model.

    apt-get install chromium fonts-noto-cjk
    python3 tests/reference/check_training.py [--bin build/g++] [--shots FOLDER] [--pictures docs]

The run learns English answers to the course's Chinese questions. One row of the evaluation is an attempt to become HTML.
Needs Python's standard library only. Ends with status 1 at the first thing that is wrong.
"""
import argparse, json, os, re, subprocess, tempfile, time, urllib.error, urllib.request

import check_page
from check_page import Browser, check

HOSTILE = '<img src=x onerror="window.hit=1"><script>window.hit=2</script>'
STEPS = 40


def rows(bin, folder):
    hostile = json.dumps({"instruction": HOSTILE, "output": HOSTILE}) + "\n"
    for name, source, count, more in (("train", "english_train", 144, []), ("test", "english_test", 9, [hostile])):
        with open(f"data/course/{source}.jsonl") as f, open(f"{folder}/{name}.jsonl", "w") as out:
            lines = f.readlines()[:count]
            out.writelines(lines[:2] + more + lines[2:])
        subprocess.run([f"{bin}/datagen", "pack", f"{folder}/{name}.jsonl", f"{folder}/{name}.bin", "-z", "data/tiny/tokenizer.bin", "--info", "none"],
                       check=True, stderr=subprocess.DEVNULL)


def train(bin, folder):
    os.symlink(os.path.abspath("data"), f"{folder}/data")
    command = [os.path.abspath(f"{bin}/train_lora"), "data/tiny/model.bin", "train.bin", "-o", "out", "--eval", "test.bin", "--steps", str(STEPS),
               "--eval-every", str(STEPS // 4), "--batch", "6", "--lr", "2e-3", "-d", "cpu", "--watch", "0"]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder)
    for line in run.stderr:
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        if found:
            return run, found.group()
    raise SystemExit("train_lora gave no address")


def open_page(b, url):
    b.call("Page.navigate", url="about:blank")
    b.call("Page.navigate", url=url)
    b.wait("document.readyState === 'complete' && !!document.querySelector('h1')")


def refused(url, headers, status):
    try:
        urllib.request.urlopen(urllib.request.Request(url, headers=headers))
        return False
    except urllib.error.HTTPError as e:
        return e.code == status


TILES = "[...document.querySelectorAll('#tiles b')].map(n => n.textContent)"
NARROW = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"


def check_live(b, run, url, shots):
    check(refused(url, {"Host": "evil.example"}, 403), "another site's name for this address is refused")
    check(refused(url + "else", {}, 404), "another path")
    open_page(b, url)
    b.wait("typeof steps !== 'undefined' && steps && steps.length >= 1", 120)
    b.wait("document.querySelectorAll('#tiles b').length === 5 && speed")
    check("trained on" in b.js("document.title"), "the run's name")
    b.wait("$('state').textContent.startsWith('running: ')")
    check(f"--steps {STEPS}" in b.js("$('recipe').textContent") and "LoRA rank 32" in b.js("$('recipe').textContent"), "the recipe")
    check(b.js("asked.size") == 3 and b.js("document.querySelectorAll('.answer h3').length") == 3, "three questions, answered before the first step")
    check(b.js("[...document.querySelectorAll('.answer dt')].map(n => n.textContent).join()") == "wanted,before,wanted,before,wanted,before", "beside their references")
    check("of the machine's ceiling" in b.js("$('tiles').textContent"), "the rate beside the ceiling")
    check(b.js("$('curve').querySelectorAll('polyline').length") == 2, "a curve")
    seen = b.js("steps.length")
    b.wait(f"steps.length > {seen} && Number($('done').value) > {seen}", 60)
    b.wait("evals.length >= 2 && [...asked.values()][0].length >= 3", 300)
    b.wait("$('curve').querySelectorAll('circle').length >= 2")
    check(b.js("[...document.querySelectorAll('.answer dt')].some(n => n.textContent === 'now')"), "the newest answers")
    check(HOSTILE in b.js("document.body.innerText") and b.js("window.hit") is None and b.js("document.images.length") == 0, "text of a question stays text")
    check(b.js("""(() => { try { document.body.innerHTML = '<b>x</b>'; return 'done' } catch (e) { return e.name } })()""") == "TypeError", "no HTML from text")
    b.js("document.querySelector('details').open = true")
    held = b.js("steps.length")
    b.wait(f"steps.length > {held}")
    check(b.js("document.querySelector('details').open"), "what was unfolded stays unfolded")
    at = b.js("(() => { const r = $('curve').getBoundingClientRect(); return [r.x + r.width * 0.2, r.y + r.height / 2] })()")
    b.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1], button="none")
    check(re.match(r"step \d+: loss ", b.js("$('at').textContent")), "a step's numbers below the pointer")
    check(b.js(TILES + ".every(t => t !== '–')"), "no tile is empty")
    if shots:
        b.js("document.querySelector('details').open = false")
        b.shot(shots("live"))
        b.look(dark=True), b.shot(shots("live-dark"))
    for width in (375, 768):
        b.look(width=width, height=812, phone=width == 375)
        check(b.js(NARROW), f"no sideways scrolling at {width}")
        if shots:
            b.shot(shots(f"live-{width}"))
    b.look(language="zh-CN")
    open_page(b, url)  # later, and all is there
    b.wait("steps && steps.length >= 20 && evals.length >= 2 && [...asked.values()].every(list => list.length >= 3)")
    b.wait("document.querySelectorAll('#tiles b').length === 5")
    check("学习率" in b.js("$('tiles').textContent") and b.js("document.documentElement.lang") == "zh", "in Chinese")
    if shots:
        b.shot(shots("live-zh"))
    b.look()
    open_page(b, url)
    b.wait("about && about.ended", 600)
    b.wait("$('state').textContent.startsWith('Done: ')")
    check(b.js("$('state').textContent").endswith("This page as a file: out/report.html"), "where the report is")
    check(run.wait(60) == 0, "the run is done")
    b.wait(f"Number($('done').value) === {STEPS}")
    check(b.js("source.readyState") == 2, "the page asks no more")


def check_report(b, path, shots):
    with open(path) as f:
        text = f.read()
    check(not re.search("<(script|img|link|iframe)|url[(]", text), "a report without scripts that loads nothing")
    open_page(b, "file://" + os.path.abspath(path))
    check(b.js("document.querySelectorAll('svg polyline').length") == 2 and b.js("document.querySelectorAll('circle').length") == 4, "the curve")
    check(f"--steps {STEPS}" in b.js("document.querySelector('pre').textContent"), "the recipe")
    check(b.js("document.querySelectorAll('.answer').length") == 3, "the questions")
    check(b.js("[...document.querySelector('.answer dl').querySelectorAll('dt')].map(n => n.textContent).join()") == f"wanted,before,after {STEPS}", "before and after")
    check(HOSTILE in b.js("document.body.innerText") and b.js("window.hit") is None and b.js("document.images.length") == 0, "text stays text")
    check(b.js(NARROW), "no sideways scrolling")
    if shots:
        b.shot(shots("report"))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--bin", default="."), p.add_argument("--shots"), p.add_argument("--pictures")
    a = p.parse_args()
    shots = (lambda name: f"{a.shots}/{name}.png") if a.shots else None
    if a.pictures:
        shots = lambda name: {"live": f"{a.pictures}/page-training.png", "report": f"{a.pictures}/page-report.png"}.get(name, os.devnull)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as profile:
        rows(a.bin, folder)
        b = Browser(profile)
        run, url = train(a.bin, folder)
        try:
            b.look(height=1180)
            check_live(b, run, url, shots)
            check_report(b, f"{folder}/out/report.html", shots)
            bad = [e["params"] for e in b.events if e.get("method") == "Runtime.exceptionThrown"]
            check(not bad, f"errors of the page: {bad}")
        finally:
            run.poll() is None and run.kill()
            b.process.kill()
    print(f"{check_page.checks} checks")


main()
