#!/usr/bin/env python3
"""Reference values for GRPO, from TRL's GRPOTrainer (run from the repo root; needs torch, transformers and trl). The result
is committed; tests/fixtures/README.md describes every file.

    python tests/reference/make_grpo.py

Two groups of four answers of random tokens and their rewards are given to TRL as if it had drawn them. A small random
model (train/tied), moved a little, is the one that drew them, so that probabilities have changed since and some are
clipped; moved further, it is the reference. In fp32.
"""
import os
import tempfile

import torch
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, PrinterCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

import make_fixtures as fixtures

ROOT = fixtures.ROOT + "/grpo"
GROUP, MOST, LOW, HIGH, BETA = 4, 9, 0.1, 0.15, 0.2
PROMPTS, LENGTHS = (5, 8), (3, 9, 1, 6, 7, 2, 9, 4)  # an answer of 9 tokens is cut off
REWARDS = [1, 0, 0, 0.25, 0.5, 1, 0, 0.75]
CASES = {  # loss_type, beta, scale_rewards, mask_truncated_completions
    "grpo": ("grpo", 0, "group", False), "grpo_kl": ("grpo", BETA, "group", True),
    "dr_grpo": ("dr_grpo", 0, "none", False), "dr_grpo_kl": ("dr_grpo", BETA, "none", True),
    "dapo": ("dapo", 0, "group", True), "dapo_kl": ("dapo", BETA, "group", False),
}
WHOLE = "dapo_kl"  # all gradients; of the others these:
SOME = ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"]
TOLD = ["kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "reward", "reward_std", "frac_reward_zero_std",
        "completions/mean_length", "completions/clipped_ratio"]


def moved(model, by, seed):
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data += by * p.data.std().nan_to_num() * torch.randn(p.shape, generator=g)
    return model


def main():
    folder = fixtures.ROOT + "/train/tied"
    g = torch.Generator().manual_seed(11)
    draw = lambda n: torch.randint(0, 95, (n,), generator=g).tolist()  # 95 ends an answer
    prompts = [draw(n) for n in PROMPTS]
    answers = [draw(n) if n == MOST else draw(n - 1) + [95] for n in LENGTHS]
    golden = {"group": GROUP, "max_tokens": MOST, "epsilon": LOW, "epsilon_high": HIGH, "prompts": prompts, "answers": answers, "rewards": REWARDS, "cases": {}}
    tensors = {}
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<end>": 95, "<pad>": 0}, "<pad>")), pad_token="<pad>", eos_token="<end>")
    words.padding_side = "left"
    for name, (loss_type, beta, scale, mask) in CASES.items():
        with tempfile.TemporaryDirectory() as scratch:
            model = moved(fixtures.load(folder, torch.float32, "eager"), 0.03, 1)  # draws
            args = GRPOConfig(scratch, use_cpu=True, bf16=False, report_to=[], save_strategy="no", gradient_checkpointing=False, disable_tqdm=True,
                              per_device_train_batch_size=2 * GROUP, num_generations=GROUP, max_completion_length=MOST, num_iterations=2,
                              loss_type=loss_type, beta=beta, scale_rewards=scale, mask_truncated_completions=mask, epsilon=LOW, epsilon_high=HIGH,
                              use_bias_correction_kl=False)  # the divergence as DeepSeekMath has it
            model.config._name_or_path = folder
            t = GRPOTrainer(model, reward_funcs=lambda completions, **_: REWARDS, args=args, processing_class=words,
                            train_dataset=Dataset.from_list([{"prompt": "0"}, {"prompt": "1"}]),
                            rollout_func=lambda asked, _: {"prompt_ids": [prompts[int(p)] for p in asked], "completion_ids": answers, "logprobs": None})
            t.remove_callback(PrinterCallback)
            if beta:
                t.ref_model.float().load_state_dict(moved(fixtures.load(folder, torch.float32, "eager"), 0.1, 2).state_dict())
            t.model.train()
            t.current_gradient_accumulation_steps = 1
            inputs = t._generate_and_score_completions([{"prompt": str(i // GROUP)} for i in range(2 * GROUP)])
            at = fixtures.load(folder, torch.float32, "eager").state_dict()
            t.model.load_state_dict(at)
            t.model.zero_grad()
            loss = t._compute_loss(t.model, inputs)
            loss.backward()

            def of_answers(x):
                return [row[:n].tolist() for row, n in zip(x, LENGTHS)]

            golden["cases"][name] = {"loss_type": loss_type, "beta": beta, "scale": scale, "mask": mask, "loss": loss.item(),
                                     "advantages": inputs["advantages"].tolist(), "old": of_answers(inputs["old_per_token_logps"]),
                                     **({"reference": of_answers(inputs["ref_per_token_logps"])} if beta else {}),
                                     **{k: t._metrics["train"][k][-1] for k in TOLD if k in t._metrics["train"]}}
            tensors |= {f"{name}.{n}": p.grad.clone() for n, p in t.model.named_parameters() if name == WHOLE or n in SOME}
            print(name, {k: v for k, v in golden["cases"][name].items() if k not in ("old", "reference")})
    save_file(tensors, ROOT + "/gradients.safetensors", {"format": "pt"})
    fixtures.write_golden(ROOT + "/batch.json", golden)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    os.makedirs(ROOT, exist_ok=True)
    main()
