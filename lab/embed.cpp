// embed.cpp: Qwen3 inside another program, by the C API of qwen3.h.
//
//   make libqwen3.so && g++ -I. lab/embed.cpp -L. -lqwen3 -Wl,-rpath,'$ORIGIN' -o embed
//   ./embed data/tiny/model.bin "什么是 warp？"
#include "qwen3.h"
#include <stdio.h>

static int show(const char* text, size_t bytes, void*) { // called as the answer comes; anything but 0 ends it
    fwrite(text, 1, bytes, stdout);
    return fflush(stdout);
}

int main(int argc, char** argv) {
    if (argc < 3) return fprintf(stderr, "usage: embed MODEL QUESTION...\n"), 1;
    qwen3_model* model = qwen3_open(argv[1], nullptr, nullptr);
    qwen3_context* chat = model ? qwen3_context_new(model, 0) : nullptr;
    int tokens = chat ? 0 : -1;
    for (int i = 2; i < argc && tokens >= 0; i++) { // each knows what was said before
        tokens = qwen3_ask(chat, argv[i], nullptr, show, nullptr);
        printf("\n");
    }
    if (tokens < 0) fprintf(stderr, "embed: %s\n", qwen3_error());
    qwen3_context_free(chat);
    qwen3_close(model);
    return tokens < 0;
}
