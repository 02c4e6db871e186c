#!/usr/bin/env python3
"""Reference values for preferences, from TRL's trainers (run from the repo root after `make`; needs torch, transformers, peft
and trl). The result is committed; tests/fixtures/README.md describes every file.

    python tests/reference/make_dpo.py [batch] [steps] [losses]      all, or only the named ones

batch  one batch of pairs of random tokens on a small random model, whose reference is another one: the loss, what is
       told beside it, and gradients, in fp32, with label smoothing and without
losses the same of IPO, SimPO, ORPO and KTO
steps  50 steps of an adapter for `tiny` on pairs.jsonl, from an adapter that is not zero, in fp32

The sigmoid loss of TRL 1.16 ignores label smoothing. Its `aot` does not, and is the same loss for a batch of one pair,
where there is nothing to sort. TRL's ORPO trains the prompt, too; here its cross entropy is the answer's, as in the paper.
"""
import json
import math
import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, PrinterCallback
from transformers.utils import logging
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

import make_fixtures as fixtures
from make_train_fixtures import dataset_rows, tiny_model

ROOT = fixtures.ROOT + "/dpo"
TOLD = ["rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected"]
STEPS, BATCH, RATE, BETA = 50, 4, 1e-3, 0.25
LENGTHS = [(5, 7, 4), (2, 3, 11), (9, 1, 2), (1, 6, 6)]  # of prompt, chosen, rejected
LABELS, WEIGHTS, GAMMA = [True, False, True, True], (1.5, 0.75), 0.4
SMOOTHING, SMOOTHED = 0.2, ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"]


class Unprepared:
    """Of rows that are tokens already; keeps each exact loss."""

    def _prepare_dataset(self, dataset, *args):
        return dataset

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.losses = getattr(self, "losses", []) + [loss.item()]
        return loss


class Trainer(Unprepared, DPOTrainer):
    pass


class AnswerTrainer(Unprepared, KTOTrainer):
    pass


class Orpo(ORPOTrainer):
    """TRL's, except that only the answer is trained, and that each answer weighs the same."""

    def concatenated_forward(self, model, batch):
        out = super().concatenated_forward(model, batch)
        if batch["chosen_input_ids"].shape[0] == 1 and batch["chosen_labels"][0, 1] >= 0:  # a prompt of one token
            assert abs(out[4] + out[0][0]) < 1e-6
        return (*out[:4], -out[0].mean())


def trainer(scratch, model, pairs, ref_model=None, kind=Trainer, config=DPOConfig, collator=DataCollatorForPreference, **options):
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0}, "<pad>")), pad_token="<pad>", eos_token="<pad>")
    args = config(scratch + "/trl", use_cpu=True, bf16=False, report_to=[], save_strategy="no", gradient_checkpointing=False,
                     max_length=None, disable_tqdm=True, **options)
    t = kind(model, ref_model=ref_model, args=args, train_dataset=Dataset.from_list(pairs), processing_class=words,
                data_collator=collator(pad_token_id=0))
    t.remove_callback(PrinterCallback)
    return t


def models_and_pairs():
    folder = fixtures.ROOT + "/train/tied"
    model, reference = (fixtures.load(folder, torch.float32, "eager") for _ in range(2))
    g = torch.Generator().manual_seed(5)
    for p in reference.parameters():
        p.data += 0.3 * p.data.std().nan_to_num() * torch.randn(p.shape, generator=g)
    pairs = [dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), (torch.randint(0, 95, (n,), generator=g).tolist() for n in lengths)))
             for lengths in LENGTHS]
    return model, reference, pairs


def padded(pairs, key):
    """Tokens, attention mask and labels of one answer of each pair, as the collators of TRL's older trainers pad them."""
    rows = [(len(p["prompt_ids"]), p["prompt_ids"] + p[key + "_ids"]) for p in pairs]
    longest = max(len(row) for _, row in rows)
    fill = lambda row, pad: row + [pad] * (longest - len(row))
    return {key + "_input_ids": torch.tensor([fill(row, 0) for _, row in rows]),
            key + "_attention_mask": torch.tensor([fill([1] * len(row), 0) for _, row in rows]),
            key + "_labels": torch.tensor([fill([-100] * n + row[n:], -100) for n, row in rows])}


def make_losses():
    """IPO by TRL's DPOTrainer, KTO by its KTOTrainer; SimPO and ORPO by the losses of CPOTrainer and ORPOTrainer."""
    golden, tensors = {"beta": BETA, "gamma": GAMMA, "labels": LABELS, "weights": WEIGHTS}, {}
    with tempfile.TemporaryDirectory() as scratch:
        model, reference, pairs = models_and_pairs()

        def keep(name, loss, metrics):
            model.zero_grad()
            loss.backward()
            golden[name] = {"loss": loss.item(), **{k: float(metrics[k]) for k in TOLD + ["kl"] if k in metrics}}
            tensors.update({f"{name}.{n}": p.grad.clone() for n, p in model.named_parameters() if n in SMOOTHED})
            print(f"losses, {name}: {golden[name]}")

        def keep_trained(name, t, rows):
            t.model.train()
            loss = t.compute_loss(t.model, t.data_collator(rows))
            keep(name, loss, {k: v[0] for k, v in t._metrics["train"].items()})

        keep_trained("ipo", trainer(scratch, model, pairs, reference, beta=BETA, loss_type=["ipo"]), pairs)
        for name, kind in (("simpo", CPOTrainer), ("orpo", Orpo)):
            t = kind.__new__(kind)
            t.beta, t.loss_type, t.simpo_gamma, t.label_smoothing, t.alpha, t.cpo_alpha = BETA, name, GAMMA, 0, 0, 0
            t.is_encoder_decoder = t.aux_loss_enabled = False
            t.pad_token_id = t.padding_value = 0
            t.accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x)
            keep(name, *t.get_batch_loss_metrics(model, {**padded(pairs, "chosen"), **padded(pairs, "rejected")}))
            for p in pairs:
                t.get_batch_loss_metrics(model, {**padded([p], "chosen"), **padded([p], "rejected")})
        answers = [p["rejected_ids"] for p in pairs]  # (of the chosen ones the KL term is 0)
        rows = [{"prompt_ids": p["prompt_ids"], "completion_ids": p["chosen_ids"], "KL_completion_ids": answers[i - 1], "label": label}
                for i, (p, label) in enumerate(zip(pairs, LABELS))]
        t = trainer(scratch, model, rows, reference, AnswerTrainer, KTOConfig, DataCollatorForUnpairedPreference, beta=BETA,
                    desirable_weight=WEIGHTS[0], undesirable_weight=WEIGHTS[1], per_device_train_batch_size=len(rows),
                    train_sampling_strategy="sequential")
        keep_trained("kto", t, rows)
        assert golden["kto"]["kl"] > 0
        golden["mismatched_ids"] = [row["KL_completion_ids"] for row in rows]
        golden["reference"], golden["mismatched"] = (x.tolist() for x in t.compute_ref_log_probs(reference, t.data_collator(rows)))
    save_file(tensors, ROOT + "/losses.safetensors", {"format": "pt"})
    fixtures.write_golden(ROOT + "/losses.json", golden)


def make_batch():
    with tempfile.TemporaryDirectory() as scratch:
        model, reference, pairs = models_and_pairs()
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
    for name in sys.argv[1:] or ["batch", "losses", "steps"]:
        globals()["make_" + name]()
