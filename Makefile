# make              qwen3, train_lora and serve, with nvcc where it is found, else with g++ alone; and datagen
# make cpu          the same with g++ alone
# make test         builds with -Werror, runs every suite; the last line counts
# make asan|fuzz    the suites under ASan + UBSan; the fuzzers (SECONDS_EACH=20)
# make campaign     mixed load and faults against ./serve for SECONDS_EACH
# make tsan         the server's suite, the server under ThreadSanitizer
# make aarch64      the model's suites for 64-bit Arm, by a cross compiler, under qemu-user
# make cuda-check   nvcc compiles every kernel for four architectures, and the code in the notes
# make lab          the kernel laboratories, from the naive loop up
# make lab-check    every step once at an odd size (CHECKER="compute-sanitizer --error-exitcode 1")
# make lab-plots    runs them all on this GPU: pictures and tables of docs/lab*.md
# make check-env    driver, toolkit, GPU, its speed beside the data sheet
# make bench        speed of this machine's build, and of its GPU's kernels
# make clean
# Options: PORTABLE=1 a binary for any x86-64    CXX=clang++    ARCH=native|all|"80 89"    V=1 shows the commands

CXX      ?= g++
NVCC     ?= nvcc
ARCH     ?= native
WARN      = -Wall -Wextra
OPT       = -O3
Q         = $(if $(V),,@)

