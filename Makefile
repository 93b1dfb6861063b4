# train_gpt: everything a user types is a target here; `make help` lists them.
#
#   CC       the MPI compiler          BLAS     openblas (default), blis or mkl: any library with a CBLAS interface
#   RUN      flags added to the default training run, e.g. make run RUN='--steps 100'
CC     = mpicc
BLAS   = openblas
PYTHON = $(shell test -x .venv/bin/python && echo .venv/bin/python || echo python3)

WARN   = -D_GNU_SOURCE -Wall -Wextra -Werror -Wno-format-truncation
FAST   = -O3 -march=native -fno-math-errno -fno-trapping-math
CFLAGS = -std=gnu11 $(FAST) -fopenmp $(WARN) -I.
BLAS_openblas = -lopenblas
BLAS_blis     = -lblis
BLAS_mkl      = -lmkl_rt
LIBS   = $(BLAS_$(BLAS)) -lm
SODIUM = $(shell echo '\#include <sodium.h>' | $(CC) -E - >/dev/null 2>&1 && echo -DUSE_SODIUM -lsodium)

# The GPU build: GPUS are the architectures it has code for; the newest that the toolkit knows serves those to come.
#   NVCC     CUDA's compiler; where none is installed, that of scripts/setup.sh cuda
#   TF32=1   products of fp32 matrices may round their operands to TF32
#   USE_CUDNN=1   attention by cuDNN's kernels where they take a shape; scripts/setup.sh cudnn installs what it needs beside cuDNN
WHEELS = $(firstword $(wildcard $(CURDIR)/.venv/lib/python3*/site-packages/nvidia))
NVCC   = $(if $(shell command -v nvcc),nvcc,$(WHEELS)/cu13/bin/nvcc)
library  = $(if $(shell command -v nvcc),-l$(2),-Xlinker -rpath=$(WHEELS)/$(1)/lib -Xlinker $(wildcard $(WHEELS)/$(1)/lib/lib$(2).so.*))
CUBLASLT = $(call library,cu13,cublasLt)
NCCL     = $(call library,nccl,nccl) $(if $(shell command -v nvcc),,-isystem $(WHEELS)/nccl/include)
NEWEST = $(shell $(NVCC) --list-gpu-arch | sort -V | tail -n 1 | tr -dc 0-9)
GPUS   = $(foreach a,80 90 $(NEWEST),-gencode arch=compute_$(a),code=sm_$(a)) -gencode arch=compute_$(NEWEST),code=compute_$(NEWEST)
NVCCFLAGS = -std=c++17 -O3 --threads 0 $(GPUS) -Werror all-warnings -D_GNU_SOURCE -Xcompiler -Wall,-Wextra,-Werror,-Wno-format-truncation,-Wno-parentheses,-fopenmp -I. $(if $(TF32),-DUSE_TF32)
MPI    = $(foreach d,$(shell $(CC) --showme:incdirs),-isystem $(d)) $(foreach d,$(shell $(CC) --showme:libdirs),-L$(d)) -lmpi
CUDNN  = -DUSE_CUDNN $(patsubst %,-isystem %,$(wildcard .venv/lib/python3*/site-packages/include)) -lcudnn -lnvrtc
EMUFLAGS = -x c++ -std=c++17 -O1 -march=native -fopenmp $(WARN) -I.

