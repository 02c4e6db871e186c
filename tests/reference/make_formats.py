#!/usr/bin/env python3
"""Tiny random Qwen3 checkpoints in the quantised formats that others publish, packed by the packages that define them, for
tests/unit/test_formats.cpp. The result is committed (tests/fixtures/README.md); run from the repository's root:

    python tests/reference/make_formats.py SOURCES [NAME...]

It needs torch, transformers and gguf; SOURCES is a folder with the unpacked source packages of PyPI's autoawq 0.2.9
(autoawq-0.2.9/awq), auto-gptq 0.7.1 (auto_gptq) and gptqmodel 7.7.0 (gptqmodel-7.7.0, with what it imports installed).
Of these only the modules that pack matrices are imported.

The K formats of GGUF are packed here, since `gguf` only unpacks them; the reference is in any case what `gguf`, torch
and the packages make of the file. Matrices are compared by the FNV-1a hash of their numbers' bytes.
"""
import importlib
import json
import os
import sys
import types

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from make_fixtures import config_json, logits_of, mean_kl, weights, write_golden, write_json  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/fixtures/"
LENGTHS = (1, 7, 24)
TYPE = gguf.GGMLQuantizationType
BASE = dict(L=1, H=1, K=1, D=64, V=64, tied=True, theta=1e6, eps=1e-6, dtype="float32", style=4, end=3)
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def fnv(array):
    """FNV-1a, 64 bits, of an array's bytes."""
    h = 0xCBF29CE484222325
    for byte in np.ascontiguousarray(array).tobytes():
        h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


def import_from(sources, name):
    """A module of a package whose __init__ would import far more."""
    folders = {"awq": "autoawq-0.2.9/awq", "auto_gptq": "auto_gptq"}
    parts = name.split(".")
    for i in range(1, len(parts)):
        package = types.ModuleType(".".join(parts[:i]))
        package.__path__ = [os.path.join(sources, folders[parts[0]], *parts[1:i])]
        sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(name)


def linear(w):
    module = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    module.weight.data = w.clone()
    return module


