"""The Python package of the C API. Usage: library.py MODEL QUESTION; prints the greedy answer."""
import sys
import threading

from qwen3 import Context, Model, Qwen3Error


def refused(call, words):
    try:
        call()
    except (Qwen3Error, TypeError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error about {words}")


model, question = Model(sys.argv[1], device="cpu"), sys.argv[2]
refused(lambda: Model("/nonexistent"), "/nonexistent")
refused(lambda: Model(sys.argv[1], device="abacus"), "abacus")
refused(lambda: model.ask(question, heat=1), "heat")
refused(lambda: model.ask("a\0b"), "NUL")
refused(lambda: model.ask(question, temperature=-1), "temperature")
refused(lambda: model.context(model.context_limit + 1), "limit")

ids = model.tokenize("warp 是什么？")
assert ids and max(ids) < model.vocabulary and model.detokenize(ids) == "warp 是什么？" and model.detokenize([]) == ""
assert len(model.tokenize("<|im_end|>", special=True)) == 1 < len(model.tokenize("<|im_end|>"))
assert len(model.prompt(question, system="Be brief.")) > len(model.prompt(question))

# An answer token by token, as a stream, and from two threads.
answer = model.ask(question, temperature=0)
context = Context(model, 512)
context.feed(model.prompt(question))
start = len(context)
scores = context.logits()
assert context.draw(temperature=0) == max(range(model.vocabulary), key=scores.__getitem__)
assert "".join(context.generate(temperature=0)) == answer
context.rewind(start)
assert "".join(context.generate(temperature=0, max_tokens=3)) == model.ask(question, temperature=0, max_tokens=3)
pieces = list(model.stream(question, temperature=0))
assert len(pieces) > 1 and "".join(pieces) == answer
for piece in context.stream(question, temperature=0):
    break  # ends the answer
assert len(context) < start + len(model.tokenize(answer))
said = []
threads = [threading.Thread(target=lambda: said.append(model.context(512).ask(question, temperature=0))) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert said == [answer, answer]
print(answer)
