#!/usr/bin/env python3
"""Tiny random Qwen3 checkpoints with golden logits, for the C++ tests (needs torch and transformers; run from
the repo root). The result is committed; tests/fixtures/README.md describes every file.

    python tests/reference/make_fixtures.py [NAME...]        all of them, or only the named ones

The weights are random but not dull: norm weights differ from 1 (q_norm and k_norm too), attention prefers
some keys to others, and logits have a standard deviation of 2 to 3. So a swapped tensor, a forgotten norm, a
rotation by pairs, a wrong theta or a wrong eps moves the logits by more than any tolerance.
"""
import json
import math
import os
import subprocess
import sys

import torch
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM
from transformers.utils import logging

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/fixtures"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GREEDY = 64          # tokens of greedy text
MARGIN = 5e-3        # a greedy step must lead by this much; the tolerance on a logit is 2e-4
EXACT = (1, 7, 40)   # lengths of the prompts
KL = (1, 7, 40, 48)  # where the mean KL is the figure, more positions make it steadier

# name, seed, config, dtype, prompt lengths, shards, config style (4: older transformers, 5: newer)
FIXTURES = {
    "tied_f32": dict(seed=111, V=1021, C=48, L=3, H=2, K=1, D=64, F=136, tied=True, theta=1e6, eps=1e-6,
                     dtype="float32", lengths=EXACT, shards=1, style=4, end=[1002, 1000]),
    "untied_f32_sharded": dict(seed=105, V=1024, C=48, L=1, H=2, K=2, D=128, F=72, tied=False, theta=1e4,
                               eps=1e-3, dtype="float32", lengths=EXACT, shards=3, style=5, end=[1002, 1000]),
    "tied_bf16": dict(seed=300, V=1024, C=80, L=3, H=4, K=1, D=64, F=72, tied=True, theta=1e6, eps=1e-6,
                      dtype="bfloat16", lengths=KL, shards=1, style=5, end=[1002, 1000]),
    "untied_bf16": dict(seed=400, V=1024, C=48, L=1, H=2, K=1, D=128, F=136, tied=False, theta=1e4, eps=1e-5,
                        dtype="bfloat16", lengths=KL, shards=1, style=4, end=[1002, 1000]),
    "tied_f16": dict(seed=500, V=1024, C=96, L=1, H=4, K=1, D=64, F=72, tied=True, theta=1e6, eps=1e-6,
                     dtype="float16", lengths=EXACT, shards=1, style=5, end=1002),
}
TINY = dict(seed=7, V=1024, C=64, L=2, H=4, K=2, D=64, F=128, tied=True, theta=1e6, eps=1e-6,
            dtype="bfloat16", shards=1, style=5)


def config_json(f):
    """config.json as Qwen published it (style 4) or as transformers 5 writes it (style 5)."""
    c = {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": f["end"][0] if isinstance(f["end"], list) else f["end"],
        "head_dim": f["D"], "hidden_act": "silu", "hidden_size": f["C"], "initializer_range": 0.02,
        "intermediate_size": f["F"], "max_position_embeddings": 4096, "max_window_layers": f["L"],
        "model_type": "qwen3", "num_attention_heads": f["H"], "num_hidden_layers": f["L"],
        "num_key_value_heads": f["K"], "rms_norm_eps": f["eps"],
    }
    if f["style"] == 4:
        c.update({"rope_scaling": None, "rope_theta": f["theta"], "torch_dtype": f["dtype"],
                  "transformers_version": "4.51.0"})
    else:
        c.update({"dtype": f["dtype"], "layer_types": ["full_attention"] * f["L"], "pad_token_id": None,
                  "rope_parameters": {"rope_theta": f["theta"], "rope_type": "default"},
                  "transformers_version": "5.23.0"})
    return dict(c, sliding_window=None, tie_word_embeddings=f["tied"], use_cache=True,
                use_sliding_window=False, vocab_size=f["V"])


def weights(f):
    """Hugging Face's names -> random tensors, in fp32 but exact in the checkpoint's own type."""
    V, C, H, K, D, F = (f[k] for k in "VCHKDF")
    g = torch.Generator().manual_seed(f["seed"])
    w = {}

    def matrix(name, rows, cols, gain):  # a unit-variance input gives an output of standard deviation `gain`
        w[name] = torch.randn(rows, cols, generator=g) * (gain / math.sqrt(cols))

    def norm(name, n, mean, spread):
        w[name] = mean + spread * torch.randn(n, generator=g)

    matrix("model.embed_tokens.weight", V, C, 2.5)
    for i in range(f["L"]):
        p = f"model.layers.{i}."
        norm(p + "input_layernorm.weight", C, 1.0, 0.2)
        matrix(p + "self_attn.q_proj.weight", H * D, C, 1.0)
        matrix(p + "self_attn.k_proj.weight", K * D, C, 1.0)
        matrix(p + "self_attn.v_proj.weight", K * D, C, 1.0)
        norm(p + "self_attn.q_norm.weight", D, 1.4, 0.3)  # scores of std about 2: attention is peaked
        norm(p + "self_attn.k_norm.weight", D, 1.4, 0.3)
        matrix(p + "self_attn.o_proj.weight", C, H * D, 1.0)
        norm(p + "post_attention_layernorm.weight", C, 1.0, 0.2)
        matrix(p + "mlp.gate_proj.weight", F, C, 1.5)
        matrix(p + "mlp.up_proj.weight", F, C, 1.5)
        matrix(p + "mlp.down_proj.weight", C, F, 1.0)
    norm("model.norm.weight", C, 1.0, 0.2)
    if not f["tied"]:
        matrix("lm_head.weight", V, C, 2.5)
    return {name: t.to(DTYPES[f["dtype"]]).float() for name, t in w.items()}


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as out:
        json.dump(value, out, indent=1, ensure_ascii=False)
        out.write("\n")


