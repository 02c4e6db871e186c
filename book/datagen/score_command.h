// book/datagen/score_command.h: `datagen score`: scores a model's answers against reference answers.
//
//   datagen score answers.jsonl reference.jsonl [--train train.jsonl] [--compat] [--json] [--seed N] [--dict FILE]
//
// As LLaMA-Factory reports: ROUGE-1, ROUGE-2 and ROUGE-L of rouge_chinese 1.0.3 over the words of jieba 0.42.1,
// and BLEU-4 of nltk over characters; each row's in percent, rounded to 4 digits; then their mean. Added here:
//   - rouge-score, the ROUGE-L of scripts that pass jieba's words to Google's rouge_score, which counts ASCII only;
//   - bleu-4-word, sacrebleu's sentence BLEU over words (tokenizer 13a), for languages with spaces;
//   - facts, the share of a row's key facts found in the answer; choice, whether the letter is the right one;
//   - a think block is removed first, on both sides;
//   - rouge_chinese counts some blank lines as words (see rouge_words), which scores layout. By default
//     they are dropped, with --compat they count; both are shown;
//   - two baselines: the question itself as the answer, and the answer of the training row with the nearest question
//     by TF-IDF (--train). A model that is no better has learnt little; the difference has its interval;
//   - 95% intervals from a bootstrap over rows, seeded (Wilson's for choice); the three worst rows, for reading.
#pragma once

namespace book {

// `score`; argv[0] is its name. Throws Error.
int score_main(int argc, char** argv);

} // namespace book
