# shellcheck shell=bash
# recipe.sh: what the training recipes (recipes/*.sh and run_shakespeare.sh) share; they read it.
#
#   recipe RANKS PROGRAM [FLAG ...]     trains; of a flag that is given several times the last
#                                       value counts
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
recipe() { mpirun --oversubscribe -np "$@"; }