HEADERS   = $(wildcard *.h server/*.h)
BUILD     = build

# ---- What there is. Only questions here; `info` says what was chosen.
HAVE_NVCC := $(if $(filter cpu,$(MAKECMDGOALS)),,$(shell command -v $(NVCC) 2>/dev/null))
OPENMP    := $(shell echo 'int main(){}' | $(CXX) -fopenmp -x c++ - -o /dev/null 2>/dev/null && echo -fopenmp)
EDIT      := $(shell printf '\043include <stdio.h>\n\043include <histedit.h>\nint main(){}' | $(CXX) -x c++ - -o /dev/null -ledit 2>/dev/null && echo -ledit)
CURL      := $(shell printf '\043include <curl/curl.h>\nint main(){curl_global_cleanup();}' | $(CXX) -x c++ - -o /dev/null -lcurl 2>/dev/null && echo -lcurl)
MHD       := $(shell printf '\043include <microhttpd.h>\nint main(){return !MHD_get_version();}' | $(CXX) -x c++ - -o /dev/null -lmicrohttpd 2>/dev/null && echo -lmicrohttpd)
NCCL      := $(shell LC_ALL=C ldconfig -p 2>/dev/null | grep -o 'libnccl\.so\.2' | head -n 1)
TUNE      := $(if $(PORTABLE),,-march=native)
CXXFLAGS  ?=
FLAGS      = $(TUNE) -ffp-contract=off $(OPENMP) $(if $(OPENMP),,-Wno-unknown-pragmas) $(if $(EDIT),-DHAVE_LIBEDIT) $(WARN) $(CXXFLAGS)
CPUFLAGS   = -std=c++17 $(OPT) $(FLAGS)

# A GPU found: its own code. None: sm_80 with PTX, which newer GPUs compile when they first run it.
# 9.0 becomes 90a (wgmma), always as -gencode. `all` takes what this nvcc knows.
ifneq ($(HAVE_NVCC),)
KNOWN     := $(shell $(NVCC) --list-gpu-code 2>/dev/null | sed -n 's/^sm_//p')
GPU       := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+\.[0-9]+$$' | sort -u | tr -d .)
WANTED    := $(if $(filter native,$(ARCH)),$(GPU),$(if $(filter all,$(ARCH)),$(filter 80 86 89 90 120,$(KNOWN)),$(ARCH:sm_%=%)))
GENCODE   := $(if $(WANTED),$(foreach a,$(patsubst 90,90a,$(WANTED)),-gencode arch=compute_$(a),code=sm_$(a)),\
               -gencode arch=compute_80,code=sm_80 -gencode arch=compute_80,code=compute_80)
endif
comma    := ,
empty    :=
space    := $(empty) $(empty)
NVCCFLAGS = -x cu -std=c++17 -O3 $(GENCODE) -ccbin $(CXX) -Xcompiler $(subst $(space),$(comma),$(strip $(OPT) $(FLAGS)))
COMPILE   = $(if $(HAVE_NVCC),$(NVCC) $(NVCCFLAGS),$(CXX) -x c++ $(CPUFLAGS))

.PHONY: all cpu info test asan tsan aarch64 fuzz campaign bench clean cuda-check lab lab-check lab-plots check-env
all cpu: info qwen3 train_lora datagen $(if $(MHD),serve)

info:
	@echo "compiler  $(if $(HAVE_NVCC),$(HAVE_NVCC) with $(CXX),$(CXX); no nvcc: CPU only)"
	@echo "threads   $(if $(OPENMP),OpenMP,one: $(CXX) has no OpenMP)"
	@echo "chat      $(if $(EDIT),libedit: line editing and history,the terminal's own line mode (libedit-dev adds history))"
	@echo "datagen   $(if $(CURL),libcurl: with generate,without generate (libcurl4-openssl-dev adds it))"
	@echo "serve     $(if $(MHD),libmicrohttpd,not built: it needs libmicrohttpd (libmicrohttpd-dev))"
	@$(if $(HAVE_NVCC),echo "GPUs      $(if $(NCCL),NCCL: train_lora --gpus N,one: no libnccl.so.2 here (libnccl2 adds it when train_lora runs; or LD_LIBRARY_PATH))",:)
	@echo "CPU code  $(if $(TUNE),for this machine (PORTABLE=1: for any x86-64),for any x86-64)"
	@$(if $(HAVE_NVCC),echo "GPU code  $(if $(WANTED),$(addprefix sm_,$(patsubst 90,90a,$(WANTED))),sm_80 and its PTX: no GPU seen here)",:)

# What the last build was made with: another compiler or flag rebuilds.
$(BUILD)/command: FORCE
	@mkdir -p $(BUILD)
	@echo '$(COMPILE) $(CURL) $(MHD)' | cmp -s - $@ || echo '$(COMPILE) $(CURL) $(MHD)' > $@
FORCE:

qwen3: qwen3.cu $(HEADERS) $(BUILD)/command
	$(Q)$(COMPILE) $< -o $@ $(EDIT)
	@echo "built     ./qwen3"

train_lora: train_lora.cu qwen3.cu $(HEADERS) $(BUILD)/command
	$(Q)$(COMPILE) $< -o $@
	@echo "built     ./train_lora"
serve: serve.cu qwen3.cu $(HEADERS) $(BUILD)/chat_page.inc $(BUILD)/command
	$(Q)$(COMPILE) $< -o $@ -lmicrohttpd
	@echo "built     ./serve"
# The page to chat on, as a string of C++.
$(BUILD)/chat_page.inc: chat.html
	@mkdir -p $(BUILD)
	@{ printf 'R"page('; cat $<; printf ')page"\n'; } > $@

# The C API, for other programs (qwen3.h; lab/embed.cpp shows how).
SHARED     = -fPIC -fvisibility=hidden
libqwen3.so: libqwen3.cu qwen3.cu $(HEADERS) $(BUILD)/command
	$(Q)$(COMPILE) $(if $(HAVE_NVCC),$(SHARED:%=-Xcompiler %),$(SHARED)) -shared $< -o $@
	@echo "built     ./libqwen3.so"

# Plain C++, whatever compiles the model.
bench_serve: tests/bench/bench_serve.cpp tests/http.h tests/workload.h $(HEADERS) $(BUILD)/command
	$(Q)$(CXX) $(CPUFLAGS) $< -o $@ -pthread
	@echo "built     ./bench_serve"

CURLFLAGS = $(if $(CURL),-DHAVE_CURL)
datagen: datagen.cpp $(HEADERS) $(BUILD)/command
	$(Q)$(CXX) $(CPUFLAGS) $(CURLFLAGS) datagen.cpp -o $@ $(CURL)
	@echo "built     ./datagen"

# ---- The laboratories (docs/lab.md). With nvcc and a GPU they print times; with g++ alone the steps run by emulation.
LABS      := $(basename $(wildcard lab/*.cu))
LAB_LIBS  := $(if $(HAVE_NVCC),$(foreach l,cublas cusparse cudnn,$(if $(wildcard $(dir $(HAVE_NVCC))../include/$(l).h),$(l))))
LAB_HAVE   = $(foreach l,cub $(LAB_LIBS),-DHAVE_$(shell echo $(l) | tr a-z A-Z))
LAB_FLAGS  = $(if $(HAVE_NVCC),$(LAB_HAVE) -Xlinker --as-needed $(LAB_LIBS:%=-l%))
lab/matmul lab/attention lab/decode: LAB_FLAGS += $(if $(HAVE_NVCC),-DLAB_QWEN3)
lab/matmul lab/attention lab/decode: qwen3.cu $(HEADERS)
lab/dynamic: LAB_FLAGS += $(if $(HAVE_NVCC),-rdc=true) # kernels launch kernels
lab: $(LABS)
LAB_ODD    = matmul:130x260x200 transpose_copy:67x45 reduce_scan:9001x2057 attention:133x2x1 decode:2x1040 \
             convolution_stencil:45x13x9 sparse:197x101x13 waves:50x1x1 dynamic:29x150x300 snn:70x45x9 \
              low_precision:37x200
CHECKER    =
lab-check: lab
	@bad=; for l in $(LAB_ODD); do echo "$$l"; $(CHECKER) lab/$${l%:*} --once --size $${l#*:} || bad="$$bad $$l"; done; \
	[ -z "$$bad" ] || { echo "wrong:$$bad"; exit 1; }
LAB_PAGES  = docs/lab.md docs/lab-irregular.md
lab-plots: lab
	@mkdir -p $(BUILD)/lab
	@bad=; for l in $(filter-out check_env,$(notdir $(LABS))); do \
	  lab/$$l > $(BUILD)/lab/$$l.txt || bad="$$bad $$l"; \
	  python3 lab/plot.py $(BUILD)/lab/$$l.txt docs/lab-$$l.svg $(LAB_PAGES) || bad="$$bad $$l"; \
	done; [ -z "$$bad" ] || { echo "not all of:$$bad"; exit 1; }
check-env: info lab/check_env
	@nvidia-smi --query-gpu=driver_version,power.limit,temperature.gpu,ecc.mode.current,mig.mode.current --format=csv 2>/dev/null || echo "driver    no nvidia-smi here that answers"
	@lab/check_env
$(LABS): %: %.cu $(wildcard lab/*.h data/course/emulate*.h) $(BUILD)/command
	$(Q)$(COMPILE) $< -o $@ $(LAB_FLAGS)
	@echo "built     $@"

# ---- Speed: the real shape with random weights, and the tokenizer.
bench: info qwen3
	@[ -f $(BUILD)/0.6B.bin ] || ./qwen3 --synthesize 0.6B $(BUILD)/0.6B.bin
	./qwen3 $(BUILD)/0.6B.bin --bench
	$(if $(GPU),./qwen3 $(BUILD)/0.6B.bin -d cpu --bench,:)
	./qwen3 $(BUILD)/0.6B.bin --bench --dtype int8
	$(if $(GPU),$(NVCC) $(NVCCFLAGS) -I. tests/bench/bench_gpu.cu -o $(BUILD)/bench_gpu -lcublas && $(BUILD)/bench_gpu $(BUILD)/0.6B.bin,:)
	@$(MAKE) --no-print-directory $(BUILD)/bench_tokenizer
	$(BUILD)/bench_tokenizer
$(BUILD)/bench_%: tests/bench/bench_%.cpp tests/bench/zipf.h $(HEADERS)
	@mkdir -p $(BUILD)
	$(Q)$(CXX) $(CPUFLAGS) $< -o $@
# What the course's notes say of the hardware.
$(BUILD)/bench_notes: tests/bench/bench_notes.cu tests/gpu/notes.h $(BUILD)/notes.cuh
	$(Q)$(NVCC) $(NVCCFLAGS) -I. -I$(BUILD) $< -o $@

# ---- Tests. Always the CPU compiler, always -Werror, in a folder of their own for each compiler and mode.
# Compiling is most of the work, so suites share programs: those that include serve.cu, those that include train_lora.cu,
# those of the model, and all others. Only a few are programs by themselves. A new tests/unit/test_*.cpp drops into one.
GPU_SUITES = $(notdir $(basename $(wildcard tests/gpu/test_*.cpp)))
UNITS     := $(notdir $(basename $(wildcard tests/unit/test_*.cpp)))
INCLUDING  = $(notdir $(basename $(shell grep -lE '^.include "\.\./$(1)' $(UNITS:%=tests/unit/%.cpp))))
SERVING   := $(call INCLUDING,engine\.h)
TRAINING  := $(call INCLUDING,trainer\.h)
ALONE     := $(call INCLUDING,\.\./(qwen3\.|datagen\.|lab/))
MODEL     := $(filter-out $(ALONE) $(SERVING) $(TRAINING),$(call INCLUDING,(common|golden)\.h))
OTHERS    := $(filter-out $(ALONE) $(SERVING) $(TRAINING) $(MODEL),$(UNITS))
JOBS      ?= $(shell nproc 2>/dev/null || echo 1)
MODE       = $(notdir $(firstword $(CXX)))$(SANITIZE:%=-asan)$(PORTABLE:%=-portable)
T          = $(BUILD)/$(MODE)
# (Without the checks for null, for the size of objects and for pointers that wrap: ASan sees what they lead to, and they
# are two fifths of the compile time.)
UNDEFINED  = undefined -fno-sanitize=null$(comma)object-size$(comma)vptr$(comma)pointer-overflow -fno-sanitize-recover=all
SANITIZER  = -fsanitize=address$(comma)$(UNDEFINED) -O1
TESTFLAGS  = -std=c++17 -O2 -g1 $(FLAGS) -Werror -I. $(if $(SANITIZE),$(SANITIZER))
# The programs that suites start: their own builds in T, or with PROGRAMS=. those that `make` made.
PROGRAMS  ?= $(T)
# test_export is about Python, test_tiny about one known file, test_library about linking, test_teach about scripts: nothing
# that sanitizers could see.
SUITES     = $(filter-out $(if $(MHD),,$(SERVING)) $(if $(SANITIZE),test_export test_tiny test_library test_teach),$(UNITS))
# A suite in a shared program is PROGRAM:SUITE. The longest come first.
SHARED_BY  = $(patsubst %,$(T)/suites_$(1):%,$(filter $(2),$(SUITES)))
RUNS       = $(call SHARED_BY,others,test_teach) $(call SHARED_BY,serve,$(SERVING)) $(call SHARED_BY,train,$(TRAINING)) $(patsubst %,$(T)/%,$(filter $(ALONE),$(SUITES))) \
             $(call SHARED_BY,others,$(filter-out test_teach,$(OTHERS))) $(call SHARED_BY,model,$(MODEL))
SUITE_PROGRAMS = $(sort $(foreach run,$(RUNS),$(firstword $(subst :, ,$(run)))))

# Suites stand for the programs where sanitizers would compile both, and no suite is left out.
ifneq ($(and $(SANITIZE),$(filter file,$(origin UNITS))),)
TESTFLAGS += -DSUITES_ARE_PROGRAMS
$(T)/qwen3: $(T)/suites_model
$(T)/train_lora: $(T)/suites_train
$(T)/serve: $(T)/suites_serve
$(T)/datagen: $(T)/test_datagen
$(addprefix $(T)/,qwen3 train_lora serve datagen):
	@ln -f $< $@
else
$(T)/qwen3: qwen3.cu $(HEADERS)
	@mkdir -p $(T)
	$(Q)$(CXX) -x c++ $(TESTFLAGS) $(if $(SANITIZE),,-O3) $< -o $@ $(EDIT)
$(T)/train_lora: train_lora.cu qwen3.cu $(HEADERS)
	@mkdir -p $(T)
	$(Q)$(CXX) -x c++ $(TESTFLAGS) $(if $(SANITIZE),,-O3) $< -o $@
$(T)/datagen: datagen.cpp $(HEADERS)
	@mkdir -p $(T)
	$(Q)$(CXX) $(TESTFLAGS) $(CURLFLAGS) datagen.cpp -o $@ $(CURL)
$(T)/serve: serve.cu qwen3.cu $(HEADERS) $(BUILD)/chat_page.inc
	@mkdir -p $(T)
	$(Q)$(CXX) -x c++ $(TESTFLAGS) $(if $(SANITIZE),,-O3) $< -o $@ -lmicrohttpd
endif
$(T)/libqwen3.so: libqwen3.cu qwen3.cu $(HEADERS)
	@mkdir -p $(T)
	$(Q)$(CXX) -x c++ $(TESTFLAGS) $(SHARED) -shared $< -o $@
$(T)/library_c: tests/unit/test_library.c qwen3.h $(T)/libqwen3.so
	$(Q)$(CC) -std=c99 -Wall -Wextra -Werror -I. $< -o $@ -L$(T) -lqwen3 -Wl,-rpath,$(abspath $(T)) -lm -lpthread
$(T)/main.o: tests/main.cpp
	@mkdir -p $(T)
	$(Q)$(CXX) $(TESTFLAGS) -c $< -o $@
TEST_HEADERS = $(wildcard tests/*.h) $(HEADERS)
$(T)/test_datagen.o: datagen.cpp
$(T)/test_datagen.o: TESTFLAGS += $(CURLFLAGS)
$(T)/test_datagen: LIBS = $(CURL)
EMULATING  = lab lab_irregular lab_model segmented packed step decoding
$(EMULATING:%=$(T)/test_%.o): $(wildcard lab/*.cu lab/*.h data/course/emulate*.h)
# Attention of single tokens and what it takes, cut out of Book II, for test_decoding.
BEGINS     = ^template <int P> struct WarpAngles|^// A row.s attention over some|^constexpr int DECODE_ROWS|^// ---- An FP8 cache
ENDS       = ^inline void qknorm_rope_kv_gpu|^// ---- Attention for prompts|^// Numbers of scratch|^inline size_t widened_numbers
$(BUILD)/decoding.inc: qwen3.cu attention.h
	@mkdir -p $(BUILD)
	@awk -v begins='$(BEGINS)' -v ends='$(ENDS)' '$$0 ~ begins {on = 1} $$0 ~ ends {on = 0} on && !/pragma unroll/' $^ > $@
$(T)/test_decoding.o: $(BUILD)/decoding.inc
$(UNITS:%=$(T)/%.o): $(T)/%.o: tests/unit/%.cpp qwen3.cu $(TEST_HEADERS)
	@mkdir -p $(T)
	$(Q)$(CXX) $(TESTFLAGS) -c $< -o $@
# Several suites as one: what they include first, then each in a namespace.
$(T)/suites_model.o: SHARE = $(MODEL)
$(T)/suites_others.o: SHARE = $(OTHERS)
$(T)/suites_serve.o: SHARE = $(SERVING)
$(T)/suites_serve $(SERVING:%=$(T)/%): LIBS = -lmicrohttpd
$(T)/suites_train.o: SHARE = $(TRAINING)
$(T)/suites_model.o: $(MODEL:%=tests/unit/%.cpp) qwen3.cu
$(T)/suites_others.o: $(OTHERS:%=tests/unit/%.cpp)
$(T)/suites_serve.o: $(SERVING:%=tests/unit/%.cpp)
$(T)/suites_serve.o $(SERVING:%=$(T)/%.o): serve.cu qwen3.cu $(BUILD)/chat_page.inc
$(T)/suites_train.o: $(TRAINING:%=tests/unit/%.cpp) train_lora.cu qwen3.cu
SHARED_SUITES = $(patsubst %,$(T)/suites_%,serve train model others)
$(SHARED_SUITES:%=%.o): $(TEST_HEADERS)
	@mkdir -p $(T)
	@grep -h '^#include' $(SHARE:%=tests/unit/%.cpp) | sort -u > $(@:.o=.cpp)
	@for suite in $(SHARE); do \
	  echo "namespace $$suite {"; echo "#include \"tests/unit/$$suite.cpp\""; echo "}"; done >> $(@:.o=.cpp)
	$(Q)$(CXX) $(TESTFLAGS) -Itests/unit -c $(@:.o=.cpp) -o $@
# (main.o comes last, so that the longest compiles begin at once.)
$(SHARED_SUITES) $(UNITS:%=$(T)/%): %: %.o $(T)/main.o
	$(Q)$(CXX) $(TESTFLAGS) $^ -o $@ $(EDIT) $(LIBS)

# The GPU's suites are nvcc's, and run where there is a GPU.
GPU_SUITE  = $(if $(GPU),$(if $(SANITIZE),,$(GPU_SUITES:%=$(BUILD)/%)))
$(BUILD)/test_gpu_backward: train_lora.cu
$(BUILD)/test_serve_gpu: serve.cu
$(BUILD)/test_notes: $(BUILD)/notes.cuh
$(GPU_SUITES:%=$(BUILD)/%): $(BUILD)/%: tests/gpu/%.cpp tests/main.cpp $(wildcard tests/gpu/*.h) qwen3.cu $(TEST_HEADERS)
	@mkdir -p $(BUILD)
	$(Q)$(NVCC) $(NVCCFLAGS) -Werror all-warnings -Xcompiler -Werror -I. -I$(BUILD) $< tests/main.cpp -o $@ $(EDIT)
# The code in the course's notes.
$(BUILD)/notes.cuh: data/course/check_notes.py $(wildcard data/course/notes/*.md)
	@mkdir -p $(BUILD)
	$(Q)python3 data/course/check_notes.py --no-compile --emit $@ > $@.log || { cat $@.log; exit 1; }

# (Two suites at a time: some wait more than they compute; more would disturb those that bound a time.)
TESTED     = $(patsubst %,$(PROGRAMS)/%,qwen3 train_lora datagen $(if $(MHD),serve))
test:
	@$(MAKE) $(if $(V),,-s) --no-print-directory -j$(JOBS) $(filter %/suites_serve %/suites_train,$(SUITE_PROGRAMS)) $(TESTED:./%=%) $(SUITE_PROGRAMS) $(if $(SANITIZE),,$(T)/library_c) $(GPU_SUITE)
	@QWEN3=$(PROGRAMS)/qwen3 TRAIN_LORA=$(PROGRAMS)/train_lora DATAGEN=$(PROGRAMS)/datagen SERVE=$(PROGRAMS)/serve JOBS=2 \
	  LIBRARY=$(T)/libqwen3.so LIBRARY_C=$(T)/library_c \
	  NO_GPU=$(if $(GPU_SUITE),,$(shell cat $(GPU_SUITES:%=tests/gpu/%.cpp) | grep -c '^TEST_CASE')) tests/run.sh $(RUNS) $(GPU_SUITE)
asan:
	@LSAN_OPTIONS=suppressions=tests/lsan.supp:print_suppressions=0 $(MAKE) --no-print-directory test SANITIZE=1
# (One thread of OpenMP: ThreadSanitizer does not see how its threads wait for each other.)
$(BUILD)/tsan/serve: serve.cu qwen3.cu $(HEADERS) $(BUILD)/chat_page.inc
	@mkdir -p $(BUILD)/tsan
	$(Q)$(CXX) -x c++ $(TESTFLAGS) -O1 -fsanitize=thread serve.cu -o $@ -lmicrohttpd
tsan:
	@$(MAKE) --no-print-directory -j$(JOBS) $(BUILD)/tsan/serve $(T)/suites_serve
	@SERVE=$(BUILD)/tsan/serve OMP_NUM_THREADS=1 TSAN_OPTIONS=halt_on_error=1 tests/run.sh $(T)/suites_serve:test_serve

# ---- 64-bit Arm, with the compiler's own vectors: Debian's g++-aarch64-linux-gnu and qemu-user-static.
ARM        = aarch64-linux-gnu-g++
ARM_SUITES = test_ops test_int8 test_model test_sampler
aarch64:
	@$(MAKE) --no-print-directory NVCC=none PORTABLE=1 CXX=$(ARM) CXXFLAGS="-static -Wl,--no-warnings" UNITS="$(ARM_SUITES)" $(BUILD)/$(ARM)-portable/suites_model
	@RUNNER=qemu-aarch64-static JOBS=2 tests/run.sh $(ARM_SUITES:%=$(BUILD)/$(ARM)-portable/suites_model:%)

# ---- Fuzzers: clang's libFuzzer, first inputs in tests/fixtures/fuzz/NAME. The same draws each time, so that CI judges a
# change by itself; a search for more is `make fuzz SEED=0 SECONDS_EACH=600`.
FUZZERS   = $(notdir $(basename $(wildcard tests/fuzz/fuzz_*.cpp)))
SECONDS_EACH ?= 20
SEED      ?= 1
CLANG     ?= clang++
# They share two programs, since most of their compile time is what they include: those of the model and the server, the
# rest. Each is a name of one of them (tests/fuzz/one_of.h).
FUZZ_MODEL := $(notdir $(basename $(shell grep -lE '^.include ".*(model|tools)\.h"' tests/fuzz/fuzz_*.cpp)))
FUZZ_DATA  := $(filter-out $(FUZZ_MODEL),$(FUZZERS))
FUZZ_TWO   := $(BUILD)/fuzz/of_model $(BUILD)/fuzz/of_data
$(BUILD)/fuzz/of_model: SHARE = $(FUZZ_MODEL)
$(BUILD)/fuzz/of_data: SHARE = $(FUZZ_DATA)
$(BUILD)/fuzz/of_model: $(FUZZ_MODEL:%=tests/fuzz/%.cpp) serve.cu qwen3.cu
$(BUILD)/fuzz/of_data: $(FUZZ_DATA:%=tests/fuzz/%.cpp) datagen.cpp
$(FUZZ_TWO): $(wildcard tests/fuzz/*.h) $(HEADERS)
	@mkdir -p $(BUILD)/fuzz
	@{ grep -h '^#define\|^#include' $(SHARE:%=tests/fuzz/%.cpp) | sort -u; echo '#include "one_of.h"'; } > $@.cpp
	@for f in $(SHARE); do echo "FUZZER($$f)"; \
	  printf '#define %s %s\n' LLVMFuzzerTestOneInput $${f}_input LLVMFuzzerCustomMutator $${f}_mutator; \
	  echo "namespace $$f {"; echo "#line 1 \"tests/fuzz/$$f.cpp\""; sed 's/^#include.*//' tests/fuzz/$$f.cpp; echo "}"; \
	  printf '#undef %s\n' LLVMFuzzerTestOneInput LLVMFuzzerCustomMutator; done >> $@.cpp
	$(Q)$(CLANG) -std=c++17 -O1 -g1 -ffp-contract=off -Wno-unknown-pragmas -fsanitize=fuzzer,address,$(UNDEFINED) \
	  -I. -Itests/fuzz $@.cpp -o $@
$(FUZZ_MODEL:%=$(BUILD)/fuzz/%): $(BUILD)/fuzz/of_model
$(FUZZ_DATA:%=$(BUILD)/fuzz/%): $(BUILD)/fuzz/of_data
$(FUZZERS:%=$(BUILD)/fuzz/%):
	@ln -f $< $@
run-%: $(BUILD)/fuzz/%
	@seeds=tests/fixtures/fuzz/$(*:fuzz_%=%); [ -d $$seeds ] || seeds=; \
	mkdir -p $(BUILD)/fuzz/corpus/$*; \
	$< -seed=$(SEED) -max_total_time=$(SECONDS_EACH) -timeout=20 -rss_limit_mb=4096 -artifact_prefix=$(BUILD)/fuzz/ -print_final_stats=1 \
	  $(BUILD)/fuzz/corpus/$* $$seeds >$(BUILD)/fuzz/$*.log 2>&1 || { tail -n 40 $(BUILD)/fuzz/$*.log; exit 1; }; \
	echo "$*: $$(sed -n 's/^stat::number_of_executed_units: *//p' $(BUILD)/fuzz/$*.log) runs in $(SECONDS_EACH) s, no fault"
.SECONDARY: $(addprefix $(BUILD)/fuzz/,$(FUZZERS))
fuzz:
	@$(MAKE) --no-print-directory -j$(JOBS) $(FUZZERS:%=run-%)

# Everything at once that may happen to a server (tests/bench/campaign.cpp).
$(BUILD)/campaign: tests/bench/campaign.cpp tests/http.h $(HEADERS)
	@mkdir -p $(BUILD)
	$(Q)$(CXX) $(CPUFLAGS) -Werror $< -o $@ -pthread
campaign: serve $(BUILD)/campaign
	$(BUILD)/campaign --seconds $(SECONDS_EACH)

# ---- All CUDA code, without linking: what CI can do without a GPU. One file has every kernel, each once, and is compiled
# for four architectures, as the laboratories are; what calls the same kernels as far as PTX, for one; the code in the
# course's notes, and what measures it, for one.
CHECKED    = 80 89 90a 120
EVERY      = tests/gpu/every.cu
NOTES      = tests/gpu/test_notes.cpp tests/bench/bench_notes.cu
LAB_FILES  = $(LABS:%=%.cu)
CALLERS    = $(filter-out tests/gpu/test_gpu_backward.cpp $(NOTES),$(wildcard tests/gpu/test_*.cpp)) \
             $(if $(wildcard $(dir $(HAVE_NVCC))../include/cublas_v2.h),tests/bench/bench_gpu.cu)
# sm_90a is compiled as it runs; the rest without optimising where nvcc can (13), in less than half the time; sm_89 from
# the PTX of sm_80, since no code of ours tells them apart.
$(EVERY:%=check/%): CODE = $(patsubst %,sm_%,$(filter 90a,$(CHECKED)))
$(EVERY:%=quick/%): CODE = $(patsubst %,sm_%,$(filter-out 90a,$(CHECKED)))
QUICK      = $(if $(shell $(NVCC) --help 2>/dev/null | grep -e --Ofast-compile),-Ofc=max)
$(EVERY:%=quick/%) $(CALLERS:%=check/%): FLAGS_TOO = $(QUICK)
$(LAB_FILES:%=check/%): CODE = $(CHECKED:%=sm_%)
check/lab/dynamic.cu: FLAGS_TOO = -rdc=true # kernels launch kernels
$(NOTES:%=check/%): CODE = sm_90a
$(CALLERS:%=check/%): CODE = compute_90a
CUDA_CHECKS = $(EVERY:%=check/%) $(EVERY:%=quick/%) $(CALLERS:%=check/%) $(LAB_FILES:%=check/%) $(NOTES:%=check/%)
CUDA_CHECK = @echo "nvcc $(CODE): $*"; [ -z "$(CODE)" ] || \
	  $(NVCC) -x cu -std=c++17 $(foreach c,$(CODE),-gencode arch=$(patsubst compute_89,compute_80,$(c:sm_%=compute_%)),code=$(c)) $(FLAGS_TOO) \
	  -Xcompiler -Wall,-Wextra,-Werror,-fopenmp -Werror all-warnings -I. -I$(BUILD) -o /dev/null -c $*
$(filter check/%,$(CUDA_CHECKS)): check/%: $(BUILD)/notes.cuh
	$(CUDA_CHECK)
$(filter quick/%,$(CUDA_CHECKS)): quick/%: $(BUILD)/notes.cuh
	$(CUDA_CHECK)
# (Laboratories beside libraries and qwen3.cu's kernels: as far as PTX.)
LAB_BESIDE = $(patsubst %,check/beside/%,$(shell grep -lE 'HAVE_CU|LAB_QWEN3' lab/*.cu))
$(LAB_BESIDE): check/beside/%:
	@echo "nvcc compute_90a: $* with $(LAB_LIBS) cub"
	$(Q)$(NVCC) -x cu -std=c++17 -gencode arch=compute_90a,code=compute_90a $(QUICK) $(LAB_HAVE) -DLAB_QWEN3 \
	  -Xcompiler -Wall,-Wextra,-Werror,-fopenmp -Werror all-warnings -o /dev/null -c $*
check/notes:
	@echo "nvcc: the code in data/course/notes"
	$(Q)python3 data/course/check_notes.py
cuda-check:
	@$(MAKE) --no-print-directory -j$(JOBS) $(CUDA_CHECKS) $(LAB_BESIDE) check/notes
.PHONY: $(CUDA_CHECKS) $(LAB_BESIDE) check/notes

clean:
	rm -rf qwen3 train_lora datagen serve bench_serve libqwen3.so $(LABS) $(BUILD)
