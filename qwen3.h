/* qwen3.h: Qwen3 in other people's programs. A C API; link with -lqwen3 (make libqwen3.so).

     qwen3_model* m = qwen3_open("Qwen3-0.6B", NULL, NULL);              // a model.bin or a Hugging Face folder
     qwen3_context* c = m ? qwen3_context_new(m, 0) : NULL;              // a conversation
     if (!c) { fprintf(stderr, "%s\n", qwen3_error()); return 1; }
     qwen3_ask(c, "What is a warp?", NULL, show, NULL);                  // show() gets the answer as it comes
     qwen3_context_free(c);
     qwen3_close(m);

   Errors: what fails returns NULL or -1, and qwen3_error() says why in one line; no C++ exception leaves the library.
   A null pointer is an error where it is not said to be allowed. So is a number out of range.
   Threads: a model may be used by any number of threads at once; a context by one at a time. Each context has its own
   keys and values, so several can answer side by side. A call on a context that is in another call is an error.
   Text is UTF-8. A token is an id from 0 to qwen3_vocabulary(m) - 1. Versions: qwen3_version(). */
#ifndef QWEN3_H
#define QWEN3_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct qwen3_model qwen3_model;     /* weights, tokenizer, device */
typedef struct qwen3_context qwen3_context; /* a KV cache, and the tokens in it */

#define QWEN3_VERSION 1
int qwen3_version(void);         /* QWEN3_VERSION of the library that is loaded */
const char* qwen3_error(void);   /* of this thread's last call that failed; "" before the first */

/* Opens a model. tokenizer: a tokenizer.bin, or NULL: beside the model, beside the program, in the working folder.
   device: "cpu", "cuda", "plain", or NULL: a GPU where there is one for it. NULL on error. */
qwen3_model* qwen3_open(const char* path, const char* tokenizer, const char* device);
void qwen3_close(qwen3_model* model); /* its contexts can still be used; NULL is allowed */
int qwen3_vocabulary(const qwen3_model* model);   /* ids that exist */
int qwen3_context_limit(const qwen3_model* model); /* tokens that the model was trained for */

/* Text to ids and back. The first `room` ids or bytes are written to `out`; returned is how many there are in all, -1
   on error. special: "<|im_end|>" and the like in the text become their ids; never do that with a user's text. */
long qwen3_tokenize(const qwen3_model* model, const char* text, size_t bytes, int special, int* out, size_t room);
long qwen3_detokenize(const qwen3_model* model, const int* ids, size_t count, char* out, size_t room);
/* The ids of a prompt: Qwen3's chat template with a system prompt (or NULL), a question, and thinking on or off. */
long qwen3_prompt(const qwen3_model* model, const char* system, const char* question, int thinking, int* out,
                  size_t room);

/* A conversation of up to `tokens` tokens, prompts and answers together; 0: 4,096, or the model's limit if that is
   less. NULL on error. */
qwen3_context* qwen3_context_new(const qwen3_model* model, int tokens);
void qwen3_context_free(qwen3_context* context); /* NULL is allowed */
int qwen3_tokens(const qwen3_context* context);  /* that are in it */
int qwen3_rewind(qwen3_context* context, int tokens); /* forgets all but the first ones, and the questions of
                                                          qwen3_ask whose tokens go; 0, or -1 */

/* Appends tokens; 0, or -1 on error. qwen3_logits gives the scores of every id as the next one, float32, as many as the
   model has vocabulary rows (`count`, if not NULL). Valid until the next call with this context. After a rewind or an
   answer the last token is computed again for them. */
int qwen3_feed(qwen3_context* context, const int* ids, size_t count);
const float* qwen3_logits(qwen3_context* context, size_t* count);

/* How tokens are drawn. 0 in max_tokens: to the end of the context. */
typedef struct {
    float temperature;  /* 0 takes the likeliest */
    int top_k;          /* 0: off */
    float top_p;        /* 1: off */
    float min_p;        /* 0: off */
    float repeat_penalty, presence_penalty, frequency_penalty; /* 1, 0, 0: off */
    uint64_t seed;      /* same seed, same answer */
    int max_tokens;
} qwen3_sampling;
qwen3_sampling qwen3_default_sampling(int thinking); /* Qwen's advice */

/* Is handed the text of an answer as it comes, whole characters, not ended by a zero. Anything but 0 ends the
   answer. */
typedef int (*qwen3_show)(const char* text, size_t bytes, void* user);

/* Draws one id from the logits; it is not in the context until it is fed. -1 on error. */
int qwen3_draw(qwen3_context* context, const qwen3_sampling* how);
/* Answers after what was fed, to an end token or a limit. The tokens of the answer are then in the context. Returns
   their number, -1 on error. how, show: NULL for the default, for nobody. */
int qwen3_generate(qwen3_context* context, const qwen3_sampling* how, qwen3_show show, void* user);
/* The next question of a conversation (without thinking), and its answer: qwen3_prompt, qwen3_feed, qwen3_generate. */
int qwen3_ask(qwen3_context* context, const char* question, const qwen3_sampling* how, qwen3_show show, void* user);

#ifdef __cplusplus
}
#endif
#endif
