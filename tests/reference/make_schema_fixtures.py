#!/usr/bin/env python3
"""Writes tests/fixtures/schema: parts of JSON-Schema-Test-Suite, as the source package of `jsonschema` holds it.

    pip download --no-deps --no-binary :all: jsonschema && tar xzf jsonschema-*.tar.gz
    make_schema_fixtures.py jsonschema-*/json
    make_schema_fixtures.py --check FILE      # with jsonschema installed: validates {"schema", "text"} lines

suite.jsonl   {"file", "schema", "valid": [texts], "invalid": [texts]} a line; a text is as json.dumps writes it
LICENSE       the suite's
"""
import json
import sys
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "fixtures" / "schema"
FILES = """additionalProperties allOf anyOf boolean_schema const contains default defs dependentRequired enum exclusiveMaximum
exclusiveMinimum if-then-else infinite-loop-detection items maxItems maxLength maximum minItems minLength minimum multipleOf not
oneOf pattern patternProperties prefixItems properties propertyNames ref required type unevaluatedProperties uniqueItems
optional/format/date optional/format/date-time optional/format/duration optional/format/email optional/format/hostname
optional/format/ipv4 optional/format/ipv6 optional/format/time optional/format/uuid optional/format/uri""".split()


def make(suite):
    OUT.mkdir(exist_ok=True)
    with open(OUT / "suite.jsonl", "w") as out:
        for name in FILES:
            for group in json.loads((suite / "tests/draft2020-12" / f"{name}.json").read_text()):
                if "remote" in json.dumps(group["schema"]) or "draft2020-12/schema" in json.dumps(group["schema"].get("$ref", "") if isinstance(group["schema"], dict) else ""):
                    continue  # of another document
                text = lambda t: json.dumps(t["data"], ensure_ascii=False)
                row = {"file": name, "schema": group["schema"],
                       "valid": [text(t) for t in group["tests"] if t["valid"]],
                       "invalid": [text(t) for t in group["tests"] if not t["valid"]]}
                line = json.dumps(row, ensure_ascii=False)
                if len(line) < 8000:
                    out.write(line + "\n")
    (OUT / "LICENSE").write_text((suite / "LICENSE").read_text())


def check(path):
    import jsonschema
    lines = [json.loads(line) for line in open(path)]
    for row in lines:
        jsonschema.Draft202012Validator(row["schema"]).validate(json.loads(row["text"]))
    print(f"jsonschema {jsonschema.__version__}: {len(lines)} texts are valid")


if __name__ == "__main__":
    check(sys.argv[2]) if sys.argv[1] == "--check" else make(Path(sys.argv[1]))
