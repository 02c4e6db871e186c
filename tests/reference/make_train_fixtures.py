#!/usr/bin/env python3
"""Reference values for the training tests, from PyTorch, transformers and PEFT (run from the repo root after `make`).
The result is committed; tests/fixtures/README.md describes every file.

    python tests/reference/make_train_fixtures.py [ops] [gradients] [peft] [loraplus] [modules] [dora] [bf16]        all of them, or only the named ones

ops        every op's gradients by autograd, in double
gradients  two small models, tied and not, and the gradients of all their parameters by the loss of a few rows, in fp32
peft       a first adapter, and the losses of 100 steps from it, with PEFT, AdamW and the Trainer's schedule, in fp32
loraplus   the losses of 30 steps from that adapter with PEFT's LoRA+, in fp32
modules    adapters with an embedding and a head of their own (modules_to_save): the gradients, and the losses of 30 steps, in fp32
dora       adapters with DoRA: the gradients, and the losses of 30 steps, in fp32; one of them with PEFT's LoRA+
bf16       how far PyTorch's gradients in bf16 are from those in fp32, for all of `tiny` and for an adapter of it
"""
import json
import math
import os
import struct
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import save, save_file
from transformers import Qwen3ForCausalLM, get_cosine_schedule_with_warmup
from transformers.utils import logging

import make_fixtures as fixtures

ROOT = fixtures.ROOT + "/train"
STEPS, BATCH, RATE = 100, 8, 2e-3
SMALL = dict(V=96, C=24, L=2, H=4, K=2, D=16, F=40, theta=1e4, eps=1e-5, dtype="float32", shards=1, style=5, end=[95])


def dataset_rows(path):
    """[(ids, trained)] of a dataset (see dataset.h)."""
    with open(path, "rb") as file:
        data = file.read()
    rows, tokens = struct.unpack_from("<QQ", data, 32)
    words = struct.unpack_from(f"<{tokens}I", data, 48)
    begin = struct.unpack_from(f"<{rows + 1}Q", data, 48 + 4 * (tokens + tokens % 2))
    return [([w & 0x7FFFFFFF for w in words[a:b]], [w >> 31 for w in words[a:b]]) for a, b in zip(begin, begin[1:])]


def row_loss(model, ids, trained):
    """Sum of the trained tokens' losses."""
    logits = model(torch.tensor([ids])).logits[0, :-1].float()
    labels = torch.tensor([i if t else -100 for i, t in zip(ids, trained)])[1:]
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


