// cli/cli.h: qwen3 around the model: chat, evaluation, perplexity, benchmark, models that are made.
//   run          what the options ask for            options     qwen3's table
//   ask          one prompt                          chat        questions and answers (editor, screen, saved_chat,
//   answer       what ask, chat and evaluate share               state, commands)
//   evaluate     --eval (questions)                  perplexity  --ppl, --against
//   embed        --embed, --rerank                   bench       --bench
//   make         --synthesize, --convert             quantize    --quantize
//   prompt_cache --prompt-cache
#pragma once
#include "base/options.h" // take_signals

namespace cli {

// Does what the options ask for; see run_program.
int run(int argc, char** argv);

} // namespace cli
