# make              qwen3, train_lora and serve, with nvcc where it is found, else with g++ alone; and datagen
# make cpu          the same with g++ alone
# make test         builds with -Werror, runs every suite; the last line counts
# make asan|fuzz    the suites under ASan + UBSan; the fuzzers (SECONDS_EACH=20)
# make tsan         the server's suite, the server under ThreadSanitizer
# make bench        speed of this machine's build, and of its GPU's kernels
# make clean
# Options: PORTABLE=1 a binary for any x86-64    CXX=clang++    ARCH=native|all|"80 89"    V=1 shows the commands

CXX      ?= g++
NVCC     ?= nvcc
ARCH     ?= native
WARN      = -Wall -Wextra
OPT       = -O3
Q         = $(if $(V),,@)

HEADERS   = $(wildcard *.h) $(wildcard parts/*)
BUILD     = build

# ---- What there is. Only questions here; `info` says what was chosen.
HAVE_NVCC := $(if $(filter cpu,$(MAKECMDGOALS)),,$(shell command -v $(NVCC) 2>/dev/null))
OPENMP    := $(shell echo 'int main(){}' | $(CXX) -fopenmp -x c++ - -o /dev/null 2>/dev/null && echo -fopenmp)
EDIT      := $(shell printf '\043include <stdio.h>\n\043include <histedit.h>\nint main(){}' | $(CXX) -x c++ - -o /dev/null -ledit 2>/dev/null && echo -ledit)
CURL      := $(shell printf '\043include <curl/curl.h>\nint main(){curl_global_cleanup();}' | $(CXX) -x c++ - -o /dev/null -lcurl 2>/dev/null && echo -lcurl)
MHD       := $(shell printf '\043include <microhttpd.h>\nint main(){return !MHD_get_version();}' | $(CXX) -x c++ - -o /dev/null -lmicrohttpd 2>/dev/null && echo -lmicrohttpd)
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

.PHONY: all cpu info test asan tsan fuzz bench clean cuda-check
all cpu: info qwen3 train_lora datagen $(if $(MHD),serve)

info:
	@echo "compiler  $(if $(HAVE_NVCC),$(HAVE_NVCC) with $(CXX),$(CXX); no nvcc: CPU only)"
	@echo "threads   $(if $(OPENMP),OpenMP,one: $(CXX) has no OpenMP)"
	@echo "chat      $(if $(EDIT),libedit: line editing and history,the terminal's own line mode (libedit-dev adds history))"
	@echo "datagen   $(if $(CURL),libcurl: with generate,without generate (libcurl4-openssl-dev adds it))"
	@echo "serve     $(if $(MHD),libmicrohttpd,not built: it needs libmicrohttpd (libmicrohttpd-dev))"
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

train_lora: train_lora.cu qwen3.cu dataset.h $(HEADERS) $(BUILD)/command
	$(Q)$(COMPILE) $< -o $@
	@echo "built     ./train_lora"
serve: serve.cu qwen3.cu $(HEADERS) $(BUILD)/command
	$(Q)$(COMPILE) $< -o $@ -lmicrohttpd
	@echo "built     ./serve"

# Plain C++, whatever compiles the model.
bench_serve: tests/bench_serve.cpp tests/http.h tests/workload.h file.h sj.h $(BUILD)/command
	$(Q)$(CXX) $(CPUFLAGS) $< -o $@ -pthread
	@echo "built     ./bench_serve"

DATAGEN   = file.h sj.h tokenizer.h dataset.h score.h datagen.cpp
CURLFLAGS = $(if $(CURL),-DHAVE_CURL)
datagen: $(DATAGEN) $(BUILD)/command
	$(Q)$(CXX) $(CPUFLAGS) $(CURLFLAGS) datagen.cpp -o $@ $(CURL)
	@echo "built     ./datagen"

# ---- Speed: the real shape with random weights, and the tokenizer.
bench: info qwen3
	@[ -f $(BUILD)/0.6B.bin ] || ./qwen3 --synthesize 0.6B $(BUILD)/0.6B.bin
	./qwen3 $(BUILD)/0.6B.bin --bench
	$(if $(GPU),./qwen3 $(BUILD)/0.6B.bin -d cpu --bench,:)
	./qwen3 $(BUILD)/0.6B.bin --bench --dtype int8
	$(if $(GPU),$(NVCC) $(NVCCFLAGS) -I. tests/bench_gpu.cu -o $(BUILD)/bench_gpu -lcublas && $(BUILD)/bench_gpu $(BUILD)/0.6B.bin,:)
	$(Q)$(CXX) $(CPUFLAGS) tests/bench_tokenizer.cpp -o $(BUILD)/bench_tokenizer
	$(BUILD)/bench_tokenizer

# ---- Tests. Always the CPU compiler, always -Werror, in a folder of their own for each compiler and mode.
UNITS     = $(addprefix test_,ops model sampler loader int8 backward attention_backward generate) # test_units.cpp includes them
GPU_SUITES = test_gpu test_gpu_backward test_serve_gpu
SUITES    = $(filter-out $(UNITS) $(GPU_SUITES) $(if $(MHD),,test_serve),$(notdir $(basename $(wildcard tests/test_*.cpp))))
JOBS     ?= $(shell nproc 2>/dev/null || echo 1)
MODE      = $(notdir $(firstword $(CXX)))$(SANITIZE:%=-asan)$(PORTABLE:%=-portable)
T         = $(BUILD)/$(MODE)
TESTFLAGS = -std=c++17 -O2 -g1 $(FLAGS) -Werror -I. $(if $(SANITIZE),-fsanitize=address$(comma)undefined -fno-sanitize-recover=all -O1)

$(T)/qwen3: qwen3.cu $(HEADERS)
	@mkdir -p $(T)
	$(Q)$(CXX) -x c++ $(TESTFLAGS) $(if $(SANITIZE),,-O3) $< -o $@ $(EDIT)
$(T)/train_lora: train_lora.cu qwen3.cu dataset.h $(HEADERS)
	@mkdir -p $(T)
	$(Q)$(CXX) -x c++ $(TESTFLAGS) $(if $(SANITIZE),,-O3) $< -o $@
$(T)/datagen: $(DATAGEN)
	@mkdir -p $(T)
	$(Q)$(CXX) $(TESTFLAGS) $(CURLFLAGS) datagen.cpp -o $@ $(CURL)
$(T)/serve: serve.cu qwen3.cu $(HEADERS)
	@mkdir -p $(T)
	$(Q)$(CXX) -x c++ $(TESTFLAGS) $(if $(SANITIZE),,-O3) $< -o $@ -lmicrohttpd
$(T)/test_serve: serve.cu
$(T)/test_units: $(UNITS:%=tests/%.cpp)
$(T)/test_datagen $(T)/test_dataset $(T)/test_train: $(DATAGEN)
$(T)/test_train: train_lora.cu
$(T)/test_score: score.h
$(T)/test_datagen: TESTFLAGS += $(CURLFLAGS)
$(T)/test_datagen: LIBS = $(CURL)
$(T)/main.o: tests/main.cpp
	@mkdir -p $(T)
	$(Q)$(CXX) $(TESTFLAGS) -c $< -o $@
$(T)/test_%: tests/test_%.cpp $(T)/main.o $(wildcard tests/*.h) qwen3.cu $(HEADERS)
	$(Q)$(CXX) $(TESTFLAGS) $< $(T)/main.o -o $@ $(EDIT) $(LIBS)

# The GPU's suites are nvcc's, and run where there is a GPU.
$(BUILD)/test_gpu_backward: train_lora.cu dataset.h
GPU_SUITE = $(if $(GPU),$(if $(SANITIZE),,$(GPU_SUITES:%=$(BUILD)/%)))
$(GPU_SUITES:%=$(BUILD)/%): $(BUILD)/%: tests/%.cpp tests/main.cpp $(wildcard tests/*.h) qwen3.cu $(HEADERS)
	@mkdir -p $(BUILD)
	$(Q)$(NVCC) $(NVCCFLAGS) -Werror all-warnings -Xcompiler -Werror -I. $< tests/main.cpp -o $@ $(EDIT)

test:
	@$(MAKE) --no-print-directory -j$(JOBS) $(T)/test_units $(T)/qwen3 $(T)/train_lora $(T)/datagen $(if $(MHD),$(T)/serve) $(addprefix $(T)/,$(SUITES)) $(GPU_SUITE)
	@QWEN3=$(T)/qwen3 TRAIN_LORA=$(T)/train_lora DATAGEN=$(T)/datagen SERVE=$(T)/serve NO_GPU=$(if $(GPU_SUITE),,$(shell cat $(GPU_SUITES:%=tests/%.cpp) | grep -c '^TEST_CASE')) \
	  tests/run.sh $(addprefix $(T)/,$(SUITES)) $(GPU_SUITE)
asan:
	@$(MAKE) --no-print-directory test SANITIZE=1
# (One thread of OpenMP: ThreadSanitizer does not see how its threads wait for each other.)
tsan: $(T)/test_serve
	@mkdir -p $(BUILD)/tsan
	$(Q)$(CXX) -x c++ $(TESTFLAGS) -O1 -fsanitize=thread serve.cu -o $(BUILD)/tsan/serve -lmicrohttpd
	SERVE=$(BUILD)/tsan/serve OMP_NUM_THREADS=1 TSAN_OPTIONS=halt_on_error=1 tests/run.sh $(T)/test_serve

# ---- Fuzzers: clang's libFuzzer, seeds in tests/fixtures/fuzz/NAME.
FUZZERS   = $(notdir $(basename $(wildcard tests/fuzz_*.cpp)))
SECONDS_EACH ?= 20
CLANG     ?= clang++
$(BUILD)/fuzz/fuzz_jieba: score.h
$(BUILD)/fuzz/fuzz_request: serve.cu
$(BUILD)/fuzz/fuzz_jsonl $(BUILD)/fuzz/fuzz_chunk $(BUILD)/fuzz/fuzz_dataset: $(DATAGEN)
$(BUILD)/fuzz/%: tests/%.cpp qwen3.cu $(HEADERS)
	@mkdir -p $(BUILD)/fuzz
	$(Q)$(CLANG) -std=c++17 -O1 -g -ffp-contract=off -Wno-unknown-pragmas -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -I. $< -o $@
run-%: $(BUILD)/fuzz/%
	@seeds=tests/fixtures/fuzz/$(*:fuzz_%=%); [ -d $$seeds ] || seeds=; \
	mkdir -p $(BUILD)/fuzz/corpus/$*; \
	$< -max_total_time=$(SECONDS_EACH) -timeout=20 -rss_limit_mb=4096 -artifact_prefix=$(BUILD)/fuzz/ -print_final_stats=1 \
	  $(BUILD)/fuzz/corpus/$* $$seeds >$(BUILD)/fuzz/$*.log 2>&1 || { tail -n 40 $(BUILD)/fuzz/$*.log; exit 1; }; \
	echo "$*: $$(sed -n 's/^stat::number_of_executed_units: *//p' $(BUILD)/fuzz/$*.log) runs in $(SECONDS_EACH) s, no fault"
.SECONDARY: $(addprefix $(BUILD)/fuzz/,$(FUZZERS))
fuzz:
	@$(MAKE) --no-print-directory -j$(JOBS) $(FUZZERS:%=run-%)

# ---- All CUDA code, once an architecture, without linking: what CI can do without a GPU. The trainer and the server's
# suite have every kernel between them.
CHECKED   = 80 89 90a 120
CHECK     = $(NVCC) -x cu -std=c++17 -gencode arch=compute_$*,code=sm_$* -Xcompiler -Wall,-Wextra,-Werror,-fopenmp -Werror all-warnings -I. -o /dev/null -c
$(CHECKED:%=nvcc-train-%): nvcc-train-%:
	@echo "nvcc sm_$* train_lora.cu"; $(CHECK) train_lora.cu
$(CHECKED:%=nvcc-serve-%): nvcc-serve-%:
	@echo "nvcc sm_$* tests/test_serve_gpu.cpp"; $(CHECK) tests/test_serve_gpu.cpp
cuda-check:
	@$(MAKE) --no-print-directory -j$(JOBS) $(CHECKED:%=nvcc-train-%) $(CHECKED:%=nvcc-serve-%)

clean:
	rm -rf qwen3 train_lora datagen serve bench_serve $(BUILD)
