#!/usr/bin/env python3
"""Loads data/course as a dataset of Hugging Face, as a user would: every configuration and split, rows, columns.

    pip install datasets
    check_hub.py

No network: the folder is the dataset. What comes out is compared with the files, row by row.
"""
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
from datasets import get_dataset_config_names, load_dataset  # noqa: E402

COURSE = Path(__file__).resolve().parents[2] / "data" / "course"
FILES = {("questions", "train"): ["gpu_qa", "train_hard", "chapters_train", "extra_train"],
         ("questions", "validation"): ["dev"], ("questions", "validation_extra"): ["extra_dev"],
         ("questions", "test"): ["exam_qa"], ("questions", "test_hard"): ["exam_hard"],
         ("questions", "test_chapters"): ["chapters_exam"], ("questions", "test_chapters_hard"): ["chapters_hard"],
         ("questions", "validation_chapters"): ["chapters_dev"],
         ("choices", "test_chapters_hard"): ["mc_chapters_hard"], ("choices", "seen_more"): ["mc_more_seen"],
         ("choices", "validation_extra"): ["mc_extra_dev"], ("choices", "seen_extra"): ["mc_extra_seen"],
         ("rephrased", "test"): ["rephrased_qa", "rephrased_more_qa"], ("choices", "test"): ["mc_exam"],
         ("choices", "seen"): ["mc_seen"], ("choices", "test_chapters"): ["mc_chapters"],
         ("choices", "seen_chapters"): ["mc_chapters_seen"], ("english_answers", "train"): ["english_train"],
         ("english_answers", "test"): ["english_test"],
         ("paraphrases", "train"): ["paraphrases"], ("notes", "train"): ["notes"]}


def main():
    faults = 0
    names = get_dataset_config_names(str(COURSE))
    if sorted(names) != sorted({name for name, _ in FILES}):
        print("fault: configurations", names)
        faults += 1
    with tempfile.TemporaryDirectory() as cache:
        for name in names:
            for split, rows in load_dataset(str(COURSE), name, cache_dir=cache).items():
                want = [json.loads(line) for file in FILES[name, split]
                        for line in (COURSE / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()]
                got = [{key: value for key, value in row.items() if value is not None and value != []} for row in rows]
                # A column that a file lacks is empty, not lost.
                same = got == [{key: value for key, value in row.items() if value != []} for row in want]
                faults += not same
                print(f"{name:16} {split:11} {len(rows):5} rows, {len(rows.column_names)} columns"
                      f"{'' if same else '  FAULT: not the rows of the files'}")
        default = load_dataset(str(COURSE), cache_dir=cache)
        if list(default) != ["train", "validation", "test", "test_hard", "test_chapters", "validation_chapters",
                             "test_chapters_hard", "validation_extra"]:
            print("fault: the default configuration has the splits", list(default))
            faults += 1
    return faults > 0


if __name__ == "__main__":
    sys.exit(main())