def grid(w, group, bits, symmetric, least_zero=0):
    """Scales and zero points (rows, groups) of a matrix, rounded to nearest."""
    x, most = w.reshape(w.shape[0], -1, group), 2**bits - 1
    if symmetric:
        scale = x.abs().amax(-1).clamp(min=1e-5) * 2 / most
        return scale.half().float(), torch.full_like(scale, (most + 1) // 2)
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    scale = ((high - low).clamp(min=1e-5) / most).half().float()
    return scale, (-low / scale).round().clamp(least_zero, most)


# ---- Hugging Face's folders: each returns the packed tensors, quantization_config and the matrices in float32

def fp8(w, sources):
    stored, dense, block = {}, {}, 128
    for name, x in w.items():
        if name.split(".")[-2] not in MODULES:
            stored[name] = x.bfloat16()
            continue
        rows, columns = -(-x.shape[0] // block), -(-x.shape[1] // block)
        padded = torch.zeros(rows * block, columns * block)
        padded[: x.shape[0], : x.shape[1]] = x
        tiles = padded.reshape(rows, block, columns, block)
        scale = (tiles.abs().amax((1, 3)) / 448).bfloat16()
        q = (tiles / scale.float()[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        real = (q.float() * scale.float()[:, None, :, None]).reshape(padded.shape)[: x.shape[0], : x.shape[1]]
        stored[name] = q.reshape(padded.shape)[: x.shape[0], : x.shape[1]].contiguous()
        stored[name + "_scale_inv"] = scale
        dense[name] = real.contiguous()
    config = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
              "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]}
    return stored, config, dense, {}


def awq(w, sources):
    gemm = import_from(sources, "awq.modules.linear.gemm")
    packing = import_from(sources, "awq.utils.packing_utils")
    stored, dense, halves, group = {}, {}, {}, 64
    for name, x in w.items():
        if name.split(".")[-2] not in MODULES:
            stored[name] = x.half()
            continue
        scale, zero = grid(x, group, 4, False)
        p = gemm.WQLinear_GEMM.from_linear(linear(x), 4, group, False, scale.T.contiguous(), zero.T.contiguous())
        base = name[: -len("weight")]
        stored.update({base + "qweight": p.qweight, base + "qzeros": p.qzeros, base + "scales": p.scales})
        # The package computes in float16; in float32 the product is exact.
        exact = packing.dequantize_gemm(p.qweight, p.qzeros, p.scales.float(), 4, group).T.contiguous()
        rounded = packing.dequantize_gemm(p.qweight, p.qzeros, p.scales, 4, group).T.contiguous()
        assert torch.equal(exact.half(), rounded)
        dense[name], halves[name] = exact, fnv(rounded.numpy())
    config = {"bits": 4, "group_size": group, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
              "zero_point": True}
    return stored, config, dense, {"halves": halves}


def gptq_config(bits, group, symmetric, ordered):
    return {"bits": bits, "group_size": group, "desc_act": ordered, "sym": symmetric, "lm_head": False,
            "damp_percent": 0.01, "static_groups": False, "true_sequential": True, "quant_method": "gptq",
            "checkpoint_format": "gptq", "dynamic": None, "pack_dtype": "int32"}


def gptq4(w, sources):
    """auto-gptq's packing: zero points, columns in an order of their own, first version of the format."""
    QuantLinear = import_from(sources, "auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    stored, dense, group = {}, {}, 32
    g = torch.Generator().manual_seed(5)
    for name, x in w.items():
        if name.split(".")[-2] not in MODULES:
            stored[name] = x.half()
            continue
        order = torch.randperm(x.shape[1], generator=g)
        index = torch.empty(x.shape[1], dtype=torch.int32)
        index[order] = torch.arange(x.shape[1], dtype=torch.int32) // group
        scale, zero = grid(x[:, order], group, 4, False, 1)
        p = QuantLinear(4, group, x.shape[1], x.shape[0], False, weight_dtype=torch.float16)
        half = linear(x).half()
        p.pack(half.float(), scale.clone(), zero.clone(), index)
        p.scales = p.scales.half()
        base = name[: -len("weight")]
        stored.update({base + k: getattr(p, k) for k in ("qweight", "qzeros", "scales", "g_idx")})
        # The forward pass of unit vectors in turn: the columns of the matrix.
        p.scales = p.scales.float()
        dense[name] = p(torch.eye(x.shape[1])).T.float().contiguous()
    return stored, gptq_config(4, group, False, True), dense, {}


def gptq8(w, sources):
    """gptqmodel's packing: symmetric, a whole row one group."""
    sys.path.insert(0, os.path.join(sources, "gptqmodel-7.7.0"))
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
    stored, dense = {}, {}
    for name, x in w.items():
        if name.split(".")[-2] not in MODULES:
            stored[name] = x.bfloat16()
            continue
        scale, zero = grid(x, x.shape[1], 8, True)
        p = TorchLinear(8, -1, True, False, x.shape[1], x.shape[0])
        p.pack_original(linear(x), scale, zero, p.g_idx)
        p.post_init()
        p.scales = p.scales.float()
        dense[name] = p.dequantize_weight().T.float().contiguous()
        p.scales = p.scales.half()
        convert_gptq_v2_to_v1_format_module(p, QuantizeConfig(bits=8, group_size=-1))
        base = name[: -len("weight")]
        stored.update({base + k: getattr(p, k).contiguous() for k in ("qweight", "qzeros", "scales", "g_idx")})
    return stored, gptq_config(8, -1, True, False), dense, {}


# ---- GGUF

def half_bytes(x):
    return x.astype("<f2").view(np.uint8).reshape(len(x), 2)


def six_bits(scale, minimum):
    """(blocks, 8) each of 6 bits -> (blocks, 12)"""
    out = np.zeros((len(scale), 12), np.uint8)
    out[:, 0:4] = scale[:, :4] | (scale[:, 4:] >> 4) << 6
    out[:, 4:8] = minimum[:, :4] | (minimum[:, 4:] >> 4) << 6
    out[:, 8:12] = (scale[:, 4:] & 15) | (minimum[:, 4:] & 15) << 4
    return out


def pack_k(x, bits):
    """Q4_K or Q5_K: rounded to nearest, groups of 32."""
    most, blocks = 2**bits - 1, x.reshape(-1, 8, 32).astype(np.float64)
    low = np.minimum(blocks.min(-1), 0)
    scale = (blocks.max(-1) - low) / most
    d = (scale.max(-1) / 63).astype(np.float16).astype(np.float64)
    m = (-low.min(-1) / 63).astype(np.float16).astype(np.float64)
    s6 = np.clip(np.round(scale / d[:, None]), 1, 63)
    m6 = np.clip(np.round(-low / m[:, None]), 0, 63)
    q = np.round((blocks + (m[:, None] * m6)[..., None]) / (d[:, None] * s6)[..., None])
    q = np.clip(q, 0, most).astype(np.uint8)
    parts = [half_bytes(d), half_bytes(m), six_bits(s6.astype(np.uint8), m6.astype(np.uint8))]
    if bits == 5:
        parts.append(np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[None, :, None], axis=1))
    pairs = (q & 15).reshape(-1, 4, 2, 32)
    parts.append((pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128))
    return np.concatenate(parts, -1)


def pack_q6_k(x):
    blocks = x.reshape(-1, 16, 16).astype(np.float64)
    scale = np.abs(blocks).max(-1) / 31
    scale[:, ::3] *= -1  # signed scales
    d = (np.abs(scale).max(-1) / 127).astype(np.float16).astype(np.float64)
    s8 = np.round(scale / d[:, None])
    s8[s8 == 0] = 1
    q = np.clip(np.round(blocks / (d[:, None] * s8)[..., None]), -32, 31).astype(np.int16) + 32
    q = q.astype(np.uint8).reshape(-1, 2, 4, 32)  # halves of 128, quarters of 32
    low = np.stack([(q[:, :, 0] & 15) | (q[:, :, 2] & 15) << 4, (q[:, :, 1] & 15) | (q[:, :, 3] & 15) << 4], 2)
    high = (q[:, :, 0] >> 4) | (q[:, :, 1] >> 4) << 2 | (q[:, :, 2] >> 4) << 4 | (q[:, :, 3] >> 4) << 6
    return np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), s8.astype(np.int8).view(np.uint8), half_bytes(d)], -1)


def quantize(x, kind):
    packers = {TYPE.Q4_K: lambda: pack_k(x, 4), TYPE.Q5_K: lambda: pack_k(x, 5), TYPE.Q6_K: lambda: pack_q6_k(x)}
    if kind not in packers:
        return gguf.quants.quantize(x, kind)
    data = packers[kind]().reshape(x.shape[0], -1)
    error = np.abs(gguf.quants.dequantize(data, kind) - x).max() / np.abs(x).max()
    assert error < 0.1, (kind, error)  # the packing is the one that gguf unpacks
    return data


NAMES = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def gguf_name(name):
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest[:-len('.weight')]]}.weight"


