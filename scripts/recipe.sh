# shellcheck shell=bash
# recipe.sh: what the training recipes (run_*.sh) share; they read it.
#
#   recipe RANKS PROGRAM FLAG VALUE ... -- [FLAG [VALUE] ...]     trains; a flag behind -- takes the place of one before
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
recipe() {
    local ranks=$1 program=$2 flags=() kept=()
    shift 2
    while [ "$1" != -- ]; do flags+=("$1") && shift; done
    shift
    for ((i = 0; i < ${#flags[@]}; i += 2)); do
        case " $* " in *" ${flags[i]} "*) ;; *) kept+=("${flags[i]}" "${flags[i + 1]}") ;; esac
    done
    mpirun --oversubscribe -np "$ranks" "$program" "${kept[@]}" "$@"
}
