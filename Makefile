# make              qwen3, train_lora, datagen and serve: with nvcc where a GPU is, else for the CPU with g++ alone
# make cpu          the same for the CPU, wherever it is
# make portable     qwen3, train_lora and serve without cpu/ and gpu/: Book I and Book II alone, to build/MODE-text/
# make single       build/qwen3_single.cu: the portable qwen3 as one file, for g++ and nvcc
# make test         builds with -Werror, runs every suite; the last line counts
# make headers      compiles every header by itself, and checks that includes go one way
# make asan|fuzz    the suites under ASan + UBSan; the fuzzers (SECONDS_EACH=20)
# make campaign     mixed load and faults against ./serve for SECONDS_EACH
# make tsan         the server's suite, the server under ThreadSanitizer
# make aarch64      the model's suites for 64-bit Arm, by a cross compiler, under qemu-user
# make cuda-check   nvcc compiles every kernel for four architectures, and the code in the notes
# make lab          the kernel laboratories, from the naive loop up
# make lab-check    every step once at an odd size (CHECKER="compute-sanitizer --error-exitcode 1")
# make lab-plots    runs them all on this GPU: pictures and tables of docs/lab*.md
# make exercises    lists the laboratories' exercises; exercise-matmul-3 writes one, check-matmul-3 judges it without
#                   a GPU, time-matmul-3 times it on one (lab/exercises.mk)
# make check-env    driver, toolkit, GPU, its speed beside the data sheet
# make dist         programs for other machines, in build/dist: any glibc from 2.31 on (docs/deploy.md)
# make wheel        a Python wheel of the C API, for this machine (docs/embedding.md)
# make course       a folder to hand in to the course: deploy/course (ADAPTER=FOLDER)
# make report       this card's speeds beside its ceilings, in at most ten minutes (docs/cards.md)
# make bench        speed of this machine's build, and of its GPU's kernels
# make clean
# Options: PORTABLE=1 a binary for any x86-64    CXX=clang++    ARCH=native|all|"80 89"    V=1 shows the commands
#
# A source is compiled once, to build/MODE/, and every program and test links the objects that it needs. Sources in
# gpu/ are nvcc's; a .cu elsewhere is plain C++ where there is no nvcc.

CXX      ?= g++
NVCC     ?= nvcc
ARCH     ?= native
Q         = $(if $(V),,@)
JOBS     ?= $(shell nproc 2>/dev/null || echo 1)
ifeq ($(MAKELEVEL),0) # all cores; JOBS=N: so many
MAKEFLAGS := $(MAKEFLAGS) $(if $(findstring -j,$(MAKEFLAGS)),,-j$(JOBS)) --no-print-directory
endif

# ---- Questions to this machine; `info` prints the answers.
HAVE_NVCC := $(if $(filter cpu,$(MAKECMDGOALS)),,$(shell command -v $(NVCC) 2>/dev/null))
OPENMP    := $(shell echo 'int main(){}' | $(CXX) -fopenmp -x c++ - -o /dev/null 2>/dev/null && echo -fopenmp)
EDIT      := $(shell printf '\043include <stdio.h>\n\043include <histedit.h>\nint main(){}' | $(CXX) -x c++ - -o /dev/null -ledit 2>/dev/null && echo -ledit)
CURL      := $(shell printf '\043include <curl/curl.h>' | $(CXX) -x c++ -fsyntax-only - 2>/dev/null && echo -ldl)
CMARK     := $(shell printf '\043include <cmark.h>\nint main(){return !cmark_version();}' | $(CXX) -x c++ - -o /dev/null -lcmark 2>/dev/null && echo -lcmark)
MHD       := $(shell printf '\043include <microhttpd.h>\nint main(){return !MHD_get_version();}' | $(CXX) -x c++ - -o /dev/null -lmicrohttpd 2>/dev/null && echo -lmicrohttpd)
NCCL      := $(shell LC_ALL=C ldconfig -p 2>/dev/null | grep -o 'libnccl\.so\.2' | head -n 1)

