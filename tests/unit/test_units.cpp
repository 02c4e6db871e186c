// The suites that include the whole model, as one program: qwen3.cu is compiled once, not eight times.
// Each also compiles alone: make build/g++/test_ops.
#include "../common.h"
#include "../files.h"
#include <sys/stat.h>

namespace ops_suite {
#include "test_ops.cpp"
}
namespace model_suite {
#include "test_model.cpp"
}
namespace sampler_suite {
#include "test_sampler.cpp"
}
namespace loader_suite {
#include "test_loader.cpp"
}
namespace int8_suite {
#include "test_int8.cpp"
}
namespace backward_suite {
#include "test_backward.cpp"
}
namespace attention_backward_suite {
#include "test_attention_backward.cpp"
}
namespace generate_suite {
#include "test_generate.cpp"
}
