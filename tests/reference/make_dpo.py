#!/usr/bin/env python3
"""Reference values for DPO, from TRL's DPOTrainer (run from the repo root after `make`; needs torch, transformers, peft
and trl). The result is committed; tests/fixtures/README.md describes every file.

    python tests/reference/make_dpo.py [batch] [steps]      both, or only the named one

batch  one batch of pairs of random tokens on a small random model, whose reference is another one: the loss, what is
       told beside it, and gradients, in fp32, with label smoothing and without
steps  50 steps of an adapter for `tiny` on pairs.jsonl, from an adapter that is not zero, in fp32

TRL's sigmoid loss has had no label smoothing since 1.0. Its `aot` has it, and is the same loss for a batch of one pair,
where there is nothing to sort.
"""
import json
import math
import os
import subprocess
import sys
import tempfile

import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, PrinterCallback
from transformers.utils import logging
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

import make_fixtures as fixtures
from make_train_fixtures import dataset_rows, tiny_model

ROOT = fixtures.ROOT + "/dpo"
TOLD = ["rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected"]
STEPS, BATCH, RATE, BETA = 50, 4, 1e-3, 0.25
LENGTHS = [(5, 7, 4), (2, 3, 11), (9, 1, 2), (1, 6, 6)]  # of prompt, chosen, rejected
SMOOTHING, SMOOTHED = 0.2, ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"]


class Trainer(DPOTrainer):
    """TRL's, of rows that are tokens already; keeps each exact loss."""

    def _prepare_dataset(self, dataset, *args):
        return dataset

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.losses = getattr(self, "losses", []) + [loss.item()]
        return loss


def trainer(scratch, model, pairs, ref_model=None, **options):
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0}, "<pad>")), pad_token="<pad>", eos_token="<pad>")
    args = DPOConfig(scratch + "/trl", use_cpu=True, bf16=False, report_to=[], save_strategy="no", gradient_checkpointing=False,
                     max_length=None, disable_tqdm=True, **options)
    t = Trainer(model, ref_model=ref_model, args=args, train_dataset=Dataset.from_list(pairs), processing_class=words,
                data_collator=DataCollatorForPreference(pad_token_id=0))
    t.remove_callback(PrinterCallback)
    return t


def make_batch():
    with tempfile.TemporaryDirectory() as scratch:
        folder = fixtures.ROOT + "/train/tied"
        model, reference = (fixtures.load(folder, torch.float32, "eager") for _ in range(2))
        g = torch.Generator().manual_seed(5)
        for p in reference.parameters():
            p.data += 0.3 * p.data.std().nan_to_num() * torch.randn(p.shape, generator=g)
        pairs = [dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), (torch.randint(0, 95, (n,), generator=g).tolist() for n in lengths)))
                 for lengths in LENGTHS]
        golden = {"pairs": pairs, "beta": BETA, "smoothing": SMOOTHING}
        tensors = {}
        for name, parts, options in (("sigmoid", [pairs], dict(loss_type=["sigmoid"])),
                                     ("smoothed", [[p] for p in pairs], dict(loss_type=["aot"], label_smoothing=SMOOTHING))):
            t = trainer(scratch, model, pairs, reference, beta=BETA, **options)
            t.model.train(), t.model.zero_grad()
            for part in parts:
                inputs = t.data_collator(part)
                (t.compute_loss(t.model, inputs) / len(parts)).backward()
            golden[name] = {"loss": sum(t.losses) / len(parts), **{k: sum(t._metrics["train"][k]) / len(parts) for k in TOLD}}
            chosen, rejected = t.compute_ref_log_probs(reference, t.data_collator(pairs))
            golden["reference"] = [x for pair in zip(chosen.tolist(), rejected.tolist()) for x in pair]
            tensors |= {f"{name}.{n}": p.grad.clone() for n, p in model.named_parameters() if name == "sigmoid" or n in SMOOTHED}
            print(f"batch, {name}: {golden[name]}")
    save_file(tensors, ROOT + "/gradients.safetensors", {"format": "pt"})
    fixtures.write_golden(ROOT + "/batch.json", golden)


def make_steps():
    with open(fixtures.ROOT + "/train/rows.jsonl") as file:
        rows = [json.loads(line) for line in file]
    with open(ROOT + "/pairs.jsonl", "w") as out:
        for i, row in enumerate(rows):
            pair = {"instruction": row["instruction"], "chosen": row["output"], "rejected": rows[(i + 1) % len(rows)]["output"]}
            out.write(json.dumps(pair, ensure_ascii=False) + "\n")
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["./datagen", "pack", "-z", fixtures.ROOT + "/tiny/tokenizer.bin", ROOT + "/pairs.jsonl", scratch + "/pairs.bin", "--info", "none",
                        "--dropped", scratch + "/dropped"],
                       check=True, capture_output=True)
        rows = dataset_rows(scratch + "/pairs.bin")
        pairs = []
        for (chosen, trained), (rejected, _) in zip(rows[::2], rows[1::2]):
            n = trained.index(1)
            assert chosen[:n] == rejected[:n]
            pairs.append({"prompt_ids": chosen[:n], "chosen_ids": chosen[n:], "rejected_ids": rejected[n:]})
        model = PeftModel.from_pretrained(tiny_model(scratch), fixtures.ROOT + "/train/adapter_bf16", is_trainable=True)
        t = trainer(scratch, model, pairs, per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=RATE, lr_scheduler_type="cosine",
                    warmup_steps=math.ceil(0.1 * STEPS), weight_decay=0.01, adam_beta2=0.999, max_grad_norm=1.0, beta=BETA, logging_steps=1,
                    train_sampling_strategy="sequential", optim="adamw_torch")
        t.train()
        log = [line for line in t.state.log_history if "loss" in line]
        assert len(log) == len(t.losses) == STEPS
        golden = {"steps": STEPS, "batch": BATCH, "lr": RATE, "beta": BETA, "losses": t.losses, "norms": [line["grad_norm"] for line in log],
                  **{k: [line[k] for line in log] for k in TOLD}}
        print(f"steps: loss {t.losses[0]:.4f} -> {t.losses[-1]:.4f}, margin {golden['rewards/margins'][-1]:.3f}")
    fixtures.write_golden(ROOT + "/steps.json", golden)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    os.makedirs(ROOT, exist_ok=True)
    for name in sys.argv[1:] or ["batch", "steps"]:
        globals()["make_" + name]()
