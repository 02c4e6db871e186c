// cli/cli.h: qwen3 around the model: chat, evaluation, perplexity, benchmark, models that are made.
//   run          executes the options                options     qwen3's table
//   ask          one prompt                          chat        questions and answers (editor, screen, saved_chat,
//   answer       shared by ask, chat, evaluate                   state, commands)
//   evaluate     --eval (questions)                  perplexity  --ppl, --against
//   embed        --embed, --rerank                   bench       --bench
//   make         --synthesize, --convert             quantize    --quantize
//   prompt_cache --prompt-cache
#pragma once
#include "base/options.h" // take_signals

namespace cli {

// Executes the options; see run_program.
int run(int argc, char** argv);

} // namespace cli
