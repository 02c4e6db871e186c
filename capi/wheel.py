#!/usr/bin/env python3
"""Writes a wheel of the C API: capi/wheel.py LIBQWEN3.so FOLDER [LOCAL]; make wheel and make dist call it.

The wheel holds capi/python/qwen3, tokenizer.bin and the library, and libgomp.so.1 and LICENSE-* if they lie beside the
library. Its platform tag is read from the library: manylinux_2_N for the C library's version N that it needs, or, if it
needs other libraries too, linux: a machine like this one only. LOCAL (cuda) is appended to the version. Python's
standard library is all that it takes, and the same inputs give the same bytes."""
import base64
import hashlib
import os
import pathlib
import re
import struct
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "capi/python/qwen3"
GLIBC = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2",
         "ld-linux-aarch64.so.1"}


def needed(elf):
    """The libraries that a 64-bit little-endian ELF file names (DT_NEEDED)."""
    at, = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, at + i * size) for i in range(count)]
    dynamic = next(s for s in sections if s[1] == 6)  # SHT_DYNAMIC: offset 4, size 5, its strings' section 6
    strings = sections[dynamic[6]][4]
    entries = [struct.unpack_from("<QQ", elf, i) for i in range(dynamic[4], dynamic[4] + dynamic[5], 16)]
    return {elf[strings + value:elf.index(b"\0", strings + value)].decode() for tag, value in entries if tag == 1}


def platform(path, libraries):
    """The wheel's platform, from what its libraries need beside each other and the C library."""
    elf = libraries[path.name]
    if elf[:6] != b"\x7fELF\x02\x01":
        sys.exit(f"{path}: no 64-bit ELF library")
    machine = {62: "x86_64", 183: "aarch64"}.get(struct.unpack_from("<H", elf, 18)[0])
    if not machine:
        sys.exit(f"{path}: neither x86-64 nor aarch64")
    others = needed(elf) - GLIBC - libraries.keys()
    if others:
        print(f"{path} needs {', '.join(sorted(others))}: a wheel for machines like this one", file=sys.stderr)
        return f"linux_{machine}"
    newest = max(int(n) for one in libraries.values() for n in re.findall(rb"GLIBC_2[.](\d+)", one))
    return f"manylinux_2_{newest}_{machine}"


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__.split("\n", 1)[0])
    path = pathlib.Path(sys.argv[1])
    beside = sorted(path.parent.glob("libgomp.so.*"))
    libraries = {file.name: file.read_bytes() for file in [path, *beside]}
    tag = f"py3-none-{platform(path, libraries)}"
    version = re.search(r"#define QWEN3_VERSION (\d+)", (ROOT / "qwen3.h").read_text())[1]
    version += f"+{sys.argv[3]}" if len(sys.argv) > 3 else ""
    source = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    info = f"qwen3-{version}.dist-info"
    metadata = (f"Metadata-Version: 2.1\nName: qwen3\nVersion: {version}\nSummary: An embedded runtime for Qwen3 models\n"
                f"License: MIT\nRequires-Python: >=3.8\nDescription-Content-Type: text/plain\n\n{source.split(chr(34) * 3)[1]}\n")
    files = {"qwen3/__init__.py": source.encode(), "qwen3/py.typed": b"",
             "qwen3/tokenizer.bin": (ROOT / "tokenizer.bin").read_bytes(),
             **{f"qwen3/{name}": data for name, data in libraries.items()},
             **{f"{info}/licenses/{file.name}": file.read_bytes()
                for file in [ROOT / "LICENSE", ROOT / "LICENSE-tokenizer", *sorted(path.parent.glob("LICENSE-[!t]*"))]},
             f"{info}/METADATA": metadata.encode(),
             f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: capi/wheel.py\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()}
    digest = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
              for name, data in files.items()}
    files[f"{info}/RECORD"] = "".join([f"{name},sha256={digest[name]},{len(data)}\n" for name, data in files.items()]
                                      + [f"{info}/RECORD,,\n"]).encode()
    out = pathlib.Path(sys.argv[2], f"qwen3-{version}-{tag}.whl")
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_suffix(f".tmp{os.getpid()}")
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.external_attr, entry.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
    new.rename(out)
    print(f"built     {out}")


main()