# A GPU found: its own code. None: the CPU's build, unless ARCH says for which GPU. 9.0 becomes 90a (wgmma), always as
# -gencode. `all` takes what this nvcc knows.
comma    := ,
space    := $(subst ,, )
ifneq ($(HAVE_NVCC),)
GPU       := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+\.[0-9]+$$' | sort -u | tr -d .)
KNOWN     := $(shell $(NVCC) --list-gpu-code 2>/dev/null | sed -n 's/^sm_//p')
WANTED    := $(patsubst 90,90a,$(if $(filter native,$(ARCH)),$(GPU),$(if $(filter all,$(ARCH)),$(filter 80 86 89 90 120,$(KNOWN)),$(ARCH:sm_%=%))))
SPLIT     := $(if $(shell $(NVCC) --help 2>/dev/null | grep -e --split-compile),-split-compile 0)
endif
CUDA      := $(if $(WANTED),yes)# this build is for a GPU

# ---- Flags, and the folder of this build's objects
TUNE       = $(if $(PORTABLE),,-march=native)
CXXFLAGS  ?=
# Most sources: -Og takes two thirds of the compile time of -O1, half of that of -O2. See HOT for the others. (g++ finds
# variables that may be unset only where it optimises; with -Og it reports others.)
COLD       = -Og $(if $(findstring clang,$(CXX)),,-Wno-maybe-uninitialized)
OPT        = $(COLD)
FLAGS      = $(TUNE) -ffp-contract=off $(OPENMP) $(if $(OPENMP),,-Wno-unknown-pragmas) $(if $(EDIT),-DHAVE_LIBEDIT) \
             $(if $(CURL),-DHAVE_CURL) $(if $(CUDA),-DQWEN3_GPU) $(if $(TEXT),-DQWEN3_PORTABLE) -Wall -Wextra $(CXXFLAGS)
CPUFLAGS   = -std=c++17 $(OPT) $(FLAGS) -fPIC -I.
GENCODE    = $(foreach a,$(WANTED),-gencode arch=compute_$(a),code=sm_$(a))
NVCCFLAGS  = -x cu -std=c++17 -O3 $(GENCODE) $(SPLIT) -I. -ccbin $(CXX) -Xcompiler $(subst $(space),$(comma),$(strip $(OPT:-Og=-O1) $(FLAGS) -fPIC))
KIND       = $(if $(CUDA),-cuda)$(PORTABLE:%=-portable)$(TEXT:%=-text)$(SANITIZE:%=-$(SANITIZE))
MODE       = $(notdir $(firstword $(CXX)))$(KIND)
BUILD      = build
B          = $(BUILD)/$(MODE)

# ---- Sources and objects. A room is one object: parsing its headers once instead of in each source halves the CPU
# seconds. Code that runs for each token, word or weight is one more, optimised. Sources with a library or an
# instruction set of their own, and nvcc's, are separate objects.
ROOMS      = base model form search book book/datagen train cli $(if $(MHD),server server/engine server/api server/http)
ROOM_FILES = $(if $(filter hot%,$(1)),$(if $(filter hot,$(1)),$(filter-out $(HOT_DATA),$(HOT)),$(HOT_DATA)),\
               $(filter-out $(SEPARATE) $(HOT),$(wildcard $(1)/*.cpp) $(if $(CUDA),,$(wildcard $(1)/*.cu))))
HOT        = $(filter $(ROOMS:%=%/%),$(patsubst %,model/%.cpp,tokenizer lookup quantized quantize_matrix) \
             $(patsubst %,form/%.cpp,grammar automaton masks) $(patsubst %,search/%.cpp,index words hybrid) \
             $(patsubst %,book/%.cpp,jieba words characters) $(HOT_DATA))
HOT_DATA   = $(patsubst %,book/datagen/%.cpp,minhash score bleu_words rouge_index)
SEPARATE   = $(patsubst %,book/datagen/%.cpp,generate grade libcurl) cli/libedit.cpp \
             $(patsubst %,cpu/%.cpp,plain avx2 avx512 avx512_bf16 amx arm_dot arm_bf16 backward backward_products)
SOURCES    = $(filter $(ROOMS:%=%/%) $(if $(TEXT),,cpu/%),$(SEPARATE)) $(if $(CUDA),$(wildcard $(ROOMS:%=%/*.cu) $(if $(TEXT),,gpu/*.cu gpu/*/*.cu)))
OBJECTS    = $(B)/text.o $(patsubst %,$(B)/%/room.o,hot $(if $(TEXT),,cpu) $(if $(filter book/datagen,$(ROOMS)),hot/datagen) $(ROOMS)) \
             $(patsubst %,$(B)/%.o,$(basename $(SOURCES)))
