/* The peer of `consort bench comm`: the same operations on live data, with MPI.
 *
 *   mpicc -O3 -march=native benches/peer_mpi.c -o target/peer_mpi
 *   consort bench comm --peer 'mpirun --bind-to core -n {ranks} target/peer_mpi'
 *   consort bench comm --transport mpi --mpirun 'mpirun --bind-to core -n {ranks}' \
 *       --peer 'mpirun --bind-to core -n {ranks} target/peer_mpi'
 *
 * Each rank connects to the abstract socket that its last argument names, says `RANK SIZE`, and obeys lines
 * `KIND OP BYTES ITERATIONS`: `prepare` takes buffers and checks the operation in both its forms, `op`, `nonblocking` and
 * `base` time a loop that writes the whole input and reads the whole result: with the blocking call, with the nonblocking
 * one, which is tested until it is over, and with neither. An answer is `NANOSECONDS CPU_NANOSECONDS`, or `error` and why.
 * It ends with the connection. */
#define _GNU_SOURCE
#include <mpi.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define WORLD MPI_COMM_WORLD
#define FLOATS(count) (int)(count), MPI_FLOAT

enum op { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, REDUCE_SCATTER_V, ALL_TO_ALL, BROADCAST, PINGPONG, RING, OPS };
static const char *const names[OPS] = {"all_reduce", "all_gather", "reduce_scatter", "reduce_scatter_v",
                                       "all_to_all", "broadcast", "pingpong", "ring"};

static int rank, size;
static float *operand, *result;
static size_t block; /* floats */
static size_t operand_floats, result_floats;
static int *counts;

static int in_place(enum op op) { return op == ALL_REDUCE || op == BROADCAST; }

enum form { BASE, BLOCKING, NONBLOCKING };

static void blocking(enum op op, long iteration) {
    int next = (rank + 1) % size, before = (rank + size - 1) % size;
    switch (op) {
    case ALL_REDUCE:
        MPI_Allreduce(MPI_IN_PLACE, operand, FLOATS(block), MPI_SUM, WORLD);
        break;
    case ALL_GATHER:
        MPI_Allgather(operand, FLOATS(block), result, FLOATS(block), WORLD);
        break;
    case REDUCE_SCATTER:
        MPI_Reduce_scatter_block(operand, result, FLOATS(block), MPI_SUM, WORLD);
        break;
    case REDUCE_SCATTER_V:
        MPI_Reduce_scatter(operand, result, counts, MPI_FLOAT, MPI_SUM, WORLD);
        break;
    case ALL_TO_ALL:
        MPI_Alltoall(operand, FLOATS(block), result, FLOATS(block), WORLD);
        break;
    case BROADCAST:
        MPI_Bcast(operand, FLOATS(block), (int)(iteration % size), WORLD);
        break;
    case PINGPONG:
        if (rank == 0) {
            MPI_Send(operand, FLOATS(block), 1, 0, WORLD);
            MPI_Recv(result, FLOATS(block), 1, 0, WORLD, MPI_STATUS_IGNORE);
        } else if (rank == 1) {
            MPI_Recv(result, FLOATS(block), 0, 0, WORLD, MPI_STATUS_IGNORE);
            MPI_Send(operand, FLOATS(block), 0, 0, WORLD);
        }
        break;
    default:
        MPI_Sendrecv(operand, FLOATS(block), next, 0, result, FLOATS(block), before, 0, WORLD, MPI_STATUS_IGNORE);
    }
}

static void test(MPI_Request *request) {
    int over = 0;
    while (!over) MPI_Test(request, &over, MPI_STATUS_IGNORE);
}

static void nonblocking(enum op op, long iteration) {
    int next = (rank + 1) % size, before = (rank + size - 1) % size;
    MPI_Request requests[2];
    switch (op) {
    case ALL_REDUCE:
        MPI_Iallreduce(MPI_IN_PLACE, operand, FLOATS(block), MPI_SUM, WORLD, requests);
        break;
    case ALL_GATHER:
        MPI_Iallgather(operand, FLOATS(block), result, FLOATS(block), WORLD, requests);
        break;
    case REDUCE_SCATTER:
        MPI_Ireduce_scatter_block(operand, result, FLOATS(block), MPI_SUM, WORLD, requests);
        break;
    case REDUCE_SCATTER_V:
        MPI_Ireduce_scatter(operand, result, counts, MPI_FLOAT, MPI_SUM, WORLD, requests);
        break;
    case ALL_TO_ALL:
        MPI_Ialltoall(operand, FLOATS(block), result, FLOATS(block), WORLD, requests);
        break;
    case BROADCAST:
        MPI_Ibcast(operand, FLOATS(block), (int)(iteration % size), WORLD, requests);
        break;
    case PINGPONG:
        if (rank > 1) return;
        MPI_Irecv(result, FLOATS(block), 1 - rank, 0, WORLD, requests);
        if (rank == 1) test(requests);
        MPI_Isend(operand, FLOATS(block), 1 - rank, 0, WORLD, requests + 1);
        test(requests + 1);
        if (rank == 1) return;
        break;
    default:
        MPI_Irecv(result, FLOATS(block), before, 0, WORLD, requests);
        MPI_Isend(operand, FLOATS(block), next, 0, WORLD, requests + 1);
        test(requests + 1);
    }
    test(requests);
}

