"""The official client's embeddings, and rankings, against a running server, by hand: pip install openai;
./serve tests/fixtures/embed --task embed --task rerank & python3 tests/reference/check_embeddings.py [URL [KEY]]
Every call that a user of the package makes; asserts, and a line at the end."""
import json
import math
import struct
import sys
import urllib.request

import openai

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
model = client.models.list().data[0].id
texts = ["What is a warp?", "A warp is a group of 32 threads that run together.", "", "线程束"]


def single(v):
    """The float32 numbers that were sent, as text or as bytes."""
    return v if isinstance(v, str) else list(struct.unpack(f"{len(v)}f", struct.pack(f"{len(v)}f", *v)))


def vectors(**how):
    answer = client.embeddings.create(model=model, **how)
    assert answer.object == "list" and [row.index for row in answer.data] == list(range(len(answer.data)))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
    return [single(row.embedding) for row in answer.data]


whole = vectors(input=texts)                            # the package asks for base64 unless it is told otherwise
assert whole == vectors(input=texts, encoding_format="float")
assert isinstance(vectors(input=texts[0], encoding_format="base64")[0], str)
assert whole == [vectors(input=text)[0] for text in texts]  # alone as together
assert all(abs(math.sqrt(sum(x * x for x in v)) - 1) < 1e-6 for v in whole)
short = vectors(input=texts, dimensions=7)
for a, b in zip(whole, short):
    length = math.sqrt(sum(x * x for x in a[:7]))
    assert len(b) == 7 and all(abs(x / length - y) < 1e-6 for x, y in zip(a, b))
assert len(vectors(input=[1, 2, 3])) == 1 and len(vectors(input=[[1, 2, 3], [4]])) == 2
assert len(vectors(input=["text"] * 1000)) == 1000      # what LangChain sends at once
vectors(input="a " * 5000, extra_body={"truncate_prompt_tokens": 64}, user="someone")

for error, how in [(openai.BadRequestError, dict(input=[])), (openai.BadRequestError, dict(input="a", dimensions=0)),
                   (openai.BadRequestError, dict(input="a", dimensions=10**6)), (openai.BadRequestError, dict(input=["a"] * 2049)),
                   (openai.BadRequestError, dict(input="a", encoding_format="hex")), (openai.BadRequestError, dict(input="7" * 70000)),
                   (openai.NotFoundError, dict(input="a", model="other"))]:
    try:
        client.embeddings.create(**{"model": model, **how})
        raise SystemExit(f"no {error.__name__} for {str(how)[:80]}")
    except error as e:
        assert e.body["message"] and "param" in e.body


def rerank(route, **body):
    request = urllib.request.Request(url.removesuffix("/v1") + route, json.dumps(body).encode(),
                                     {"Content-Type": "application/json", "Authorization": f"Bearer {key}"})
    return json.load(urllib.request.urlopen(request))


for route in ("/rerank", "/v1/rerank", "/v2/rerank"):
    ranking = rerank(route, model=model, query=texts[0], documents=texts)["results"]
    scores = [row["relevance_score"] for row in ranking]
    assert sorted(row["index"] for row in ranking) == [0, 1, 2, 3] and scores == sorted(scores, reverse=True)
    assert all(0 <= s <= 1 for s in scores) and all(row["document"]["text"] == texts[row["index"]] for row in ranking)
    best = rerank(route, query=texts[0], documents=[{"text": t} for t in texts], top_n=1, return_documents=False)["results"]
    assert best == [{"index": ranking[0]["index"], "relevance_score": scores[0]}]
print("embeddings and rankings: every call did what it should")
