"""Files and batches by the package `openai`, unchanged: pip install openai; ./serve data/tiny/model.bin --files /tmp/files &
python3 tests/reference/check_batches.py [URL [KEY]]. Last run with openai 3.54.0. Asserts, and a line at the end."""
import io
import json
import sys
import time
import openai

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = openai.OpenAI(base_url=url, api_key=sys.argv[2] if len(sys.argv) > 2 else "none", max_retries=0)
model = client.models.list().data[0].id


def refused(error, call):
    try:
        call()
    except error:
        return
    raise SystemExit(f"no {error.__name__}")


def wait(batch, *states):
    for _ in range(600):
        if client.batches.retrieve(batch.id).status in states:
            return client.batches.retrieve(batch.id)
        time.sleep(0.1)
    raise SystemExit(f"{batch.id} is {client.batches.retrieve(batch.id).status}")


def body(i):
    return {"model": model, "messages": [{"role": "user", "content": f"What is {i}?"}], "max_tokens": 8, "seed": i}


requests = [{"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body(i)} for i in range(20)]
requests.append({"custom_id": "bad", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}})
data = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in requests).encode()
file = client.files.create(file=("requests \"1\" 试.jsonl", io.BytesIO(data)), purpose="batch")
assert file.object == "file" and file.bytes == len(data) and file.purpose == "batch" and file.filename.startswith("requests")
assert client.files.retrieve(file.id) == file and client.files.content(file.id).read() == data
assert file.id in [f.id for f in client.files.list()] and [f.id for f in client.files.list(limit=1)]
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"for": "check"})
assert batch.status in ("validating", "in_progress") and batch.metadata == {"for": "check"}
done = wait(batch, "completed")
assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (21, 20, 1)
answers = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
assert [a["custom_id"] for a in answers] == [f"r{i}" for i in range(20)]
for i in (0, 7, 19):
    assert answers[i]["response"]["body"]["choices"][0]["message"]["content"] == client.chat.completions.create(**body(i)).choices[0].message.content
(error,) = [json.loads(line) for line in client.files.content(done.error_file_id).text.splitlines()]
assert error["custom_id"] == "bad" and error["response"]["status_code"] == 400
assert batch.id in [b.id for b in client.batches.list(limit=5)]
refused(openai.ConflictError, lambda: client.batches.cancel(batch.id))
long = "".join(json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions",
                           "body": {"model": model, "prompt": "a", "max_tokens": 400, "ignore_eos": True}}) + "\n" for i in range(400)).encode()
other = client.files.create(file=long, purpose="batch")
running = client.batches.create(input_file_id=other.id, endpoint="/v1/completions", completion_window="24h")
refused(openai.ConflictError, lambda: client.files.delete(other.id))
assert client.batches.cancel(running.id).status == "cancelling"
assert wait(running, "cancelled").request_counts.completed < 400
for f in [file.id, other.id, done.output_file_id, done.error_file_id]:
    assert client.files.delete(f).deleted
refused(openai.NotFoundError, lambda: client.files.retrieve(file.id))
refused(openai.BadRequestError, lambda: client.files.create(file=b"x", purpose="assistants"))
refused(openai.BadRequestError, lambda: client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"))
print(f"openai {openai.__version__}: files and batches are good with {model} at {url}")
