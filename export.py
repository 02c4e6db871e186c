#!/usr/bin/env python3
"""Hugging Face <-> model.bin, tokenizer.json -> tokenizer.bin. Python's standard library only (3.9 or later).

    export.py HF_DIR model.bin [--keep-dtype | --int8]
        Makes one file for qwen3 of a Qwen3 checkpoint: all shards merged, F32 and F16 rounded to bfloat16
        (--keep-dtype leaves every tensor as it is; --int8 stores every matrix as 8-bit integers with a scale
        for each 32 of them: half the size of bfloat16).
    export.py --to-hf model.bin OUT_DIR [--tokenizer-from DIR]
        The way back: config.json, generation_config.json and model.safetensors, which transformers opens.
        The tokenizer's own files are copied from DIR, a Hugging Face folder.
    export.py --tokenizer HF_DIR tokenizer.bin
        Makes the tokenizer's file of tokenizer.json.
    export.py --help

model.bin is itself a safetensors file: 8 bytes with the header's length (little-endian), the header (JSON:
dtype, shape and place of each tensor), then the tensors' bytes without gaps. Three things make it ours: the
texts of config.json and generation_config.json ride in the header's `__metadata__`; the tensors stand in the
order in which the model runs; the header is padded with spaces so that the data begin at a multiple of 64.

Tensors move block by block, so a 65 GB model needs a few megabytes of memory. Input is not trusted: a fault
is one line on stderr and exit status 1, and output appears under its name only when it is complete. NumPy
makes the rounding faster if it can be imported; the bytes are the same without it.
"""
import collections
import contextlib
import functools
import json
import math
import os
import re
import struct
import sys
import time

try:
    import numpy
except Exception:  # not installed, hidden by -S, or broken: all the same here
    numpy = None

# ------------------------------------------------------------------------------------------ faults and files


class Fault(Exception):
    """What a user can cause: "file: what is wrong". main prints it as one line."""


@contextlib.contextmanager
def faults_of(path):
    """Errors of the system become faults of `path`."""
    try:
        yield
    except OSError as error:
        raise Fault(f"{path}: {error.strerror or error}") from None


def open_input(path):
    """A regular file, open for reading."""
    if os.path.exists(path) and not os.path.isfile(path):  # a folder, or a FIFO that would make us wait
        raise Fault(f"{path}: not a regular file")
    with faults_of(path):
        return open(path, "rb")


def read_file(path):
    """The bytes of a small file."""
    with open_input(path) as file, faults_of(path):
        return file.read()


@contextlib.contextmanager
def outputs():
    """Files that all appear when the block ends, and not at all if it raises.

        with outputs() as create:
            write = create(path)
            write(some_bytes)

    Each is written under a temporary name in its own folder and renamed at the end. A path that exists and is
    no regular file (/dev/stdout) is written in place.
    """
    pending = []  # (file, its temporary name or None, path)

    def create(path):
        with faults_of(path):
            if os.path.isdir(path):
                raise Fault(f"{path}: is a folder")
            special = os.path.exists(path) and not os.path.isfile(path)
            temporary = None if special else f"{path}.tmp{os.getpid()}"
            file = open(temporary or path, "wb")
        pending.append((file, temporary, path))

        def write(data):
            with faults_of(path):
                file.write(data)
        return write

    try:
        yield create
        for file, temporary, path in pending:
            with faults_of(path):
                file.flush()
                if temporary:
                    os.fsync(file.fileno())
        for file, temporary, path in pending:
            with faults_of(path):
                file.close()
                if temporary:
                    os.replace(temporary, path)
    finally:
        for file, temporary, path in pending:
            with contextlib.suppress(OSError):  # a full disk is reported once
                file.close()
            with contextlib.suppress(OSError):  # after os.replace there is nothing to remove
                if temporary:
                    os.unlink(temporary)


