// mpi.h: which MPI the program calls: the installed library, or for a build of one rank
// (make MPI=0 defines WITHOUT_MPI) the stand-in of mpi_alone.h. The choice is made here alone.
#ifndef COMM_MPI_H
#define COMM_MPI_H

#ifdef WITHOUT_MPI
#include "comm/mpi_alone.h" // IWYU pragma: export
enum { HAS_MPI = 0 };
#define MPIRUN ""
#define ONE_RANK_HINT "; this program was built for one rank, without MPI (make MPI=0)"
#else
#define OMPI_SKIP_MPICXX 1 // the C interface only
#include <mpi.h>           // point-to-point messages
enum { HAS_MPI = 1 };
#define MPIRUN "mpirun -np RANKS "
#define ONE_RANK_HINT ""
#endif
// The hint of a message about the number of ranks: where there is one, more may be impossible.
#define HINT_ON_RANKS(ranks, hint) ((ranks) == 1 ? hint ONE_RANK_HINT : hint)

#endif
