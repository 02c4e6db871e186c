"""The official client against a running server, by hand: pip install openai; ./serve MODEL & python3 tests/reference/check_openai.py
[URL [KEY]]. Every call that a user of the package makes; asserts, and a line at the end."""
import json
import sys
import typing
import openai
import pydantic
try:
    import jsonschema
except ImportError:
    jsonschema = None

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

scored = client.completions.create(model=model, prompt=["A warp is", [5, 6]], max_tokens=0, echo=True, logprobs=2).choices[0]
assert scored.text == "A warp is" == "".join(scored.logprobs.tokens) and scored.logprobs.text_offset[0] == 0
assert scored.logprobs.token_logprobs[0] is scored.logprobs.top_logprobs[0] is None and max(scored.logprobs.token_logprobs[1:]) < 0

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
# Forms: every answer is validated, by jsonschema too where it is installed.
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
                                           "kind": {"enum": ["a", "b", 3, None]}, "when": {"type": "string", "format": "date"}},
          "required": ["name", "age", "kind", "when"], "additionalProperties": False}
SCHEMAS = [PERSON, {"type": "array", "items": {"type": ["string", "null", "boolean"], "maxLength": 6}, "minItems": 1, "maxItems": 4},
           {"anyOf": [{"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25}, {"const": {"a": [1, "x"]}}]},
           {"type": "object", "properties": {"id": {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$", }}, "additionalProperties": {"type": "boolean"}},
           {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}},
                                                 "required": ["v", "next"]}}}]
complete = 0
for schema in SCHEMAS:
    for seed in range(8):
        form = dict(model=model, messages=messages, max_tokens=250, temperature=1.0, seed=seed, response_format={
            "type": "json_schema", "json_schema": {"name": "form", "strict": True, "schema": schema}})
        answer = client.chat.completions.create(**form).choices[0]
        joined = "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**form, stream=True) if c.choices)
        assert joined == answer.message.content
        if answer.finish_reason == "length":
            continue
        value = json.loads(answer.message.content)
        complete += 1
        if jsonschema:
            jsonschema.Draft202012Validator(schema).validate(value)
assert complete > 10, complete
for extra, good in [({"structured_outputs": {"choice": ["yes", "no"]}}, lambda s: s in ("yes", "no")),
                    ({"structured_outputs": {"regex": "[0-9]{4}"}}, lambda s: len(s) == 4 and s.isdigit()),
                    ({"structured_outputs": {"grammar": 'root ::= "<" [a-c]{2} ">"'}}, lambda s: len(s) == 4 and s[0] == "<")]:
    assert good(client.chat.completions.create(**how, extra_body=extra).choices[0].message.content)


class Point(pydantic.BaseModel):
    x: int
    label: typing.Literal["left", "right"]


parsed = client.chat.completions.parse(model=model, messages=messages, seed=1, response_format=Point).choices[0].message.parsed
assert isinstance(parsed, Point)

# Tools, whole and streamed.
tools = [{"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
         for name, schema, strict in [("person", PERSON, True), ("now", {"type": "object", "properties": {}}, False)]]
for choice in ["required", {"type": "function", "function": {"name": "person"}}]:
    asked = dict(model=model, messages=messages, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=250, seed=3)
    call = client.chat.completions.create(**asked).choices[0]
    if call.finish_reason == "tool_calls":
        (one,) = call.message.tool_calls
        arguments = json.loads(one.function.arguments)
        assert call.message.content is None and one.function.name in ("person", "now")
        if jsonschema and one.function.name == "person":
            jsonschema.Draft202012Validator(PERSON).validate(arguments)
        with client.chat.completions.stream(**asked) as stream:
            (again,) = stream.get_final_completion().choices[0].message.tool_calls
        assert (again.function.name, again.function.arguments) == (one.function.name, one.function.arguments)
        after = messages + [call.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": one.id, "content": "done"}]
        assert client.chat.completions.create(model=model, messages=after, tools=tools, tool_choice="none", max_tokens=5).choices[0].message.tool_calls is None
try:
    client.chat.completions.create(model=model, messages=messages, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}})
    raise SystemExit("a schema that cannot be kept was taken")
except openai.BadRequestError as e:
    assert e.body["param"] == "response_format" and "not is not supported" in e.body["message"]

if len(sys.argv) > 2:
    try:
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
        raise SystemExit("a wrong key was let in")
    except openai.AuthenticationError:
        pass
print(f"openai {openai.__version__}: all good with {model} at {url}")
