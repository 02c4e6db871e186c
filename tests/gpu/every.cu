// Every kernel of the programs in one translation unit, for `make cuda-check`: the server's, and the trainer's with its
// suite.
#define SERVE_NO_HTTP
#define SERVE_NO_MAIN
#include "serve.cu"
template struct Engine<bf16>;
#include "tests/gpu/test_gpu_backward.cpp"
