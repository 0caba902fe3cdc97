/* The peer of `consort bench launch --mpirun`: a program that starts MPI and ends it.
 *
 *   mpicc -O3 benches/peer_start.c -o target/peer_start
 *   consort bench launch --mpirun 'mpirun -n {ranks}' --peer 'mpirun -n {ranks} target/peer_start' */
#include <mpi.h>

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Finalize();
    return 0;
}