def parse_json(data, path):
    """One strict JSON object: valid UTF-8 (escapes too), no duplicate keys, no NaN, no giant integers."""
    def pairs(items):
        members = dict(items)
        if len(members) < len(items):
            twice = [key for key, n in collections.Counter(key for key, _ in items).items() if n > 1]
            raise ValueError(f"duplicate key {twice[0][:80]!r}")
        for key, value in items:
            (key + value if isinstance(value, str) else key).encode()  # refuses half a surrogate pair
        return members

    def integer(digits):
        if len(digits) > 20:  # no 64-bit number is longer, and int() takes quadratic time
            raise ValueError("an integer is too large")
        return -0.0 if digits == "-0" else int(digits)  # no integer for the reference either

    def constant(name):
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(data.decode(), object_pairs_hook=pairs, parse_int=integer, parse_constant=constant)
    except UnicodeError:
        raise Fault(f"{path}: not valid UTF-8") from None
    except RecursionError:
        raise Fault(f"{path}: JSON nested too deeply") from None
    except ValueError as error:
        raise Fault(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise Fault(f"{path}: not a JSON object")
    return value


# ---------------------------------------------------------------------------------------------- safetensors

MAX_HEADER = 100_000_000  # bytes; the reference implementation's limit
ITEM_SIZE = {  # bytes
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8}

Tensor = collections.namedtuple("Tensor", "name dtype shape path offset size")  # offset in path, size: bytes


def read_header(path):
    """(metadata, [Tensor] in file order) of a safetensors file, checked as strictly as the reference does."""
    with open_input(path) as file, faults_of(path):
        file_size = os.fstat(file.fileno()).st_size
        if file_size < 8:
            raise Fault(f"{path}: {file_size} bytes are too few for a safetensors file")
        header_size = struct.unpack("<Q", file.read(8))[0]
        if header_size > MAX_HEADER:
            raise Fault(f"{path}: not a safetensors file: a header of {header_size} bytes (limit 100 MB)")
        if header_size > file_size - 8:
            raise Fault(f"{path}: truncated: the header has {header_size} bytes, the file {file_size}")
        text = file.read(header_size)
    if text[:1] != b"{":
        raise Fault(f"{path}: the header does not begin with '{{'")
    header = parse_json(text, path)

    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Fault(f"{path}: __metadata__ does not map strings to strings")

    start, tensors = 8 + header_size, []
    for name, entry in header.items():
        fault = f"{path}: tensor {name[:80]!r}:"
        if not isinstance(entry, dict):
            raise Fault(f"{fault} not an object")
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
            raise Fault(f"{fault} unknown dtype {str(dtype)[:20]!r}")
        if not is_sizes(shape):
            raise Fault(f"{fault} the shape is not a list of sizes")
        if not is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise Fault(f"{fault} data_offsets are not [begin, end]")
        size = ITEM_SIZE[dtype]
        for n in shape:
            size *= n
            if size >= 1 << 64:  # checked at each step, as 64-bit arithmetic has to
                raise Fault(f"{fault} the shape overflows")
        begin, end = offsets
        if size != end - begin:
            raise Fault(f"{fault} {end - begin} bytes for a shape of {size}")
        tensors.append(Tensor(name, dtype, shape, path, start + begin, size))

    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size))
    position = start
    for tensor in tensors:
        if tensor.offset != position:
            what = "a hole before it" if tensor.offset > position else "overlaps another"
            raise Fault(f"{path}: tensor {tensor.name[:80]!r}: {what}")
        position += tensor.size
    if position != file_size:
        what = "truncated" if position > file_size else "bytes after the last tensor"
        raise Fault(f"{path}: {what}: the tensors end at {position}, the file at {file_size}")
    return metadata, tensors


def is_sizes(value):
    """A list of integers >= 0 (JSON's true is no integer, though Python's True is)."""
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


# A tensor to write: `convert` makes its bytes of the blocks of `tensor` (None: they are the same). Blocks end
# where a row of `row` bytes ends, too.
Entry = collections.namedtuple("Entry", "name dtype shape tensor convert row")


def unchanged(tensor):
    return Entry(tensor.name, tensor.dtype, tensor.shape, tensor, None, tensor.size)


def write_safetensors(write, label, metadata, entries):
    """Writes a whole file of `entries` in their order, with progress under the name `label` on stderr."""
    header, position = {"__metadata__": metadata}, 0
    for entry in entries:
        end = position + ITEM_SIZE[entry.dtype] * math.prod(entry.shape)
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    if len(text) > MAX_HEADER:
        raise Fault(f"{label}: the header would be larger than 100 MB")
    write(struct.pack("<Q", len(text)) + text)

    with progress(label, sum(entry.tensor.size for entry in entries)) as advance:
        for entry in entries:
            for block in blocks(entry.tensor, entry.row):
                write(entry.convert(block) if entry.convert else block)
                advance(len(block))


def blocks(tensor, row):
    """The bytes of a tensor, at most 1 MiB at a time and never of two rows of `row` bytes."""
    done = 0
    with open_input(tensor.path) as file, faults_of(tensor.path):
        file.seek(tensor.offset)
        while done < tensor.size:
            size = min(1 << 20, row - done % row)
            block = file.read(size)
            if len(block) < size:
                raise Fault(f"{tensor.path}: became shorter while it was read")
            done += size
            yield block


