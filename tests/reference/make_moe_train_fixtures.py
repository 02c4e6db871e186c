#!/usr/bin/env python3
"""Reference values for training a mixture of experts, by transformers and PEFT on moe/odd_f32, in fp32 (needs torch,
transformers 5 and peft; run from the repo root). The result is committed; tests/fixtures/README.md describes it.

    python tests/reference/make_moe_train_fixtures.py

Each expert's matrices become nn.Linear, as before transformers 5, so that PEFT gives each its own module; the logits stay
those of the original. The router is frozen with LoRA, and trained where everything is.
"""
import json
import math
import os

import peft.utils.transformers_weight_conversion as conversion
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3MoeForCausalLM, get_cosine_schedule_with_warmup
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func
from transformers.utils import logging

import make_fixtures as fixtures
import make_train_fixtures as training

ROOT = fixtures.ROOT + "/moe"
STEPS, RATE, RANK, COEFFICIENT = 12, 2e-3, 3, 0.05
LENGTHS = (2, 23, 9, 14, 30)
FULL = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "model.layers.0.mlp.experts.3.gate_proj",
        "model.layers.0.mlp.experts.3.up_proj", "model.layers.1.mlp.experts.6.down_proj", "model.layers.0.self_attn.q_proj",
        "model.layers.0.post_attention_layernorm", "model.layers.1.input_layernorm"]


class Expert(nn.Module):
    def __init__(self, gate, up, down):
        super().__init__()
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = nn.Parameter(weight.clone())
            setattr(self, name, linear)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.ModuleList):
    def forward(self, x, chosen, shares):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self):
            tokens, j = torch.where(chosen == e)
            if len(tokens):
                out.index_add_(0, tokens, expert(x[tokens]) * shares[tokens, j, None])
        return out


def load():
    model = Qwen3MoeForCausalLM.from_pretrained(ROOT + "/odd_f32", dtype=torch.float32, attn_implementation="eager",
                                                experts_implementation="eager")
    ids = torch.arange(20)[None]
    before = model(ids).logits
    for layer in model.model.layers:
        gate_up, down = layer.mlp.experts.gate_up_proj.detach(), layer.mlp.experts.down_proj.detach()
        layer.mlp.experts = Experts(Expert(*both.chunk(2), d) for both, d in zip(gate_up, down))
    assert (model(ids).logits - before).abs().max() < 1e-5
    return model


def loss_of(model, rows, count, balance):
    """The mean over trained tokens; with `balance` also the load-balancing loss of all tokens that a row feeds."""
    total, scores = 0, []
    for ids, trained in rows:
        out = model(torch.tensor([ids[:-1]]), output_router_logits=True)
        labels = torch.tensor([i if t else -100 for i, t in zip(ids, trained)])[1:]
        total = total + nn.functional.cross_entropy(out.logits[0], labels, reduction="sum", ignore_index=-100) / count
        scores.append(out.router_logits)
    if balance:
        together = tuple(torch.cat(layer) for layer in zip(*scores))
        total = total + balance * load_balancing_loss_func(together, 7, 3)
    return total


def train(model, rows, balance):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(0.1 * STEPS), STEPS)
    count, losses, norms = sum(sum(t) for _, t in rows), [], []
    for _ in range(STEPS):
        loss = loss_of(model, rows, count, balance)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def adapted():
    """The model with the adapter on disk, whose B is not zero."""
    torch.manual_seed(1)
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None  # (it is for experts in one tensor)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, task_type="CAUSAL_LM",
                        target_modules=[m + "_proj" for m in "q k v o gate up down".split()])
    model = get_peft_model(load(), config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model


def main():
    g = torch.Generator().manual_seed(5)
    rows = [(torch.randint(0, 300, (n,), generator=g).tolist(), [0] + torch.randint(0, 2, (n - 1,), generator=g).tolist())
            for n in LENGTHS]
    rows[0][1][1] = 1
    count = sum(sum(trained) for _, trained in rows)
    model = adapted()
    folder = ROOT + "/adapter"
    os.makedirs(folder, exist_ok=True)
    numbers = {n.replace(".default", ""): p.detach().clone().contiguous() for n, p in model.named_parameters() if "lora_" in n}
    save_file(numbers, folder + "/adapter_model.safetensors", {"format": "pt"})
    fixtures.write_json(folder + "/adapter_config.json", {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "lora_dropout": 0.0, "bias": "none",
        "target_modules": sorted(m + "_proj" for m in "q k v o gate up down".split())})
    golden = {"ids": [ids for ids, _ in rows], "trained": [t for _, t in rows], "steps": STEPS, "lr": RATE,
              "coefficient": COEFFICIENT}
    for name, balance in (("plain", 0), ("balanced", COEFFICIENT)):
        model = adapted()
        loss = loss_of(model, rows, count, balance)
        loss.backward()
        save_file({n.replace(".default", ""): p.grad.contiguous() for n, p in model.named_parameters() if "lora_" in n},
                  f"{folder}/{name}.safetensors", {"format": "pt"})
        losses, norms = train(adapted(), rows, balance)
        golden[name] = {"losses": losses, "norms": norms}
        print(f"{name}: loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    model = load()
    loss_of(model, rows, count, COEFFICIENT).backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    save_file({n + ".weight": grads[n + ".weight"].contiguous() for n in FULL}, folder + "/full.safetensors", {"format": "pt"})
    fixtures.write_golden(ROOT + "/train.json", golden)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    main()