def add_shape(out, f):
    out.add_block_count(f["L"])
    out.add_context_length(4096)
    out.add_embedding_length(f["C"])
    out.add_feed_forward_length(f["F"])
    out.add_head_count(f["H"])
    out.add_head_count_kv(f["K"])
    out.add_key_length(f["D"])
    out.add_value_length(f["D"])
    out.add_rope_freq_base(f["theta"])
    out.add_layer_norm_rms_eps(f["eps"])


def write_gguf(path, f, w, kinds, tokenizer=None, alignment=None):
    out = gguf.GGUFWriter(path, "qwen3")
    out.add_name(os.path.basename(path))
    if alignment:
        out.add_custom_alignment(alignment)
    add_shape(out, f)
    if tokenizer:
        add_tokenizer(out, f, tokenizer)
    dense = {}
    for name, x in w.items():
        x = x.numpy()
        kind = kinds(name) if x.ndim == 2 else TYPE.F32
        data = quantize(x, kind)
        dense[name] = torch.from_numpy(gguf.quants.dequantize(data, kind).reshape(x.shape).copy())
        out.add_tensor(gguf_name(name), data, raw_dtype=None if kind in (TYPE.F32, TYPE.F16) else kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return dense


def add_tokenizer(out, f, folder):
    """As llama.cpp's converter does it: every row has a token, byte-level text, added tokens as they are."""
    with open(folder + "/tokenizer.json", encoding="utf-8") as file:
        j = json.load(file)
    tokens, kinds = [f"[PAD{i}]" for i in range(f["V"])], [5] * f["V"]
    for text, i in j["model"]["vocab"].items():
        tokens[i], kinds[i] = text, 1
    added = {t["content"]: t["id"] for t in j["added_tokens"]}
    for t in j["added_tokens"]:
        tokens[t["id"]], kinds[t["id"]] = t["content"], 3 if t["special"] else 4
    merges = [m if isinstance(m, str) else " ".join(m) for m in j["model"]["merges"]]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(tokens)
    out.add_token_types(kinds)
    out.add_token_merges(merges)
    out.add_eos_token_id(added["<|im_end|>"])
    out.add_pad_token_id(added["<|endoftext|>"])
    out.add_add_bos_token(False)
    out.add_chat_template("{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}")


def mixed(name):
    if "embed" in name:
        return TYPE.Q6_K
    first = dict(zip(MODULES, (TYPE.Q4_K, TYPE.Q5_K, TYPE.Q6_K, TYPE.Q4_0, TYPE.Q8_0, TYPE.Q5_0, TYPE.Q4_1)))
    second = dict(zip(MODULES, (TYPE.F16, TYPE.BF16, TYPE.F32, TYPE.Q5_1, TYPE.Q4_K, TYPE.Q5_K, TYPE.Q8_0)))
    return (second if ".layers.1." in name else first)[name.split(".")[-2]]


# ---- The fixtures

def dense_model(f, w):
    c = {k: v for k, v in config_json(dict(f, dtype="float32")).items() if k != "torch_dtype"}
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(dict(c, rope_theta=f["theta"]))).float().eval()
    missing, strange = model.load_state_dict(w, strict=False)
    assert not strange and all(m == "lm_head.weight" for m in missing), (missing, strange)
    model.tie_weights()
    return model


