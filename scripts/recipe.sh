# shellcheck shell=bash
# recipe.sh: what the training recipes (recipes/*.sh and run_shakespeare.sh) share; they read it.
#
#   recipe RANKS PROGRAM [FLAG ...]     trains; of a flag that is given several times the last
#                                       value counts
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
recipe() {
    if ! without_mpi "$2"; then
        mpirun --oversubscribe -np "$@"
    elif [ "$1" = 1 ]; then
        "${@:2}"
    else
        echo "recipe: $2 was built for one rank (make MPI=0), and this recipe is for $1;" \
            "RANKS=1 starts one" >&2
        return 2
    fi
}
# Whether the program was built without MPI, for one rank.
without_mpi() { [[ $("$1" --version 2>&1) = *"without MPI"* ]]; }
