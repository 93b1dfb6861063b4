# train_gpt: everything a user types is a target here; `make help` lists them.
#
#   MPI=0    programs for one rank, without MPI
#   CC       the compiler: mpicc, or with MPI=0 cc
#   MATMUL   the library of matrix products on the CPU: onednn (default where it is), or cblas
#   PORTABLE=1   a program for every x86-64 CPU with AVX2, or every 64-bit ARM, not for this
#            machine's alone; oneDNN's products use what the CPU has all the same
#   PCRE2=0  a program without PCRE2 and utf8proc, which cut and normalize the text of --prompt:
#            it encodes bytes only. The default where one of the two is missing
#   BLAS     for MATMUL=cblas: openblas (default), blis or mkl; any library with a CBLAS interface
#   RUN      flags added to the default training run, e.g. make run RUN='--steps 100'
MPI    = 1
WITHOUT_MPI = $(if $(filter 0,$(MPI)),-DWITHOUT_MPI)
CC     = $(if $(WITHOUT_MPI),cc,mpicc)
has_cc = $(shell command -v $(firstword $(CC)))
some_cc = $(or $(and $(has_cc),$(CC)),cc)
ifneq ($(filter-out 0 1,$(MPI)),)
$(error MPI=$(MPI): expected 0 or 1)
endif
ifneq ($(filter-out 0 1,$(USE_CUDNN)),)
$(error USE_CUDNN=$(USE_CUDNN): expected 0 or 1)
endif
# $(call if_header,HEADER,TEXT,FLAGS): TEXT if the compiler, with the flags, finds the header
hash := \#
if_header = $(shell echo '$(hash)include <$(1)>' | $(some_cc) \
            -DPCRE2_CODE_UNIT_WIDTH=8 $(3) -E - >/dev/null 2>&1 && echo '$(2)')
MATMUL := $(or $(call if_header,dnnl.h,onednn),cblas)
ifneq ($(filter-out onednn cblas,$(MATMUL)),)
$(error MATMUL=$(MATMUL): expected onednn or cblas)
endif
BLAS   = openblas
PYTHON = $(shell test -x .venv/bin/python && echo .venv/bin/python || echo python3)

WARN   = -D_GNU_SOURCE -Wall -Wextra -Werror -Wno-format-truncation -Wno-missing-field-initializers
PORTABLE_ARCH = $(if $(filter aarch64-%,$(shell $(some_cc) -dumpmachine 2>&1)),armv8-a,x86-64-v3)
FAST   = -O3 -march=$(if $(PORTABLE),$(PORTABLE_ARCH),native) -fno-math-errno -fno-trapping-math
CFLAGS = -std=gnu11 $(FAST) -fopenmp $(WARN) -I.
BLAS_openblas = -lopenblas
BLAS_blis     = -lblis
BLAS_mkl      = -lmkl_rt
MATMUL_onednn = -DUSE_ONEDNN -ldnnl
MATMUL_cblas  = $(BLAS_$(BLAS))
PCRE2 := $(or $(call if_header,pcre2.h,$(call if_header,utf8proc.h,1)),0)
TEXT   = $(if $(filter 1,$(PCRE2)),-DUSE_PCRE2 -lpcre2-8 -lutf8proc)
LIBS   = $(MATMUL_$(MATMUL)) $(TEXT) -lm
SODIUM = $(call if_header,sodium.h,-DUSE_SODIUM -lsodium)

# The GPU build: ARCHS are the architectures that it has machine code for, by default all that the
# toolkit knows from 8.0 on; make cuda ARCHS=90 compiles for one, in a tenth of the time. The
# intermediate code (PTX) of 8.0 and 9.0 serves whatever comes later. No kernel uses what only one
# architecture has (wgmma, tcgen05), so none is compiled for sm_90a or sm_100a.
#   NVCC     CUDA's compiler; where none is installed, that of scripts/setup.sh cuda
#   TF32=1   products of fp32 matrices may round their operands to TF32
#   USE_CUDNN=0   own attention only. The default is attention by cuDNN's kernels where they take a
#            shape, if its headers are found, which scripts/setup.sh cuda installs; USE_CUDNN=1
#            fails without them
SITE   = $(firstword $(wildcard $(CURDIR)/.venv/lib/python3*/site-packages))
WHEELS = $(SITE)/nvidia
NVCC   = $(if $(shell command -v nvcc),nvcc,$(WHEELS)/cu13/bin/nvcc)
library  = $(if $(shell command -v nvcc),-l$(2),-Xlinker -rpath=$(WHEELS)/$(1)/lib \
           -Xlinker $(wildcard $(WHEELS)/$(1)/lib/lib$(2).so.*))
