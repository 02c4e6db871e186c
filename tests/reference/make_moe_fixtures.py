#!/usr/bin/env python3
"""Tiny random mixtures of experts with golden logits, for tests/unit/test_moe.cpp (needs torch, transformers 5 and gguf;
run from the repo root). The result is committed; tests/fixtures/README.md describes every file.

    python tests/reference/make_moe_fixtures.py [NAME...]    all of them, or only the named ones

One tensor an expert, as Qwen publishes them, or transformers 5's two of a layer (`fused`). The layers' other weights are
those of make_fixtures.py; the router's scores have a standard deviation of 1.5, so that experts have unequal shares.
"""
import json
import math
import os
import sys
import tempfile

import gguf
import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeForCausalLM
from transformers.utils import logging

import make_fixtures as fixtures
from make_formats import MODULES, add_shape, grid

ROOT = fixtures.ROOT + "/moe"
# The k-th expert leads the next by this much in every token: the choice is no matter of rounding.
EDGE = {"float32": 1e-4, "bfloat16": 3e-3}

# E experts, k of them a token, M wide; step and dense: which layers have experts; normed: their shares add up to 1
COMMON = dict(V=311, C=40, D=32, F=56, theta=1e6, eps=1e-6, end=[302, 300], style=5, shards=1)
FIXTURES = {
    "odd_f32": dict(COMMON, seed=1, L=2, H=4, K=2, E=7, k=3, M=24, step=1, dense=[], normed=True, tied=False,
                    dtype="float32", fused=False, lengths=(1, 7, 24)),
    "top1_f32": dict(COMMON, seed=2, L=2, H=2, K=1, E=4, k=1, M=40, step=1, dense=[], normed=False, tied=True,
                     dtype="float32", fused=False, lengths=(1, 7, 24)),
    "dense_between_f32": dict(COMMON, seed=3, L=4, H=2, K=2, E=5, k=2, M=16, step=1, dense=[1], normed=True, tied=True,
                              dtype="float32", fused=True, lengths=(1, 7, 24)),
    "step_f32": dict(COMMON, seed=14, L=4, H=3, K=1, E=6, k=4, M=8, step=2, dense=[], normed=False, tied=False,
                     dtype="float32", fused=True, lengths=(1, 7, 24)),
    "bf16": dict(COMMON, seed=6, C=64, F=72, L=2, H=4, K=1, E=6, k=2, M=32, step=2, dense=[], normed=True, tied=True,
                 dtype="bfloat16", fused=False, lengths=(1, 7, 24, 32)),
    # AWQ's layout, in groups of 32; the logits are those of the packed numbers
    "int4": dict(COMMON, seed=41, C=64, L=2, H=4, K=1, E=6, k=2, M=32, step=1, dense=[], normed=True, tied=True,
                 dtype="bfloat16", fused=False, lengths=(1, 7, 24, 32), group=32),
}


# llama.cpp's architecture qwen3moe: every layer has experts, their shares add up to 1. Types by tensor.
GGUF = dict(COMMON, seed=32, C=64, L=2, H=2, K=1, F=96, E=5, k=2, M=32, step=1, dense=[], normed=True, tied=False,
            dtype="float32", fused=False, lengths=(1, 7, 24))
