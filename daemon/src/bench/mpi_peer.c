/* The peer of `allreduced bench --vs-mpi`: MPI_Allreduce, timed as the bench times its own ranks.
 *
 * mpi_peer TYPE CASE...
 *   TYPE: f32, f64, i32, i64
 *   CASE: STEPS:BYTES[,BYTES...]   a step is one all-reduce (sum, out of place) of each length, one after the other
 *
 * Prints, for each case and rank, one line: case, rank, median and 99th percentile of a step, microseconds. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct kind {
    const char *name;
    MPI_Datatype type;
    size_t size;
};

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void *allocate(size_t bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 4096, bytes ? bytes : 1) != 0) {
        fprintf(stderr, "mpi_peer: no memory for %zu bytes\n", bytes);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    memset(memory, 0, bytes);
    return memory;
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    const struct kind kinds[] = {
        {"f32", MPI_FLOAT, 4},
        {"f64", MPI_DOUBLE, 8},
        {"i32", MPI_INT32_T, 4},
        {"i64", MPI_INT64_T, 8},
    };
    const struct kind *kind = NULL;
    for (size_t at = 0; argc > 1 && at < sizeof kinds / sizeof kinds[0]; at++)
        if (strcmp(argv[1], kinds[at].name) == 0)
            kind = &kinds[at];
    if (kind == NULL) {
        fprintf(stderr, "usage: mpi_peer f32|f64|i32|i64 STEPS:BYTES[,BYTES...]...\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
        return 2;
    }
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (int which = 2; which < argc; which++) {
        size_t capacity = strlen(argv[which]), count = 0, longest = 0;
        size_t *bytes = calloc(capacity + 1, sizeof *bytes);
        char *at = argv[which];
        long steps = strtol(at, &at, 10);
        while (bytes != NULL && *at != 0) {
            size_t length = strtoull(at + 1, &at, 10);
            longest = length > longest ? length : longest;
            bytes[count++] = length;
        }
        if (steps < 1 || count == 0) {
            fprintf(stderr, "mpi_peer: bad case %s\n", argv[which]);
            MPI_Abort(MPI_COMM_WORLD, 2);
            return 2;
        }
        void *in = allocate(longest), *out = allocate(longest);
        double *took = calloc((size_t)steps, sizeof *took);
        for (long step = -(steps / 10 + 2); step < steps; step++) {
            if (step == 0)
                MPI_Barrier(MPI_COMM_WORLD);
            double start = MPI_Wtime();
            for (size_t next = 0; next < count; next++)
                MPI_Allreduce(in, out, (int)(bytes[next] / kind->size), kind->type, MPI_SUM, MPI_COMM_WORLD);
            if (step >= 0)
                took[step] = (MPI_Wtime() - start) * 1e6;
        }
        qsort(took, (size_t)steps, sizeof *took, by_value);
        printf("%d %d %.3f %.3f\n", which - 2, rank, took[steps / 2], took[steps * 99 / 100]);
        fflush(stdout);
        free(took);
        free(in);
        free(out);
        free(bytes);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    MPI_Finalize();
    return 0;
}
