# lab/exercises.mk: exercises out of the laboratories (docs/lab.md, "Exercises"); the Makefile includes it.
#
# make exercise-matmul-3      writes exercises/matmul-3.cu: lab/matmul.cu with a TODO in step 3
# make check-matmul-3         right or wrong, conflicts of banks, uncoalesced accesses; without a GPU (SIZE=130x260x200)
# make solution-matmul-3      the counts of the laboratory's own lines
# make time-matmul-3          its time on this GPU
# make exercises              lists them
# make exercises-check        every skeleton compiles and is judged wrong, every laboratory right
MINE       = exercises# where a student's files lie
EXERCISES := $(shell awk -v list=1 -f lab/exercise.awk lab/*.cu)
E_LAB      = $(firstword $(subst -, ,$*))
E_STEP     = $(lastword $(subst -, ,$*))
E_SIZE     = --size $(or $(SIZE),$(patsubst $(E_LAB):%,%,$(filter $(E_LAB):%,$(LAB_ODD))))
E          = $(BUILD)/exercises
.PHONY: exercises exercises-check $(foreach e,$(EXERCISES),$(patsubst %,%-$(e),exercise check solution time))
exercises:
	@printf '%s\n' $(EXERCISES)
$(EXERCISES:%=exercise-%): exercise-%:
	@[ ! -e $(MINE)/$*.cu ] || { echo "$(MINE)/$*.cu is there: rename it first" >&2; exit 1; }
	@mkdir -p $(MINE) && awk -v name=$* -f lab/exercise.awk lab/$(E_LAB).cu > $(MINE)/$*.tmp && \
	mv $(MINE)/$*.tmp $(MINE)/$*.cu
	@echo "$(MINE)/$*.cu: line $$(grep -n -m 1 '// TODO' $(MINE)/$*.cu | cut -d : -f 1) is yours; make check-$* judges it"
$(EXERCISES:%=check-%): check-%: $(E)/%
	@$< $(E_STEP) $(E_SIZE)
$(EXERCISES:%=solution-%): solution-%:
	@$(MAKE) $(E)/lab/$(E_LAB)
	@$(E)/lab/$(E_LAB) $(E_STEP) $(E_SIZE)
exercise-% check-% solution-% time-%:
	@echo "there is no exercise $*: make exercises lists them" >&2; exit 1
$(MINE)/%.cu:
	@echo "there is no $@: make exercise-$* writes it" >&2; exit 1
# -fsanitize=thread calls the counters of tests/emulate/accesses.cpp; its own library is not linked. g++ alone does that
# for copies of 16 bytes.
E_CXX      = g++
$(E)/accesses.o: tests/emulate/accesses.cpp tests/emulate/accesses.h
	@mkdir -p $(@D)
	$(Q)$(E_CXX) -std=c++17 -O2 -Wall -Wextra -I. -c $< -o $@
# A source's checker: of an exercise, or of the laboratory as it is.
E_FLAGS    = -std=c++17 -g1 -Wall -Wno-unused -Wno-class-memaccess -Wno-unknown-pragmas -fsanitize=thread -I.
E_BUILD    = $(Q)$(E_CXX) $(E_FLAGS) -DEXERCISE='"$<"' -DLABORATORY=$(E_LAB) -c lab/check.cpp -o $@.o && \
             $(E_CXX) -no-pie $@.o $(E)/accesses.o -o $@
E_NEEDS    = lab/check.cpp $(E)/accesses.o $(wildcard lab/*.h tests/emulate/*.h)
$(EXERCISES:%=$(E)/%): $(E)/%: $(MINE)/%.cu $(E_NEEDS)
	@echo "$(E_CXX)  $<"
	$(E_BUILD)
$(E)/lab/%: lab/%.cu $(E_NEEDS)
	@mkdir -p $(@D); echo "$(E_CXX)  $<"
	$(E_BUILD)
$(EXERCISES:%=time-%): time-%: $(MINE)/%.cu
	@[ -n "$(CUDA)" ] || { echo "times need nvcc and a GPU; make check-$* needs neither" >&2; exit 1; }
	@mkdir -p $(E)
	$(Q)$(NVCC) $(NVCCFLAGS) $(LAB_HAVE) $(if $(filter dynamic,$(E_LAB)),-rdc=true) $< -o $(E)/$*.timed \
	  -Xlinker --as-needed $(LAB_LIBS:%=-l%)
	@$(E)/$*.timed $(E_STEP) $(SIZE:%=--size %)
# To change a laboratory.
$(E)/skeletons/%.cu: lab/exercise.awk $(wildcard lab/*.cu)
	@mkdir -p $(@D) && awk -v name=$* -f lab/exercise.awk lab/$(E_LAB).cu > $@.tmp && mv $@.tmp $@
$(EXERCISES:%=$(E)/skeletons/%): $(E)/skeletons/%: $(E)/skeletons/%.cu $(E_NEEDS)
	@echo "$(E_CXX)  $<"
	$(E_BUILD)
E_LABS     = $(sort $(foreach e,$(EXERCISES),$(firstword $(subst -, ,$(e)))))
exercises-check: $(EXERCISES:%=$(E)/skeletons/%) $(E_LABS:%=$(E)/lab/%)
	@bad=; for e in $(EXERCISES); do echo "$$e"; \
	  ! $(E)/skeletons/$$e $${e#*-} > /dev/null 2>&1 || bad="$$bad $$e (its skeleton is right)"; \
	  $(MAKE) solution-$$e || bad="$$bad $$e"; done; \
	[ -z "$$bad" ] || { echo "wrong:$$bad"; exit 1; }