def train_peft(model, rows, steps, batch, rate, ratio=None):
    """The losses of `steps` steps in the rows' order; an epoch's last one may be smaller."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
    if ratio:
        optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=rate, loraplus_lr_ratio=ratio, weight_decay=0.01, loraplus_weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(0.1 * steps), steps)
    losses, norms = [], []
    for step in range(steps):
        first = step % math.ceil(len(rows) / batch) * batch
        some = rows[first : first + batch]
        count = sum(sum(trained) for _, trained in some)
        total = 0
        for ids, trained in some:
            loss = row_loss(model, ids, trained) / count
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def tiny_model(scratch):
    subprocess.run([sys.executable, "-I", "-S", "export.py", "--to-hf", fixtures.ROOT + "/tiny/model.bin", scratch + "/hf"], check=True, capture_output=True)
    return Qwen3ForCausalLM.from_pretrained(scratch + "/hf", dtype=torch.float32, attn_implementation="eager")


def make_fuzz_seed(dora=False):
    """What fuzz_adapter reads: an adapter of rank 1 for `tiny`, one module: config, a zero byte, tensors."""
    with open(ROOT + "/adapter/adapter_config.json", "rb") as file:
        config = dict(json.load(file), r=1, target_modules=["k_proj"], use_dora=dora)
    tensors = {f"base_model.model.model.layers.{i}.self_attn.k_proj.lora_{m}.weight": torch.full((1, 64) if m == "A" else (128, 1), 0.01)
               for i in range(2) for m in "AB"}
    if dora:
        tensors.update({f"base_model.model.model.layers.{i}.self_attn.k_proj.lora_magnitude_vector": torch.ones(128) for i in range(2)})
    with open(fixtures.ROOT + "/fuzz/adapter/k_proj" + dora * "_dora", "wb") as out:
        out.write(json.dumps(config).encode() + b"\0" + save(tensors))


def packed_rows(scratch):
    subprocess.run(["./datagen", "pack", "-z", fixtures.ROOT + "/tiny/tokenizer.bin", ROOT + "/rows.jsonl", scratch + "/rows.bin", "--info", "none"],
                   check=True, capture_output=True)
    return dataset_rows(scratch + "/rows.bin")


def make_loraplus():
    with tempfile.TemporaryDirectory() as scratch:
        model = PeftModel.from_pretrained(tiny_model(scratch), ROOT + "/adapter", is_trainable=True)
        losses, norms = train_peft(model.train(), packed_rows(scratch), 30, BATCH, 5e-4, ratio=16)
    fixtures.write_golden(ROOT + "/loraplus.json", {"steps": 30, "batch": BATCH, "lr": 5e-4, "ratio": 16, "losses": losses, "norms": norms})
    print(f"loraplus: loss {losses[0]:.4f} -> {losses[-1]:.4f}")


def make_adapter(folder, base, seed, config, renamed):
    """A random adapter of a small model in a folder, with its gradients on the model's rows; `renamed`: from and to, in
    the gradients' names. Returns the model, the rows and the names."""
    torch.manual_seed(seed)
    with open(f"{ROOT}/{base}/rows.json") as file:
        rows = json.load(file)
    rows = list(zip(rows["ids"], rows["trained"]))
    count = sum(sum(trained) for _, trained in rows)
    model = get_peft_model(fixtures.load(f"{ROOT}/{base}", torch.float32, "eager"), config)
    for n, p in model.named_parameters():
        if p.requires_grad:
            p.data += 0.05 * torch.randn(p.shape)
    model.peft_config["default"].base_model_name_or_path = base
    model.peft_config["default"].target_modules = sorted(config.target_modules)
    model.save_pretrained(folder)
    os.remove(folder + "/README.md")
    (sum(row_loss(model, *row) for row in rows) / count).backward()
    some = {n.replace(".default", "").replace(*renamed): p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    save_file(some, folder + "/gradients.safetensors", {"format": "pt"})
    model.zero_grad()
    return model.train(), rows, sorted(some)


def make_modules():
    golden = {"steps": 30, "lr": 5e-3}
    for name, base, saved in (("both", "tied", ["embed_tokens", "lm_head"]), ("embed", "tied", ["embed_tokens"]), ("untied", "untied", ["embed_tokens", "lm_head"])):
        config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "down_proj"], modules_to_save=saved, task_type="CAUSAL_LM")
        model, rows, names = make_adapter(f"{ROOT}/modules_{name}", base, 4, config, (".modules_to_save", ""))
        losses, norms = train_peft(model, rows, 30, len(rows), 5e-3)
        golden[name] = {"losses": losses, "norms": norms}
        print(f"modules: {name}, {names[:2]}.., loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    fixtures.write_golden(ROOT + "/modules.json", golden)


def make_dora():
    golden = {"steps": 30, "lr": 5e-3, "ratio": 4}
    for name, base, targets, rslora in (("all", "tied", "q k v o gate up down", False), ("some", "untied", "k v up down", True)):
        config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, use_dora=True, use_rslora=rslora, target_modules=[m + "_proj" for m in targets.split()], task_type="CAUSAL_LM")
        model, rows, names = make_adapter(f"{ROOT}/dora_{name}", base, 6, config, ("_vector.weight", "_vector"))
        losses, norms = train_peft(model, rows, 30, len(rows), 5e-3, ratio=None if name == "all" else 4)
        model.eval()
        logits = model(torch.tensor([rows[0][0]])).logits[0]
        merged = model.merge_and_unload()(torch.tensor([rows[0][0]])).logits[0]
        golden[name] = {"losses": losses, "norms": norms}
        print(f"dora: {name}, {len(names)} tensors, loss {losses[0]:.4f} -> {losses[-1]:.4f}, merged {(merged - logits).abs().max():.1e}")
    fixtures.write_golden(ROOT + "/dora.json", golden)
    make_fuzz_seed(dora=True)


def make_peft():
    with tempfile.TemporaryDirectory() as scratch:
        rows = packed_rows(scratch)
        torch.manual_seed(1)
        config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=[m + "_proj" for m in "q k v o gate up down".split()], task_type="CAUSAL_LM")
        model = get_peft_model(tiny_model(scratch), config)
        model.peft_config["default"].base_model_name_or_path = "tiny"
        model.peft_config["default"].target_modules = sorted(config.target_modules)  # a set's order changes
        model.save_pretrained(ROOT + "/adapter")
        os.remove(ROOT + "/adapter/README.md")
        make_fuzz_seed()
        losses, norms = train_peft(model.train(), rows, STEPS, BATCH, RATE)
        model.eval()
        with torch.no_grad():
            count = sum(sum(trained) for _, trained in rows)
            final = sum(row_loss(model, *row).item() for row in rows) / count
    fixtures.write_golden(ROOT + "/peft.json", {"steps": STEPS, "batch": BATCH, "lr": RATE, "losses": losses, "norms": norms, "final": final})
    print(f"peft: {len(rows)} rows, loss {losses[0]:.4f} -> {losses[-1]:.4f}")


