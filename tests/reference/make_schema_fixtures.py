#!/usr/bin/env python3
"""Writes tests/fixtures/schema: parts of JSON-Schema-Test-Suite, as the source package of `jsonschema` holds it.

    pip download --no-deps --no-binary :all: jsonschema && tar xzf jsonschema-*.tar.gz
    make_schema_fixtures.py jsonschema-*/json

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
                schema = group["schema"]
                ref = schema.get("$ref", "") if isinstance(schema, dict) else ""
                if "remote" in json.dumps(schema) or "draft2020-12/schema" in ref:
                    continue  # of another document
                row = {"file": name, "schema": schema}
                for kind in (True, False):
                    row["valid" if kind else "invalid"] = [json.dumps(t["data"], ensure_ascii=False)
                                                           for t in group["tests"] if t["valid"] == kind]
                line = json.dumps(row, ensure_ascii=False)
                if len(line) < 8000:
                    out.write(line + "\n")
    (OUT / "LICENSE").write_text((suite / "LICENSE").read_text())


if __name__ == "__main__":
    make(Path(sys.argv[1]))
