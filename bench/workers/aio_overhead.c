/* What one request costs a C program through csrc/aio: aio_overhead FILE REQUESTS ROUNDS prints, for each round, the CPU time
 * of this thread and the time, in ns a request. The requests are reads of the file's first 4 KiB, one at a time. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "aio.h"

static int64_t now(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    int fd = open(arguments[1], O_RDWR | O_DIRECT | O_CLOEXEC);
    long requests = atol(arguments[2]), rounds = atol(arguments[3]);
    void *memory = aligned_alloc(4096, 4096);
    aio_engine *engine;
    int32_t ticket;
    if (fd < 0 || !memory || aio_open(32, 1 << 20, NULL, 0, &engine))
        return 1;
    if (aio_register_file(engine, fd, &ticket) || aio_register_memory(engine, (uint64_t)(uintptr_t)memory, 4096))
        return 1;
    for (long round = 0; round < rounds; round++) {
        int64_t cpu = now(CLOCK_THREAD_CPUTIME_ID), begin = now(CLOCK_MONOTONIC);
        for (long i = 0; i < requests; i++) {
            aio_request request = {.operation = {.fd = fd, .ticket = ticket, .granule_bytes = 512,
                                                 .address = (uint64_t)(uintptr_t)memory, .length = 4096}};
            if (aio_submit(engine, &request, 1))
                return 1;
            while (aio_wait(engine, &request, 1, 0, 500) == AIO_NOT_YET)
                ;
            if (request.code)
                return 1;
        }
        cpu = now(CLOCK_THREAD_CPUTIME_ID) - cpu;
        printf("%.1f %.1f\n", (double)cpu / (double)requests, (double)(now(CLOCK_MONOTONIC) - begin) / (double)requests);
    }
    aio_close(engine);
    aio_free(engine);
    return 0;
}