def groups(names):
    """Tensors that are one product in the runtime are one group: [[name]]."""
    together = {"q_proj": ("q_proj", "k_proj", "v_proj"), "gate_proj": ("gate_proj", "up_proj"), "k_proj": (), "v_proj": (), "up_proj": ()}
    all_groups = []
    for name in names:
        module = name.split(".")[-2]
        all_groups.append([name.replace(module, m) for m in together.get(module, (module,))])
    return [g for g in all_groups if g]


def together(tensors, names):
    return torch.cat([tensors[n].flatten() for n in names])


def make_gradients():
    for name, tied in (("tied", True), ("untied", False)):
        folder = f"{ROOT}/{name}"
        f = dict(SMALL, tied=tied, seed=600 + tied)
        fixtures.save(folder, f, fixtures.weights(f))
        model = fixtures.load(folder, torch.float32, "eager")
        g = torch.Generator().manual_seed(7)
        rows = [(torch.randint(0, 95, (n,), generator=g).tolist(), [0] + torch.randint(0, 2, (n - 1,), generator=g).tolist()) for n in (2, 23, 9)]
        rows[0][1][1] = 1
        count = sum(sum(trained) for _, trained in rows)
        losses = [row_loss(model, *row) for row in rows]
        (sum(losses) / count).backward()
        rival = fixtures.load(folder, torch.bfloat16, "sdpa")
        (sum(row_loss(rival, *row) for row in rows) / count).backward()
        theirs, truth = ({n: p.grad.double() for n, p in m.named_parameters()} for m in (rival, model))
        errors = [(together(theirs, n) - together(truth, n)).norm() / together(truth, n).norm() for n in groups(truth)]
        save_file({n: p.grad.contiguous() for n, p in model.named_parameters()}, folder + "/gradients.safetensors", {"format": "pt"})
        fixtures.write_golden(folder + "/rows.json", {"ids": [ids for ids, _ in rows], "trained": [t for _, t in rows],
                                                      "losses": [loss.item() for loss in losses],
                                                      "bf16_error": (sum(errors) / len(errors)).item()})
        print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, {count} trained tokens")


def make_bf16():
    g = torch.Generator().manual_seed(11)
    rows = [(torch.randint(0, 960, (n,), generator=g).tolist(), [0] + torch.randint(0, 2, (n - 1,), generator=g).tolist()) for n in (70, 33, 3, 129, 16, 17)]
    ids = torch.zeros(len(rows), max(len(ids) for ids, _ in rows), dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, (row, trained) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, : len(row)] = torch.tensor([t if use else -100 for t, use in zip(row, trained)])
    mask = (torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row, _ in rows])).long()

    def gradients(model):  # one padded batch, so that no gradient is rounded between rows
        logits = model(ids, attention_mask=mask).logits[:, :-1].float()
        F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100).backward()
        return {n.replace(".default", ""): p.grad.double() for n, p in model.named_parameters() if p.requires_grad}

    with tempfile.TemporaryDirectory() as scratch:
        config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=[m + "_proj" for m in "q k v o gate up down".split()], task_type="CAUSAL_LM")
        torch.manual_seed(2)
        first = get_peft_model(tiny_model(scratch), config)
        first.peft_config["default"].base_model_name_or_path = "tiny"
        first.peft_config["default"].target_modules = sorted(config.target_modules)
        for name, p in first.named_parameters():  # trained a little, and exact in bf16
            if p.requires_grad:
                p.data = (torch.randn(p.shape) * 0.05 if "lora_B" in name else p.data).bfloat16().float()
        first.bfloat16().save_pretrained(ROOT + "/adapter_bf16")
        os.remove(ROOT + "/adapter_bf16/README.md")
        errors = {}
        for name in ("full", "lora"):
            def load(dtype, attention):
                base = fixtures.load(scratch + "/hf", dtype, attention)
                return base if name == "full" else PeftModel.from_pretrained(base, ROOT + "/adapter_bf16", is_trainable=True, autocast_adapter_dtype=dtype == torch.float32)

            truth, rival = gradients(load(torch.float32, "eager")), gradients(load(torch.bfloat16, "sdpa"))
            errors[name] = {n: ((rival[n] - truth[n]).norm() / truth[n].norm()).item() for n in truth}
            errors[name]["all"] = ((together(rival, truth) - together(truth, truth)).norm() / together(truth, truth).norm()).item()
            print(f"bf16: {name}, {len(truth)} tensors, error {errors[name]['all']:.4f}")
    fixtures.write_golden(ROOT + "/bf16.json", {"ids": [row for row, _ in rows], "trained": [t for _, t in rows], **errors})