CUBLASLT = $(call library,cu13,cublasLt)
NCCL     = $(call library,nccl,nccl) \
           $(if $(shell command -v nvcc),,-isystem $(WHEELS)/nccl/include)
ARCHS  = $(shell $(NVCC) --list-gpu-code | tr -dc '0-9\n' | awk '$$1 >= 80' | sort -nu)
GPUS   = $(foreach a,$(ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
         $(foreach a,80 90,-gencode arch=compute_$(a),code=compute_$(a))
comma  = ,
empty  =
HOST_FLAGS = $(filter-out -O3,$(FAST)) -Wall -Wextra -Werror -Wno-format-truncation \
             -Wno-missing-field-initializers -Wno-parentheses -fopenmp
HOST   = $(subst $(empty) ,$(comma),$(strip $(HOST_FLAGS)))
OPTIMISE = -O3
NVCCFLAGS = -std=c++17 $(OPTIMISE) --threads 0 $(GPUS) -Werror all-warnings \
            -D_GNU_SOURCE -Xcompiler $(HOST) -I. $(if $(TF32),-DUSE_TF32)
CUDA_MPI = $(or $(WITHOUT_MPI),$(if $(has_cc),$(MPI_FLAGS),-DWITHOUT_MPI))
MPI_FLAGS = $(foreach d,$(shell $(CC) --showme:incdirs),-isystem $(d)) \
         $(foreach d,$(shell $(CC) --showme:libdirs),-L$(d)) -lmpi
# cuDNN, its frontend and NVRTC: the system's, the toolkit's, or those of scripts/setup.sh cuda.
CUDNN_PATHS = $(patsubst %,-isystem %,$(wildcard $(SITE)/include $(WHEELS)/cudnn/include))
TOOLKIT = $(if $(shell command -v nvcc),$(dir $(realpath $(shell command -v nvcc)))..,\
          $(WHEELS)/cu13)
no_header = $(if $(call if_header,$(1),1,$(CUDNN_PATHS) -isystem $(TOOLKIT)/include),,$(1))
NO_CUDNN = $(strip $(foreach h,cudnn_version.h cudnn_frontend_version.h nvrtc.h,\
           $(call no_header,$(h))))
# What installs these. A toolkit of the system has NVRTC in a package of its own.
OF_TOOLKIT = $(if $(shell command -v nvcc),$(filter nvrtc.h,$(NO_CUDNN)))
CUDNN_FROM = $(strip $(if $(filter-out $(OF_TOOLKIT),$(NO_CUDNN)),scripts/setup.sh cuda \
             $(if $(OF_TOOLKIT),and)) $(if $(OF_TOOLKIT),NVIDIA's package cuda-nvrtc-dev))
WITH_CUDNN = $(or $(USE_CUDNN),$(if $(NO_CUDNN),0,1))
CUDNN  = $(if $(filter 1,$(WITH_CUDNN)),-DUSE_CUDNN $(CUDNN_PATHS) \
         $(if $(wildcard $(WHEELS)/cudnn/lib),-Xlinker -rpath=$(WHEELS)/cudnn/lib \
         -Xlinker $(wildcard $(WHEELS)/cudnn/lib/libcudnn.so.*),-lcudnn) \
         $(call library,cu13,nvrtc))
EMUFLAGS = -x c++ -std=c++17 -O1 -march=native -fopenmp $(WARN) -I.

FOLDERS = . cli run report planner plan executor schedule checkpoint privacy text state model comm \
          ops ops/cpu ops/cuda base
HEADERS = $(wildcard $(FOLDERS:=/*.h))
CUDA_HEADERS = $(HEADERS) $(wildcard $(FOLDERS:=/*.cuh))
UNIT_TESTS = $(patsubst test/%.c,build/%,$(wildcard test/test_*.c))
# Longest to compile first, so that none is left alone at the end.
TEST_PROGRAMS = build/train_gpt_faulty_emu train_gpt_emu \
    build/train_gpt_faulty build/train_gpt_alone build/train_gpt_sanitized \
    build/train_gpt_planted build/planner_planted \
    build/test_ops_checked build/test_ops_emu build/test_gpt build/test_ops build/test_cyclic \
    build/bench_kernels_emu build/bench_attention_emu build/test_comm_nccl build/test_emu \
    build/test_emu_checks build/jumping_clock.so build/encode_text build/test_mpi_alone \
    $(UNIT_TESTS)

.PHONY: FORCE all cuda emu run data test test-all test-gpu lint format bench bench-ops bench-peers \
    bench-gpu sanitize install uninstall clean help
.DELETE_ON_ERROR:

all: train_gpt

# How a program is compiled, by kind. build/flags-KIND holds the line and is what its programs
# depend on: it is written when the line is another one than before, so `make cuda USE_CUDNN=1`
# after `make cuda` builds again.
# While it compiles a program, the compiler writes down which headers it includes (build/*.d): when
# one changes, what includes it is built again, and nothing else. For GPUs every header counts.
DEPENDS   = -MMD -MP -MF build/$(@F).d -MT $@
c         = $(CC) $(CFLAGS) $(WITHOUT_MPI) $(DEPENDS) $< -o $@ $(LIBS)
# without what a program need not have
alone     = cc $(CFLAGS) -DWITHOUT_MPI $(DEPENDS) $< -o $@ $(filter-out $(TEXT),$(LIBS))
# with the other library, so that both are tested
sanitized = $(CC) -std=gnu11 -O0 -g -march=native -fopenmp $(WARN) -fsanitize=address,undefined \
            -fno-sanitize-recover=all -I. $(WITHOUT_MPI) $(DEPENDS) $< -o $@ $(MATMUL_cblas) \
            $(TEXT) -lm
planted   = $(CC) -std=gnu11 -O0 -march=native -fopenmp -w -D_GNU_SOURCE -Ibuild/planted \
            -include test/emulated_tiles.h build/planted/train_gpt.c -o $@ $(LIBS)
shared    = $(CC) -O1 -shared -fPIC $(WARN) $< -o $@
emu       = OMPI_CXX=g++ mpicxx $(EMUFLAGS) $(DEPENDS) $< -o $@ $(TEXT)
checked   = $(emu_object) && \
            OMPI_CXX=g++ mpicxx -fopenmp build/checked_$(@F).o build/emu_checks.o -o $@ $(TEXT)
emu_object = OMPI_CXX=g++ mpicxx $(EMUFLAGS) -DEMU_CHECKED -fsanitize=thread -fno-tree-sra -g1 \
            $(filter -D%,$(TEXT)) $(DEPENDS) -c $< -o build/checked_$(@F).o
cuda      = $(NVCC) $(NVCCFLAGS) $< -o $@ $(CUDA_MPI) $(CUDNN) $(CUBLASLT) $(NCCL) $(TEXT) -lgomp
gpu       = $(NVCC) $(NVCCFLAGS) $< -o $@ $(CUBLASLT) -lgomp -lcmocka
gpu_production = $(NVCC) $(NVCCFLAGS) -DPRODUCTION $< -o $@ $(CUBLASLT) -lgomp -lcmocka
cudnn     = $(NVCC) $(NVCCFLAGS) -DWITHOUT_MPI $< -o $@ $(CUDNN) $(CUBLASLT) -lgomp
KINDS = alone arm64 c planted sanitized shared emu checked cuda gpu gpu_production cudnn
# What a kind that calls MPI's compiler says where there is none; the same of another compiler, and
# of the header of what multiplies matrices.
no_mpi = $(if $(shell command -v mpicc),,echo "mpicc is missing: scripts/setup.sh build installs" \
         "MPI; make MPI=0 builds for one rank, without MPI" >&2; exit 2;)
no_cc = $(if $(shell command -v $(1)),,echo "$(1) is missing: scripts/setup.sh \
        $(if $(WITHOUT_MPI),alone,build) installs a compiler" >&2; exit 2;)
HEADERS_onednn = dnnl.h
HEADERS_cblas  = cblas.h mkl_cblas.h
no_products = $(if $(strip $(foreach h,$(HEADERS_$(MATMUL)),$(call if_header,$(h),1))),,echo \
              "no $(firstword $(HEADERS_$(MATMUL))): scripts/setup.sh \
              $(if $(WITHOUT_MPI),alone,build) installs oneDNN or a BLAS, which multiply matrices" \
              >&2; exit 2;)
# What is said of libraries without which the program is slower, or takes only bytes as text.
OPTIONAL = $(strip $(if $(filter onednn command,$(MATMUL) $(word 1,$(origin MATMUL))),,oneDNN \
           (matrix products are slower)) $(if $(filter 1 command,$(PCRE2) \
           $(word 1,$(origin PCRE2))),,PCRE2 and utf8proc (--prompt takes only bytes)))
# The same, of USE_CUDNN=1 without cuDNN.
no_cudnn = $(if $(filter 1,$(USE_CUDNN)),$(if $(NO_CUDNN),echo "USE_CUDNN=1: no $(NO_CUDNN):" \
           "$(CUDNN_FROM) installs it" >&2; exit 2;))
$(KINDS:%=build/flags-%): build/flags-%: FORCE
	+@$(if $(filter mpicc mpicxx,$($*)),$(no_mpi)) \
	$(if $(filter c alone,$*),$(call no_cc,$(firstword $($*)))$(no_products)) \
	$(if $(filter cuda cudnn,$*),$(no_cudnn)) mkdir -p build; \
	line='$(subst ','\'',$($*))'; \
	[ "$$line" = "$$(cat $@ 2>/dev/null)" ] || printf '%s\n' "$$line" >$@
FORCE:
-include $(wildcard build/*.d)

# Read when a program is compiled; another commit alone compiles nothing again.
COMMIT = -DCOMMIT='"$(shell git describe --always --dirty 2>/dev/null)"'
train_gpt: train_gpt.c build/flags-c
	@echo "train_gpt: compiling takes about half a minute"
	@$(if $(OPTIONAL),echo "train_gpt: without $(OPTIONAL): scripts/setup.sh build installs it")
	$(c) $(COMMIT)

## cuda         the GPU build, train_gpt_cuda: needs nvcc, cuBLASLt and NCCL;
##              MPI=0, or without mpicc: for one rank; attention by cuDNN where it is found,
##              USE_CUDNN=0: by own kernels
cuda: train_gpt_cuda
train_gpt_cuda: train_gpt.cu train_gpt.c $(CUDA_HEADERS) build/flags-cuda
	@$(if $(WITHOUT_MPI)$(has_cc),,echo "mpicc is missing: train_gpt_cuda is built for one rank," \
	    "as with MPI=0")
	@echo "$@: $(if $(filter 1,$(WITH_CUDNN)),attention by cuDNN; make cuda USE_CUDNN=0 builds own \
	attention only,own attention only; $(if $(USE_CUDNN),make cuda builds it,$(CUDNN_FROM) \
	installs what) $(if $(USE_CUDNN),with cuDNN's,cuDNN's needs (no $(NO_CUDNN))))"
	$(cuda) $(COMMIT)
## emu          the GPU build's program, emulated on the processor for tests: train_gpt_emu
emu: train_gpt_emu
train_gpt_emu: train_gpt.cu build/flags-emu
	$(emu)

# For 64-bit ARM, with what scripts/setup.sh arm64 has fetched. MPI's own libraries are found when
# the program starts.
ARM64 = build/arm64/usr/lib/aarch64-linux-gnu
arm64 = aarch64-linux-gnu-gcc $(subst -march=native,,$(CFLAGS)) -isystem $(ARM64)/openmpi/include \
        -isystem build/arm64/usr/include/aarch64-linux-gnu/openblas-openmp $(DEPENDS) $< -o $@ \
        $(ARM64)/openblas-openmp/libblas.so.3 -L$(ARM64)/openmpi/lib -Wl,--allow-shlib-undefined \
        -lmpi -lm
build/train_gpt_arm64: train_gpt.c build/flags-arm64
	$(arm64)

## install      the program, its scripts and documents, a manual page and bash's completion, into
##              PREFIX (default: /usr/local); DESTDIR goes before it. `make uninstall` removes them
PREFIX = /usr/local
BIN    = $(DESTDIR)$(PREFIX)/bin
SHARE  = $(DESTDIR)$(PREFIX)/share/train_gpt
MANUAL = $(DESTDIR)$(PREFIX)/share/man/man1/train_gpt.1
COMPLETION = $(DESTDIR)$(PREFIX)/share/bash-completion/completions/train_gpt
TOOLS  = prepare_data.py data_files.py text_sources.py text_tokenizers.py encode_blocks.py \
         image_sources.py regular_files.py run_log.py plot.py watch.py report.py report.js \
         progress.py launch.sh sweep.sh sweep.py
install: train_gpt
	install -d $(BIN) $(SHARE)/scripts $(SHARE)/docs/results/logs
	install $(wildcard train_gpt train_gpt_cuda) $(BIN)
	install $(TOOLS:%=scripts/%) $(SHARE)/scripts
	install -m 644 README.md LICENSE $(SHARE)
	install -m 644 docs/*.md $(SHARE)/docs
	install -m 644 docs/results/*.md $(SHARE)/docs/results
	install -m 644 docs/results/logs/*.txt $(SHARE)/docs/results/logs
	install -d $(dir $(MANUAL) $(COMPLETION))
	./train_gpt --help man >$(MANUAL)
	./train_gpt --help completion >$(COMPLETION)
uninstall:
	rm -rf $(SHARE) $(BIN)/train_gpt $(BIN)/train_gpt_cuda $(MANUAL) $(COMPLETION)

## run          install what is missing, build, prepare the data, train for one to four minutes
run:
	@scripts/setup.sh $(if $(WITHOUT_MPI),alone,build)
# Python's packages are fetched while the compiler works.
	@scripts/setup.sh python & \
	$(MAKE) --no-print-directory train_gpt; status=$$?; wait; exit $$status
	@$(MAKE) --no-print-directory data
	@scripts/run_shakespeare.sh $(RUN)

## data         Shakespeare's works as byte tokens and as GPT-2 tokens, in data/
data:
	@$(PYTHON) scripts/prepare_data.py --tokenizer bytes --out data --name text_bytes
	@$(PYTHON) scripts/prepare_data.py --tokenizer gpt2 --out data --name text_gpt2

## test         install what is missing, lint, build, run the tests: of the exhaustive ones a sample
test test-all:
	@$(if $(WITHOUT_MPI),echo "make $@ needs MPI; it also tests the build without MPI" >&2; exit 2)
	@scripts/setup.sh test
	@scripts/setup.sh python
	@scripts/setup.sh data
	@$(MAKE) --no-print-directory -j $$(nproc) train_gpt lint $(TEST_PROGRAMS) \
	    $(if $(filter test-all,$@),build/train_gpt_checked)
	@python3 test/run.py $(if $(filter test-all,$@),--all)
## test-all     all of the tests

## test-gpu     on a machine with a GPU: the operations' cases, golden numbers, 1, 2 and 4 ranks on
##              one GPU, resume
test-gpu:
	@if nvidia-smi -L 2>&1 | grep -q '^GPU'; then \
	    $(MAKE) --no-print-directory cuda build/gpu_test_ops && $(PYTHON) test/test_gpu_device.py; \
	else echo "test-gpu: skipped, no GPU is at hand (nvidia-smi -L lists none)"; fi

# private: the flags' file is everybody's.
build/test_noise: private LIBS += $(SODIUM)
# These compute little, and compile in less than half of the time.
QUICK = checkpoint comm comm_store cyclic dataloader gpt mpi mpi_alone offload options pipeline \
        report schedule
$(QUICK:%=build/test_%): private FAST = -O1 -march=native
# These compute the program's bits, in half of the time that it takes to compile, but of Qwen3's and
# nano's norms of heads, where -O3 fuses other multiplications with additions. Without the second
# flag -O1 fuses none.
SAME_BITS = build/train_gpt_alone build/train_gpt_faulty
$(SAME_BITS): private FAST = -O1 -fexpensive-optimizations -march=native -fno-math-errno \
                             -fno-trapping-math
build/test_comm: test/test_comm.c build/flags-c
	$(c)
build/test_mpi_alone: test/test_mpi.c build/flags-alone
	$(alone) -lcmocka
build/test_%: test/test_%.c build/flags-c
	$(c) -lcmocka
build/test_ops_emu: test/test_ops.cu build/flags-emu
	$(emu) -lcmocka
# The shorter stem counts: build/gpu_production_test_ops is a program of the production workspace.
build/gpu_production_%: test/%.cu test/test_ops.c $(CUDA_HEADERS) build/flags-gpu_production
	$(gpu_production)
build/gpu_%: test/%.cu test/test_ops.c $(CUDA_HEADERS) build/flags-gpu
	$(gpu)
# Own attention beside cuDNN's, where it is found.
build/gpu_bench_attention: test/bench_attention.cu $(CUDA_HEADERS) build/flags-cudnn
	$(cudnn)
build/bench_%_emu: test/bench_%.cu build/flags-emu
	$(emu)
# With test/cudnn_frontend.h in place of cuDNN's, as has train_gpt_faulty_emu.
build/bench_attention_emu: private EMUFLAGS += -DUSE_CUDNN -Itest
build/test_comm_nccl: test/test_comm_nccl.cu build/flags-emu
	$(emu)
build/test_emu: test/test_emu.cu build/flags-emu
	$(emu) -lcmocka
# The same with each access of a kernel checked: the compiler calls the functions of emu_checks.cc,
# which take the place of the sanitizer's.
build/emu_checks.o: test/emu_checks.cc test/emu_checks.h test/emu_symbols.h
	@mkdir -p build
	g++ -std=c++17 -O2 -g1 $(WARN) -I. -c $< -o $@
build/emu_names.h: ops/ops.h
	@mkdir -p build
	sed -n '/^\/\/ --- embedding/,$$s/^static [a-z0-9_]* \(ops_[a-z_]*\)(Stream \*s, .*/\1/p' \
	    ops/ops.h | grep -v _host | \
	sed 's/.*/#define &(s, ...) (emu_operation(s), &(s, __VA_ARGS__))/' > $@
build/test_ops_checked: test/test_ops.cu build/emu_checks.o build/emu_names.h build/flags-checked
	$(checked) -lcmocka
build/test_emu_checks: test/test_emu_checks.cu build/emu_checks.o build/flags-checked
	$(checked) -lcmocka
build/train_gpt_checked: test/train_gpt_checked.cu build/emu_checks.o build/emu_names.h \
                         build/flags-checked
	$(checked)
build/bench_%: test/bench_%.c build/flags-c
	$(c)
# The program without MPI, for test_alone.py.
build/train_gpt_alone: train_gpt.c build/flags-alone
	$(alone)
# The same with the sanitizers, for the tests of bad input: they compute little, and -O1 takes four
# times as long to compile.
build/train_gpt_sanitized: train_gpt.c build/flags-sanitized
	$(sanitized)
sanitize: build/train_gpt_sanitized
# With the sanitizers, too: test_encode.py gives it damaged tokenizers.
build/encode_text: test/encode_text.c build/flags-sanitized
	$(sanitized)
# With faults in it, and with memory that an action does not touch made NaN.
build/train_gpt_faulty: test/train_gpt_faulty.c build/flags-c
	$(c)
# With the faults that tests must see, each switched on by the environment.
build/train_gpt_planted: train_gpt.c $(HEADERS) test/planted_faults.py test/emulated_tiles.h \
                         build/flags-planted
	rm -rf build/planted
	python3 test/planted_faults.py build/planted
	$(planted)
# The planner's tests with the same faults in what they test.
build/planner_planted: test/test_planner.c build/train_gpt_planted
	$(subst build/planted/train_gpt.c,-I. $<,$(planted)) -lcmocka
build/train_gpt_faulty_emu: private EMUFLAGS += -O0 -DUSE_CUDNN -Itest
build/train_gpt_faulty_emu: test/train_gpt_faulty.c build/flags-emu
	$(emu)
build/jumping_clock.so: test/jumping_clock.c build/flags-shared
	$(shared)

## lint         formatting and static analysis; part of `make test`
lint:
	@scripts/lint.sh
## format       rewrites the sources as .clang-format says
format:
	clang-format -i *.c *.cu $(CUDA_HEADERS) test/*.[ch] test/*.cu

## bench        speed of a training step against the peak of this machine's cores, GPT-2 124M
bench: train_gpt build/bench_ops
	@python3 scripts/bench.py
bench-ops: build/bench_ops
	@build/bench_ops
## bench-peers  the same shapes against current PyTorch, in a virtual environment that it makes
bench-peers: train_gpt
	@scripts/bench_peers.sh
## bench-gpu    on a machine with a GPU: GPT-2 124M, 774M, 1558M and Llama 1B in bf16, tokens/s,
##              MFU, each operation; against PyTorch where it is installed; own attention against
##              cuDNN's where the build has it
TIMED = build/gpu_bench_kernels build/gpu_bench_attention
bench-gpu:
	@if nvidia-smi -L 2>&1 | grep -q '^GPU'; then \
	    $(MAKE) --no-print-directory cuda $(TIMED) && \
	    { $(PYTHON) scripts/gpu_ten.py run --only machine,ceilings,kernels,124M,1558M,others \
	          --out build/bench_gpu; \
	      $(PYTHON) scripts/gpu_ten.py table build/bench_gpu --page -; }; \
	else echo "bench-gpu: skipped, no GPU is at hand (nvidia-smi -L lists none)"; fi

## clean        removes what was built
clean:
	rm -rf build train_gpt train_gpt_emu train_gpt_cuda

help:
	@grep -h '^## ' $(MAKEFILE_LIST) | cut -c4-