def finish(folder, f, truth, dense, extra, golden_name="golden.json", logits_name="logits.f32"):
    g = torch.Generator().manual_seed(f["seed"] + 1)
    prompts = [torch.randint(0, f["V"], (n,), generator=g).tolist() for n in f.get("lengths", LENGTHS)]
    logits = logits_of(truth, prompts)
    rounded = {}
    for attention in ("eager", "sdpa"):
        model = Qwen3ForCausalLM._from_config(truth.config, attn_implementation=attention).eval()
        model.load_state_dict(truth.state_dict())
        rounded[attention] = mean_kl(logits, logits_of(model.to(torch.bfloat16), prompts))
    logits.numpy().astype("<f4").tofile(folder + logits_name)
    matrices = {n: [fnv(x.numpy().astype("<f4")), fnv(x.bfloat16().view(torch.int16).numpy())] for n, x in dense.items()}
    write_golden(folder + golden_name, {"vocab_size": f["V"], "prompts": prompts, "logits": logits_name,
                                        "transformers_bf16_mean_kl": rounded, "matrices": matrices, **extra})
    print(f"{folder}: logits std {logits.std():.2f}, bf16 KL {rounded}")


def make_folder(name, f, pack, sources):
    folder = f"{ROOT}quantized/{name}/"
    os.makedirs(folder, exist_ok=True)
    w = weights(f)
    stored, config, dense, extra = pack(w, sources)
    write_json(folder + "config.json", dict(config_json(f), quantization_config=config))
    write_json(folder + "generation_config.json", {"eos_token_id": [f["end"], 1]})
    save_file({n: t.contiguous() for n, t in stored.items()}, folder + "model.safetensors", {"format": "pt"})
    plain = {n: t.float() for n, t in stored.items() if n in w and n not in dense}
    finish(folder, f, dense_model(f, {**plain, **dense}), dense, extra)


def make_gguf(name, f, kinds, **options):
    folder = f"{ROOT}quantized/{name}/"
    os.makedirs(folder, exist_ok=True)
    dense = write_gguf(folder + "model.gguf", f, weights(f), kinds, **options)
    # transformers opens the file itself, and has names and numbers from there. (Not the config: it forgets the heads' size.)
    ours = dense_model(f, dense)
    truth = Qwen3ForCausalLM.from_pretrained(folder, gguf_file="model.gguf", config=ours.config, dtype=torch.float32).eval()
    for (n, a), (_, b) in zip(ours.state_dict().items(), truth.state_dict().items()):
        assert torch.equal(a, b), n
    finish(folder, f, truth, {n: x for n, x in dense.items() if x.ndim == 2}, {})


def main(sources, names):
    folders = {
        "fp8": (dict(BASE, seed=900, C=144, F=136, dtype="bfloat16"), fp8),
        "awq": (dict(BASE, seed=910, C=128, F=128, H=2, tied=False, dtype="float16"), awq),
        "gptq4": (dict(BASE, seed=920, C=64, F=96, dtype="float16"), gptq4),
        "gptq8": (dict(BASE, seed=930, C=64, F=96, dtype="bfloat16"), gptq8),
    }
    for name, (f, pack) in folders.items():
        if not names or name in names:
            make_folder(name, f, pack, sources)
    if not names or "mixed" in names:
        make_gguf("mixed", dict(BASE, seed=940, L=2, C=256, D=32, F=32), mixed, alignment=64)
    if not names or "chat" in names:
        f = dict(BASE, seed=951, C=32, D=32, F=32, V=1040, lengths=(1, 7))
        make_gguf("chat", f, lambda name: TYPE.Q8_0, tokenizer=ROOT + "tiny")


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    main(os.path.abspath(sys.argv[1]), sys.argv[2:])