static void once(enum op op, enum form form, long iteration) {
    if (form == BLOCKING) blocking(op, iteration);
    if (form == NONBLOCKING) nonblocking(op, iteration);
}

/* What rank r brings r + 1 to leaves in a block of the result. */
static float expected(enum op op, size_t at) {
    switch (op) {
    case ALL_GATHER:
    case ALL_TO_ALL:
        return (float)(at / block + 1);
    case BROADCAST:
        return 1;
    case PINGPONG:
        return rank == 0 ? 2 : 1;
    case RING:
        return (float)((rank + size - 1) % size + 1);
    default:
        return (float)(size * (size + 1) / 2);
    }
}

/* Keeps the compiler from knowing what memory holds. */
static void forget(void *memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

static void write_operand(long iteration) {
    float values[8];
    for (int i = 0; i < 8; i++) values[i] = (float)(i + iteration % 4);
    size_t i = 0;
    for (; i + 8 <= operand_floats; i += 8) memcpy(operand + i, values, sizeof values);
    for (; i < operand_floats; i++) operand[i] = values[i % 8];
    forget(operand);
}

static void read_result(const float *from) {
    float sums[8] = {0};
    size_t i = 0;
    for (; i + 8 <= result_floats; i += 8)
        for (int k = 0; k < 8; k++) sums[k] += from[i + k];
    for (; i < result_floats; i++) sums[0] += from[i];
    forget(sums);
}

static long nanoseconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

static const char *prepare(enum op op, size_t bytes) {
    free(operand);
    free(result);
    block = bytes / sizeof(float);
    operand_floats = block * (op == REDUCE_SCATTER || op == REDUCE_SCATTER_V || op == ALL_TO_ALL ? size : 1);
    result_floats = block * (op == ALL_GATHER || op == ALL_TO_ALL ? size : 1);
    if (posix_memalign((void **)&operand, 4096, operand_floats * sizeof(float)) != 0) operand = NULL;
    if (posix_memalign((void **)&result, 4096, result_floats * sizeof(float)) != 0) result = NULL;
    if (!operand || !result) return "out of memory";
    for (int i = 0; i < size; i++) counts[i] = (int)block;
    const float *got = in_place(op) ? operand : result;
    for (enum form form = BLOCKING; form <= NONBLOCKING; form++) {
        for (size_t i = 0; i < operand_floats; i++) operand[i] = (float)(rank + 1);
        for (size_t i = 0; i < result_floats; i++) result[i] = 0;
        once(op, form, 0);
        for (size_t i = 0; i < result_floats && !(op == PINGPONG && rank > 1); i++)
            if (got[i] != expected(op, i)) return "the result is wrong";
    }
    return NULL;
}

static void iterate(enum op op, enum form form, long iterations) {
    const float *arrived = in_place(op) ? operand : result;
    for (long i = 0; i < iterations; i++) {
        write_operand(i);
        once(op, form, i);
        read_result(arrived);
    }
}

static void run(enum op op, enum form form, long iterations, long *spent, long *cpu) {
    /* The first time finds lines where other work has left them, so it does not count. */
    iterate(op, form, 1);
    for (int i = 0; i < 3; i++) MPI_Barrier(WORLD);
    *cpu = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    *spent = nanoseconds(CLOCK_MONOTONIC);
    iterate(op, form, iterations);
    *spent = nanoseconds(CLOCK_MONOTONIC) - *spent;
    *cpu = nanoseconds(CLOCK_THREAD_CPUTIME_ID) - *cpu;
}

static enum form form_of(const char *kind) {
    if (strcmp(kind, "nonblocking") == 0) return NONBLOCKING;
    return strcmp(kind, "op") == 0 ? BLOCKING : BASE;
}

static int connect_to(const char *name) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(name);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0 || length + 1 > sizeof address.sun_path) return -1;
    memcpy(address.sun_path + 1, name, length);
    socklen_t whole = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
    return connect(fd, (struct sockaddr *)&address, whole) == 0 ? fd : -1;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(WORLD, &rank);
    MPI_Comm_size(WORLD, &size);
    int fd = argc > 1 ? connect_to(argv[argc - 1]) : -1;
    FILE *commands = fd < 0 ? NULL : fdopen(fd, "r");
    counts = calloc((size_t)size, sizeof *counts);
    if (!commands || !counts) {
        fprintf(stderr, "peer_mpi: expected the name of a socket as the last argument: `consort bench comm` gives it\n");
        MPI_Abort(WORLD, 1);
    }
    dprintf(fd, "%d %d\n", rank, size);
    char kind[16], name[32];
    size_t bytes;
    long iterations;
    while (fscanf(commands, "%15s %31s %zu %ld", kind, name, &bytes, &iterations) == 4) {
        int op = 0;
        while (op < OPS && strcmp(name, names[op]) != 0) op++;
        const char *wrong = op == OPS ? "no such operation" : NULL;
        long spent = 0, cpu = 0;
        if (!wrong && strcmp(kind, "prepare") == 0)
            wrong = prepare(op, bytes);
        else if (!wrong && operand && result)
            run(op, form_of(kind), iterations, &spent, &cpu);
        if (wrong)
            dprintf(fd, "error %s: %s\n", name, wrong);
        else
            dprintf(fd, "%ld %ld\n", spent, cpu);
    }
    fclose(commands);
    MPI_Finalize();
    return 0;
}
