# tests/tests.mk: the test machinery; the Makefile includes it.
#
# Suites are linked with the objects of the programs. Parsing is most of their compile time, so several share a
# translation unit: those of the server, of the trainer, of the model, of the programs, all others. Suites that emulate
# kernels, or compile Book I alone, are programs by themselves. A new tests/unit/test_*.cpp drops into one.
GPU_SUITES = $(notdir $(basename $(wildcard tests/gpu/test_*.cpp)))
UNITS     := $(notdir $(basename $(wildcard tests/unit/test_*.cpp)))
INCLUDING  = $(notdir $(basename $(shell grep -lE '^.(include|define) $(1)' $(UNITS:%=tests/unit/%.cpp))))
ALONE     := $(call INCLUDING,("tests/emulate/|"lab/|"datagen|QWEN3_PLAIN|"gpu/))
SERVING   := $(filter-out $(ALONE),$(call INCLUDING,"(tests/engine|server/)))
TRAINING  := $(filter-out $(ALONE) $(SERVING),$(call INCLUDING,"(tests/trainer|train/)))
MODEL     := $(filter-out $(ALONE) $(SERVING) $(TRAINING),$(call INCLUDING,"tests/(common|golden)))
OTHERS    := $(filter-out $(ALONE) $(SERVING) $(TRAINING) $(MODEL),$(UNITS))
SHARED     = serve train model others
T          = $(B)/tests
TESTOPT    = -O0
# (Without the checks for null, for the size of objects and for pointers that wrap: ASan sees their effects, and they
# are two fifths of the compile time.)
UNDEFINED  = undefined -fno-sanitize=null$(comma)object-size$(comma)vptr$(comma)pointer-overflow -fno-sanitize-recover=all
COVERED    = $(if $(findstring clang,$(CXX)),-fsanitize=fuzzer-no-link)
SAN        = $(if $(filter asan,$(SANITIZE)),-fsanitize=address$(comma)$(UNDEFINED) -g1) \
             $(if $(filter tsan,$(SANITIZE)),-fsanitize=thread -g1)
# clang++ takes three times as long for a sanitized source with -O1 as with -O0: -O1 is for loops over numbers and for
# the fuzzers' inputs. What the fuzzers reach counts its branches, too.
ifeq ($(SANITIZE),asan)
COLD       = -O0
OPT_CPU    = -O1
OPT_HOT    = -O1
FUZZED     = base model form search book book/datagen server/api hot hot/datagen
$(FUZZED:%=$(B)/%/room.o): private SAN += $(COVERED)
$(patsubst %,$(B)/%/room.o,base model form) $(T)/double/%.o: private OPT = -O1
endif
ifeq ($(SANITIZE),tsan)
OPT_CPU    = -O2
OPT_HOT    = -O1
$(B)/text.o: private OPT = -O2
endif
TEST       = $(CXX) -x c++ $(CPUFLAGS) $(TESTOPT) $(SAN) -include $(T)/std.h -MMD -MP
# test_export is about Python, test_tiny about one known file, test_library about linking, test_docs about pages, the
# others about scripts: sanitizers could find nothing.
UNSEEN     = test_course test_docs test_exercises test_export test_get test_library test_report test_teach test_tiny
SUITES     = $(filter-out $(if $(MHD),,$(SERVING)) $(if $(SANITIZE),$(UNSEEN)),$(UNITS))
# A suite in a shared program is PROGRAM:SUITE. The longest come first.
SHARED_BY  = $(patsubst %,$(T)/suites_$(1):%,$(filter $(2),$(SUITES)))
RUNS       = $(call SHARED_BY,others,test_teach) $(call SHARED_BY,serve,$(SERVING)) $(call SHARED_BY,train,$(TRAINING)) \
             $(patsubst %,$(T)/%,$(filter $(ALONE),$(SUITES))) \
             $(call SHARED_BY,others,$(filter-out test_teach,$(OTHERS))) $(call SHARED_BY,model,$(MODEL))
SUITE_PROGRAMS = $(sort $(foreach run,$(RUNS),$(firstword $(subst :, ,$(run)))))

# The standard headers and doctest, parsed once.
$(T)/std.h: $(B)/command
	@mkdir -p $(T); { printf '\043include <%s>\n' $(STD) doctest/doctest.h; } > $@
TEST_PCH   = $(T)/std.h.$(if $(findstring clang,$(MODE)),pch,gch)
$(TEST_PCH): $(T)/std.h
	$(Q)$(CXX) -x c++-header $(CPUFLAGS) $(TESTOPT) $(SAN) $< -o $@
$(T)/main.o $(T)/numbers.o: $(T)/%.o: tests/%.cpp $(B)/command
	@mkdir -p $(T)
	$(Q)$(CXX) $(CPUFLAGS) $(TESTOPT) $(SAN) -MMD -MP -c $< -o $@
$(T)/numbers.o: TESTOPT = -O2
$(T)/%.o: tests/unit/%.cpp $(TEST_PCH)
	@echo "$(notdir $(CXX))  $<"
	$(Q)$(TEST) -c $< -o $@
# Several suites as one: their includes first, then each in a namespace.
SHARE_serve  = $(SERVING)
SHARE_train  = $(TRAINING)
SHARE_model  = $(MODEL)
SHARE_others = $(OTHERS)
$(SHARED:%=$(T)/suites_%.cpp): $(T)/suites_%.cpp: $(UNITS:%=tests/unit/%.cpp) | $(T)/std.h
	@grep -h '^#include' $(SHARE_$*:%=tests/unit/%.cpp) | sort -u > $@
	@for suite in $(SHARE_$*); do \
	  echo "namespace $$suite {"; echo "#include \"tests/unit/$$suite.cpp\""; echo "}"; done >> $@
$(SHARED:%=$(T)/suites_%.o): %.o: %.cpp $(TEST_PCH)
	@echo "$(notdir $(CXX))  $<"
	$(Q)$(TEST) -c $< -o $@
# The templates once more, for double: tests hold float and bf16 to it.
DOUBLE     = $(patsubst %.cpp,$(T)/double/%.o,$(shell grep -l QWEN3_INSTANCES model/*.cpp cpu/*.cpp)) $(T)/double/text.o
$(T)/double/%.o: %.cpp $(PCH)
	$(call CPP_OBJECT,-DQWEN3_DOUBLE)
$(T)/double/text.o: qwen3.cu $(PCH)
	$(call CPP_OBJECT,-DQWEN3_DOUBLE -DQWEN3_LIBRARY)
$(T)/double.a: $(DOUBLE) $(T)/numbers.o
	@rm -f $@ && ar rcs $@ $^
$(SHARED:%=$(T)/suites_%) $(ALONE:%=$(T)/%): %: %.o $(T)/main.o $(T)/double.a $(LIB)
	$(Q)$(LINK) $*.o $(T)/main.o $(T)/double.a $(LIB) -o $@ $(EDIT) $(CURL) $(CMARK) $(MHD)
$(patsubst %,$(T)/%.o,$(filter-out test_datagen,$(ALONE))): TESTOPT = -Og
$(ALONE:%=$(T)/%.o): $(T)/%.o: tests/unit/%.cpp $(B)/command
	@mkdir -p $(T); echo "$(notdir $(CXX))  $<"
	$(Q)$(CXX) $(CPUFLAGS) $(TESTOPT) $(SAN) -MMD -MP -c $< -o $@
$(T)/library_c: tests/unit/test_library.c qwen3.h $(B)/libqwen3.so
	$(Q)$(CC) -std=c99 -Wall -Wextra -Werror -I. $< -o $@ -L$(B) -lqwen3 -Wl,-rpath,$(abspath $(B)) -lm -lpthread

# The GPU's suites are nvcc's, and run where there is a GPU.
GPU_SUITE  = $(if $(GPU),$(if $(SANITIZE),,$(GPU_SUITES:%=$(T)/%)))
$(T)/test_notes.o: $(BUILD)/notes.cuh
$(GPU_SUITES:%=$(T)/%.o): $(T)/%.o: tests/gpu/%.cpp $(B)/command
	$(call CU_OBJECT,-Werror all-warnings -Xcompiler -Werror -I$(BUILD))
# (Their references are the ops of cpu/, in a portable build too.)
$(GPU_SUITES:%=$(T)/%): %: %.o $(T)/main.o $(T)/numbers.o $(LIB) $(if $(TEXT),$(B)/cpu/room.o $(patsubst %.cpp,$(B)/%.o,$(filter cpu/%,$(SEPARATE))))
	$(Q)$(LINK) $^ -o $@ $(EDIT) $(CURL) $(CMARK) $(MHD)
# The code in the course's notes.
$(BUILD)/notes.cuh: data/course/check_notes.py $(wildcard data/course/notes/*.md)
	@mkdir -p $(BUILD)
	$(Q)python3 data/course/check_notes.py --no-compile --emit $@ > $@.log || { cat $@.log; exit 1; }

# (Two suites at a time: some wait more than they compute; more would disturb those that bound a time.)
TESTED     = $(PROGRAMS_ALL:%=$(B)/%)
test: CXXFLAGS += -Werror
test: $(TESTED) $(SUITE_PROGRAMS) $(if $(SANITIZE),,$(T)/library_c) $(GPU_SUITE)
	@QWEN3=$(B)/qwen3 TRAIN_LORA=$(B)/train_lora DATAGEN=$(B)/datagen SERVE=$(B)/serve JOBS=2 \
	  LIBRARY=$(B)/libqwen3.so LIBRARY_C=$(T)/library_c \
	  NO_GPU=$(if $(GPU_SUITE),,$(shell cat $(GPU_SUITES:%=tests/gpu/%.cpp) | grep -c '^TEST_CASE')) tests/run.sh $(RUNS) $(GPU_SUITE)
asan:
	@LSAN_OPTIONS=suppressions=tests/lsan.supp:print_suppressions=0 $(MAKE) test SANITIZE=asan NVCC=none
# (The test cases that start ./serve: it alone is instrumented. One thread of OpenMP: ThreadSanitizer does not see how its
# threads wait for each other.)
CPU        = $(BUILD)/$(notdir $(firstword $(CXX)))
tsan:
	@$(MAKE) NVCC=none $(CPU)/tests/suites_serve
	@$(MAKE) NVCC=none SANITIZE=tsan ROOMS="$(filter-out cli train,$(ROOMS))" $(CPU)-tsan/serve
	@SERVE=$(CPU)-tsan/serve CASES=--test-suite=program OMP_NUM_THREADS=1 TSAN_OPTIONS=halt_on_error=1 \
	  tests/run.sh $(CPU)/tests/suites_serve:test_serve

# Every header by itself; the order of the rooms.
headers:
	@CXX=$(CXX) JOBS=$(JOBS) tests/headers.sh

# ---- 64-bit Arm, with BF16 and with the compiler's own vectors: Debian's g++-aarch64-linux-gnu and qemu-user-static.
# (Optimised, since qemu takes far longer than the compiler; test_packed_products takes half an hour.)
ARM        = aarch64-linux-gnu-g++
ARM_SUITES = test_ops test_int8 test_blocks test_model test_sampler
aarch64:
	@$(MAKE) NVCC=none PORTABLE=1 CXX=$(ARM) CXXFLAGS="-static -Wl,--no-warnings" ROOMS="base model" UNITS="$(ARM_SUITES)" TESTOPT=-Og \
	  $(BUILD)/$(ARM)-portable/tests/suites_model
	@RUNNER="qemu-aarch64-static -cpu max" JOBS=2 tests/run.sh $(ARM_SUITES:%=$(BUILD)/$(ARM)-portable/tests/suites_model:%)

# ---- Fuzzers: clang's libFuzzer, first inputs in tests/fixtures/fuzz/NAME. The same seed each time, so that CI judges
# a change by itself; a longer search is `make fuzz SEED=0 SECONDS_EACH=600`. They are one program, in which each has a
# name (tests/fuzz/one_of.h), over the objects that `make asan CXX=clang++` compiled.
FUZZERS   = $(notdir $(basename $(wildcard tests/fuzz/fuzz_*.cpp)))
SECONDS_EACH ?= 20
SEED      ?= 1
CLANG     ?= clang++
$(T)/fuzz/all.cpp: $(FUZZERS:%=tests/fuzz/%.cpp) $(wildcard tests/fuzz/*.h)
	@mkdir -p $(@D)
	@{ grep -h '^#define\|^#include' $(FUZZERS:%=tests/fuzz/%.cpp) | sort -u; echo '#include "tests/fuzz/one_of.h"'; } > $@
	@for f in $(FUZZERS); do echo "FUZZER($$f)"; \
	  printf '#define %s %s\n' LLVMFuzzerTestOneInput $${f}_input LLVMFuzzerCustomMutator $${f}_mutator; \
	  echo "namespace $$f {"; echo "#line 1 \"tests/fuzz/$$f.cpp\""; sed 's/^#include.*//' tests/fuzz/$$f.cpp; echo "}"; \
	  printf '#undef %s\n' LLVMFuzzerTestOneInput LLVMFuzzerCustomMutator; done >> $@
$(T)/fuzz/all: $(T)/fuzz/all.cpp $(LIB)
	@echo "$(CXX)  $<"
	$(Q)$(COMPILE) -fsanitize=fuzzer $< -x none $(LIB) -o $@ $(CURL) $(CMARK) $(EDIT)
$(FUZZERS:%=$(T)/fuzz/%): $(T)/fuzz/all
	@ln -f $< $@
run-%: $(T)/fuzz/%
	@seeds=tests/fixtures/fuzz/$(*:fuzz_%=%); [ -d $$seeds ] || seeds=; \
	mkdir -p $(BUILD)/fuzz/corpus/$*; \
	$< -seed=$(SEED) -max_total_time=$(SECONDS_EACH) -timeout=20 -rss_limit_mb=4096 -artifact_prefix=$(BUILD)/fuzz/ -print_final_stats=1 \
	  $(BUILD)/fuzz/corpus/$* $$seeds >$(BUILD)/fuzz/$*.log 2>&1 || { tail -n 40 $(BUILD)/fuzz/$*.log; exit 1; }; \
	echo "$*: $$(sed -n 's/^stat::number_of_executed_units: *//p' $(BUILD)/fuzz/$*.log) runs in $(SECONDS_EACH) s, no fault"
.SECONDARY: $(FUZZERS:%=$(T)/fuzz/%)
fuzz:
	@$(MAKE) SANITIZE=asan CXX=$(CLANG) NVCC=none -j$(JOBS) $(FUZZERS:%=run-%)

# Mixed load and faults against a server (tests/bench/campaign.cpp).
campaign: serve $(B)/bench/campaign
	$(B)/bench/campaign --seconds $(SECONDS_EACH)

# ---- All CUDA code, without linking, for CI without a GPU. One file has every kernel, each once, and is compiled for
# four architectures, as the laboratories are; callers of the same kernels are compiled to PTX only, for one; the code
# in the course's notes, and its measurements, for one.
CHECKED    = 80 89 90a 120
EVERY      = tests/gpu/every.cu
NOTES      = tests/gpu/test_notes.cpp tests/bench/bench_notes.cu
LAB_FILES  = $(LABS:%=%.cu)
CALLERS    = $(filter-out tests/gpu/test_gpu_backward.cpp $(NOTES),$(wildcard tests/gpu/test_*.cpp)) \
             tests/bench/bench_packed.cu \
             $(if $(wildcard $(dir $(HAVE_NVCC))../include/cublas_v2.h),tests/bench/bench_gpu.cu tests/bench/bench_fp8.cu)
# All without optimising where nvcc can (13), in a quarter of the time; sm_89 from the PTX of sm_80, since none of our
# code distinguishes them. (ptxas then says C7520 of each wgmma: without inlining they wait for each other.) Attention's
# wgmma once more as it runs: it is short of registers.
HOPPER     = $(shell grep -lE '"gpu/(hopper|.*/hopper|backward/lora_up)\.h"' gpu/*/*.cu)
$(EVERY:%=quick/%): CODE = $(patsubst %,sm_%,$(CHECKED))
$(HOPPER:%=check/%): CODE = $(patsubst %,sm_%,$(filter 90a,$(CHECKED)))
QUICK      = $(if $(shell $(NVCC) --help 2>/dev/null | grep -e --Ofast-compile),-Ofc=max)
$(EVERY:%=quick/%) $(CALLERS:%=check/%): FLAGS_TOO = $(QUICK)
$(LAB_FILES:%=check/%): CODE = $(CHECKED:%=sm_%)
check/lab/dynamic.cu: FLAGS_TOO = -rdc=true # kernels launch kernels
$(NOTES:%=check/%): CODE = sm_90a
$(CALLERS:%=check/%): CODE = compute_90a
CUDA_CHECKS = $(EVERY:%=quick/%) $(HOPPER:%=check/%) $(CALLERS:%=check/%) $(LAB_FILES:%=check/%) $(NOTES:%=check/%)
CUDA_CHECK = @echo "nvcc $(CODE): $*"; [ -z "$(CODE)" ] || \
	  $(NVCC) -x cu -std=c++17 $(foreach c,$(CODE),-gencode arch=$(patsubst compute_89,compute_80,$(c:sm_%=compute_%)),code=$(c)) $(FLAGS_TOO) \
	  -Xcompiler -Wall,-Wextra,-Werror,-fopenmp -Werror all-warnings -DQWEN3_GPU -I. -I$(BUILD) -o /dev/null -c $*
$(filter check/%,$(CUDA_CHECKS)): check/%: $(BUILD)/notes.cuh
	$(CUDA_CHECK)
$(filter quick/%,$(CUDA_CHECKS)): quick/%: $(BUILD)/notes.cuh
	$(CUDA_CHECK)
# (Laboratories beside libraries and qwen3.cu's kernels: as far as PTX.)
LAB_BESIDE = $(patsubst %,check/beside/%,$(shell grep -lE 'HAVE_CU|LAB_QWEN3' lab/*.cu))
$(LAB_BESIDE): check/beside/%:
	@echo "nvcc compute_90a: $* with $(LAB_LIBS) cub"
	$(Q)$(NVCC) -x cu -std=c++17 -gencode arch=compute_90a,code=compute_90a $(QUICK) $(LAB_HAVE) -DLAB_QWEN3 \
	  -Xcompiler -Wall,-Wextra,-Werror,-fopenmp -Werror all-warnings -DQWEN3_GPU -I. -o /dev/null -c $*
# The study text alone; the program as one file, as far as PTX and the host compiler's syntax: g++ makes code of it for
# `make single`'s check, and its kernels are the text's.
check/text: CODE = sm_80 sm_89
check/single: CODE = compute_80
check/text check/single: check/%:
	@echo "nvcc $(CODE): qwen3.cu, portable$(if $(filter single,$*),$(comma) as one file)"
	$(Q)$(NVCC) -x cu -std=c++17 $(foreach c,$(CODE),-gencode arch=$(patsubst compute_89,compute_80,$(c:sm_%=compute_%)),code=$(c)) \
	  $(QUICK) -I. -o /dev/null $(if $(filter single,$*),-Xcompiler -fopenmp$(comma)-fsyntax-only -c $(BUILD)/qwen3_single.cu,\
	  -Xcompiler -Wall$(comma)-Wextra$(comma)-Werror$(comma)-fopenmp -Werror all-warnings -DQWEN3_GPU -DQWEN3_PORTABLE -DQWEN3_LIBRARY -c qwen3.cu)
check/single: $(BUILD)/qwen3_single.cu
check/notes:
	@echo "nvcc: the code in data/course/notes"
	$(Q)python3 data/course/check_notes.py
cuda-check:
	@$(MAKE) --no-print-directory -j$(JOBS) $(CUDA_CHECKS) $(LAB_BESIDE) check/text check/single check/notes
.PHONY: $(CUDA_CHECKS) $(LAB_BESIDE) check/text check/single check/notes