# Tests link all objects. qwen3 waits only for those that it needs.
LIB        = $(B)/all.a
CORE       = $(B)/core.a
DATAGEN    = $(filter $(B)/book/datagen/% $(B)/hot/datagen/%,$(OBJECTS))
TRAIN      = $(filter $(B)/train/%,$(OBJECTS))
SERVER     = $(filter $(B)/server/%,$(OBJECTS))
PROGRAMS_ALL = qwen3 train_lora datagen $(if $(MHD),serve)
.PHONY: all cpu portable single info test headers asan tsan aarch64 fuzz campaign bench report \
        course course-folder dist wheel clean cuda-check lab lab-check lab-plots check-env text-programs
all cpu: $(PROGRAMS_ALL)
portable:
	@$(MAKE) TEXT=1 text-programs
text-programs: $(filter-out $(B)/datagen,$(PROGRAMS_ALL:%=$(B)/%)) | info
	@echo "built     $(filter-out %.a,$^)"

info:
	@echo "compiler  $(if $(CUDA),$(HAVE_NVCC) with $(CXX),$(CXX); $(if $(HAVE_NVCC),nvcc is here$(comma) but no GPU: CPU only (make ARCH=89 builds for a GPU),no nvcc: CPU only))"
	@echo "threads   $(if $(OPENMP),OpenMP,one: $(CXX) has no OpenMP)"
	@echo "chat      $(if $(EDIT),libedit: line editing and history,the terminal's own line mode (libedit-dev adds history))"
	@echo "datagen   $(if $(CURL),libcurl: with generate and grade,without generate and grade (libcurl4-openssl-dev adds it))"
	@echo "chunk     $(if $(CMARK),libcmark: Markdown as CommonMark has it,rules of its own for Markdown (libcmark-dev adds CommonMark's))"
	@echo "serve     $(if $(MHD),libmicrohttpd; train_lora --watch$(comma) too,not built: it needs libmicrohttpd (libmicrohttpd-dev); train_lora has no --watch)"
	@$(if $(CUDA),echo "GPUs      $(if $(NCCL),NCCL: train_lora --gpus N,one: no libnccl.so.2 here (libnccl2 adds it when train_lora runs; or LD_LIBRARY_PATH))",:)
	@echo "code for  $(if $(TUNE),this machine's CPU (PORTABLE=1: any x86-64),any x86-64)$(if $(CUDA),$(comma) and $(WANTED:%=sm_%))"

# The flags of the last build: another compiler or flag rebuilds. (-Werror changes no object.)
COMMAND    = $(CXX) $(filter-out -Werror,$(CPUFLAGS)) $(if $(CUDA),$(NVCC) $(GENCODE)) $(CURL) $(CMARK) $(MHD)
$(B)/command: FORCE
	@mkdir -p $(@D)
	@echo '$(COMMAND)' | cmp -s - $@ || echo '$(COMMAND)' > $@
FORCE:

# The standard headers that most sources include, parsed once. (make headers compiles without it.)
STD        = algorithm atomic cmath cstring functional map memory mutex numeric optional set string string_view vector
PCH        = $(B)/std.h$(if $(findstring clang,$(MODE)),.pch,.gch)
$(PCH): $(B)/command
	@printf '\043include <%s>\n' $(STD) > $(B)/std.h
	$(Q)$(CXX) -x c++-header $(CPUFLAGS) $(SAN) $(B)/std.h -o $@

