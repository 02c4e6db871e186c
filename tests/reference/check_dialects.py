"""/v1/responses and /v1/messages by the packages that people use, unchanged: pip install openai anthropic langchain-openai; ./serve data/tiny/model.bin &
python3 tests/reference/check_dialects.py [URL [KEY]]. Last run with openai 3.54.0, anthropic 2.12.0 and langchain-openai 1.7.3. Asserts, and a line at
the end."""
import json
import sys
import anthropic
import openai
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
import langchain_openai

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
          "required": ["name", "age"], "additionalProperties": False}


def refused(error, param, call):
    try:
        call()
    except error as e:
        assert param in json.dumps(e.body), (param, e.body)
        return
    raise SystemExit(f"{param} was taken")


# ---- OpenAI's Responses
client = openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)
model = client.models.list().data[0].id
how = dict(model=model, max_output_tokens=40, temperature=1.0, extra_body={"seed": 7})
whole = client.responses.create(input="What is a warp?", instructions="Be brief.", **how)
assert whole.object == "response" and whole.status in ("completed", "incomplete") and whole.store is False
assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
assert whole.instructions == "Be brief." and whole.output[0].type == "message"
chat = client.chat.completions.create(model=model, messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a warp?"}],
                                      max_tokens=40, temperature=1.0, seed=7)