FOLDERS = . engine plan store kernels support
HEADERS = $(wildcard $(FOLDERS:=/*.h))
CUDA_HEADERS = $(HEADERS) $(wildcard $(FOLDERS:=/*.cuh))
EMU_HEADERS = $(CUDA_HEADERS) $(wildcard test/emu*.h)
TEST_PROGRAMS = build/train_gpt_cpp build/train_gpt_sanitized build/train_gpt_faulty build/train_gpt_faulty_emu build/jumping_clock.so build/test_comm $(UNIT_TESTS) train_gpt_emu build/test_ops_emu build/test_ops_checked build/test_emu build/test_emu_checks build/train_gpt_checked build/test_comm_nccl build/bench_attention_emu
UNIT_TESTS = $(patsubst test/%.c,build/%,$(filter-out test/test_comm.c,$(wildcard test/test_*.c)))

.PHONY: all cuda emu run data test test-all test-gpu lint format bench bench-ops bench-peers bench-gpu sanitize clean help
.DELETE_ON_ERROR:

all: train_gpt

train_gpt: train_gpt.c $(HEADERS)
	$(CC) $(CFLAGS) $< -o $@ $(LIBS)

## cuda         the GPU build, train_gpt_cuda: needs nvcc, cuBLASLt and NCCL; USE_CUDNN=1: attention by cuDNN
cuda: train_gpt_cuda
train_gpt_cuda: train_gpt.cu train_gpt.c $(CUDA_HEADERS)
	$(NVCC) $(NVCCFLAGS) $< -o $@ $(MPI) $(if $(filter 1,$(USE_CUDNN)),$(CUDNN)) $(CUBLASLT) $(NCCL) -lgomp
## emu          the GPU build's program, emulated on the processor for tests: train_gpt_emu
emu: train_gpt_emu
train_gpt_emu: train_gpt.cu train_gpt.c $(EMU_HEADERS)
	OMPI_CXX=g++ mpicxx $(EMUFLAGS) $< -o $@

## run          install what is missing, build, prepare the data, train for about three minutes
run:
	@scripts/setup.sh build
	@scripts/setup.sh python
	@$(MAKE) --no-print-directory train_gpt data
	@scripts/run_shakespeare.sh $(RUN)

## data         Shakespeare's works as byte tokens and as GPT-2 tokens, in data/
data:
	@$(PYTHON) scripts/prepare_data.py --tokenizer bytes --out data --name text_bytes
	@$(PYTHON) scripts/prepare_data.py --tokenizer gpt2 --out data --name text_gpt2

## test         install what is missing, lint, build, run the tests (a sample of the exhaustive ones)
test test-all:
	@scripts/setup.sh test
	@scripts/setup.sh python
	@$(MAKE) --no-print-directory -j $$(nproc) lint train_gpt $(TEST_PROGRAMS)
	@python3 test/run.py $(if $(filter test-all,$@),--all)
## test-all     all of the tests

## test-gpu     on a machine with a GPU: the operations' cases, golden numbers, 1, 2 and 4 ranks on one GPU, resume
test-gpu:
	@if nvidia-smi -L 2>&1 | grep -q '^GPU'; then $(MAKE) --no-print-directory cuda build/gpu_test_ops && $(PYTHON) test/test_gpu_device.py; \
	else echo "test-gpu: skipped, no GPU is at hand (nvidia-smi -L lists none)"; fi

build/test_comm: test/test_comm.c test/counts.h $(HEADERS)
	@mkdir -p build
	$(CC) $(CFLAGS) $< -o $@ $(LIBS)
build/test_noise: LIBS += $(SODIUM)
# These compute little, and compile in less than half of the time.
$(patsubst %,build/test_%,checkpoint comm comm_store dataloader offload options pipeline privacy report schedule): FAST = -O1 -march=native
build/test_%: test/test_%.c test/child.h test/counts.h test/policies.h $(HEADERS)
	@mkdir -p build
	$(CC) $(CFLAGS) $< -o $@ $(LIBS) -lcmocka
build/test_ops_emu: test/test_ops.cu test/test_ops.c $(EMU_HEADERS)
	@mkdir -p build
	g++ $(EMUFLAGS) $< -o $@ -lcmocka
build/gpu_%: test/%.cu test/test_ops.c $(CUDA_HEADERS)
	@mkdir -p build
	$(NVCC) $(NVCCFLAGS) $< -o $@ $(CUBLASLT) -lgomp -lcmocka
build/cudnn_%: test/%.cu $(CUDA_HEADERS)
	@mkdir -p build
	$(NVCC) $(NVCCFLAGS) $< -o $@ $(CUDNN) $(CUBLASLT) -lgomp
build/bench_attention_emu: test/bench_attention.cu $(EMU_HEADERS)
	@mkdir -p build
	g++ $(EMUFLAGS) $< -o $@
build/test_comm_nccl: test/test_comm_nccl.cu $(EMU_HEADERS)
	@mkdir -p build
	OMPI_CXX=g++ mpicxx $(EMUFLAGS) $< -o $@
build/test_emu: test/test_emu.cu test/child.h test/emu.h test/emu_checks.h test/emu_symbols.h support/base.h
	@mkdir -p build
	g++ $(EMUFLAGS) $< -o $@ -lcmocka
# The same with each access of a kernel checked: the compiler calls the functions of emu_checks.cc, which take the place of the sanitizer's.
CHECKED = -DEMU_CHECKED -fsanitize=thread -fno-tree-sra -g1
build/emu_checks.o: test/emu_checks.cc test/emu_checks.h test/emu_symbols.h
	@mkdir -p build
	g++ -std=c++17 -O2 -g1 $(WARN) -I. -c $< -o $@
build/emu_names.h: ops.h
	@mkdir -p build
	sed -n '/^\/\/ --- embedding/,$$s/^static [a-z0-9_]* \(ops_[a-z_]*\)(Stream \*s, .*/\1/p' ops.h | grep -v _host | \
	sed 's/.*/#define &(s, ...) (emu_operation(s), &(s, __VA_ARGS__))/' > $@
build/test_ops_checked: test/test_ops.cu test/test_ops.c build/emu_checks.o build/emu_names.h $(EMU_HEADERS)
	g++ $(EMUFLAGS) $(CHECKED) -c $< -o build/checked_$(@F).o
	g++ -fopenmp build/checked_$(@F).o build/emu_checks.o -o $@ -lcmocka
build/test_emu_checks: test/test_emu_checks.cu test/child.h build/emu_checks.o $(EMU_HEADERS)
	g++ $(EMUFLAGS) $(CHECKED) -c $< -o build/checked_$(@F).o
	g++ -fopenmp build/checked_$(@F).o build/emu_checks.o -o $@ -lcmocka
build/train_gpt_checked: test/train_gpt_checked.cu train_gpt.cu train_gpt.c build/emu_checks.o build/emu_names.h $(EMU_HEADERS)
	OMPI_CXX=g++ mpicxx $(EMUFLAGS) $(CHECKED) -c $< -o build/checked_$(@F).o
	OMPI_CXX=g++ mpicxx -fopenmp build/checked_$(@F).o build/emu_checks.o -o $@
build/bench_%: test/bench_%.c $(HEADERS)
	@mkdir -p build
	$(CC) $(CFLAGS) $< -o $@ $(LIBS)
# The same program as C++17, as the GPU build compiles it; and with the sanitizers, for the tests of bad input: they compute little, and -O1
# takes four times as long to compile.
build/train_gpt_cpp: train_gpt.c $(HEADERS)
	@mkdir -p build
	OMPI_CXX=g++ mpicxx -x c++ -std=c++17 -O1 -march=native -fopenmp $(WARN) -I. $< -o $@ $(LIBS)
build/train_gpt_sanitized: train_gpt.c $(HEADERS)
	@mkdir -p build
	$(CC) -std=gnu11 -O0 -g -march=native -fopenmp $(WARN) -fsanitize=address,undefined -fno-sanitize-recover=all -I. $< -o $@ $(LIBS)
sanitize: build/train_gpt_sanitized
# With faults in it, and with clocks that jump, for test_faults.py.
build/train_gpt_faulty: test/train_gpt_faulty.c train_gpt.c $(HEADERS)
	@mkdir -p build
	$(CC) $(CFLAGS) $< -o $@ $(LIBS)
build/train_gpt_faulty_emu: test/train_gpt_faulty.c train_gpt.cu train_gpt.c $(EMU_HEADERS)
	@mkdir -p build
	OMPI_CXX=g++ mpicxx $(EMUFLAGS) $< -o $@
build/jumping_clock.so: test/jumping_clock.c
	@mkdir -p build
	$(CC) -O1 -shared -fPIC $(WARN) $< -o $@

## lint         formatting and static analysis; part of `make test`
lint:
	@scripts/lint.sh
## format       rewrites the sources as .clang-format says
format:
	clang-format -i *.c *.cu $(CUDA_HEADERS) test/*.[ch] test/*.cu

## bench        speed of a training step against this machine's BLAS, on GPT-2 124M shapes
bench: train_gpt build/bench_ops
	@python3 scripts/bench.py
bench-ops: build/bench_ops
	@build/bench_ops
## bench-peers  the same shapes against current PyTorch, in a virtual environment that it makes
bench-peers: train_gpt
	@scripts/bench_peers.sh
## bench-gpu    on a machine with a GPU: GPT-2 124M and 1558M in bf16, tokens/s, MFU, memory; against PyTorch where it is installed;
##              own attention against cuDNN's after scripts/setup.sh cudnn
ATTENTIONS = $(if $(wildcard .venv/lib/python3*/site-packages/include/cudnn_frontend.h),build/cudnn_bench_attention) build/gpu_bench_attention
bench-gpu:
	@if nvidia-smi -L 2>&1 | grep -q '^GPU'; then $(MAKE) --no-print-directory cuda $(ATTENTIONS) && $(PYTHON) scripts/bench_gpu.py $(ATTENTIONS:%=--attention %); \
	else echo "bench-gpu: skipped, no GPU is at hand (nvidia-smi -L lists none)"; fi

## clean        removes what was built
clean:
	rm -rf build train_gpt train_gpt_emu train_gpt_cuda

help:
	@grep -h '^## ' $(MAKEFILE_LIST) | cut -c4-
