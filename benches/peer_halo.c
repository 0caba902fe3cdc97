/* The peer of the halo cases of `consort bench programs`, with MPI: the same grid, steps and rows on live data.
 *
 *   mpicc -O3 -march=native benches/peer_halo.c -o target/peer_halo
 *   consort bench programs --cases halo --peer 'halo=mpirun --bind-to core -n 2 target/peer_halo'
 *
 * Prints one JSON object a line: medians in milliseconds, of the slowest rank. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { WIDTH = 2048, STEPS = 200, RUNS = 15, EXCHANGES = 500 };
#define WORLD MPI_COMM_WORLD

static int rank, size, height;
static float *old_grid, *new_grid;
static volatile float seen;

static float *row(float *grid, int at) { return grid + (size_t)at * (WIDTH + 2); }

static int start_exchange(float *grid, MPI_Request *requests) {
    int n = 0;
    for (int side = 0; side < 2; side++) {
        int other = side ? rank + 1 : rank - 1;
        if (other < 0 || other >= size) continue;
        MPI_Irecv(row(grid, side ? height + 1 : 0) + 1, WIDTH, MPI_FLOAT, other, 0, WORLD, &requests[n++]);
        MPI_Isend(row(grid, side ? height : 1) + 1, WIDTH, MPI_FLOAT, other, 0, WORLD, &requests[n++]);
    }
    return n;
}

/* Writes the rows that are sent, and reads those that come. */
static void exchange_rows(int with_messages) {
    MPI_Request requests[4];
    for (int side = 0; side < 2; side++) {
        float *sent = row(old_grid, side ? height : 1);
        for (int i = 0; i < WIDTH + 2; i++) sent[i] *= 0.999f;
    }
    if (with_messages) MPI_Waitall(start_exchange(old_grid, requests), requests, MPI_STATUSES_IGNORE);
    float sum = 0;
    for (int side = 0; side < 2; side++) {
        float *came = row(old_grid, side ? height + 1 : 0), lanes[16] = {0};
        for (int i = 0; i < WIDTH; i += 16)
            for (int lane = 0; lane < 16; lane++) lanes[lane] += came[i + lane];
        for (int lane = 0; lane < 16; lane++) sum += lanes[lane];
    }
    seen = sum;
}

static void update(int from, int to) {
    for (int i = from; i < to; i++) {
        const float *above = row(old_grid, i - 1), *at = row(old_grid, i), *below = row(old_grid, i + 1);
        float *restrict next = row(new_grid, i);
        for (int j = 1; j <= WIDTH; j++) next[j] = 0.25f * ((above[j] + below[j]) + (at[j - 1] + at[j + 1]));
    }
}

static void jacobi(void) {
    for (int step = 0; step < STEPS; step++) {
        MPI_Request requests[4];
        int n = start_exchange(old_grid, requests);
        update(2, height);
        MPI_Waitall(n, requests, MPI_STATUSES_IGNORE);
        update(1, 2);
        update(height, height + 1);
        float *swap = old_grid;
        old_grid = new_grid, new_grid = swap;
    }
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(WORLD, &rank);
    MPI_Comm_size(WORLD, &size);
    height = 2048 / size;
    size_t floats = (size_t)(height + 2) * (WIDTH + 2);
    old_grid = malloc(floats * sizeof(float)), new_grid = malloc(floats * sizeof(float));
    if (!old_grid || !new_grid) MPI_Abort(WORLD, 1);
    for (size_t i = 0; i < floats; i++) old_grid[i] = new_grid[i] = (float)(i % 31) / 31;
    const char *const cases[] = {"halo_exchange", "halo_exchange", "halo_jacobi"};
    const char *const modes[] = {"open_mpi", "open_mpi_no_exchange", "open_mpi"};
    for (int which = 0; which < 3; which++) {
        double took[RUNS];
        int times = which < 2 ? EXCHANGES : 1;
        for (int run = 0; run < RUNS; run++) {
            MPI_Barrier(WORLD);
            double start = MPI_Wtime();
            for (int i = 0; i < times; i++) which < 2 ? exchange_rows(which == 0) : jacobi();
            double own = (MPI_Wtime() - start) * 1e3 / times;
            MPI_Allreduce(&own, &took[run], 1, MPI_DOUBLE, MPI_MAX, WORLD);
        }
        qsort(took, RUNS, sizeof *took, by_size);
        if (rank == 0)
            printf("{\"case\": \"%s\", \"mode\": \"%s\", \"ranks\": %d, \"ms\": %.6f, \"samples\": %d}\n", cases[which],
                   modes[which], size, took[RUNS / 2], RUNS);
    }
    MPI_Finalize();
}