TYPES = {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q8_0", "ffn_down_exps": "Q5_1", "attn_q": "Q8_0", "ffn_gate_inp": "F32"}


def is_sparse(f, layer):
    return (layer + 1) % f["step"] == 0 and layer not in f["dense"]


def config_json(f):
    c = fixtures.config_json(f)
    c.update({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": f["step"],
              "mlp_only_layers": f["dense"], "moe_intermediate_size": f["M"], "norm_topk_prob": f["normed"],
              "num_experts_per_tok": f["k"], "output_router_logits": False, "router_aux_loss_coef": 0.001,
              "num_local_experts" if f["fused"] else "num_experts": f["E"]})
    return c


def weights(f):
    """Hugging Face's names -> random tensors, one an expert."""
    C, E, M = f["C"], f["E"], f["M"]
    w = fixtures.weights(f)
    g = torch.Generator().manual_seed(f["seed"] + 1000)

    def matrix(name, rows, cols, gain):
        w[name] = (torch.randn(rows, cols, generator=g) * (gain / math.sqrt(cols))).to(
            fixtures.DTYPES[f["dtype"]]).float()

    for i in range(f["L"]):
        if not is_sparse(f, i):
            continue
        p = f"model.layers.{i}.mlp."
        for name in ("gate_proj", "up_proj", "down_proj"):
            del w[f"{p}{name}.weight"]
        matrix(p + "gate.weight", E, C, 1.5)
        for e in range(E):
            matrix(f"{p}experts.{e}.gate_proj.weight", M, C, 1.5)
            matrix(f"{p}experts.{e}.up_proj.weight", M, C, 1.5)
            matrix(f"{p}experts.{e}.down_proj.weight", C, M, 1.5)
    return w


def fuse(f, w):
    """The experts' tensors as transformers 5 keeps them."""
    w = dict(w)
    for i in range(f["L"]):
        if is_sparse(f, i):
            p = f"model.layers.{i}.mlp.experts."
            take = lambda name: torch.stack([w.pop(f"{p}{e}.{name}.weight") for e in range(f["E"])])
            w[p + "gate_up_proj"] = torch.cat([take("gate_proj"), take("up_proj")], dim=1)
            w[p + "down_proj"] = take("down_proj")
    return w


def pack(f, w):
    """Matrices of the modules as AWQ's tensors, and all numbers that these stand for."""
    stored, real = {}, dict(w)
    for name, x in w.items():
        if name.split(".")[-2] not in MODULES:
            stored[name] = x
            continue
        scale, zero = grid(x, f["group"], 4, False)
        wide = lambda t: t.repeat_interleave(f["group"], 1)
        q = ((x / wide(scale)).round() + wide(zero)).clamp(0, 15)
        real[name] = (q - wide(zero)) * wide(scale)
        for key, codes in (("qweight", q), ("qzeros", zero)):  # (rows, n) -> (n, rows / 8)
            of_word = codes.T.to(torch.int64).reshape(codes.shape[1], -1, 8)
            word = sum(of_word[..., row] << 4 * place for place, row in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
            stored[name[:-len("weight")] + key] = (word - (word >> 31 << 32)).to(torch.int32)
        stored[name[:-len("weight")] + "scales"] = scale.T.half()
    return stored, real


def save(folder, f, quantised=False):
    os.makedirs(folder, exist_ok=True)
    w, config = weights(f), config_json(f)
    if "group" in f:
        packed, w = pack(f, w)
        if quantised:
            w = packed
            config["quantization_config"] = {"bits": 4, "group_size": f["group"], "quant_method": "awq",
                                             "version": "gemm", "zero_point": True}
    kept = (torch.int32, torch.float16) if quantised else ()
    dtype = torch.float32 if "group" in f and not quantised else fixtures.DTYPES[f["dtype"]]
    whole = fuse(f, w) if f["fused"] else w
    stored = {n: (t if t.dtype in kept else t.to(dtype)).contiguous() for n, t in whole.items()}
    fixtures.write_json(folder + "/config.json", config)
    fixtures.write_json(folder + "/generation_config.json", {"eos_token_id": f["end"]})
    save_file(stored, folder + "/model.safetensors", {"format": "pt"})


def load(folder, dtype, attention):
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention,
                                                experts_implementation="eager").eval()
    return model


def edge(model, f, prompts):
    """The smallest lead of a token's last expert over the first that is not chosen, and how often each is chosen."""
    least, counts = math.inf, torch.zeros(f["E"])
    for p in prompts:
        for scores in model(torch.tensor([p]), output_router_logits=True).router_logits:
            best = scores.softmax(-1).sort(descending=True)
            least = min(least, (best.values[:, f["k"] - 1] - best.values[:, f["k"]]).min().item())
            counts += torch.bincount(best.indices[:, :f["k"]].reshape(-1), minlength=f["E"])
    return least, counts


def make(name, f):
    folder = f"{ROOT}/{name}"
    save(folder, f)  # (of packed matrices their numbers, which transformers reads)
    g = torch.Generator().manual_seed(f["seed"] + 1)
    prompts = [torch.randint(0, 300, (n,), generator=g).tolist() for n in f["lengths"]]
    truth = load(folder, torch.float32, "eager")
    golden = {"vocab_size": f["V"], "prompts": prompts, "logits": "logits.f32"}
    with torch.no_grad():
        lead, counts = edge(truth, f, prompts)
    if lead < EDGE[f["dtype"]]:
        sys.exit(f"{name}: a choice of experts has a near-tie ({lead:.1e}): take another seed")
    if counts.min() == 0:
        sys.exit(f"{name}: an expert has no token: take another seed")
    logits = fixtures.logits_of(truth, prompts)
    if f["dtype"] != "float32":
        golden["transformers_bf16_mean_kl"] = {
            a: fixtures.mean_kl(logits, fixtures.logits_of(load(folder, torch.bfloat16, a), prompts))
            for a in ("eager", "sdpa")}
    if "group" in f:
        save(folder, f, quantised=True)
    with open(folder + "/logits.f32", "wb") as out:
        out.write(logits.numpy().astype("<f4").tobytes())
    fixtures.write_golden(folder + "/golden.json", golden)
    size = sum(os.path.getsize(f"{folder}/{x}") for x in os.listdir(folder))
    print(f"{name}: {size:,} bytes, logits std {logits.std():.2f}, lead {lead:.4f}, tokens of experts {counts.tolist()}",
          golden.get("transformers_bf16_mean_kl", ""))


def gguf_tensors(f, w):
    """llama.cpp's name of each tensor -> the tensor; the experts' of a layer together."""
    fused = dict(w)
    for i in range(f["L"]):
        for name in ("gate", "up", "down"):
            fused[f"blk.{i}.ffn_{name}_exps.weight"] = torch.stack(
                [fused.pop(f"model.layers.{i}.mlp.experts.{e}.{name}_proj.weight") for e in range(f["E"])])
    ours = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
            "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
            "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    def name_of(name):
        parts = name.split(".")
        if parts[0] == "blk":
            return name
        if parts[1] == "layers":
            return f"blk.{parts[2]}.{ours['.'.join(parts[3:-1])]}.weight"
        return ours[".".join(parts[:-1])] + ".weight"
    return {name_of(name): tensor for name, tensor in fused.items()}


def make_gguf(f):
    """gguf/model.gguf, and transformers' logits of its dequantised numbers."""
    folder = ROOT + "/gguf"
    os.makedirs(folder, exist_ok=True)
    w = weights(f)
    out = gguf.GGUFWriter(folder + "/model.gguf", "qwen3moe")
    add_shape(out, f)
    out.add_expert_count(f["E"])
    out.add_expert_used_count(f["k"])
    out.add_expert_feed_forward_length(f["M"])
    read = {}
    for name, tensor in gguf_tensors(f, w).items():
        kind = gguf.GGMLQuantizationType[TYPES.get(name.split(".")[-2], "F32")]
        data = gguf.quants.quantize(tensor.numpy(), kind)
        out.add_tensor(name, data, raw_dtype=None if kind == gguf.GGMLQuantizationType.F32 else kind)
        read[name] = torch.from_numpy(gguf.quants.dequantize(data, kind).reshape(tensor.shape).copy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    for i in range(f["L"]):
        for name in ("gate", "up", "down"):
            for e, tensor in enumerate(read[f"blk.{i}.ffn_{name}_exps.weight"]):
                w[f"model.layers.{i}.mlp.experts.{e}.{name}_proj.weight"] = tensor
        w[f"model.layers.{i}.self_attn.q_proj.weight"] = read[f"blk.{i}.attn_q.weight"]
    g = torch.Generator().manual_seed(f["seed"] + 1)
    prompts = [torch.randint(0, 300, (n,), generator=g).tolist() for n in f["lengths"]]
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        fixtures.write_json(scratch + "/config.json", config_json(f))
        save_file({name: t.contiguous() for name, t in w.items()}, scratch + "/model.safetensors", {"format": "pt"})
        truth = load(scratch, torch.float32, "eager")
        lead, counts = edge(truth, f, prompts)
        if lead < EDGE["float32"] or counts.min() == 0:
            sys.exit(f"gguf: a near-tie ({lead:.1e}), or an expert without a token: take another seed")
        logits = fixtures.logits_of(truth, prompts)
    with open(folder + "/logits.f32", "wb") as file:
        file.write(logits.numpy().astype("<f4").tobytes())
    fixtures.write_golden(folder + "/golden.json", {"vocab_size": f["V"], "prompts": prompts, "logits": "logits.f32"})
    print(f"gguf: {os.path.getsize(folder + '/model.gguf'):,} bytes, lead {lead:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for name in sys.argv[1:] or [*FIXTURES, "gguf"]:
        make_gguf(GGUF) if name == "gguf" else make(name, FIXTURES[name])
