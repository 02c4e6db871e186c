#!/usr/bin/env python3
"""Which fields of requests, and which of their values, do the current packages type that docs/server.md does not name?

    pip install openai anthropic
    check_fields.py [CHECKOUT_OF_VLLM]

Reads the packages' sources, not the network. Prints a line for each and exits with 1 if there are any. Last run with openai
3.57.0 and anthropic 2.14.0."""
import ast
import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def package(name):
    return Path(importlib.util.find_spec(name).origin).parent


def members(path, names):
    """{field: values of its Literal} of these classes and of those that they are made of, if they are in the same file."""
    tree = ast.parse(path.read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found = {}
    for name in names:
        node = classes[name]
        found |= members(path, [b.id for b in node.bases if isinstance(b, ast.Name) and b.id in classes])
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and not line.target.id.startswith("_"):
                found[line.target.id] = [c.value for sub in ast.walk(line.annotation) if isinstance(sub, ast.Subscript)
                                         and getattr(sub.value, "id", "") == "Literal" for c in ast.walk(sub.slice)
                                         if isinstance(c, ast.Constant) and isinstance(c.value, str)]
    return found


def literals(path):
    return re.findall(r'"([^"]+)"', re.search(r"Literal\[(.*?)\]", path.read_text(), re.S)[1])


def routes(vllm):
    o, a = package("openai") / "types", package("anthropic") / "types"
    chat = members(o / "chat/completion_create_params.py", ["CompletionCreateParamsBase"])
    chat["reasoning_effort"] = literals(o / "shared/reasoning_effort.py")
    yield "Fields", chat
    yield "Fields", members(o / "completion_create_params.py", ["CompletionCreateParamsBase"])
    if vllm:
        for kind, name in (("chat_completion", "ChatCompletionRequest"), ("completion", "CompletionRequest")):
            yield "Fields", members(vllm / f"vllm/entrypoints/openai/{kind}/protocol.py", [name])
    response = members(o / "responses/response_create_params.py", ["ResponseCreateParamsBase"])
    yield "Responses and Messages", response
    yield "Responses and Messages", members(o / "shared_params/reasoning.py", ["Reasoning"])
    yield "Responses and Messages", members(o / "responses/response_text_config_param.py", ["ResponseTextConfigParam"])
    yield "Responses and Messages", members(a / "message_create_params.py", ["MessageCreateParamsBase"])
    yield "Responses and Messages", members(a / "output_config_param.py", ["OutputConfigParam"])
    yield "Vectors and rankings", members(o / "embedding_create_params.py", ["EmbeddingCreateParams"])


def main():
    page = (ROOT / "docs/server.md").read_text()
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page, re.S | re.M))
    new = set()
    for section, fields in routes(Path(sys.argv[1]) if len(sys.argv) > 1 else None):
        rows = [line for line in sections[section].splitlines() if line.startswith("|")]
        for field, values in fields.items():
            named = [row for row in rows if re.search(rf"`([a-z_]+\.)?{field}[.`]", row)]
            if not named:
                new.add(f"{section}: {field}")
            done = [row for row in named if row.split("|")[2].strip().startswith("done")]
            if not done or field == "model" or any("as `" in row for row in done):
                continue  # refused; or all values pass, or they are those of another field
            for value in values:
                if not any(f"`{value}`" in row for row in done):
                    new.add(f"{section}: {field}: {value}")
    print(*sorted(new), sep="\n")
    sys.exit(bool(new))


if __name__ == "__main__":
    main()
