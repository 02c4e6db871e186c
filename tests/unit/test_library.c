/* The C API of qwen3.h, from plain C: tests/test_library.cpp builds this with the C compiler and runs it.
   Usage: test_library MODEL QUESTION; prints the greedy answer, then on a line of its own what else was checked. */
#include "qwen3.h"
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MUST(x) ((x) ? (void)0 : (fprintf(stderr, "line %d: %s; %s\n", __LINE__, #x, qwen3_error()), exit(1)))

struct answer {
    const qwen3_model* model;
    const char* question;
    char text[4096];
    size_t bytes;
    int stop_after; /* pieces of text; 0: never */
};

static int keep(const char* text, size_t bytes, void* user) {
    struct answer* a = user;
    MUST(a->bytes + bytes < sizeof a->text);
    memcpy(a->text + a->bytes, text, bytes);
    a->bytes += bytes;
    return a->stop_after && --a->stop_after == 0;
}

static void* ask(void* user) {
    struct answer* a = user;
    qwen3_sampling greedy = qwen3_default_sampling(0);
    qwen3_context* c = qwen3_context_new(a->model, 512);
    MUST(c);
    greedy.temperature = 0;
    MUST(qwen3_ask(c, a->question, &greedy, keep, a) > 0);
    qwen3_context_free(c);
    return NULL;
}

int main(int argc, char** argv) {
    qwen3_model* m;
    qwen3_context* c;
    qwen3_sampling greedy = qwen3_default_sampling(0);
    int ids[256], limit, i;
    long n, all;
    char text[64];
    size_t rows;
    const float* logits;
    struct answer one = {0}, two = {0}, cut = {0};
    pthread_t threads[2];
    if (argc != 3) return 2;
    greedy.temperature = 0;

    MUST(qwen3_version() == QWEN3_VERSION);
    MUST(!strcmp(qwen3_error(), ""));
    MUST(!qwen3_open("/nonexistent", NULL, NULL) && strstr(qwen3_error(), "/nonexistent"));
    MUST(!qwen3_open(argv[1], NULL, "abacus") && strstr(qwen3_error(), "abacus"));
    MUST((m = qwen3_open(argv[1], NULL, "cpu")));
    limit = qwen3_context_limit(m);

    n = qwen3_tokenize(m, "warp", 4, 0, ids, 256);
    MUST(n > 0 && ids[0] >= 0 && ids[0] < qwen3_vocabulary(m));
    MUST(qwen3_detokenize(m, ids, (size_t)n, text, sizeof text) == 4 && !memcmp(text, "warp", 4));
    MUST(qwen3_tokenize(m, "<|im_end|>", 10, 1, ids, 256) == 1);
    MUST(qwen3_tokenize(m, "<|im_end|>", 10, 0, ids, 256) > 1);
    all = qwen3_prompt(m, "Be brief.", argv[2], 0, ids, 3); /* too little room: how many there are */
    MUST(all > 3 && all <= 256);
    MUST(qwen3_prompt(m, "Be brief.", argv[2], 0, ids, 256) == all);

    MUST(!qwen3_context_new(m, limit + 1) && strstr(qwen3_error(), "limit"));
    MUST((c = qwen3_context_new(m, 128)));
    MUST(qwen3_generate(c, &greedy, NULL, NULL) == -1 && strstr(qwen3_error(), "feed"));
    MUST(qwen3_draw(c, &greedy) == -1);
    n = qwen3_prompt(m, NULL, argv[2], 0, ids, 256);
    MUST(qwen3_feed(c, ids, (size_t)n) == 0 && qwen3_tokens(c) == n);
    logits = qwen3_logits(c, &rows);
    MUST(rows >= (size_t)qwen3_vocabulary(m));
    for (i = 0; i < (int)rows; i++) MUST(isfinite(logits[i]));
    i = qwen3_draw(c, &greedy);
    MUST(i >= 0 && qwen3_feed(c, &i, 1) == 0 && qwen3_tokens(c) == n + 1);
    MUST(qwen3_rewind(c, (int)n) == 0 && qwen3_tokens(c) == n && qwen3_rewind(c, 1000) == -1);
    i = -1;
    MUST(qwen3_feed(c, &i, 1) == -1 && strstr(qwen3_error(), "vocabulary"));
    MUST(qwen3_rewind(c, 0) == 0 && qwen3_feed(c, ids, (size_t)n) == 0);
    greedy.max_tokens = 3;
    MUST(qwen3_generate(c, &greedy, NULL, NULL) == 3 && qwen3_tokens(c) == n + 3);
    greedy.max_tokens = 0;
    cut.stop_after = 2;
    MUST(qwen3_rewind(c, 0) == 0 && qwen3_ask(c, argv[2], &greedy, keep, &cut) >= 2);
    MUST(qwen3_ask(c, argv[2], &greedy, keep, &cut) >= 0); /* a second question to the same conversation */
    qwen3_context_free(c);

    one.model = two.model = m; /* two contexts in two threads say what one says */
    one.question = two.question = argv[2];
    MUST(!pthread_create(threads, NULL, ask, &one) && !pthread_create(threads + 1, NULL, ask, &two));
    MUST(!pthread_join(threads[0], NULL) && !pthread_join(threads[1], NULL));
    MUST(one.bytes == two.bytes && !memcmp(one.text, two.text, one.bytes));
    MUST(cut.bytes > 0 && !strncmp(cut.text, one.text, 4));
    printf("%.*s\n", (int)one.bytes, one.text);
    qwen3_close(m);
    qwen3_close(NULL);
    qwen3_context_free(NULL);
    return 0;
}
