#!/usr/bin/env python3
"""Reference values for reward models, from TRL's RewardTrainer (run from the repo root after `make`; needs torch, transformers,
peft and trl). The result is committed; tests/fixtures/README.md describes every file.

    python tests/reference/make_reward.py

Six pairs of dpo/pairs.jsonl, scored by `tiny` with train/adapter_bf16 and a head of random numbers: the loss, the scores and
the gradients by the head and by three modules of the adapter, in fp32, from one padded batch.
"""
import os
import subprocess
import tempfile
from collections import defaultdict
from types import SimpleNamespace

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForSequenceClassification
from trl import RewardTrainer
from trl.trainer.reward_trainer import DataCollatorForPreference

import make_fixtures as fixtures
from make_train_fixtures import dataset_rows, tiny_model

ROOT = fixtures.ROOT + "/reward"
PAIRS = 6
SOME = ["layers.0.self_attn.q_proj", "layers.1.mlp.down_proj", "layers.1.self_attn.v_proj"]


def main():
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["./datagen", "pack", "-z", fixtures.ROOT + "/tiny/tokenizer.bin", fixtures.ROOT + "/dpo/pairs.jsonl", scratch + "/pairs.bin",
                        "--info", "none"], check=True, capture_output=True)
        rows = [ids for ids, _ in dataset_rows(scratch + "/pairs.bin")][: 2 * PAIRS]
        tiny_model(scratch)  # exports it
        base = Qwen3ForSequenceClassification.from_pretrained(scratch + "/hf", num_labels=1, dtype=torch.float32, attn_implementation="eager")
        base.config.pad_token_id = 0
        g = torch.Generator().manual_seed(9)
        base.score.weight.data = (0.5 * torch.randn(base.score.weight.shape, generator=g)).bfloat16().float()
        config = LoraConfig.from_pretrained(fixtures.ROOT + "/train/adapter_bf16")
        config.task_type, config.inference_mode = None, False
        model = get_peft_model(base, config)
        faults = set_peft_model_state_dict(model, load_file(fixtures.ROOT + "/train/adapter_bf16/adapter_model.safetensors"))
        assert not faults.unexpected_keys
        model.base_model.model.score.weight.requires_grad_(True)
        t = RewardTrainer.__new__(RewardTrainer)
        t.model, t.args, t._metrics = model.eval(), SimpleNamespace(center_rewards_coefficient=None), {"eval": defaultdict(list)}
        t._total_train_tokens, t.accelerator = 0, SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
        inputs = DataCollatorForPreference(pad_token_id=0)([{"chosen_ids": a, "rejected_ids": b} for a, b in zip(rows[::2], rows[1::2])])
        loss, outputs = t.compute_loss(model, inputs, return_outputs=True)
        loss.backward()
        scores = outputs.logits.squeeze(-1).tolist()
        weight = model.base_model.model.score.weight
        tensors = {"score": weight.detach().clone(), "base_model.model.score.weight": weight.grad.clone()}
        for name, p in model.named_parameters():
            if p.grad is not None and any(some in name for some in SOME):
                tensors[name.replace(".default", "")] = p.grad.clone()
        told = {k: v[0] for k, v in t._metrics["eval"].items()}
        golden = {"pairs": PAIRS, "loss": loss.item(), "chosen": scores[:PAIRS], "rejected": scores[PAIRS:], "accuracy": told["accuracy"], "margin": told["margin"]}
        print(golden, sorted(tensors))
    save_file(tensors, ROOT + "/gradients.safetensors", {"format": "pt"})
    fixtures.write_golden(ROOT + "/batch.json", golden)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.makedirs(ROOT, exist_ok=True)
    main()
