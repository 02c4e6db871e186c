#!/usr/bin/env python3
"""Writes tests/fixtures/schema: parts of JSON-Schema-Test-Suite, as the source package of `jsonschema` holds it.

    pip download --no-deps --no-binary :all: jsonschema && tar xzf jsonschema-*.tar.gz
    make_schema_fixtures.py jsonschema-*/json

suite.jsonl   {"file", "schema", "valid": [texts], "invalid": [texts]} a line; a text is as json.dumps writes it
formats.jsonl {"format", "valid": [strings], "invalid": [strings]}: texts of RFCs, and these with a character changed, as
              `jsonschema[format]` judges them
LICENSE       the suite's
"""
import json
import random
import re
import sys
from pathlib import Path

import jsonschema

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


SEEDS = {
    "date": "0001-01-01 1963-06-19 2024-02-29 2000-02-29 1600-02-29 1900-02-28 9999-12-31 2023-04-30 2023-10-31 0004-02-29",
    "time": "00:00:00Z 23:59:59.999999999999+23:59 12:00:00-00:00 08:30:06.283185z 01:02:03.4-05:06",
    "date-time": "1963-06-19T08:30:06.283185Z 1990-12-31t15:59:50.123-08:00 2024-02-29T00:00:00z 1937-01-01T12:00:27.87+00:20",
    "duration": "P4DT12H30M5S P3Y6M4DT12H30M5S PT0S P0D P1M PT1M PT36H P1DT12H P2W P123456789Y PT1H2M3S",
    "hostname": "a example.com www.Example.COM 1.2.3.4a xn--4gbwdl.xn--wgbh1c a-b.c--d " + "x" * 63 + ".org " + ".".join("ab" * 6),
    "ipv4": "0.0.0.0 127.0.0.1 192.168.0.1 255.255.255.255 87.10.249.100",
    "ipv6": ":: ::1 1:: fe80::1 2001:DB8::8:800:200C:417A ::ffff:192.168.0.1 1:2:3:4:5:6:7:8 1:2:3:4:5:6:7:: ::2:3:4:5:6:7:8 "
            "1:2:3:4:5:6:1.2.3.4 1::5:1.2.3.4 1:2:3:4:5::1.2.3.4 ABCD:ef01:2345:6789:0:0:0:1 ::42:ff:1 d6:: 1:d6::42",
    "uuid": "2EB8AA08-AA98-11EA-B4AA-73B441D16380 2eb8aa08-aa98-11ea-b4aa-73b441d16380 00000000-0000-0000-0000-000000000000"}
MORE = {"date": "1900-02-29 2023-02-29 2023-02-30 2023-04-31 0000-01-01 2023-00-10 2023-13-01", "time": "24:00:00Z 12:00Z 12:00:00 12:00:00+24:00",
        "date-time": "2023-02-29T00:00:00Z 2023-01-01 2023-01-01T00:00:00", "duration": "P P1 PT P1Y2W P1D2H P4DT P2D1Y P1Y2D",
        "hostname": "-a a- a..b a_b .a " + "x" * 64, "ipv4": "01.2.3.4 256.1.1.1 1.2.3 1.2.3.4.5 1.2.3.4/24",
        "ipv6": "1:::2 :1 1: 1::2::3 1:2:3:4:5:6:7 1:2:3:4::5:6:7:8 12345:: ::1.2.3 ::1.2.3.256 ::1%eth0 1:2:3:4:5:6:7:1.2.3.4 ::g 1::d6::42",
        "uuid": "2eb8aa08aa9811eab4aa73b441d16380 2eb8aa08-aa98-11ea-b4aa-73b441d1638 {2eb8aa08-aa98-11ea-b4aa-73b441d16380}"}


def formats():
    """`jsonschema` takes more than the RFCs in places: a dot at a host's end, a UUID's dashes anywhere, parts of a second in a
    duration, hours with seconds without minutes, and numbers of nothing."""
    draw = random.Random(1)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    too_wide = {"uuid": lambda t: not re.fullmatch(r"\w{8}-\w{4}-\w{4}-\w{4}-\w{12}", t),
                "duration": lambda t: re.search(r"[.,+-]|H\d+S|Y\d+D|\dT", t)}
    with open(OUT / "formats.jsonl", "w") as out:
        for name, seeds in SEEDS.items():
            texts = seeds.split() + MORE[name].split()
            for seed in seeds.split():
                for _ in range(60):
                    at, c = draw.randrange(len(seed)), draw.choice("0123456789:.-+TZPMDabcfxYWHS ")
                    texts.append(draw.choice([seed[:at] + c + seed[at + 1:], seed[:at] + seed[at + 1:], seed[:at] + c + seed[at:]]))
            row = {"format": name, "valid": [], "invalid": []}
            for text in dict.fromkeys(texts):
                if text and text == text.strip() and not text.endswith("."):
                    good = checker.conforms(text, name) and not too_wide.get(name, lambda t: False)(text)
                    row["valid" if good else "invalid"].append(text)
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
    formats()
