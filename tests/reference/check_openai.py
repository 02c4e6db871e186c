"""The official client against a running server, by hand: pip install openai; ./serve MODEL & python3 tests/reference/check_openai.py
[URL [KEY]]. Every call that a user of the package makes; asserts, and a line at the end."""
import sys
import openai

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = openai.OpenAI(base_url=url, api_key=sys.argv[2] if len(sys.argv) > 2 else "none", max_retries=0)
model = client.models.list().data[0].id
assert client.models.retrieve(model).id == model
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a warp?"}]
how = dict(model=model, messages=messages, max_tokens=24, temperature=1.0, seed=7)

whole = client.chat.completions.create(**how)
text = whole.choices[0].message.content
assert whole.object == "chat.completion" and whole.choices[0].message.role == "assistant"
assert whole.choices[0].finish_reason in ("stop", "length")
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

chunks = list(client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
assert chunks[0].choices[0].delta.role == "assistant"
assert len({c.id for c in chunks}) == 1
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [whole.choices[0].finish_reason]
assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

told = client.chat.completions.create(**how, logprobs=True, top_logprobs=3, n=2)
assert told.choices[0].message.content == text and len(told.choices) == 2
assert "".join(t.token for t in told.choices[0].logprobs.content) == text
assert all(len(t.top_logprobs) == 3 for t in told.choices[0].logprobs.content)

with client.chat.completions.stream(**how) as stream:  # the package's own helper joins the chunks
    assert "".join(event.delta for event in stream if event.type == "content.delta") == text

thinking = client.chat.completions.create(**how, extra_body={"chat_template_kwargs": {"enable_thinking": True}, "top_k": 5, "min_p": 0.01,
                                                             "repetition_penalty": 1.1})
assert thinking.usage.prompt_tokens < whole.usage.prompt_tokens
limited = client.chat.completions.create(model=model, messages=messages, max_completion_tokens=3, stop=["\n"], logit_bias={"5": -100},
                                         presence_penalty=0.5, frequency_penalty=0.5, user="someone")
assert limited.usage.completion_tokens <= 3

done = client.completions.create(model=model, prompt=["one", "two"], max_tokens=5, logprobs=2, seed=1)
assert len(done.choices) == 2 and done.object == "text_completion"
assert "".join(done.choices[0].logprobs.tokens) == done.choices[0].text
assert "".join(c.choices[0].text for c in client.completions.create(model=model, prompt="one", max_tokens=5, seed=1, stream=True)) == done.choices[0].text
client.completions.create(model=model, prompt=[1, 2, 3], max_tokens=1)

for error, arguments in [(openai.BadRequestError, dict(how, temperature=5)), (openai.NotFoundError, dict(how, model="other")),
                         (openai.BadRequestError, dict(how, messages=[])), (openai.BadRequestError, dict(how, max_tokens=10**8))]:
    try:
        client.chat.completions.create(**arguments)
        raise SystemExit(f"no {error.__name__} for {arguments}")
    except error as e:
        assert e.body["message"] and "param" in e.body
if len(sys.argv) > 2:
    try:
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
        raise SystemExit("a wrong key was let in")
    except openai.AuthenticationError:
        pass
print(f"openai {openai.__version__}: all good with {model} at {url}")