def save(folder, f, w):
    """A Hugging Face folder: config.json, generation_config.json, the weights in one file or in shards."""
    os.makedirs(folder, exist_ok=True)
    write_json(folder + "/config.json", config_json(f))
    write_json(folder + "/generation_config.json", {"do_sample": True, "eos_token_id": f["end"],
                                                    "temperature": 0.6, "top_k": 20, "top_p": 0.95})
    stored = {name: t.to(DTYPES[f["dtype"]]).contiguous() for name, t in w.items()}
    if f["shards"] == 1:
        save_file(stored, folder + "/model.safetensors", {"format": "pt"})
        return
    names, n, where = list(stored), f["shards"], {}
    for i in range(n):
        file = f"model-{i + 1:05}-of-{n:05}.safetensors"
        part = names[len(names) * i // n : len(names) * (i + 1) // n]
        save_file({name: stored[name] for name in part}, f"{folder}/{file}", {"format": "pt"})
        where.update((name, file) for name in part)
    size = sum(t.numel() * t.element_size() for t in stored.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    write_json(folder + "/model.safetensors.index.json", index)


def load(folder, dtype, attention):
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()


@torch.no_grad()
def logits_of(model, prompts):
    """(total tokens, V), fp32: every position of every prompt, one prompt after the other."""
    return torch.cat([model(torch.tensor([p])).logits[0].float() for p in prompts])


@torch.no_grad()
def greedy(model, prompt):
    """GREEDY ids, and the smallest lead of a chosen token over the second best."""
    ids, lead = list(prompt), math.inf
    for _ in range(GREEDY):
        best = model(torch.tensor([ids])).logits[0, -1].topk(2)
        lead = min(lead, (best.values[0] - best.values[1]).item())
        ids.append(best.indices[0].item())
    return ids[len(prompt):], lead


def mean_kl(truth, logits):
    """Mean over positions of KL(softmax(truth) || softmax(logits)), in nats, computed in fp64."""
    p, q = torch.log_softmax(truth.double(), -1), torch.log_softmax(logits.double(), -1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def make(name, f):
    folder = f"{ROOT}/{name}"
    save(folder, f, weights(f))
    g = torch.Generator().manual_seed(f["seed"] + 1)
    prompts = [torch.randint(0, 1000, (n,), generator=g).tolist() for n in f["lengths"]]
    golden = {"vocab_size": f["V"], "prompts": prompts, "logits": "logits.f32"}

    if f["dtype"] == "float32":
        truth = load(folder, torch.float32, "eager")
        texts = [greedy(truth, p) for p in prompts]
        golden["greedy"] = [ids for ids, _ in texts]
        lead = min(lead for _, lead in texts)
        ends = f["end"] if isinstance(f["end"], list) else [f["end"]]
        if lead < MARGIN or any(e in ids for ids in golden["greedy"] for e in ends):
            sys.exit(f"{name}: greedy text has a near-tie ({lead:.1e}) or an end token: take another seed")
        note = f"greedy lead >= {lead:.4f}, {len(set(sum(golden['greedy'], [])))} different tokens"
    else:
        # The runtime computes F16 checkpoints in bf16, so the truth is fp32 arithmetic on bf16 weights.
        truth = load(folder, torch.float32, "eager")
        for p in truth.parameters():
            p.data = p.data.bfloat16().float()
        rivals = {a: mean_kl(logits_of(truth, prompts), logits_of(load(folder, torch.bfloat16, a), prompts))
                  for a in ("eager", "sdpa")}
        golden["transformers_bf16_mean_kl"] = rivals
        note = "mean KL of transformers' bf16: " + ", ".join(f"{a} {kl:.3e}" for a, kl in rivals.items())

    logits = logits_of(truth, prompts)
    with open(folder + "/logits.f32", "wb") as out:
        out.write(logits.numpy().astype("<f4").tobytes())
    write_golden(folder + "/golden.json", golden)
    size = sum(os.path.getsize(f"{folder}/{x}") for x in os.listdir(folder))
    print(f"{name}: {size:,} bytes, logits std {logits.std():.2f} max {logits.abs().max():.1f}, {note}")


def write_golden(path, golden):
    """JSON with one key a line: lists of ids stay on their line."""
    with open(path, "w", encoding="utf-8") as out:
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items()]
        out.write("{\n" + ",\n".join(lines) + "\n}\n")


def make_tiny():
    """The model that the README's first line runs: model.bin beside the small tokenizer of the tests."""
    folder, scratch = ROOT + "/tiny", f"/tmp/make_fixtures.{os.getpid()}"
    with open(folder + "/tokenizer.json", encoding="utf-8") as file:
        special = {t["content"]: t["id"] for t in json.load(file)["added_tokens"]}
    f = dict(TINY, end=[special["<|im_end|>"], special["<|endoftext|>"]])
    w = weights(f)
    w["model.embed_tokens.weight"][special["<|im_end|>"]] *= 2  # a likely token: the babble ends by itself
    save(scratch, f, w)
    export = os.path.dirname(ROOT) + "/../export.py"
    subprocess.run([sys.executable, "-I", "-S", export, scratch, folder + "/model.bin"], check=True)
    subprocess.run(["rm", "-r", scratch], check=True)
    print(f"tiny: model.bin {os.path.getsize(folder + '/model.bin'):,} bytes, end tokens {f['end']}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for name in sys.argv[1:] or [*FIXTURES, "tiny"]:
        make_tiny() if name == "tiny" else make(name, FIXTURES[name])