assert whole.output_text == chat.choices[0].message.content
events = list(client.responses.create(input="What is a warp?", instructions="Be brief.", stream=True, **how))
assert [e.sequence_number for e in events] == list(range(len(events)))
names = [e.type for e in events]
assert names[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
assert names[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
assert names[-1] in ("response.completed", "response.incomplete") and set(names[4:-4]) == {"response.output_text.delta"}
assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text == events[-1].response.output_text
with client.responses.stream(input=[{"role": "user", "content": [{"type": "input_text", "text": "What is a warp?"}]}], instructions="Be brief.", **how) as stream:
    last = list(stream)[-1]  # (get_final_response() knows only answers that are complete)
    assert last.response.output_text == whole.output_text
again = client.responses.create(input=[{"role": "user", "content": "a"}, *[item.model_dump(exclude_none=True) for item in whole.output],
                                       {"role": "user", "content": "b"}], **how)
assert again.usage.input_tokens > 10
thought = client.responses.create(input="a", reasoning={"effort": "high"}, model=model, max_output_tokens=30, extra_body={"seed": 1})
assert thought.status in ("completed", "incomplete")

tool = {"type": "function", "name": "person", "description": "Notes a person.", "parameters": PERSON, "strict": True}
called = 0
for choice in ["required", {"type": "function", "name": "person"}]:
    asked = dict(model=model, input="a", tools=[tool], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=250, extra_body={"seed": 3})
    response = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        seen = list(stream)
        final = seen[-1].response
    (call,), (streamed,) = response.output, final.output
    assert (call.type, call.name, call.arguments) == ("function_call", streamed.name, streamed.arguments)
    assert "".join(e.delta for e in seen if e.type == "response.function_call_arguments.delta") == call.arguments
    if response.status == "completed":
        assert set(json.loads(call.arguments)) == {"name", "age"}
        called += 1
        after = client.responses.create(model=model, max_output_tokens=5, tools=[tool], tool_choice="none", input=[
            {"role": "user", "content": "a"}, call.model_dump(exclude_none=True), {"type": "function_call_output", "call_id": call.call_id, "output": "done"}])
        assert after.output == [] or after.output[0].type == "message"
assert called
form = client.responses.create(model=model, input="a", max_output_tokens=250, text={"format": {"type": "json_schema", "name": "p", "schema": PERSON, "strict": True}},
                               extra_body={"seed": 5})
if form.status == "completed":
    assert set(json.loads(form.output_text)) == {"name", "age"}
for field, value in [("previous_response_id", "resp_1"), ("store", True), ("background", True), ("conversation", "c"), ("include", ["reasoning.encrypted_content"]),
                     ("truncation", "auto"), ("max_output_tokens", 10**8), ("temperature", 5), ("tools", [{"type": "web_search"}])]:
    refused(openai.BadRequestError, "input" if field == "max_output_tokens" else field,
            lambda: client.responses.create(**{"model": model, "input": "a", field: value}))
refused(openai.NotFoundError, "model", lambda: client.responses.create(model="other", input="a"))

# ---- LangChain, on both of OpenAI's routes
for responses in [False, True]:
    llm = ChatOpenAI(model=model, base_url=url + "/v1", api_key=key, max_retries=0, use_responses_api=responses, max_tokens=200, seed=None, temperature=1.0)
    said = llm.invoke([HumanMessage("What is a warp?")])
    assert isinstance(said, AIMessage) and said.text and said.usage_metadata["output_tokens"] > 0
    streamed = None
    for chunk in llm.stream("What is a warp?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.text

    def person(name: str, age: int) -> str:
        "Notes a person."
        return "noted"

    bound = llm.bind_tools([person], tool_choice="person")
    message = bound.invoke("Who?")
    if message.tool_calls:
        (call,) = message.tool_calls
        assert call["name"] == "person" and "age" in call["args"]
        assert llm.bind_tools([person]).invoke([HumanMessage("Who?"), message, ToolMessage("noted", tool_call_id=call["id"])]) is not None
    structured = llm.with_structured_output(PERSON | {"title": "Person"}, method="json_schema", include_raw=True).invoke("Who?")
    if structured["parsed"]:
        assert set(structured["parsed"]) == {"name", "age"}

# ---- Anthropic's Messages
claude = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
how = dict(model=model, max_tokens=40, system="Be brief.", messages=[{"role": "user", "content": "What is a warp?"}], extra_body={"seed": 7, "temperature": 1.0})
message = claude.messages.create(**how)
assert message.type == "message" and message.role == "assistant" and message.stop_reason in ("end_turn", "max_tokens")
assert message.content[0].text == chat.choices[0].message.content
counted = claude.messages.count_tokens(model=model, system="Be brief.", messages=how["messages"])
assert counted.input_tokens == chat.usage.prompt_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
events = list(claude.messages.create(**how, stream=True))
names = [e.type for e in events]
assert names[:2] == ["message_start", "content_block_start"] and names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
assert set(names[2:-3]) == {"content_block_delta"}
assert "".join(e.delta.text for e in events if e.type == "content_block_delta") == message.content[0].text
with claude.messages.stream(**how) as stream:
    assert "".join(stream.text_stream) == message.content[0].text
    final = stream.get_final_message()
    assert final.stop_reason == message.stop_reason and final.usage.output_tokens == message.usage.output_tokens
letter = message.content[0].text[3]
stopped = claude.messages.create(**how, stop_sequences=[letter])
assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == letter and letter not in "".join(b.text for b in stopped.content)
begun = claude.messages.create(model=model, max_tokens=5, messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "A warp is"}])
assert begun.usage.output_tokens <= 5
thinking = claude.messages.create(model=model, max_tokens=30, messages=how["messages"], thinking={"type": "adaptive"}, extra_body={"seed": 1})
assert all(b.type in ("thinking", "text") for b in thinking.content)
tools = [{"name": "person", "description": "Notes a person.", "input_schema": PERSON, "cache_control": {"type": "ephemeral"}}]
called = 0
for choice in [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "person"}]:
    asked = dict(model=model, max_tokens=250, messages=how["messages"], tools=tools, tool_choice=choice, extra_body={"seed": 3})
    message = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    if message.stop_reason == "tool_use":
        called += 1
        (use,), (streamed,) = message.content, final.content
        assert use.name == "person" and set(use.input) == {"name", "age"} and use.input == streamed.input
        after = claude.messages.create(model=model, max_tokens=5, tools=tools, messages=how["messages"] + [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "noted"}, {"type": "text", "text": "And?"}]}])
        assert after.stop_reason
assert called
form = claude.messages.create(model=model, max_tokens=250, messages=how["messages"], output_config={"format": {"type": "json_schema", "schema": PERSON}})
if form.stop_reason == "end_turn":
    assert set(json.loads(form.content[0].text)) == {"name", "age"}
for field, value in [("thinking", {"type": "enabled", "budget_tokens": 1024}), ("max_tokens", 5000), ("container", "c"), ("output_config", {"effort": "low"}),
                     ("messages", [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}])]:
    refused(anthropic.BadRequestError, "messages" if field == "max_tokens" else field,
            lambda: claude.messages.create(**{"model": model, "max_tokens": 5, "messages": how["messages"], field: value}))
refused(anthropic.NotFoundError, "model", lambda: claude.messages.create(model="other", max_tokens=5, messages=how["messages"]))
if len(sys.argv) > 2:
    refused(anthropic.AuthenticationError, "authentication_error",
            lambda: anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(**how))
print(f"openai {openai.__version__}, anthropic {anthropic.__version__}, langchain-openai {langchain_openai.__version__}: all good with {model} at {url}")