OPT_CPU    = -O3
OPT_HOT    = -O2
# (private: what they need, the shared header among it, is compiled as always.)
$(B)/cpu/%.o: private OPT = $(OPT_CPU)
$(B)/text.o $(B)/hot/room.o $(B)/hot/datagen/room.o $(B)/server/engine/room.o $(B)/bench/%.o: private OPT = $(OPT_HOT)
$(B)/server/%.o: private OPT = $(if $(SANITIZE),$(COLD),-O1)
$(B)/book/room.o: private FLAGS += $(if $(CMARK),-DHAVE_CMARK)
$(B)/train/room.o: private FLAGS += $(if $(MHD),-DHAVE_MICROHTTPD)
# Instruction sets of x86-64, a source each; the program asks at its start which ones its CPU has.
SIMD      := $(shell $(CXX) -mamx-bf16 -mavx512bf16 -E -x c++ /dev/null >/dev/null 2>&1 && echo yes)
AVX512     = -mavx2 -mfma -mavx512f -mavx512bw -mavx512vl -mavx512dq
$(B)/cpu/avx2.o $(B)/tests/double/cpu/avx2.o: private ISA = -mavx2 -mfma
$(B)/cpu/avx512.o $(B)/tests/double/cpu/avx512.o: private ISA = $(AVX512)
$(B)/cpu/avx512_bf16.o $(B)/tests/double/cpu/avx512_bf16.o: private ISA = $(AVX512) -mavx512bf16 -mavx512vnni
$(B)/cpu/amx.o $(B)/tests/double/cpu/amx.o: private ISA = $(AVX512) -mavx512bf16 -mavx512vnni -mavx512vbmi -mamx-tile -mamx-bf16 -mamx-int8
$(B)/cpu/arm_%.o: private ARM_ISA = $(shell F=-march=armv8.2-a+$(subst dot,dotprod,$(*F:arm_%=%)); $(CXX) $$F -E -x c++ /dev/null >/dev/null 2>&1 && echo $$F)
# A line for each file while it compiles; $(1): more flags.
define CPP_OBJECT
@mkdir -p $(@D); echo "$(notdir $(CXX))  $<"
$(Q)$(CPP) $(1) -c $< -o $@
endef
define CU_OBJECT
@mkdir -p $(@D); echo "$(if $(CUDA),nvcc,$(notdir $(CXX)))  $<"
$(Q)$(if $(CUDA),$(NVCC) $(NVCCFLAGS) -MMD -MP,$(CPP)) $(1) -c $< -o $@
endef
COMPILE    = $(CXX) -x c++ $(CPUFLAGS) $(if $(SIMD),$(ISA)) $(ARM_ISA) $(SAN) -MMD -MP
CPP        = $(COMPILE) $(if $(filter-out $(COLD),$(OPT))$(ISA)$(filter $(COVERED),$(SAN)),,-include $(B)/std.h)

ROOM_OBJECTS = $(sort $(B)/cpu/room.o $(filter %/room.o,$(OBJECTS)))
$(ROOM_OBJECTS:.o=.cpp): $(B)/%/room.cpp: FORCE
	@mkdir -p $(@D); printf '\043include "%s"\n' $(call ROOM_FILES,$*) >$@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@
$(ROOM_OBJECTS): $(B)/%/room.o: $(B)/%/room.cpp $(PCH)
	@echo "$(notdir $(CXX))  $*/"
	$(Q)$(CPP) -c $< -o $@
$(B)/%.o: %.cpp $(PCH)
	$(CPP_OBJECT)
$(B)/%.o: %.cu $(PCH)
	$(CU_OBJECT)
# The study text: its ops, and on a GPU its kernels.
$(B)/text.o: qwen3.cu $(PCH)
	$(call CU_OBJECT,-DQWEN3_LIBRARY)
# Programs are plain C++: their GPU code is in the objects.
$(B)/main/%.o: %.cu $(PCH)
	$(CPP_OBJECT)
$(B)/main/%.o: %.cpp $(PCH)
	$(CPP_OBJECT)
$(LIB): $(OBJECTS)
$(CORE): $(filter-out $(DATAGEN) $(TRAIN) $(SERVER),$(OBJECTS))
$(LIB) $(CORE):
	@rm -f $@ && ar rcs $@ $^