def make_ops():
    """ops.json: op -> name -> numbers in row-major order; d_NAME is the gradient by NAME of sum(out * g)."""
    torch.manual_seed(3)
    ops = {}

    def op(name, function, **inputs):
        tensors = {k: v.double().requires_grad_() for k, v in inputs.items()}
        out = function(**tensors)
        g = torch.randn_like(out)
        (out * g).sum().backward()
        ops[name] = {**{k: v.detach() for k, v in tensors.items()}, "out": out.detach(), "g": g, **{"d_" + k: v.grad for k, v in tensors.items()}}

    def rms(x, w, eps=1e-5):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w

    def turn(x, pos, theta=100.0):  # (N,heads,D), halves
        D = x.shape[-1]
        angle = pos[:, None, None] * theta ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        cos, sin = angle.cos().repeat(1, 1, 2), angle.sin().repeat(1, 1, 2)
        return x * cos + torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1) * sin

    N, H, K, D = 7, 4, 2, 6

    def attend(qkv, q_weight, k_weight):  # sequences of 3 and 4 tokens
        q, k, v = qkv.view(N, H + 2 * K, D).split((H, K, K), 1)
        pos = torch.tensor([0, 1, 2, 0, 1, 2, 3], dtype=torch.float64)
        q, k = turn(rms(q, q_weight), pos), turn(rms(k, k_weight), pos)
        out = [F.scaled_dot_product_attention(*(t[a:b].transpose(0, 1) for t in (q, k.repeat_interleave(H // K, 1), v.repeat_interleave(H // K, 1))),
                                              is_causal=True).transpose(0, 1) for a, b in ((0, 3), (3, 7))]
        return torch.cat(out)

    target = torch.tensor([3, 0, 18])
    op("cross_entropy", lambda logits: F.cross_entropy(logits, target, reduction="none"), logits=3 * torch.randn(3, 19))
    op("linear", lambda x, W: x @ W.T, x=torch.randn(4, 9), W=torch.randn(5, 9))
    op("lora", lambda x, W, A, B: x @ W.T + 2 * (x @ A.T @ B.T), x=torch.randn(4, 9), W=torch.randn(5, 9), A=torch.randn(3, 9), B=torch.randn(5, 3))
    op("rmsnorm", rms, x=torch.randn(3, 10), w=1 + 0.3 * torch.randn(10))
    op("swiglu", lambda gate_up: F.silu(gate_up[:, :11]) * gate_up[:, 11:], gate_up=2 * torch.randn(3, 22))
    op("attend", attend, qkv=torch.randn(N, (H + 2 * K) * D), q_weight=1 + 0.3 * torch.randn(D), k_weight=1 + 0.3 * torch.randn(D))
    op("embed", lambda W: F.embedding(torch.tensor([2, 0, 2, 4]), W), W=torch.randn(5, 3))

    p = torch.randn(6, dtype=torch.float64, requires_grad=True)
    adamw = {"p": p.detach().clone(), "gradients": [], "steps": [], "norms": []}
    optimizer = torch.optim.AdamW([p], lr=0.01, weight_decay=0.1)
    for scale in (5.0, 0.1, 1.0):
        p.grad = scale * torch.randn(6, dtype=torch.float64)
        adamw["gradients"].append(p.grad.clone())
        adamw["norms"].append(torch.nn.utils.clip_grad_norm_([p], 1.0))
        optimizer.step()
        adamw["steps"].append(p.detach().clone())
    ops["adamw"] = {k: v if torch.is_tensor(v) else torch.stack(v) for k, v in adamw.items()}
    fixtures.write_golden(ROOT + "/ops.json", {k: {n: t.flatten().tolist() for n, t in v.items()} for k, v in ops.items()})
    print(f"ops: {', '.join(ops)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    os.makedirs(ROOT, exist_ok=True)
    for name in sys.argv[1:] or ["ops", "gradients", "peft", "loraplus", "modules", "dora", "bf16"]:
        globals()["make_" + name]()
