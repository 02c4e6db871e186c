#!/usr/bin/env python3
"""An endpoint for `teach` that needs no language model: its questions are the beginnings of sentences of the source,
its answers their rest and the next sentences. The same request has the same reply.

    python3 tests/reference/mock_writer.py 8009 &
    ./teach book.md --model data/tiny/model.bin --endpoint http://127.0.0.1:8009
"""
import http.server
import json
import re
import sys

MORE = {"easy": 1, "medium": 2, "hard": 4}  # sentences of an answer after the one that was asked about


def sentences(source):
    """Sentences of the paragraphs and list items: no headings, tables and code."""
    source = re.sub(r"```.*?(```|$)", "\n\n", source, flags=re.S)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\.) )", source):
        if not re.match(r"\s*(#|\||!|\[)", block):
            text = re.sub(r"\[([^]]*)\]\([^)]*\)|\*\*|^\s*(?:[-*]|\d+\.)\s", r"\1", " ".join(block.split()))
            found += [s for s in re.split(r"(?<=[.!?])\s+(?=[A-Z`\"])", text) if s.endswith((".", "!", "?"))]
    return found


def questions(prompt):
    asked = re.search(r"Write (\d+) \*\*(easy|medium|hard)\*\*.*\nSource:\n(.*)", prompt, re.S)
    if not asked:  # a chunk in Chinese
        return []
    count, difficulty = int(asked[1]), asked[2]
    all_of = sentences(asked[3])
    starts = [i for i, s in enumerate(all_of) if len(s.split()) >= 9]
    starts = starts[list(MORE).index(difficulty)::len(MORE)]  # each difficulty has sentences of its own
    chosen = [starts[k * len(starts) // count] for k in range(count)] if len(starts) >= count else starts
    items = []
    for i in chosen:
        words = all_of[i].split()
        half = max(4, len(words) // 2)
        answer = " ".join([" ".join(words[half:])] + all_of[i + 1:i + 1 + MORE[difficulty]])
        items.append({"question": "Continue: " + " ".join(words[:half]) + " ...", "answer": answer})
    return items


class Writer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def reply(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply({"object": "list", "data": [{"id": "mock"}]})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = next(m["content"] for m in request["messages"] if m["role"] == "user")
        content = json.dumps({"questions": questions(prompt)})
        self.reply({"model": "mock", "choices": [{"index": 0, "finish_reason": "stop",
                                                  "message": {"role": "assistant", "content": content}}]})

    def log_message(self, *words):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Writer).serve_forever()