LINK       = $(if $(CUDA),$(NVCC) $(GENCODE) -ccbin $(CXX) -Xcompiler $(subst $(space),$(comma),$(strip $(FLAGS))),$(CXX) $(FLAGS) $(SAN))
$(B)/qwen3: LIBS = $(EDIT)
$(B)/datagen: LIBS = $(CURL)
$(B)/serve $(B)/train_lora: LIBS = $(MHD)
$(B)/datagen: $(DATAGEN)
$(B)/train_lora: $(DATAGEN) $(TRAIN)
$(B)/serve: $(SERVER)
$(PROGRAMS_ALL:%=$(B)/%): $(B)/%: $(B)/main/%.o $(CORE)
	$(Q)$(LINK) $(filter-out $(CORE),$^) $(CORE) -o $@ $(LIBS) $(CMARK)
$(PROGRAMS_ALL): %: $(B)/% FORCE | info
	@[ $@ -ef $< ] || { ln -f $< $@ && echo "built     ./$@"; }

# The study text, its headers and the sources of qwen3 as one file; model/*.cu last, where g++ skips their includes.
SINGLE     = qwen3.cu $(wildcard $(patsubst %,%/*.cpp,base model form search book cli) model/*.cu)
single: $(BUILD)/qwen3_single.cu
$(BUILD)/qwen3_single.cu: capi/single.awk $(shell git ls-files '*.h' 2>/dev/null) $(SINGLE)
	@mkdir -p $(BUILD)
	@awk -f $< $(SINGLE) > $@ && echo "built     $@"

# Pages, as strings of C++: JOIN,PAGE,FOLDERS: each line {{FILE}} of the page is replaced by the file, in one of the
# folders. The page to chat on; the page of a training run, live and as a file. Beside the first the script that draws
# its formulas, below its licence, as numbers: it has characters that g++ warns of.
define JOIN
@mkdir -p $(BUILD)
@{ printf 'R"page(' && awk -v folders="$(2)" '/^[{][{][a-z]*[.][a-z]*[}][}]$$/ { \
    parts = split(folders, folder, " "); \
    for (n = k = 0; n == 0 && k++ < parts;) \
      for (file = folder[k] "/" substr($$0, 3, length - 4); (getline line < file) > 0; n++) print line; \
    if (n == 0) { print $$0 ": cannot be read" > "/dev/stderr"; exit 1 } \
    next \
  } {print}' $(1) && printf ')page"\n'; } > $@.$$$$ && mv $@.$$$$ $@
endef
$(BUILD)/chat_page.inc: $(wildcard server/page/*)
	$(call JOIN,server/page/page.html,server/page)
$(BUILD)/train_%.inc: $(wildcard train/page/*) server/page/theme.css
	$(call JOIN,train/page/$*.html,train/page server/page)
$(BUILD)/temml.inc: server/page/LICENSE-temml server/page/temml.min.js
	@mkdir -p $(BUILD)
	@{ echo '/*' && cat $< && echo '*/' && cat $(lastword $^); } | od -An -v -tu1 | sed 's/[0-9][0-9]*/&,/g' > $@.$$$$ && mv $@.$$$$ $@
$(B)/server/http/room.o: $(BUILD)/chat_page.inc $(BUILD)/temml.inc
$(B)/train/room.o: $(BUILD)/train_live.inc $(BUILD)/train_report.inc

# The C API, for other programs (qwen3.h; lab/embed.cpp shows how).
libqwen3.so: $(B)/libqwen3.so
	@ln -f $< $@ && echo "built     ./$@"
$(B)/qwen3.map: Makefile
	@mkdir -p $(B); echo '{ global: qwen3_*; local: *; };' > $@
$(B)/libqwen3.so: $(B)/capi/library.o $(CORE) $(B)/qwen3.map
	$(Q)$(LINK) -shared $(filter-out %.map,$^) -o $@ $(if $(CUDA),-Xlinker --version-script=$(B)/qwen3.map,-Wl$(comma)--version-script=$(B)/qwen3.map) $(CURL) $(CMARK)

# A hand-in (deploy/course): for any x86-64 with a GPU of these kinds.
course:
	@$(MAKE) PORTABLE=1 ARCH="89 90 120" course-folder
course-folder: $(B)/serve | info
	@$(if $(CUDA),,echo "no nvcc here: this hand-in answers by the CPU" >&2)
	@rm -rf $(BUILD)/course && deploy/course/pack.sh $(BUILD)/course $< $(ADAPTER)

# Programs, and wheels of the C API, for other machines. DIST="linux-x86_64": only these kinds (deploy/dist.sh).
dist:
	+@deploy/dist.sh $(BUILD)/dist $(DIST)
wheel: $(B)/libqwen3.so
	@capi/wheel.py $< $(BUILD) $(if $(CUDA),cuda)

# ---- The laboratories (docs/lab.md). With nvcc and a GPU they print times; with g++ alone the steps run by emulation.
LABS      := $(basename $(wildcard lab/*.cu))
LAB_LIBS  := $(if $(CUDA),$(foreach l,cublas cusparse cudnn,$(if $(wildcard $(dir $(HAVE_NVCC))../include/$(l).h),$(l))))
LAB_HAVE   = $(foreach l,cub $(LAB_LIBS),-DHAVE_$(shell echo $(l) | tr a-z A-Z))
LAB_FLAGS  = $(if $(CUDA),$(LAB_HAVE) -Xlinker --as-needed $(LAB_LIBS:%=-l%))
lab/matmul lab/attention lab/decode: LAB_FLAGS += $(if $(CUDA),-DLAB_QWEN3)
lab/matmul lab/attention lab/decode: $(if $(CUDA),$(LIB))
lab/dynamic: LAB_FLAGS += $(if $(CUDA),-rdc=true) # kernels launch kernels
lab: $(LABS)
LAB_ODD    = matmul:130x260x200 transpose_copy:67x45 reduce_scan:9001x2057 attention:133x2x1 decode:2x1040 \
             convolution_stencil:45x13x9 sparse:197x101x13 waves:50x1x1 dynamic:29x150x300 snn:70x45x9 \
              low_precision:37x200
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
$(LABS): %: %.cu $(wildcard lab/*.h tests/emulate/*.h) $(B)/command
	$(Q)$(if $(CUDA),$(NVCC) $(NVCCFLAGS),$(CXX) -x c++ $(CPUFLAGS)) $< $(if $(CUDA),-x none $(filter %.a,$^)) -o $@ $(LAB_FLAGS)
	@echo "built     $@"

# ---- Speed: the real shape with random weights, and the tokenizer.
bench: qwen3 $(B)/bench/bench_tokenizer $(if $(CUDA),$(B)/bench/bench_gpu)
	@[ -f $(BUILD)/0.6B.bin ] || ./qwen3 --synthesize 0.6B $(BUILD)/0.6B.bin
	./qwen3 $(BUILD)/0.6B.bin --bench
	$(if $(CUDA),./qwen3 $(BUILD)/0.6B.bin -d cpu --bench,:)
	./qwen3 $(BUILD)/0.6B.bin --bench --dtype int8
	$(if $(CUDA),$(B)/bench/bench_gpu $(BUILD)/0.6B.bin,:)
	$(B)/bench/bench_tokenizer
report: qwen3 train_lora $(if $(MHD),serve) bench_serve $(B)/bench/rows
	@ROWS=$(B)/bench/rows CXX="$(CXX)" NVCC="$(NVCC)" tests/bench/report.sh $(BUILD)/report $(BUILD)/0.6B.bin
$(B)/bench/%.o: tests/bench/%.cpp $(PCH)
	$(CPP_OBJECT)
$(B)/bench/%.o: tests/bench/%.cu $(B)/command
	$(call CU_OBJECT,-I$(BUILD))
$(B)/bench/%: $(B)/bench/%.o $(LIB)
	$(Q)$(LINK) $^ -o $@ $(if $(wildcard tests/bench/$*.cu),-lcublas -lcublasLt) $(CURL) $(CMARK) $(MHD)
$(BUILD)/bench_%: $(B)/bench/bench_%
	@ln -f $< $@ && echo "built     $@"
.PRECIOUS: $(B)/bench/% $(BUILD)/bench_%
bench_serve: $(BUILD)/bench_serve
	@ln -f $< $@

include tests/tests.mk lab/exercises.mk

clean:
	rm -rf $(PROGRAMS_ALL) serve bench_serve libqwen3.so $(LABS) $(BUILD)

-include $(shell find $(B) -name '*.d' 2>/dev/null)
