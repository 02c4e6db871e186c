#!/usr/bin/env python3
"""The chat page (server/page) in a real browser: Chromium without a window, driven by its DevTools protocol over a pipe.

    apt-get install chromium fonts-noto-cjk pandoc poppler-utils
    python3 tests/reference/check_page.py [--shots FOLDER] [--serve ./serve] [--model data/tiny/model.bin]
    python3 tests/reference/check_page.py --pictures docs

A conversation with ./serve; stop, reload, edit, answer again, export and import; then answers of a server of our own,
which gives the page as ./serve does, and says what we want: attempts to become HTML or to run a script, Markdown of every
kind, errors, 10,000 tokens. Needs Python's standard library only. Ends with status 1 at the first thing that is wrong.
"""
import argparse, base64, http.server, io, json, math, os, re, struct, subprocess, sys, tempfile, threading, time, urllib.parse, urllib.request, zipfile

CHROMIUM = os.environ.get("CHROMIUM", "chromium")


class Browser:
    def __init__(self, folder):
        to_browser, from_browser = os.pipe(), os.pipe()

        def pipes():  # the protocol's are 3 and 4
            a, b = os.dup(to_browser[0]), os.dup(from_browser[1])
            a, b = os.dup2(a, 33), os.dup2(b, 44)
            os.dup2(a, 3), os.dup2(b, 4)

        self.process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars", "--disable-lcd-text",
             "--disable-background-networking", "--no-first-run", "--lang=en-US", f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser[0]), os.close(from_browser[1])
        self.out, self.inp = to_browser[1], os.fdopen(from_browser[0], "rb", 0)
        self.buffer, self.last, self.session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=folder)

    def read(self):
        while b"\0" not in self.buffer:
            some = self.inp.read(1 << 20)
            if not some:
                raise SystemExit("the browser has ended")
            self.buffer += some
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        if self.session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def js(self, code):
        r = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True, userGesture=True)
        if "exceptionDetails" in r:
            raise RuntimeError(code + "\n" + json.dumps(r["exceptionDetails"])[:600])
        return r["result"].get("value")

    def wait(self, code, seconds=20):
        def true():
            try:
                return self.js(code)
            except RuntimeError as e:  # asked while another page came
                if "navigated or closed" not in str(e):
                    raise

        end = time.time() + seconds
        while not true():
            if time.time() > end:
                raise SystemExit(f"waited in vain for {code}\n" + self.js("document.body.innerText")[:1500])
            time.sleep(0.03)

    def open(self, url):
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && !!document.getElementById('send')")

    def reload(self):
        self.js("window.before = 1")
        self.call("Page.reload")
        self.wait("!window.before && document.readyState === 'complete'")

    def key(self, key, code=None, modifiers=0, text=None):
        base = dict(key=key, code=code or key, modifiers=modifiers,
                    windowsVirtualKeyCode={"Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40, "ArrowRight": 39}.get(key, ord(key[0].upper())))
        self.call("Input.dispatchKeyEvent", type="keyDown", **base, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **base)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def say(self, text, wait=True):
        self.js("document.getElementById('input').focus()")
        self.type(text)
        self.key("Enter", text="\r")
        if wait:
            self.idle()

    def idle(self, seconds=60):
        self.wait("live.size === 0", seconds)

    def click(self, selector):
        at = self.js(f"(() => {{ const n = document.querySelector({json.dumps(selector)}); n.scrollIntoView({{block: 'nearest'}}); "
                     "const r = n.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="none" if kind == "mouseMoved" else "left",
                      clickCount=int(kind != "mouseMoved"))

    def look(self, width=1280, height=860, dark=False, language="en-US", phone=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
                                                          {"name": "hover", "value": "none" if phone else "hover"}])
        self.call("Emulation.setUserAgentOverride", userAgent="test", acceptLanguage=language)

    def shot(self, path):
        time.sleep(0.35)
        with open(path, "wb") as f:
            f.write(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


checks = 0


def check(good, what):
    global checks
    checks += 1
    if not good:
        raise SystemExit(f"WRONG: {what}")


# ---- A server of our own: the page as ./serve gives it, and answers by what the question begins with.
ANSWERS = {}


class Fake(http.server.BaseHTTPRequestHandler):
    real = None
    asked = []
    protocol_version = "HTTP/1.1"

    def log_message(self, *a):
        pass

    def give(self, status, body, kind="application/json", headers=()):
        self.send_response(status)
        for name, value in [("Content-Type", kind), ("Content-Length", str(len(body))), *headers]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/":
            with urllib.request.urlopen(urllib.request.Request(self.real, headers={"Accept": "text/html"})) as r:
                kept = [(k, v) for k, v in r.headers.items() if k in ("Content-Security-Policy", "X-Content-Type-Options", "Referrer-Policy")]
                return self.give(200, r.read(), r.headers["Content-Type"], kept)
        if self.path == "/temml.js":
            with urllib.request.urlopen(self.real + "temml.js") as r:
                return self.give(200, r.read(), r.headers["Content-Type"], [("X-Content-Type-Options", "nosniff")])
        if self.path == "/health":
            return self.give(200, b"{}")
        if self.path == "/v1/models":
            return self.give(200, b'{"data": [{"id": "fake-<b>1</b>", "max_model_len": 32768}]}')
        self.give(404, b"{}")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/convert?name="):
            name = urllib.parse.unquote(self.path.split("=", 1)[1])
            if name == "huge.pdf":  # (the server allows 4 << 20 bytes)
                return self.give(200, json.dumps({"name": name, "text": "x " * 2050000}).encode())
            if name.endswith(".pdf"):
                time.sleep(0.3)
                return self.give(200, json.dumps({"name": name, "text": f"Of {len(body)} bytes."}).encode())
            return self.give(501, json.dumps({"error": {"message": name + ": there is no <b>pandoc</b>", "code": None}}).encode())
        body = json.loads(body)
        if self.path == "/tokenize":
            return self.give(200, json.dumps({"count": len(body["prompt"])}).encode())
        Fake.asked.append((body, self.headers.get("Authorization")))
        word = body["messages"][-1]["content"].split()[0]
        answer = ANSWERS[word]
        if isinstance(answer, tuple):
            status, message = answer
            return self.give(status, json.dumps({"error": {"message": message, "code": None}}).encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        pieces = answer if isinstance(answer, list) else [("content", answer[i:i + 4]) for i in range(0, len(answer), 4)]

        def event(choices, **more):
            self.wfile.write(b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n")

        try:
            event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
            for kind, text in pieces:
                if kind == "wait":
                    self.wfile.write(b":\n\n")
                    time.sleep(text)
                elif kind == "break":
                    return
                else:
                    event([{"index": 0, "delta": {kind: text}, "finish_reason": None}])
            event([{"index": 0, "delta": {}, "finish_reason": "stop"}])
            event([], usage={"prompt_tokens": 10, "completion_tokens": len(pieces), "total_tokens": 10 + len(pieces)})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass


HOSTILE = """<script>window.hit = 1</script><img src=x onerror="window.hit = 2"><svg onload="window.hit = 3">
<iframe srcdoc="<script>parent.hit = 4</script>"></iframe>

# <b>heading</b> <a href="javascript:window.hit=5">x</a>

[click](javascript:window.hit=6) [click](JaVaScRiPt:window.hit=7) [click](data:text/html,<script>window.hit=8</script>) [click](vbscript:hit)
[a](https://example.org/"onmouseover="window.hit=9) [b](https://example.org/'><script>window.hit=10</script>)
![x](https://evil.example/pixel.png) ![x](javascript:window.hit=11) <https://ok.example/<script>>

| <img src=x onerror=hit=12> | b |
|---|---|
| <script>window.hit = 13</script> | `<img src=x onerror=window.hit=14>` |

```html"><img src=x onerror=window.hit=15>
<script>window.hit = 16</script></code></pre><script>window.hit = 17</script>
```

- <details open ontoggle="window.hit=18">
> <style>* { display: none !important }</style>

&lt;script&gt;window.hit=19&lt;/script&gt; {{nonce}} ${window.hit=20} $<script>window.hit=21</script>$ \\(<img src=x onerror=window.hit=22>\\)
"""

MARKDOWN = """## Adding two vectors

Every thread adds **one** element; a *warp* is 32 of them, run in ~~locked~~ step. See `blockIdx` and [the guide](https://docs.nvidia.com/cuda/).

```cuda
// c = a + b, one element a thread
__global__ void add(const float* a, const float* b, float* c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i]; /* the last block
                                      may be larger */
}
```

1. Copy the vectors to the GPU
2. Launch `add<<<(n + 255) / 256, 256>>>`
   - 256 threads a block
   - the grid covers all *n*
3. Copy the sum back

| memory | scope | latency | size |
|:--|:--|--:|:-:|
| registers | thread | 1 cycle | 256 KB / SM |
| shared | block | 20–30 cycles | up to 228 KB |
| global | grid | 400–800 cycles | 80 GB |

> Coalesced: neighbours in a warp read neighbours in memory.

- [x] measured
- [ ] written up

The bandwidth is $B = 2 n s / t$, with \\(s\\) bytes an element. 中文**“加粗”**也可以。
"""


FORMULAS = r"""The energy is $E=mc^2$, half of it \(\frac{a}{b}\); a root is \[x = \sqrt{2}\], a sum $$y=\sum_{i=0}^{n} x_i$$ in a line.

$$\begin{aligned} \nabla L &= \frac{\partial L}{\partial w} \\ \text{softmax}(x)_i &= \frac{e^{x_i}}{\sum_j e^{x_j}} \end{aligned}$$

- It costs $5 and $6, not more. $O(n \log n)$, and `$not$` code

| shape | size |
|---|---|
| square | $x^2$ |
"""
# No formula: shown as they are. Links, names and classes; endless, huge and deep ones.
NO_FORMULAS = [r"\frac{a", r"\def\a{xx}\a\a", r"\newcommand{\b}{y}\b", r"\unheardof{x}", r"\href{javascript:window.hit=60}{x}", r"\url{javascript:window.hit=61}",
               r"\includegraphics{https://evil.example/x.png}", r"\class{hidden}{x}", r"\ref{a}", r"\def\a{\a\a}\a",
               "x" * 2001, r"\sqrt{" * 200 + "x" + "}" * 200]


def told_faults(browser):
    """What the page has said to the console, and policy violations."""
    faults = []
    for e in browser.events:
        if e.get("method") == "Runtime.exceptionThrown":
            faults.append(json.dumps(e["params"]["exceptionDetails"])[:500])
        if e.get("method") == "Log.entryAdded" and e["params"]["entry"]["level"] == "error":
            if e["params"]["entry"]["source"] != "network":
                faults.append(json.dumps(e["params"]["entry"])[:500])
    browser.events = [e for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    return faults


def last_text(browser):
    return browser.js("[...document.querySelectorAll('.assistant .md.text')].at(-1).innerText")


def with_serve(b, url, shots):
    b.look()
    b.open(url)
    b.wait("model.name === 'model.bin'")
    check(b.js("document.title") == "Warp", "the title")
    check(b.js("document.querySelector('#hello').offsetHeight > 200"), "the first sight")
    check(b.js("document.activeElement.id") == "input", "one can type at once")
    b.shot(shots + "/first-light.png")
    check(b.js("STARTERS.map(s => s[1])") == b.js("[...document.querySelectorAll('#starters button')].map(n => n.innerText)") != [], "the model's own questions")
    b.click("#starters button")
    b.idle()
    first = b.js("[current.nodes[0].text, STARTERS[0][1]]")
    check(first[0] == first[1] and len(last_text(b)) > 20, "the model's answer: " + last_text(b))
    check(re.search(r"\d+ tokens · [\d.]+ tok/s", b.js("document.querySelector('.stats').innerText")), "tokens a second")
    check(b.js("document.querySelectorAll('.chat').length") == 1, "it is in the list")
    check("Probabilities" in b.js("document.querySelector('.assistant .row').innerText"), "the probabilities are offered in words")
    b.click("#model")
    check("Adapters that the server has loaded are listed here." in b.js("document.getElementById('models').innerText"), "where a second model comes from")
    b.key("Escape")
    b.say("What is shared memory?")
    b.wait("pathOf(current).length === 4")
    b.shot(shots + "/conversation-light.png")

    before = last_text(b)
    b.reload()  # all is kept
    b.wait("document.querySelectorAll('.assistant').length === 2")
    check(last_text(b) == before, "what was said is there after a reload")

    b.js("document.querySelector('.assistant:last-child [aria-label=\"Answer again\"]').click()")
    b.idle()
    check(b.js("document.querySelector('.said:last-child .turns').innerText.trim()") == "2 / 2", "two versions of an answer")
    b.js("document.querySelector('.said:last-child [aria-label=\"Previous version\"]').click()")
    check(last_text(b) == before, "back to the first of them")

    b.key("ArrowUp")  # edits the last question
    b.wait("document.activeElement.closest('.user') !== null")
    b.js("document.activeElement.select()")
    b.type("What is a block?")
    b.key("Enter", text="\r")
    b.idle()
    check(b.js("[...document.querySelectorAll('.user .text')].map(n => n.innerText)") == [first[0], "What is a block?"], "an edited question")
    check(b.js("document.querySelectorAll('.user .turns').length") == 1, "the question as it was is still there")

    b.js("document.getElementById('new').click()")
    b.js("settings.sampling = {max_tokens: 4000, temperature: 2}; saveSettings(); window.plain = requestFor; "
         "requestFor = (...a) => ({...plain(...a), ignore_eos: true})")
    b.say("Write a very long text about everything", wait=False)
    b.wait("current && current.nodes[1].text.length > 0")
    b.shot(shots + "/writing.png")
    b.key("Escape")
    b.idle(2)
    check(b.js("current.nodes[1].finish") == "stopped", "Escape stops")
    end = time.time() + 3
    while "running{model_name=\"model.bin\"} 0" not in urllib.request.urlopen(url + "metrics").read().decode():
        check(time.time() < end, "the server stops, too")
        time.sleep(0.05)
    text = b.js("current.nodes[1].text")
    b.js("[...document.querySelectorAll('.note button')].find(n => n.innerText === 'Continue').click()")
    b.wait(f"current.nodes[1].text.length > {len(text)}")
    b.reload()  # in the middle of an answer
    b.wait("document.querySelectorAll('.assistant').length === 1")
    check(b.js("current.nodes[1].text").startswith(text), "an answer goes on where it was stopped")
    check(b.js("current.nodes[1].finish") == "broken" and len(b.js("current.nodes[1].text")) > len(text), "what was there at a reload is kept")
    b.js("settings.sampling = {}; saveSettings()")


def hostile(b, url, shots):
    ANSWERS["hostile"] = HOSTILE
    b.look()
    b.open(url)
    b.wait("model.name !== ''")
    check(b.js("document.querySelector('#model b') === null"), "a model's name is text")
    told_faults(b)
    b.events.clear()
    b.say("hostile <img src=x onerror=window.hit=30>")
    time.sleep(0.3)
    look = """[window.hit ?? null, document.querySelectorAll('main script, main iframe, main img, main style, main object, #log svg[onload], main form').length,
              [...document.querySelectorAll('#log *')].flatMap(n => [...n.attributes]).filter(a => /^on|^style$|^src/.test(a.name)).length,
              [...document.querySelectorAll('#log a')].map(a => a.href)]"""
    hit, nodes, attributes, links = b.js(look)
    check(hit is None, f"a script of the answer ran: {hit}")
    check(nodes == 0 and attributes == 0, "an answer made elements of its own")
    check(all(link.startswith(("https://", "mailto:")) for link in links), f"links: {links}")
    check("<script>window.hit = 1</script>" in last_text(b), "what looks like HTML is shown")
    b.reload()  # once more, from the store
    b.wait("document.querySelectorAll('.assistant').length === 1")
    check(b.js(look)[:3] == [None, 0, 0], "from the store")
    b.shot(shots + "/hostile.png")
    wanted = [e["params"]["request"]["url"] for e in b.events if e.get("method") == "Network.requestWillBeSent"]
    check(all(u.startswith((url, "data:", "about:")) for u in wanted), f"requests to others: {wanted}")

    # The policy itself: were there a hole, the browser would refuse.
    check(b.js("try { document.body.innerHTML = '<b>x</b>'; 'done' } catch { 'refused' }") == "refused", "trusted types")
    b.js("try { const s = document.createElement('div'); s.setAttribute('onclick', 'window.hit = 40'); document.body.append(s); s.click() } catch {}")
    check(b.js("window.hit ?? null") is None, "inline handlers do not run")
    check(b.js("fetch('https://example.org/').then(() => 'done', () => 'refused')") == "refused", "no other host can be asked")
    b.events.clear()
    # A store and a file of any content.
    b.js("""localStorage.setItem('warp:chat:x1', '{"id": "x1", "nodes": [{"parent": 5}]}'); localStorage.setItem('warp:chat:x2', '][');
            localStorage.setItem('warp:settings', '{"theme": 7, "system": ["x"], "sampling": "y", "language": "<b>"}')""")
    b.reload()
    b.wait("!!document.getElementById('send') && document.querySelectorAll('#starters button').length > 0 || document.querySelectorAll('.said').length > 0")
    check(told_faults(b) == [], "a damaged store")
    b.js("localStorage.removeItem('warp:settings'); localStorage.removeItem('warp:chat:x1'); localStorage.removeItem('warp:chat:x2')")


def formulas(b, url, shots):
    ANSWERS["none"], ANSWERS["formulas"] = "It costs $5 or $6.", FORMULAS
    ANSWERS["refused"] = "\n\n".join(f"$${tex}$$" for tex in NO_FORMULAS) + "\n\n$$\\begin{equation}\\label{send} y \\end{equation}$$"
    asked = lambda: [e for e in b.events if e["params"]["request"]["url"].endswith("/temml.js")]
    b.look()
    b.open(url)
    b.js("newChat()")
    b.events.clear()
    b.say("none")
    check(told_faults(b) == [] and not asked(), "without a formula nothing is loaded")
    b.say("formulas")
    b.wait("document.querySelectorAll('.md math').length === 7")
    check(told_faults(b) == [] and len(asked()) == 1, "the script is loaded once")
    check(b.js("['.md math[display=block]', 'mfrac', 'msqrt', 'munderover', 'mtable', 'td math', 'li math'].map(s => document.querySelectorAll(s).length)") ==
          [3, 3, 1, 1, 1, 1, 1], "what TeX became")
    check("It costs $5 and $6, not more." in last_text(b) and "$not$" in last_text(b), "money and code are no formulas")
    check(b.js("document.querySelector('.md math').parentNode.title") == "E=mc^2", "the TeX of a formula")
    once = b.js("[...document.querySelectorAll('.text.md')].at(-1).innerHTML")
    check(b.js("{ const v = new MarkdownView(); v.set(current.nodes[current.at].text, true); v.node.innerHTML }") == once, "piece by piece is as at once")
    b.shot(shots + "/formulas.png")
    b.look(dark=True)
    b.shot(shots + "/formulas-dark.png")
    b.look()
    b.js("newChat()")
    b.say("refused")
    got = b.js("[...document.querySelectorAll('.md .math')].map(n => n.querySelector('math') ? '' : n.innerText)")
    check(got == NO_FORMULAS + [""], f"refused formulas are shown as TeX: {got}")
    check(b.js("[document.getElementById('send').tagName, document.querySelectorAll('#log [id], #log [href], #log .hidden').length, window.hit ?? null]") ==
          ["BUTTON", 0, None], "a formula has no names, links or classes of its own")
    took = b.js("(() => { const v = new MarkdownView(), n = performance.now(); v.set('$' + '{'.repeat(900) + '}'.repeat(900) + '$ ', true);"
                "v.set('$x_1$ '.repeat(20000), true); v.set(Array.from({length: 2000}, (_, i) => `$x_{${i}}$ `).join(''), true);"
                "v.set('$$\\\\begin{matrix}' + '&'.repeat(1900) + '\\\\end{matrix}$$', true); return performance.now() - n })()")
    print(f"  four texts of slow formulas: {took:.0f} ms")
    check(took < 4000, "no formula takes forever")


def markdown(b, url, shots, folder):
    ANSWERS["markdown"] = [("reasoning_content", w + " ") for w in "The user wants a kernel. I show it with a table, briefly.".split()] + \
        [("wait", 0.3)] + [("content", MARKDOWN[i:i + 3]) for i in range(0, len(MARKDOWN), 3)]
    ANSWERS["slowly"] = [("reasoning_content", "Let me see. "), ("wait", 1.5), ("content", "Yes.")]
    ANSWERS["broken"] = [("content", "Half of an"), ("break", 0)]
    ANSWERS["busy"], ANSWERS["key"], ANSWERS["fault"] = (429, "x"), (401, "x"), (500, "<b>out of memory</b>")
    b.look()
    b.open(url)
    b.js("for (const k of Object.keys(localStorage)) localStorage.removeItem(k)")
    b.open(url)
    b.say("slowly please", wait=False)
    b.wait("!!document.querySelector('.thought summary .bars')")
    b.shot(shots + "/thinking.png")
    b.idle()
    check(b.js("document.querySelector('.thought').open") is False, "thoughts are folded")
    check(b.js("document.querySelector('.thought summary').innerText").strip().startswith("Thought for 1."), "how long it thought")
    b.click(".thought summary")
    b.wait("document.querySelector('.thought .md').innerText.includes('Let me see.')")
    b.js("newChat()")
    b.say("markdown of every kind, please: add two vectors")
    b.wait("document.querySelectorAll('.md math').length === 2")
    counts = b.js("""['h2', 'strong', 'em', 'del', 'pre code', 'table', 'td', 'ol > li', 'ol ul > li', 'blockquote', '.task', 'a', '.math', '.w', '.c', 'p code', 'tr:first-child .right']
                     .map(s => document.querySelectorAll('.text.md ' + s).length)""")
    check(counts == [1, 2, 2, 1, 1, 1, 12, 3, 2, 1, 2, 1, 2, 10, 4, 1, 2], f"what Markdown became: {counts}")
    code = b.js("document.querySelector('.text.md pre').innerText")
    check(code.startswith("// c = a + b") and "threadIdx.x;\n    if (i < n)" in code, "code is as it was written")
    once = b.js("document.querySelector('.text.md').innerHTML")
    check(b.js("{ const v = new MarkdownView(); v.set(current.nodes[current.at].text, true); v.node.innerHTML }") == once, "piece by piece is as at once")
    b.js("Object.defineProperty(navigator, 'clipboard', {value: {writeText: async t => { window.copied = t }}})")
    b.click(".block .bar button")
    b.wait("window.copied !== undefined")
    check(b.js("window.copied").startswith("// c = a + b") and b.js("window.copied").endswith("}"), "the copy button")
    b.js("document.getElementById('scroll').scrollTop = 0")
    b.shot(shots + "/markdown-light.png")
    b.look(dark=True)
    b.shot(shots + "/markdown-dark.png")
    b.look()
    for word, said in [("broken", "broke off"), ("busy", "busy"), ("fault", "<b>out of memory</b>"), ("key", "API key")]:
        b.js("newChat()")
        b.say(word)
        check(said in b.js("document.querySelector('.said:last-child .note').innerText"), f"{word}: {said}")
    b.shot(shots + "/key-wanted.png")
    b.js("settings.key = 'abc'; settings.system = 'Be brief.'; settings.sampling = {temperature: 0.5, max_tokens: 77}; saveSettings()")
    ANSWERS["key"] = "In."
    b.js("[...document.querySelectorAll('.note button')].find(n => n.innerText === 'Try again').click()")
    b.idle()
    body, authorization = Fake.asked[-1]
    check(authorization == "Bearer abc" and body["temperature"] == 0.5 and body["max_tokens"] == 77, "settings are sent")
    check(body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "key"}], f"messages: {body['messages']}")
    check(b.js("current.nodes.length") == 2, "a failed answer leaves no branch")

    # Out to a file, all deleted, and back.
    kept = b.js("Object.fromEntries(chats)")
    b.js("openSettings()")
    b.shot(shots + "/settings.png")
    b.js("[...document.querySelectorAll('#settings .acts button')].find(n => n.innerText === 'Export all').click()")
    path, end = os.path.join(folder, "Warp.jsonl"), time.time() + 5
    while not os.path.exists(path):
        check(time.time() < end, "the export was downloaded")
        time.sleep(0.05)
    lines = [json.loads(line) for line in open(path, encoding="utf-8")]
    check(len(lines) == 6 and lines[0]["messages"][0]["role"] == "user" and "abc" not in open(path).read().split('"'), "what is exported")
    remove = "[...document.querySelectorAll('#settings .danger')][0].click()"
    b.js(remove)
    check(b.js("chats.size") == 6, "it asks before it deletes all")
    b.js(remove)
    check(b.js("[chats.size, Object.keys(localStorage).filter(k => k.includes('chat')).length]") == [0, 0], "all deleted")
    b.js(f"importChats(new File([{json.dumps(open(path, encoding='utf-8').read())}], 'x.jsonl'))")
    check(b.js("Object.fromEntries(chats)") == kept, "an import gives back what was exported")
    b.js("importChats(new File(['{\"messages\": [{\"role\": \"user\", \"content\": \"<img src=x onerror=window.hit=50>\"}]}\\n{\"nodes\": [{\"parent\": 9}]}\\nnothing\\n'], 'x.jsonl'))")
    b.wait("chats.size === 7")
    b.reload()
    b.wait("typeof chats !== 'undefined' && chats.size === 7")
    check(b.js("window.hit ?? null") is None, "a file's text is text")
    check(b.js("[...chats.keys()].every(id => typeof id === 'string' && id !== 'undefined')"), "what had no id has got one")
    b.click(".chat .icon[aria-label=Delete]")
    b.wait("chats.size === 6")
    b.click("#toast button")
    check(b.js("chats.size") == 7, "undo")


def looks(b, url, shots):
    b.look(phone=True, width=390, height=800, dark=False)
    b.open(url)
    b.wait("typeof chats !== 'undefined'")
    b.js("newChat()")
    b.shot(shots + "/phone-first.png")
    wide = b.js("document.documentElement.scrollWidth <= innerWidth && document.body.scrollWidth <= innerWidth")
    check(wide, "no sideways scrolling on a phone")
    b.js("showChat([...chats.values()].find(c => c.title.startsWith('markdown')))")
    b.js("document.getElementById('scroll').scrollTop = 700")
    b.shot(shots + "/phone-light.png")
    b.js("toggleSide()")
    b.shot(shots + "/phone-list.png")
    b.look(language="zh-CN", dark=True)
    b.open(url)
    b.js("newChat()")
    check(b.js("document.documentElement.lang") == "zh-CN", "Chinese by the browser's language")
    b.shot(shots + "/first-chinese-dark.png")
    b.js("openSettings()")
    b.shot(shots + "/settings-chinese-dark.png")
    b.js("settings.language = 'en'; applyLook(); document.getElementById('settings').close()")
    check(b.js("document.getElementById('input').placeholder") == "Ask anything", "the language can be switched")
    b.js("settings.language = 'auto'; saveSettings(); applyLook()")


def long_answer(b, url, shots):
    """10,000 tokens in some seconds: the page must go on reacting."""
    words = []
    for n in range(1250):
        words += ["Word ", "**bold** ", f"number {n} ", "and `code` ", "in a ", "long ", "text. ", "\n\n" if n % 5 == 4 else "\n- item " if n % 7 == 3 else "more "]
    code = ["\n\n```c\n"] + [w for n in range(300) for w in (f"int x{n} = ", f"f({n}); ", "// why\n")] + ["```\n\nEnd of it."]
    pieces = [("content", w) for w in words + code]
    spread = []
    for i, p in enumerate(pieces):
        spread.append(p)
        if i % 20 == 19:
            spread.append(("wait", 0.01))
    ANSWERS["long"] = spread
    b.look()
    b.open(url)
    b.js("newChat()")
    b.js("""window.slow = []; { let last = performance.now(); const tick = () => { const now = performance.now(); slow.push(now - last); last = now; requestAnimationFrame(tick) };
            requestAnimationFrame(tick) } new PerformanceObserver(list => list.getEntries().forEach(e => (window.tasks ??= []).push(e.duration))).observe({type: 'longtask'})""")
    b.say("long answer", wait=False)
    b.wait("current && current.nodes[1].text.length > 20000", 60)
    b.js("document.getElementById('scroll').scrollTop -= 400")  # whoever reads above is left there
    b.wait("!stick")
    at = b.js("document.getElementById('scroll').scrollTop")
    time.sleep(0.5)
    check(b.js("document.getElementById('scroll').scrollTop") == at, "the reader's place stays")
    b.js("document.getElementById('down').click()")
    b.idle(120)
    slow = sorted(b.js("slow"))
    tasks = b.js("window.tasks || []")
    worst, p95 = slow[-1], slow[int(len(slow) * 0.95)]
    print(f"  10,000 tokens: {len(slow)} frames, 95% within {p95:.0f} ms, worst {worst:.0f} ms; {len(tasks)} tasks above 50 ms, longest {max(tasks, default=0):.0f} ms")
    check(p95 < 100 and worst < 600, "the page stays smooth")
    check("End of it." in last_text(b), "all of it is there")
    check(b.js("(() => { const s = document.getElementById('scroll'); return s.scrollHeight - s.scrollTop - s.clientHeight < 5 })()"), "the end is in sight")
    took = b.js("(() => { const v = new MarkdownView(), n = performance.now(); v.set('*a **b _c [d '.repeat(12000), true); v.set('`'.repeat(3000) + ' `` '.repeat(20000), true); "
                "v.set('> '.repeat(20000) + 'x', true); v.set('- '.repeat(20000), true); v.set('|a'.repeat(30000) + '\\n|-|', true); v.set('$a '.repeat(30000) + '\\\\('.repeat(20000), true);"
                "v.set('[](https://a.b/('.repeat(20000), true); v.set(('#'.repeat(5000) + ' '.repeat(5000)).repeat(4), true); v.set('- - - '.repeat(10000) + 'x', true);"
                "v.set('# a' + ' '.repeat(20000) + 'b', true); v.set('` ' + 'a'.repeat(100000) + '`', true); v.set('~'.repeat(100000) + '`', true);"
                "v.set('|a'.repeat(2000) + '\\n' + '|-'.repeat(2000) + '\\n|'.repeat(2000), true); return performance.now() - n })()")
    print(f"  thirteen texts made to be slow: {took:.0f} ms")
    check(took < 4000, "no text takes forever")


def make_adapter(folder, size=0.05):
    """A LoRA adapter of rank 1 for the queries of the default model: 8 layers of 256 to 256."""
    os.makedirs(folder)
    with open(folder + "/adapter_config.json", "w") as f:
        json.dump({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}, f)
    names = [f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_{x}.weight" for n in range(8) for x in "AB"]
    header = json.dumps({name: {"dtype": "F32", "shape": [1, 256] if "_A" in name else [256, 1], "data_offsets": [1024 * i, 1024 * (i + 1)]}
                         for i, name in enumerate(names)}).encode()
    with open(folder + "/adapter_model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header + struct.pack("<4096f", *([size, -size] * 2048)))
    return folder


def models(b, o, folder):
    """A server with two adapters: the list of models, each answer's model, and two answers beside each other."""
    server, url = serve(o, "--adapter", "first=" + make_adapter(folder + "/first"),
                        "--adapter", "second=" + make_adapter(folder + "/second"))
    try:
        b.look()
        b.open(url)
        b.js("store.clear()")
        b.reload()
        b.wait("models.length === 3")
        b.js("settings.sampling = {max_tokens: 40}; saveSettings()")
        b.say("What is a warp?")
        b.click("#model")
        check(b.js("[...document.querySelectorAll('#models .one')].map(n => n.innerText)") ==
              ["model.bin\nreads 1,024 tokens", "first\nadapter of model.bin", "second\nadapter of model.bin"], "the list of models")
        check(b.js("document.getElementById('models').innerText").count("Side by side") == 2, "the second answer is offered in words")
        b.js("document.querySelectorAll('#models button')[2].focus(); showModel()")
        check(b.js("document.activeElement.innerText") == "Side by side", "the list keeps the focus when it is drawn again")
        b.shot(o.shots + "/models.png")
        b.js("document.querySelectorAll('#models .one')[1].click()")
        check(b.js("document.querySelector('#models').classList.contains('hidden') && document.querySelector('#model').innerText") == "first", "the pill")
        b.say("What is a warp?")
        check(b.js("[...document.querySelectorAll('.assistant .stats')].map(n => n.innerText.split(' · ')[0])") == ["model.bin", "first"], "each answer says which gave it")
        b.click("#model")
        b.js("document.querySelector('#models .icon').click()")
        b.key("Escape")
        check(b.js("document.querySelector('#model').innerText") == "first | model.bin", "two of them")
        b.say("What is a block?")
        check(b.js("[...document.querySelectorAll('.beside .stats')].map(n => n.innerText.split(' · ')[0])") == ["first", "model.bin"], "two answers")
        b.shot(o.shots + "/beside.png")
        check(b.js("(() => { const [a, b] = [...document.querySelectorAll('.beside > .said')].map(n => n.getBoundingClientRect()); return a.top === b.top && b.left >= a.right })()"), "side by side")
        texts = b.js("[...document.querySelectorAll('.beside .md')].map(n => n.innerText)")
        b.reload()
        b.wait("document.querySelectorAll('.beside .md').length === 2")
        check(b.js("[...document.querySelectorAll('.beside .md')].map(n => n.innerText)") == texts, "they are kept")
        check(b.js("document.querySelectorAll('.beside > .on').length") == 1, "the conversation goes on from one of them")
        b.js("document.querySelector('.beside > :not(.on) [aria-label=\"Continue with this answer\"]').click()")
        check(b.js("[...document.querySelectorAll('.beside > .said')].map(n => n.classList.contains('on'))") == [False, True], "... or from the other")
        check(b.js("requestFor(current, current.at, true).messages.at(-1).content") == texts[1], "which the model is told")
        b.look(phone=True, width=390, height=800)
        check(b.js("(() => { const [a, b] = [...document.querySelectorAll('.beside > .said')].map(n => n.getBoundingClientRect()); return b.top >= a.bottom })()"), "one above the other on a phone")
        check(b.js("document.documentElement.scrollWidth <= innerWidth"), "no sideways scrolling on a phone")
        b.look()
    finally:
        server.kill()


def full_context(b, o):
    """A server with a small context: the oldest turns are dropped, as in the terminal."""
    server, url = serve(o, "--ctx", "384")
    try:
        b.look()
        b.open(url)
        b.js("store.clear()")
        b.reload()
        b.wait("model.limit === 384")
        b.js("settings.sampling = {max_tokens: 60, temperature: 0}; saveSettings(); window.plain = call; window.asked = [];"
             "call = (path, o) => { if (path === 'v1/chat/completions') asked.push(JSON.parse(o.body)); return plain(path, o); }")
        for n in range(6):
            b.say(f"What is a warp? Say it in other words, number {n}")
            check(b.js("current.nodes.at(-1).error ?? null") is None, "no error")
        counts, said = b.js("asked.map(r => r.messages.length)"), b.js("pathOf(current).map(i => ({role: current.nodes[i].role, content: current.nodes[i].text}))")

        def tokens(messages):
            body = json.dumps({"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}).encode()
            return json.load(urllib.request.urlopen(urllib.request.Request(url + "tokenize", body, {"Content-Type": "application/json"})))["count"]

        wanted, begin = [], 0  # the rule of Chat::fit: room for 60 tokens; if there is none, half of the context is freed
        for n in range(0, len(said), 2):
            if tokens(said[begin:n + 1]) > 384 - 60:
                while n > begin and tokens(said[begin:n + 1]) > 384 / 2:
                    begin += 2
            wanted.append(n + 1 - begin)
        check(counts == wanted and 0 < begin < len(said) - 2, f"messages sent: {counts}, by the rule {wanted}")
        dropped = b.js("droppedOf(current, pathOf(current))")
        check(dropped == begin, f"dropped: {dropped}, by the rule {begin}")
        check(b.js("asked.at(-1).messages[0].content") == f"What is a warp? Say it in other words, number {dropped // 2}", "the latest are sent")
        check(b.js("document.querySelectorAll('.said.gone').length") == dropped, "dropped turns are greyed")
        check(b.js(f"document.querySelector('#log').children[{dropped}].innerText") ==
              f"The context is full: the model no longer reads the oldest {dropped} messages.", "a line says it")
        b.js("document.getElementById('scroll').scrollTop = 0")
        b.shot(o.shots + "/full-context.png")
        b.reload()
        b.wait("document.querySelectorAll('.said.gone').length > 0")
        check(b.js("document.querySelectorAll('.said.gone').length") == dropped, "it is kept")
        b.say("a warp " * 300)
        check("longer than the model can read" in b.js("document.querySelector('.said:last-child .note').innerText"), "one question that is too long")
    finally:
        server.kill()


def odds(b, url, shots):
    """The probabilities of an answer's tokens are those that the server reports for the answer."""
    b.look()
    b.open(url)
    b.js("store.clear()")
    b.reload()
    b.wait("model.name === 'model.bin'")
    how = {"temperature": 0, "max_tokens": 60}
    b.js(f"settings.sampling = {json.dumps(how)}; saveSettings()")
    for question in ("What is a warp?", "什么是共享内存？"):
        b.say(question)
        b.js("[...document.querySelectorAll('.row [aria-label=\"Probabilities of the tokens\"]')].at(-1).click()")
        b.wait("!!document.querySelector('.said:last-child .odds')")
        text = b.js("current.nodes[current.at].text")
        check(b.js("document.querySelector('.said:last-child .odds').textContent") == text, "the tokens are the answer")
        history = b.js("requestFor(current, current.at, false).messages")
        body = json.dumps({"messages": history, **how, "logprobs": True, "top_logprobs": 6}).encode()
        told = json.load(urllib.request.urlopen(urllib.request.Request(url + "v1/chat/completions", body, {"Content-Type": "application/json"})))
        wanted = [w for w in told["choices"][0]["logprobs"]["content"] if w["token"] != "<|im_end|>"]
        got = b.js("oddsOf(current, current.at)")
        check(told["choices"][0]["message"]["content"] == text and len(got) == len(wanted), f"{len(got)} tokens, not {len(wanted)}")
        for g, w in zip(got, wanted):
            check(g["text"] == w["token"] and abs(g["p"] - math.exp(w["logprob"])) < 1e-3, f"{g}, not {w['token']} {w['logprob']}")
            others = [t for t in w["top_logprobs"] if t["token"] != w["token"]][:len(g["others"])]
            check(all(abs(p - math.exp(t["logprob"])) < 1e-3 for (_, p), t in zip(g["others"], others)), f"alternatives: {g}, not {w}")
    unlikely = "A warp is a group of 17 zebras 🙂 of one block. They execute an instruction together."
    b.js("newChat()")
    b.js(f"importChats(new File([JSON.stringify({{messages: [{{role: 'user', content: 'What is a warp?'}}, {{role: 'assistant', content: {json.dumps(unlikely)}}}]}})], 'x.json'))")
    b.wait("chats.size === 2")
    b.js("showChat([...chats.values()].find(c => c.nodes[1].text.includes('zebras'))); document.querySelector('.row [aria-label=\"Probabilities of the tokens\"]').click()")
    b.wait("!!document.querySelector('.odds')")
    spans = b.js("[...document.querySelectorAll('.odds > span')].map(n => [n.textContent, n.className])")
    check("".join(text for text, _ in spans) == unlikely, f"the tokens are the answer: {spans}")
    number = next(n for n, (text, _) in enumerate(spans) if "17" in text or text.endswith("1"))
    check(spans[number][1] == "p0" and [c for _, c in spans[:number]].count("p4") >= 4, f"colours: {spans}")
    b.js(f"document.querySelectorAll('.odds > span')[{number}].click()")
    said = b.js("document.querySelector('.panel').innerText")
    check(said.count("%") in (5, 6) and said.startswith("3\n"), "a token and its alternatives: " + said)
    first = b.js("document.querySelector('.panel').innerText")
    b.js("document.querySelector('.odds').focus()")
    b.key("ArrowRight")
    check(b.js("document.querySelector('.panel').innerText") != first and b.js("document.querySelectorAll('.odds .chosen').length") == 1, "the next token by a key")
    b.js("document.getElementById('scroll').scrollTop = 0")
    b.shot(shots + "/odds.png")
    check(b.js("{ const joined = joinBytes('a🙂b', [['a', .5], ['\\ufffd', .5], ['\\ufffd', .5], ['b', 1]].map(([text, p]) => ({text, p, others: []})));"
               "joined.map(j => j.text + j.p).join(' ') }") == "a0.5 🙂0.25 b1", "parts of a character")
    b.js("[...document.querySelectorAll('.row [aria-pressed=true]')].forEach(n => n.click())")
    check(b.js("document.querySelectorAll('.odds').length === 0 && document.querySelectorAll('.md.text:not(.hidden)').length") == 1, "back to Markdown")
    b.js("settings.sampling = {min_p: 0.1, frequency_penalty: 0.5, repetition_penalty: 1.1}; settings.stops = 'thread\\n\\nblock'; saveSettings(); newChat()")
    body = b.js("requestFor({nodes: [{parent: -1, role: 'user', text: 'a'}, {parent: 0, role: 'assistant', text: ''}], at: 1}, 1, false)")
    check((body["min_p"], body["frequency_penalty"], body["repetition_penalty"], body["stop"]) == (0.1, 0.5, 1.1, ["thread", "block"]), f"samplers: {body}")
    b.say("What is a warp?")
    check("thread" not in last_text(b) and b.js("current.nodes[1].finish") == "stop", "a stop string: " + last_text(b))
    b.js("settings.sampling = {}; settings.stops = ''; saveSettings()")


def search(b, url, shots):
    b.look()
    b.open(url)
    b.js("store.clear()")
    b.reload()
    b.wait("chats.size === 0")
    b.js("""importChats(new File(['{"messages": [{"role": "user", "content": "A first question"}, {"role": "assistant", "content": "Zebras have <b>stripes</b>."}, ' +
            '{"role": "user", "content": "Count"}, {"role": "assistant", "content": "' + '1\\\\n\\\\n'.repeat(200) + '"}]}\\n' +
            '{"messages": [{"role": "user", "content": "About zebras"}]}\\n{"messages": [{"role": "user", "content": "第三个问题"}]}'], 'x.jsonl'))""")
    b.wait("chats.size === 3")
    titles = lambda: sorted(b.js("[...document.querySelectorAll('.chat > button:first-child')].map(n => n.firstChild.data)"))
    check(b.js("document.querySelectorAll('.found').length") == 0, "without a search no places")
    check(b.js("titleOf('🙂'.repeat(40))") == "🙂" * 29 + "…", "a title has whole characters")
    b.key("k", "KeyK", modifiers=1)
    check(b.js("document.activeElement.id") == "find", "Alt K")
    b.type("ZEBRAS")
    check(titles() == ["A first question", "About zebras"], f"found: {titles()}")
    check(b.js("document.querySelector('.found').textContent") == "Zebras have <b>stripes</b>." and b.js("document.querySelector('.found b') === null"), "the place")
    b.shot(shots + "/search.png")
    b.type(" stripes")
    check(titles() == ["A first question"], "all words")
    b.js("$('find').value = 'question zebras'; showList()")
    check(titles() == ["A first question"], "words of several messages")
    b.js("$('find').value = 'zebras stripes'; showList()")
    b.key("ArrowDown")
    check(b.js("document.activeElement.firstChild.data") == "A first question", "to what is found")
    b.key("ArrowUp")
    b.key("Enter", text="\r")
    check(b.js("current.title") == "A first question", "Enter opens the first")
    check(b.js("(() => { const n = views.get(1).node.getBoundingClientRect(); return n.top < innerHeight && n.bottom > 0 })()"), "at the message")
    b.type("x")
    check(titles() == [] and "No conversation has these words." in b.js("document.getElementById('chats').innerText"), "nothing is found")
    b.key("Escape")
    check(len(titles()) == 3 and b.js("document.activeElement.id") == "input", "Escape ends the search")
    b.js("document.getElementById('find').focus()")
    b.type("第三")
    check(titles() == ["第三个问题"], "Chinese")


def files(b, url, shots):
    """Files that are dropped, pasted or chosen go with the question; others are refused by name."""
    ANSWERS["notes.md:"] = ANSWERS["again"] = "Seen."
    b.look()
    b.open(url)
    b.js("store.clear()")
    b.reload()
    b.wait("model.limit > 0")
    b.js("""{ const data = new DataTransfer();
               data.items.add(new File(['A zebra <img src=x onerror=window.hit=70>\\n```\\ncode\\n```\\n'], 'notes.md'));
               document.dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})) }""")
    b.wait("document.querySelectorAll('#files .file').length === 1")
    b.js("""{ const data = new DataTransfer(); data.items.add(new File(['second'], '<b>.txt'));
               document.getElementById('input').dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, cancelable: true})) }""")
    b.wait("document.querySelectorAll('#files .file').length === 2")
    for name, content, said in [("z.docx", "'PK\\x03\\x04\\0'", "there is no <b>pandoc</b>"), ("z.xlsx", "'PK\\x03\\x04\\0'", "no text"),
                                ("huge.pdf", "'x'", "may have 4 MB of text together"), ("utf16.txt", "new Uint8Array([255, 254, 65, 0])", "no text"), ("e.txt", "' '", "empty"), ("large.txt", "'x'.repeat(4000001)", "larger than 4 MB"), ("large.pdf", "'x'.repeat((32 << 20) + 1)", "larger than 33 MB")]:
        b.js(f"attach([new File([{content}], '{name}')])")
        b.wait(f"document.getElementById('toast').innerText.includes('{name}: ')")
        check(said in b.js("document.getElementById('toast').innerText"), f"{name} is refused")
    for kind in ("dragEnter", "dragOver", "drop"):
        b.call("Input.dispatchDragEvent", type=kind, x=600, y=300, data={"items": [], "files": [os.path.abspath("tests")], "dragOperationsMask": 1})
    b.wait("document.getElementById('toast').innerText.includes('tests: it cannot be read. Folders cannot be attached')")
    check(b.js("attached.length") == 2, "what is refused is not attached")
    # A PDF is converted by the server; a question waits for it.
    b.js("attach([new File(['%PDF-1.4'], 'x y.pdf')]); 0")  # (not awaited)
    b.wait("document.querySelectorAll('#files .bars').length === 1")
    check(b.js("document.getElementById('send').disabled"), "no question goes without a file that is being read")
    b.wait("attached.length === 3 && document.querySelectorAll('#files .bars').length === 0")
    check(b.js("attached[2]") == {"name": "x y.pdf", "text": "Of 8 bytes."}, "a PDF's text")
    b.shot(shots + "/files.png")
    for _ in range(2):
        b.js("document.querySelector('#files .file:last-child button').click()")
    b.say("Which animal?")
    body, _ = Fake.asked[-1]
    content = "notes.md:\n````\nA zebra <img src=x onerror=window.hit=70>\n```\ncode\n```\n````\n\nWhich animal?"
    check(body["messages"] == [{"role": "user", "content": content}], f"the message: {body['messages']}")
    check(b.js("attached.length === 0 && document.querySelectorAll('#files .file').length === 0"), "the next question has no files")
    b.reload()
    b.wait("document.querySelectorAll('.user .file').length === 1")
    b.click(".user .file summary")
    check("A zebra <img" in b.js("document.querySelector('.user .file pre').innerText") and b.js("window.hit ?? null") is None, "a file's text is text")
    b.shot(shots + "/file.png")
    check(json.loads(b.js("lineOf(current)"))["messages"][0]["content"] == content, "an export has it")
    b.say("again")
    check(Fake.asked[-1][0]["messages"][0]["content"] == content, "later questions have it, too")

    # A file that is too long for the context is looked up, in this question and in later ones.
    ANSWERS["Which"] = "Looked up."
    b.js("newChat(); model = {...model, limit: 1000}; attach([new File(['x '.repeat(2000)], 'long.txt')])")
    b.wait("attached.length === 1")
    check("4,000 tokens, looked up for each question" in b.js("document.querySelector('#files .file').innerText"), "it is said")
    b.shot(shots + "/long-file.png")
    b.say("Which animal?")
    b.say("again")
    for body, _ in Fake.asked[-2:]:
        check(body["documents"] == [{"title": "long.txt", "text": "x " * 2000}] and body["messages"][0]["content"] == "Which animal?", "a long file goes as a document")
    b.reload()
    b.wait("document.querySelectorAll('.user .file small').length === 1")
    check(b.js("requestFor(current, current.at, true).documents.length") == 1, "it is kept")
    check(b.js("cleanChat(JSON.parse(lineOf(current))).nodes[0].files[0].long") is True, "an export has it")
    b.js("model = {...model, limit: 1000}; attach([new File(['x '.repeat(1999999)], 'a.txt')])")
    b.wait("document.getElementById('toast').innerText.includes('a.txt: the long files of a conversation may have 4 MB of text together')")

    # A full store: what does not fit is not attached; a conversation that does not fit is said, and kept when there is room.
    b.js("newChat(); { let size = 1 << 22; for (let n = 0; size > 100; n++) try { store.setItem('fill' + n, 'x'.repeat(size)) } catch { size >>= 1 } }")
    b.js("attach([new File(['a zebra '.repeat(100)], 'zebra.txt')])")
    b.wait("document.getElementById('toast').innerText.includes('zebra.txt: this browser’s storage has no room')")
    b.say("again " + "and again " * 30)
    b.wait("!document.getElementById('unkept').classList.contains('hidden')")
    check("this conversation is lost when the page is closed" in b.js("document.getElementById('unkept').innerText"), "it is said that it is not kept")
    b.shot(shots + "/storage-full.png")
    b.js("for (const name of Object.keys(localStorage)) if (name.startsWith('fill')) store.removeItem(name)")
    b.say("again")
    check(b.js("document.getElementById('unkept').classList.contains('hidden') && !!store.getItem('warp:chat:' + current.id)"), "it is kept when there is room")
    b.js("store.clear()")


def pdf(text):
    """A PDF of one page with this text."""
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    parts = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
             b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
             b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream), b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"]
    out, at = b"%PDF-1.4\n", []
    for n, part in enumerate(parts):
        at.append(len(out))
        out += b"%d 0 obj%s endobj\n" % (n + 1, part)
    table = b"".join(b"%010d 00000 n \n" % n for n in at)
    return out + b"xref\n0 6\n0000000000 65535 f \n" + table + b"trailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % len(out)


def docx(paragraphs):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("[Content_Types].xml", '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"><Default Extension="rels" ContentType='
                   '"application/vnd.openxmlformats-package.relationships+xml"/><Override PartName="/word/document.xml" ContentType='
                   '"application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>')
        z.writestr("_rels/.rels", '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship Id="r" Type='
                   '"http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" Target="word/document.xml"/></Relationships>')
        z.writestr("word/document.xml", '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>' +
                   "".join(f"<w:p><w:r><w:t>{p}</w:t></w:r></w:p>" for p in paragraphs) + "</w:body></w:document>")
    return out.getvalue()


def drop(b, name, data):
    """Drops a file on the page and waits until it is read."""
    b.js(f"""{{ const data = new DataTransfer(); data.items.add(new File([Uint8Array.from(atob('{base64.b64encode(data).decode()}'), c => c.charCodeAt(0))], '{name}'));
             document.dispatchEvent(new DragEvent('drop', {{dataTransfer: data, bubbles: true, cancelable: true}})) }}""")
    b.wait("reading.length === 0")


def converted(b, url, shots):
    """PDF and DOCX through ./serve, pdftotext and pandoc: in the question if short, looked up if long."""
    b.look()
    b.open(url)
    b.js("store.clear()")
    b.reload()
    b.wait("model.name === 'model.bin'")
    b.js("settings.sampling = {max_tokens: 20, temperature: 0}; saveSettings(); window.plain = call; window.asked = [];"
         "call = (path, o) => { if (path === 'v1/chat/completions') asked.push(JSON.parse(o.body)); return plain(path, o); }")

    drop(b, "zoo.pdf", pdf("A zebra has stripes."))
    drop(b, "notes.docx", docx(["A lion has a mane."]))
    check(b.js("attached.map(f => [f.name, f.text.trim()])") == [["zoo.pdf", "A zebra has stripes."], ["notes.docx", "A lion has a mane."]], "the texts")
    drop(b, "broken.docx", b"PK\3\4")
    check(re.search(r"broken.docx: pandoc failed: exit status", b.js("document.getElementById('toast').innerText")), "a damaged file is refused")
    b.say("What has a zebra?")
    check(b.js("current.nodes[1].error ?? null") is None and b.js("asked[0].messages[0].content").startswith("zoo.pdf:\n```\nA zebra has stripes.\n```\n\nnotes.docx:\n"), "they go with the question")
    b.js("newChat()")
    drop(b, "book.docx", docx([f"Chapter {n} is about number {n} and its square {n * n}." for n in range(200)] + ["The okapi lives in the rain forest."]))
    check("looked up for each question" in b.js("document.querySelector('#files .file').innerText"), "a long one")
    b.shot(shots + "/converted.png")
    b.say("Where lives the okapi?")
    check(b.js("current.nodes[1].error ?? null") is None and "book.docx" not in b.js("asked[1].messages[0].content"), "a long one is not in the question")
    check(b.js("current.nodes[1].sources[0].file") == "book.docx" and "rain forest" in b.js("current.nodes[1].sources[0].text"), "its passage is the source")
    b.js("document.querySelectorAll('.sources').forEach(d => d.open = true)")
    b.shot(shots + "/converted-sources.png")
    b.say("And the square of number 77?")
    check("5929" in b.js("current.nodes[3].sources[0].text"), "the next question, too")
    b.js("[...document.querySelectorAll('.row [aria-label=\"Probabilities of the tokens\"]')].at(-1).click()")
    b.wait("!!document.querySelector('.odds')")
    b.js("settings.sampling = {}; saveSettings()")


def documents(b, o, folder):
    """A server with documents, one of which is hostile: the switch, the sources, and that they stay."""
    docs = os.path.join(folder, "docs")
    os.makedirs(docs)
    with open(docs + "/warps.md", "w") as f:
        f.write("# Warps\n\nA warp has 32 lanes. zebra\n")
    with open(docs + "/<img src=x onerror=hit=1>.md", "w") as f:
        f.write("# <script>window.hit = 2</script>\n\nzebra <img src=x onerror=window.hit=3>\n")
    server, url = serve(o, "--docs", docs, "--index", folder + "/page.index")
    try:
        b.open(url)
        b.js("store.clear()")
        b.reload()
        b.wait("model.name === 'model.bin'")
        check(b.js("document.getElementById('docs').getAttribute('aria-pressed')") == "true", "documents are used at first")
        b.say("Has a zebra lanes?")
        check(b.js("document.querySelectorAll('.sources > details').length") == 2, "two sources are shown")
        check("tok/s" not in b.js("document.querySelector('.stats').innerText"), "a quote has no speed")
        b.js("document.querySelectorAll('.sources, .sources > details').forEach(d => d.open = true)")
        said = b.js("document.querySelector('.sources').innerText")
        check("[1] warps.md:1 · Warps" in said and "A warp has 32 lanes." in said, "a source has file, line, heading and text: " + said)
        check("<script>window.hit = 2</script>" in said and not b.js("window.hit"), "what documents say is text")
        b.shot(o.shots + "/sources.png")
        b.reload()
        b.wait("document.querySelectorAll('.sources > details').length === 2")
        b.say("unheard-of")
        check(b.js("document.querySelectorAll('.sources').length") == 1 and "Nothing was found" in b.js("document.body.innerText"), "nothing found is said")
        b.click("#docs")
        check(b.js("document.getElementById('docs').getAttribute('aria-pressed')") == "false", "the switch")
        b.say("Has a zebra lanes?")
        check(b.js("document.querySelectorAll('.sources').length") == 1, "without documents there are no sources")
        b.reload()
        check(b.js("document.getElementById('docs').getAttribute('aria-pressed')") == "false", "the switch stays")
        b.look(dark=True, language="zh-CN", phone=True, width=390, height=780)
        b.reload()
        b.shot(o.shots + "/sources-phone.png")
        b.look()
    finally:
        server.kill()


def pictures(b, o, folder):
    """The pictures of docs/server.md."""
    server, url = serve(o, "--adapter", "my-adapter=" + make_adapter(folder + "/my-adapter", 0.4), "--ctx", "384")
    try:
        b.look(width=860, height=520)
        b.open(url)
        b.js("store.clear()")
        b.reload()
        b.wait("models.length === 2")
        chat = lambda question, answer: json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
        softmax = ("Softmax turns scores $x$ into probabilities: $$p_i = \\frac{e^{x_i - m}}{\\sum_{j=1}^{n} e^{x_j - m}}, \\quad m = \\max_j x_j$$\n\n"
                   "Without \\(m\\), $e^{x_i}$ overflows. Its gradient is \\[\\frac{\\partial p_i}{\\partial x_j} = p_i (\\delta_{ij} - p_j)\\]")
        b.js(f"importChats(new File([{json.dumps(chat('What is softmax?', softmax))} + '\\n' +"
             f"{json.dumps(chat('What is a warp?', 'A warp is a group of 17 threads of one block that execute an instruction together.'))}], 'x'))")
        b.wait("chats.size === 2")
        b.js("settings.sampling = {max_tokens: 60, temperature: 0}; saveSettings()")
        show = lambda word: b.js(f"showChat([...chats.values()].find(c => c.nodes[1].text.includes('{word}'))); $('toast').classList.add('hidden')")
        show("Softmax")
        b.wait("document.querySelectorAll('math').length === 5")
        b.js("document.getElementById('scroll').scrollTop = 0")
        b.shot(o.pictures + "/page-formulas.png")
        show("17 threads")
        b.click("[aria-label='Probabilities of the tokens']")
        b.wait("!!document.querySelector('.odds')")
        b.js("[...document.querySelectorAll('.odds > span')].find(n => n.className === 'p0').click()")
        b.shot(o.pictures + "/page-probabilities.png")
        b.js("toggleSide(); newChat(); chooseModel('beside', 'my-adapter'); settings.sampling.max_tokens = 45")
        b.say("What is shared memory?")
        b.click("#model")
        b.js("document.getElementById('scroll').scrollTop = 0")
        b.shot(o.pictures + "/page-models.png")
        b.js("settings.sampling.max_tokens = 60; openModels(false); chooseModel('beside', ''); newChat()")
        for question in ("What is a warp?", "What is a block?", "What is shared memory?", "What is a grid?", "What is CUDA?", "What is a kernel?"):
            b.say(question)
        b.js("document.querySelector('.note.line').scrollIntoView({block: 'center'})")
        b.shot(o.pictures + "/page-context.png")
        b.js("toggleSide(); newChat(); $('find').value = 'threads execute'; showList()")
        b.js("document.querySelector('.chat > button').click()")
        b.shot(o.pictures + "/page-search.png")
        b.js("$('find').value = ''; showList(); toggleSide(); newChat(); settings.sampling = {temperature: 0.7, min_p: 0.05, frequency_penalty: 0.2}; openSettings();"
             "document.getElementById('settings').scrollTop = 150; $('min_p')?.focus()")
        b.shot(o.pictures + "/page-settings.png")
        b.js("document.getElementById('settings').close(); settings.sampling = {temperature: 0}")
        book = ["A warp is a group of 32 threads of one block.", "Shared memory is on the multiprocessor; it is divided into 32 banks.",
                "Global memory is far from the multiprocessor: a read takes hundreds of cycles."] + [f"Exercise {n}: sum {n * 1000} numbers." for n in range(60)]
        drop(b, "gpu-book.docx", docx(book))
        b.say("How is shared memory divided?")
        b.js("document.querySelectorAll('.sources, .sources > details').forEach(d => d.open = true)")
        drop(b, "report.pdf", pdf("A zebra has stripes."))
        drop(b, "thesis.docx", docx(book * 3))
        b.js("document.getElementById('scroll').scrollTop = 0")
        b.shot(o.pictures + "/page-files.png")
    finally:
        server.kill()
    os.makedirs(folder + "/docs")
    for name, data in (("bread.pdf", pdf("Dough rises for two hours at 24 degrees.")), ("oven.docx", docx(["Heat the oven to 250 degrees, with a pan of water."]))):
        with open(f"{folder}/docs/{name}", "wb") as f:
            f.write(data)
    server, url = serve(o, "--title", "Bread Book", "--starter", "How long does dough rise?", "--starter", "How hot is the oven?",
                        "--docs", folder + "/docs", "--index", folder + "/bread.index")
    try:
        b.open(url)
        b.js("store.clear()")
        b.reload()
        b.wait("models.length === 1")
        b.shot(o.pictures + "/page-starters.png")
        b.click("#starters button")
        b.idle()
        b.say("How does a rainbow form?")
        b.js("toggleSide(); document.querySelectorAll('.sources, .sources > details').forEach(d => d.open = true)")
        b.look(width=860, height=740)
        b.js("document.getElementById('scroll').scrollTop = 0")
        b.shot(o.pictures + "/page-sources.png")
    finally:
        server.kill()


def serve(o, *options):
    """A server with our own model, and its address."""
    server = subprocess.Popen([o.serve, o.model, "--port", "0", *options], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    port = next(m[1] for m in (re.search(r"listening on http://127.0.0.1:(\d+)", line) for line in server.stderr) if m)
    threading.Thread(target=server.stderr.read, daemon=True).start()
    return server, f"http://127.0.0.1:{port}/"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shots", default="build/page")
    parser.add_argument("--serve", default="./serve")
    parser.add_argument("--model", default="data/tiny/model.bin")
    parser.add_argument("--only", default="", help="the parts with this in their name")
    parser.add_argument("--pictures", help="only write the pictures of docs/server.md there")
    o = parser.parse_args()
    os.makedirs(o.shots, exist_ok=True)
    server, Fake.real = serve(o)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = None
        try:
            fake = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fake)
            fake.daemon_threads = True
            threading.Thread(target=fake.serve_forever, daemon=True).start()
            own = f"http://127.0.0.1:{fake.server_port}/"
            browser = Browser(folder)
            if o.pictures:
                return pictures(browser, o, folder)
            for name, run in [("a conversation with ./serve", lambda: with_serve(browser, Fake.real, o.shots)),
                              ("models", lambda: models(browser, o, folder)),
                              ("a full context", lambda: full_context(browser, o)),
                              ("probabilities and samplers", lambda: odds(browser, Fake.real, o.shots)),
                              ("search", lambda: search(browser, Fake.real, o.shots)),
                              ("documents", lambda: documents(browser, o, folder)),
                              ("PDF and DOCX", lambda: converted(browser, Fake.real, o.shots)),
                              ("hostile answers", lambda: hostile(browser, own, o.shots)),
                              ("formulas", lambda: formulas(browser, own, o.shots)),
                              ("files", lambda: files(browser, own, o.shots)),
                              ("Markdown, errors, settings, export and import", lambda: markdown(browser, own, o.shots, folder)),
                              ("phone, Chinese", lambda: looks(browser, own, o.shots)),
                              ("10,000 tokens", lambda: long_answer(browser, own, o.shots))]:
                if o.only not in name:
                    continue
                print(name, flush=True)
                run()
                faults = told_faults(browser)
                check(faults == [], f"the console says: {faults}")
            print(f"{checks} checks, all good; pictures in {o.shots}")
        finally:
            if browser:
                browser.process.kill()
                browser.process.wait()
            server.kill()


if __name__ == "__main__":
    main()