@contextlib.contextmanager
def progress(label, total):
    """Bytes read and MB/s on stderr: live on a terminal, one line at the end elsewhere."""
    begin, done, shown, live = time.monotonic(), 0, 0.0, sys.stderr.isatty()

    def line():
        rate = done / 1e6 / max(time.monotonic() - begin, 1e-6)
        return f"{label}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {rate:,.0f} MB/s"

    def advance(n):
        nonlocal done, shown
        done += n
        if live and time.monotonic() - shown > 0.2:
            shown = time.monotonic()
            print(f"\r{line()}\033[K", end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        print("\r\033[K" if live else "", end="", file=sys.stderr)
    print(line(), file=sys.stderr)


# ------------------------------------------------------------------------------------------ rounding to bf16
# A bf16 number is the upper half of a float32. Rounding to nearest, ties to even, adds 0x7fff and the lowest
# bit that stays, and drops the lower half; a carry into the exponent is right, up to infinity. Only NaN must
# not be rounded (it could become infinity): each becomes 0x7fc0, the plainest NaN.


def f32_to_bf16(block):
    """Bytes of float32 -> bytes of bf16."""
    if numpy:
        x = numpy.frombuffer(block, "<u4")
        y = (x + (0x7FFF + (x >> 16 & 1))) >> 16
        return numpy.where((x & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, y).astype("<u2").tobytes()
    return b"".join(f32_to_bf16_lanes(block[i : i + 4 * LANES]) for i in range(0, len(block), 4 * LANES))


# Without NumPy a Python integer of LANES x 32 bits serves as a vector register: no sum below leaves its lane.
# That is ten times as fast as a loop over the numbers.
LANES = 4096


def lanes(value):
    """`value` in every lane."""
    return int.from_bytes(value.to_bytes(4, "little") * LANES, "little")


ONE, ROUND, MAGNITUDE, PAST_INF, TOP = map(lanes, (1, 0x7FFF, 0x7FFFFFFF, 0x7FFFFF, 0x80000000))


def f32_to_bf16_lanes(block):
    x = int.from_bytes(block, "little")
    nan = ((x & MAGNITUDE) + PAST_INF & TOP) >> 31  # 1 where |x| > 0x7f800000
    if nan:
        x ^= x & nan * 0xFFFFFFFF  # clear the lane,
        x |= nan * 0x7FC00000      # and put what rounding leaves as it is
    y = (x + ROUND + (x >> 16 & ONE)).to_bytes(4 * LANES, "little")
    upper = bytearray(2 * LANES)
    upper[0::2], upper[1::2] = y[2::4], y[3::4]
    return upper[: len(block) // 2]


def f16_to_bf16(block):
    """Bytes of float16 -> bytes of bf16. float32 holds every float16 exactly, so there is one rounding."""
    if numpy:
        return f32_to_bf16(numpy.frombuffer(block, "<f2").astype("<f4").tobytes())
    return b"".join(f16_to_bf16_lanes(block[i : i + 2 * LANES]) for i in range(0, len(block), 2 * LANES))


def f16_to_bf16_lanes(block):
    n = len(block) // 2
    return f32_to_bf16_lanes(struct.pack(f"<{n}f", *struct.unpack(f"<{n}e", block)))


TO_BF16 = {"F32": f32_to_bf16, "F16": f16_to_bf16}


def in_bf16(tensor):
    if tensor.dtype not in TO_BF16:
        return unchanged(tensor)
    return Entry(tensor.name, "BF16", tensor.shape, tensor, TO_BF16[tensor.dtype], tensor.size)


# ------------------------------------------------------------------------------------------ rounding to INT8
# GROUP neighbours in a row share a scale s: the smallest bf16 with 127 s >= max |w|, or that one of the next
# SCALES - 1 which leaves the least squares. A weight becomes w / s (in double) rounded to nearest, ties to
# even: -127..127. qwen3 --dtype int8 makes the same numbers: sums in double, in the order of the weights.
# In the file the integers have the matrix's own name, the scales that name with "_scale".

GROUP, SCALES, LARGEST_BF16 = 32, 8, 0x7F7F


def in_int8(tensor):
    """The two entries of a matrix: its scales and its integers. Each reads the matrix, so nothing is kept."""
    fault = f"{tensor.path}: tensor {tensor.name[:80]!r}"
    if tensor.dtype not in ("BF16", "F16", "F32"):
        raise Fault(f"{fault} is {tensor.dtype}: --int8 takes BF16, F16 and F32")
    if len(tensor.shape) != 2:
        raise Fault(f"{fault} is not a matrix")
    rows, columns = tensor.shape
    row = columns * ITEM_SIZE[tensor.dtype] if columns % GROUP else tensor.size  # where groups have to end

    def entry(suffix, dtype, shape, convert):
        return Entry(tensor.name + suffix, dtype, shape, tensor, functools.partial(convert, tensor), row)
    return [entry("_scale", "BF16", [rows, -(-columns // GROUP)], int8_scales),
            entry("", "I8", tensor.shape, int8_weights)]


def int8_scales(tensor, block):
    """Bytes of weights -> bytes of their groups' scales."""
    if numpy:
        return int8_groups_numpy(tensor, block)[1].astype("<u2").tobytes()
    return b"".join(struct.pack(f"<{len(bits)}H", *bits) for _, bits, _ in int8_groups(tensor, block))


# A double of this magnitude counts in ones, so that adding it rounds; the lowest byte is then the integer.
ROUNDER = 1.5 * 2**52


def int8_weights(tensor, block):
    """Bytes of weights -> bytes of integers."""
    n = len(block) // ITEM_SIZE[tensor.dtype]
    if numpy:
        weights, _, scales = int8_groups_numpy(tensor, block)
        return numpy.rint(weights / scales[:, None]).astype("i1").tobytes()[:n]
    integers = bytearray()
    for weights, _, scales in int8_groups(tensor, block):
        rounded = [w / scale + ROUNDER for g, scale in enumerate(scales)
                   for w in weights[g * GROUP : (g + 1) * GROUP]]
        integers += struct.pack(f"<{len(rounded)}d", *rounded)[::8]
    return integers[:n]


def not_finite(tensor):
    fault = "has an infinity or a NaN, which INT8 cannot hold"
    return Fault(f"{tensor.path}: tensor {tensor.name[:80]!r} {fault}")


def int8_groups_numpy(tensor, block):
    """(weights in rows of GROUP, the scales' bits, what to divide by: the scales, but 1 instead of 0)."""
    if tensor.dtype == "BF16":
        weights = (numpy.frombuffer(block, "<u2").astype("<u4") << 16).view("<f4")
    else:
        weights = numpy.frombuffer(block, "<f2" if tensor.dtype == "F16" else "<f4").astype("<f4")
    weights = numpy.pad(weights, (0, -len(weights) % GROUP)).reshape(-1, GROUP)
    largest = abs(weights).max(axis=1).astype("<f8")
    if not numpy.isfinite(largest).all():
        raise not_finite(tensor)
    # The upper half of the float32 is at most one bf16 too small, and never too large.
    bits = (largest / 127).astype("<f4").view("<u4") >> 16
    bits += 127 * (bits << 16).view("<f4").astype("<f8") < largest
    columns = weights.T.astype("<f8")
    best = None
    for more in range(SCALES):
        others = numpy.where(bits == 0, 0, numpy.minimum(bits + more, LARGEST_BF16)).astype("<u4")
        scales = (others << 16).view("<f4").astype("<f8")
        scales[bits == 0] = 1
        inverse, lost = 1 / scales, numpy.zeros(len(scales))
        for column in columns:
            off = column - numpy.rint(column * inverse) * scales
            lost += off * off
        if best is None:
            best = [others, scales, lost]
        for kept, new in zip(best, (others, scales, lost)):
            if new is not lost:
                numpy.copyto(kept, new, where=lost < best[2])
        numpy.minimum(best[2], lost, out=best[2])
    return weights, best[0], best[1]


def int8_groups(tensor, block):
    """The same without NumPy, LANES weights at a time."""
    def upper_halves(halves):  # bytes of bf16 -> floats
        wide = bytearray(2 * len(halves))
        wide[2::4], wide[3::4] = halves[0::2], halves[1::2]
        return struct.unpack(f"<{len(halves) // 2}f", wide)

    size = ITEM_SIZE[tensor.dtype]
    for i in range(0, len(block), size * LANES):
        piece = block[i : i + size * LANES]
        piece += bytes(-len(piece) % (size * GROUP))
        n = len(piece) // size
        if tensor.dtype == "BF16":
            weights = upper_halves(piece)
        else:
            weights = struct.unpack(f"<{n}{'e' if tensor.dtype == 'F16' else 'f'}", piece)
        if not math.isfinite(sum(weights)):
            raise not_finite(tensor)
        magnitudes = map(abs, weights)
        largest = list(map(max, *[magnitudes] * GROUP))
        quotients = struct.pack(f"<{len(largest)}f", *[x / 127 for x in largest])
        low = struct.unpack("<" + "2xH" * len(largest), quotients)
        scales = upper_halves(struct.pack(f"<{len(low)}H", *low))
        bits = [b + (127 * s < x) for b, s, x in zip(low, scales, largest)]
        columns = [weights[i::GROUP] for i in range(GROUP)]
        best = []
        for more in range(SCALES):
            others = [b and min(b + more, LARGEST_BF16) for b in bits]
            scales = [s or 1.0 for s in upper_halves(struct.pack(f"<{len(others)}H", *others))]
            inverses, lost = [1 / s for s in scales], [0.0] * len(scales)
            for column in columns:
                offs = [w - (w * i + ROUNDER - ROUNDER) * s for w, i, s in zip(column, inverses, scales)]
                lost = [sum_ + off * off for sum_, off in zip(lost, offs)]
            new = list(zip(lost, others, scales))
            best = [b if b[0] <= n[0] else n for b, n in zip(best, new)] or new
        yield weights, [b[1] for b in best], [b[2] for b in best]


# ---------------------------------------------------------------------------------------------- model.bin

LAYER = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm",
         "self_attn.k_norm", "self_attn.o_proj", "post_attention_layernorm", "mlp.gate", "mlp.gate_proj", "mlp.up_proj",
         "mlp.down_proj"]
EXPERT = re.compile(r"mlp\.experts\.(\d{1,6})\.((?:gate|up|down)_proj)", re.ASCII)
OUTSIDE = {"model.embed_tokens.weight": 0, "model.norm.weight": 2, "lm_head.weight": 3}


def place(name):
    """A sort key: the order in which the model uses its tensors; strangers come last, by name."""
    match = re.fullmatch(r"model\.layers\.(\d{1,6})\.(.+)\.weight", name, re.ASCII)
    if match and match[2] in LAYER:
        return 1, int(match[1]), LAYER.index(match[2]), 0, name
    expert = match and EXPERT.fullmatch(match[2])
    if expert:  # one after another, behind the router
        return 1, int(match[1]), len(LAYER) + int(expert[1]), LAYER.index("mlp." + expert[2]), name
    return OUTSIDE.get(name, 4), 0, 0, 0, name


def cut_experts(tensors):
    """transformers 5 keeps the matrices of all experts of a layer in one tensor: it becomes a tensor for each."""
    cut = []
    for tensor in tensors:
        match = re.fullmatch(r"(model\.layers\.\d{1,6}\.mlp\.experts\.)(gate_up_proj|down_proj)", tensor.name, re.ASCII)
        kinds = ["gate_proj", "up_proj"] if match and match[2] == "gate_up_proj" else ["down_proj"]
        if not match or len(tensor.shape) != 3 or tensor.shape[1] % len(kinds):
            cut.append(tensor)
            continue
        pieces = tensor.shape[0] * len(kinds)
        for i in range(pieces):
            size, shape = tensor.size // pieces, [tensor.shape[1] // len(kinds), tensor.shape[2]]
            name = f"{match[1]}{i // len(kinds)}.{kinds[i % len(kinds)]}.weight"
            cut.append(tensor._replace(name=name, shape=shape, offset=tensor.offset + i * size, size=size))
    return cut


def check_config(data, path, quantized=False):
    """Refuses what is no Qwen3 model, dense or of experts; returns the text. quantized: that is fine."""
    config = parse_json(data, path)
    kind = config.get("model_type")
    if kind not in ("qwen3", "qwen3_moe"):
        raise Fault(f"{path}: model_type {str(kind)[:40]!r} is not supported, only 'qwen3' and 'qwen3_moe' are")
    if config.get("quantization_config") is not None and not quantized:
        raise Fault(f"{path}: quantization_config is not supported: `qwen3 FOLDER --convert OUT.bin` makes bf16 of it")
    return data.decode()


def checkpoint(hf_dir):
    """(metadata, [Tensor]) of a Hugging Face folder: of model.safetensors, or of the shards that its index names."""
    single = os.path.join(hf_dir, "model.safetensors")
    index = single + ".index.json"
    if os.path.exists(single) or not os.path.exists(index):
        if not os.path.exists(single):
            raise Fault(f"{hf_dir}: no model.safetensors and no model.safetensors.index.json")
        return read_header(single)

    where = parse_json(read_file(index), index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
        raise Fault(f"{index}: weight_map does not map tensors to files")
    metadata, tensors = {}, {}
    for shard in sorted(set(where.values())):
        if os.path.basename(shard) != shard or shard in ("", ".", "..") or "\0" in shard:
            raise Fault(f"{index}: {shard[:80]!r} is not the name of a file in this folder")
        theirs, of_shard = read_header(os.path.join(hf_dir, shard))
        metadata.update(theirs)
        for tensor in of_shard:
            if tensor.name in tensors:
                raise Fault(f"{tensor.path}: tensor {tensor.name[:80]!r} is in two shards")
            tensors[tensor.name] = tensor
    for name, shard in where.items():
        if name not in tensors or os.path.basename(tensors[name].path) != shard:
            raise Fault(f"{index}: tensor {name[:80]!r} is not in {shard}")
    return metadata, list(tensors.values())


def needed(tensors, config, config_path):
    """The tensors that the config has a place for. A weight or bias beside them is a fault, as it is for qwen3: but for
    biases of zeros, and for a head that is the embedding where they are tied. Those are left out."""
    layers, tied = config.get("num_hidden_layers"), config.get("tie_word_embeddings") is True
    by_name = {tensor.name: tensor for tensor in tensors}
    kept = []
    for tensor in tensors:
        known, layer, *_, name = place(tensor.name.removesuffix(".bias") + ".weight" if tensor.name.endswith(".bias")
                                      else tensor.name)
        fault = f"{tensor.path}: tensor {tensor.name[:80]!r}"
        if not tensor.name.endswith((".weight", ".bias")):
            kept.append(tensor)
        elif known == 4 or (known == 1 and type(layers) is int and layer >= layers):
            raise Fault(f"{fault} is none of the model that {config_path} describes")
        elif tensor.name.endswith(".bias"):
            if any(block.strip(b"\0") for block in blocks(tensor, tensor.size)):
                raise Fault(f"{fault} is not zero: a model with a bias is not supported")
        elif name == "lm_head.weight" and tied:
            embedding = by_name.get("model.embed_tokens.weight")
            if embedding and (embedding.dtype != tensor.dtype or embedding.shape != tensor.shape or any(
                    a != b for a, b in zip(blocks(tensor, tensor.size), blocks(embedding, embedding.size)))):
                raise Fault(f"{fault}: tie_word_embeddings is true, and it is not model.embed_tokens.weight")
        else:
            kept.append(tensor)
    return kept


def is_matrix(name):
    return name in ("model.embed_tokens.weight", "lm_head.weight") or (
        place(name)[0] == 1 and name.endswith("_proj.weight"))


def chat_template(hf_dir):
    """The folder's Jinja text: chat_template.jinja, or tokenizer_config.json's chat_template; "": none."""
    alone, among = (os.path.join(hf_dir, name) for name in ("chat_template.jinja", "tokenizer_config.json"))
    if os.path.exists(alone):
        try:
            return read_file(alone).decode()
        except UnicodeError:
            raise Fault(f"{alone}: not valid UTF-8") from None
    found = parse_json(read_file(among), among).get("chat_template") if os.path.exists(among) else None
    for one in found if isinstance(found, list) else []:
        if isinstance(one, dict) and one.get("name") == "default":
            found = one.get("template")
    return found if isinstance(found, str) else ""


def kept(metadata):
    """The metadata of ours that a folder's safetensors files keep, too: the questions that a chat begins with."""
    return {key: value for key, value in metadata.items() if key == "starters"}


def export_model(hf_dir, out_path, option):
    """Hugging Face folder -> model.bin. option: --keep-dtype, --int8 or None."""
    if not os.path.isdir(hf_dir):
        raise Fault(f"{hf_dir}: no such folder")
    config_path = os.path.join(hf_dir, "config.json")
    generation_path = os.path.join(hf_dir, "generation_config.json")
    metadata = {"format": "pt", "config": check_config(read_file(config_path), config_path)}
    if os.path.exists(generation_path):
        data = read_file(generation_path)
        parse_json(data, generation_path)
        metadata["generation_config"] = data.decode()
    template = chat_template(hf_dir)
    if template:
        metadata["chat_template"] = template
    theirs, tensors = checkpoint(hf_dir)
    metadata.update(kept(theirs))
    if any(tensor.name == "embed_tokens.weight" for tensor in tensors):  # a bare model, as Qwen3-Embedding is published
        tensors = [tensor if tensor.name == "lm_head.weight" else tensor._replace(name="model." + tensor.name)
                   for tensor in tensors]
    tensors = needed(cut_experts(tensors), parse_json(metadata["config"].encode(), config_path), config_path)

    if option != "--keep-dtype" and any(tensor.dtype in TO_BF16 for tensor in tensors):
        metadata["config"] = re.sub(r'("(?:torch_)?dtype"\s*:\s*)"\w+"', r'\1"bfloat16"', metadata["config"])

    entries = []
    for tensor in tensors:
        if option == "--int8" and is_matrix(tensor.name):
            entries += in_int8(tensor)
        else:
            entries.append(unchanged(tensor) if option == "--keep-dtype" else in_bf16(tensor))
    if len({entry.name for entry in entries}) < len(entries):
        raise Fault(f"{hf_dir}: has a matrix together with its _scale, so it is no plain checkpoint")
    # larger items first, where a file mixes types: all stay aligned
    entries.sort(key=lambda entry: (-ITEM_SIZE[entry.dtype], *place(entry.tensor.name)))
    with outputs() as create:
        write_safetensors(create(out_path), out_path, metadata, entries)


TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json",
                   "special_tokens_map.json", "chat_template.jinja", "generation_config.json"]


def export_hf(model_path, out_dir, tokenizer_dir):
    """model.bin -> Hugging Face folder. Tensors keep their bytes and their order."""
    metadata, tensors = read_header(model_path)
    if "config" not in metadata:
        raise Fault(f"{model_path}: no config in its metadata: not made by export.py")
    names = {tensor.name for tensor in tensors}
    if any(tensor.dtype == "I8" and tensor.name + "_scale" in names for tensor in tensors):
        raise Fault(f"{model_path}: has INT8 weights, which transformers cannot open")
    texts = {"config.json": metadata["config"].encode()}
    check_config(texts["config.json"], model_path, quantized=True)
    if "generation_config" in metadata:
        texts["generation_config.json"] = metadata["generation_config"].encode()
        parse_json(texts["generation_config.json"], model_path)
    if metadata.get("chat_template"):
        texts["chat_template.jinja"] = metadata["chat_template"].encode()
    if tokenizer_dir is not None:
        if not os.path.exists(os.path.join(tokenizer_dir, "tokenizer.json")):
            raise Fault(f"{tokenizer_dir}: no tokenizer.json")
        for name in TOKENIZER_FILES:
            if name not in texts and os.path.exists(os.path.join(tokenizer_dir, name)):
                texts[name] = read_file(os.path.join(tokenizer_dir, name))

    existed = os.path.exists(out_dir)
    with faults_of(out_dir):
        os.makedirs(out_dir, exist_ok=True)
    try:
        with outputs() as create:
            path = os.path.join(out_dir, "model.safetensors")
            write_safetensors(create(path), path, {"format": "pt", **kept(metadata)},
                              [unchanged(tensor) for tensor in tensors])
            for name, data in texts.items():
                create(os.path.join(out_dir, name))(data)
    except BaseException:
        with contextlib.suppress(OSError):  # the fault itself is what counts
            if not existed:
                os.rmdir(out_dir)
        raise


# ------------------------------------------------------------------------------------------ tokenizer.bin

SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")  # tokenizer.h has this expression as code
IN_VOCABULARY, ADDED, SPECIAL, WHOLE = 1, 2, 4, 8  # flags of a token
NFC_ACTIVE = 63  # in place of a combining class: it is 0, yet NFC may change the character or the one before


def unicode_tables(path):
    """data/datagen/unicode.txt -> the ranges, decompositions and compositions of which tokenizer.h speaks."""
    sections = {}
    for line in read_file(path).decode().splitlines():
        if line.startswith("["):
            name = line[1:line.index("]")]
            sections[name] = []
        elif line and not line.startswith("#"):
            sections[name] += line.split()

    def code_points(name):
        for entry in sections[name]:
            first, _, last = entry.partition("-")
            yield from range(int(first, 16), int(last or first, 16) + 1)

    def equations(name):
        return [[int(number, 16) for number in re.split("[=+]", entry)] for entry in sections[name]]

    decompose, compose = equations("decompose"), equations("compose")
    mark = dict.fromkeys((x for x, *_ in decompose), NFC_ACTIVE)
    for x, _, _ in compose:  # NFC takes it apart and puts it together again
        del mark[x]
    for _, _, second in compose:
        mark[second] = NFC_ACTIVE
    mark.update(dict.fromkeys([*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)], NFC_ACTIVE))  # Hangul V, T
    orders = [name for name in sections if name.startswith("order")]
    assert len(orders) < NFC_ACTIVE
    for name in orders:
        mark.update(dict.fromkeys(code_points(name), int(name[5:])))

    value = {c: m << 2 for c, m in mark.items()}
    for kind, name in enumerate("LNS", 1):
        for c in code_points(name):
            value[c] = value.get(c, 0) | kind
    ranges = []
    for c in sorted(value):
        if ranges and ranges[-1][1:] == [c - 1, value[c]]:
            ranges[-1][1] = c
        else:
            ranges.append([c, c, value[c]])
    return ranges, [(d + [0, 0, 0])[:5] for d in sorted(decompose)], sorted([a, b, x] for x, a, b in compose)


def byte_alphabet():
    """tokenizer.json writes a byte as one character: a printable one as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {**{chr(b): b for b in printable}, **{chr(256 + i): b for i, b in enumerate(others)}}


def byte_pair_encoding(ids, ranked):
    """Always the first of the lowest-ranked neighbours becomes one token."""
    while True:
        found = [(ranked[pair], i) for i, pair in enumerate(zip(ids, ids[1:])) if pair in ranked]
        if not found:
            return ids
        (_, merged), i = min(found)
        ids[i:i + 2] = [merged]


def export_tokenizer(hf_dir, out_path):
    """tokenizer.json -> the file that tokenizer.h describes. Refuses by name what that file cannot say."""
    path = os.path.join(hf_dir, "tokenizer.json")
    top = parse_json(read_file(path), path)

    def need(condition, fault):
        if not condition:
            raise Fault(f"{path}: {fault}")

    def is_objects(value):
        return isinstance(value, list) and all(isinstance(item, dict) for item in value)

    # what the pipeline must be
    need(top.get("normalizer") == {"type": "NFC"}, "the normalizer is not NFC")
    steps = top.get("pre_tokenizer")
    need(isinstance(steps, dict) and steps.get("type") == "Sequence"
         and is_objects(steps.get("pretokenizers")) and len(steps["pretokenizers"]) == 2,
         "the pre_tokenizer is not a Sequence of two steps")
    split, byte_level = steps["pretokenizers"]
    need(split == {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
         "the pre_tokenizer does not split by Qwen's regular expression")
    need(byte_level.get("type") == "ByteLevel" and byte_level.get("add_prefix_space") is False
         and byte_level.get("use_regex") is False, "the pre_tokenizer does not end in a plain ByteLevel")
    for part in ("post_processor", "decoder"):
        step = top.get(part)
        if part == "post_processor" and isinstance(step, dict) and step.get("type") == "Sequence":
            # Qwen3-Embedding's: what its second step appends is added by the programs, where they make vectors
            steps = step.get("processors")
            need(is_objects(steps) and [s.get("type") for s in steps] == ["ByteLevel", "TemplateProcessing"],
                 "the post_processor is neither ByteLevel nor ByteLevel and a template")
            continue
        need(isinstance(step, dict) and step.get("type") == "ByteLevel"
             or (part, step) == ("post_processor", None), f"the {part} is not ByteLevel")
    for part in ("truncation", "padding"):
        need(top.get(part) is None, f"{part} is set")
    model, added = top.get("model"), top.get("added_tokens", [])
    need(isinstance(model, dict) and model.get("type", "BPE") == "BPE", "the model is not BPE")
    for key in ("dropout", "unk_token", "byte_fallback", "ignore_merges", "continuing_subword_prefix",
                "end_of_word_suffix"):
        need(not model.get(key), f"{key} is set")
    vocab, merges = model.get("vocab"), model.get("merges")
    need(isinstance(vocab, dict) and isinstance(merges, list), "the model has no vocab or no merges")
    need(is_objects(added), "added_tokens is not a list of objects")

    # tokens: every id once, every text once
    alphabet = byte_alphabet()
    given = [*vocab.values(), *(token.get("id") for token in added)]
    need(all(type(i) is int for i in given), "an id that is not an integer")
    size = len(set(given))
    need(size and min(given) == 0 and max(given) == size - 1, "the ids do not run from 0 on without holes")
    texts, flags = [b""] * size, bytearray(size)
    for name, i in vocab.items():
        need(name and all(c in alphabet for c in name), f"token {name[:80]!r} is not in bytes' alphabet")
        need(not flags[i], f"token {i} is there twice")
        texts[i], flags[i] = bytes(alphabet[c] for c in name), IN_VOCABULARY
    for token in added:
        name, i = token.get("content"), token["id"]
        need(isinstance(name, str) and name, f"added token {i} has no text")
        for key in ("single_word", "lstrip", "rstrip", "normalized"):
            need(token.get(key) is False, f"added token {name[:80]!r}: {key} is set")
        need(not flags[i] & ADDED and vocab.get(name, i) == i and (not flags[i] or name in vocab),
             f"token {i} is there twice")
        text = name.encode()
        # `tokenizers` decodes an added token by the alphabet of bytes as well, if all of it is in there
        need(not all(c in alphabet for c in name) or bytes(alphabet[c] for c in name) == text,
             f"added token {name[:80]!r} would not decode to itself")
        texts[i] = text
        flags[i] |= ADDED | (SPECIAL if token.get("special") else 0)
    need(len(set(texts)) == size, "two tokens have the same text")

    # merges
    ids = {texts[i]: i for i in vocab.values()}
    need(all(bytes([b]) in ids for b in range(256)), "a byte has no token of its own")
    ranked = {}  # (left, right) -> (rank, merged)
    for rank, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        need(isinstance(pair, list) and len(pair) == 2 and all(isinstance(name, str) for name in pair),
             f"merge {rank} is not a pair")
        left, right = pair
        need(left in vocab and right in vocab and left + right in vocab, f"merge {rank}: no such token")
        need((vocab[left], vocab[right]) not in ranked, f"merge {rank} is there twice")
        ranked[vocab[left], vocab[right]] = rank, vocab[left + right]
    for text, i in ids.items():
        if byte_pair_encoding([ids[text[k:k + 1]] for k in range(len(text))], ranked) == [i]:
            flags[i] |= WHOLE

    ranges, decompose, compose = unicode_tables(
        os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "datagen", "unicode.txt"))
    offsets = [0]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    words = [1, size, len(ranked), offsets[-1], len(ranges), len(decompose), len(compose), *offsets]
    for pair, (_, merged) in ranked.items():
        words += [*pair, merged]
    for row in ranges + decompose + compose:
        words += row
    with outputs() as create:
        write = create(out_path)
        write(b"qwen3tok" + struct.pack(f"<{len(words)}I", *words))
        write(flags + b"".join(texts))


# --------------------------------------------------------------------------------------------------- main


def main(args):
    if args in (["-h"], ["--help"]):
        print(__doc__.strip())
        return
    given, paths, args = {}, [], list(args)
    while args:
        arg = args.pop(0)
        if arg == "--tokenizer-from":
            if not args:
                raise Fault("--tokenizer-from: needs a folder")
            given[arg] = args.pop(0)
        elif arg in ("--keep-dtype", "--int8", "--to-hf", "--tokenizer"):
            given[arg] = True
        elif arg.startswith("-"):
            raise Fault(f"unknown option {arg} (see export.py --help)")
        else:
            paths.append(arg)
    if len(paths) != 2:
        raise Fault(f"needs two paths, got {len(paths)} (see export.py --help)")
    options = set(given)
    if options <= {"--keep-dtype"} or options == {"--int8"}:
        export_model(*paths, option=next(iter(options), None))
    elif "--to-hf" in options and options <= {"--to-hf", "--tokenizer-from"}:
        export_hf(*paths, given.get("--tokenizer-from"))
    elif options == {"--tokenizer"}:
        export_tokenizer(*paths)
    else:
        raise Fault(f"{' and '.join(sorted(options))} do not go together (see export.py --help)")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Fault as fault:
        line = " ".join(str(fault).split())
        sys.exit(f"export.py: {line}")
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        sys.exit(f"export.py: {error}")
