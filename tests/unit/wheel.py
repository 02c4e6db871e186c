"""A wheel by itself. Usage: wheel.py FOLDER MODEL QUESTION: FOLDER has one wheel, which is checked as pip does and
unpacked; the package in it prints the greedy answer."""
import base64
import csv
import hashlib
import io
import pathlib
import re
import sys
import zipfile

folder = pathlib.Path(sys.argv[1])
path, = folder.glob("*.whl")
name = re.fullmatch(r"qwen3-(\d+\+cpu)-(py3-none-(?:manylinux_2_\d+|linux)_\w+)[.]whl", path.name)
assert name, path.name
info = f"qwen3-{name[1]}.dist-info"
with zipfile.ZipFile(path) as wheel:
    assert wheel.testzip() is None
    files = {entry: wheel.read(entry) for entry in wheel.namelist()}
    wheel.extractall(folder / "site")
record = {row[0]: row[1:] for row in csv.reader(io.StringIO(files[f"{info}/RECORD"].decode()))}
assert record.keys() == files.keys() and record.pop(f"{info}/RECORD") == ["", ""]
for entry, (digest, size) in record.items():
    found = base64.urlsafe_b64encode(hashlib.sha256(files[entry]).digest()).rstrip(b"=").decode()
    assert (digest, size) == (f"sha256={found}", str(len(files[entry]))), entry
assert f"Tag: {name[2]}\n" in files[f"{info}/WHEEL"].decode()
assert f"Name: qwen3\nVersion: {name[1]}\n" in files[f"{info}/METADATA"].decode()
assert {"qwen3/py.typed", "qwen3/tokenizer.bin"} <= files.keys()

sys.path.insert(0, str(folder / "site"))
import qwen3  # noqa: E402

assert pathlib.Path(qwen3.__file__).is_relative_to(folder)
print(qwen3.Model(sys.argv[2]).ask(sys.argv[3], temperature=0))
