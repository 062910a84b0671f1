/* Drives csrc/aio from several threads, for the sanitizers: `hammer DIRECTORY`. Exits 0, 1 with the line that failed, or 77
 * where there is no io_uring.
 *
 * Linked with --wrap for the two calls below, so that a ring can die and a kernel can lack the poll that stays armed. The thread
 * sanitizer needs nothing suppressed: what the kernel shares with the ring's thread is read and written by that thread alone.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
#define NUM_THREADS 3
#define CHECK(condition)                                                     \
    do {                                                                     \
        if (!(condition)) {                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                         \
        }                                                                    \
    } while (0)

static atomic_bool ring_dies, polls_fire_once;

int __real_io_uring_submit_and_wait(struct io_uring *ring, unsigned count);
int __real_io_uring_queue_init(unsigned entries, struct io_uring *ring, unsigned flags);

/* What was queued is submitted, and then the ring is said to be dead. */
int __wrap_io_uring_submit_and_wait(struct io_uring *ring, unsigned count)
{
    if (!atomic_load(&ring_dies))
        return __real_io_uring_submit_and_wait(ring, count);
    io_uring_submit(ring);
    return -EBADF;
}

int __wrap_io_uring_queue_init(unsigned entries, struct io_uring *ring, unsigned flags)
{
    aio_engine *engine = (aio_engine *)((char *)ring - offsetof(aio_engine, ring));
    engine->wake_once = atomic_load(&polls_fire_once);
    return __real_io_uring_queue_init(entries, ring, flags);
}

static void *allocate(size_t num_bytes)
{
    void *memory = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static int open_file(const char *directory, const char *name)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/%s", directory, name);
    int fd = open(path, O_RDWR | O_CREAT | O_DIRECT, 0600);
    if (fd < 0 && errno == EINVAL)
        fd = open(path, O_RDWR | O_CREAT, 0600);
    CHECK(fd >= 0);
    return fd;
}

static aio_engine *open_engine(uint32_t queue_depth, uint32_t block_bytes)
{
    aio_engine *engine;
    CHECK(aio_open(queue_depth, block_bytes, NULL, 0, &engine) == 0);
    return engine;
}

static void close_engine(aio_engine *engine)
{
    aio_close(engine);
    aio_free(engine);
}

static aio_request request(int fd, int32_t ticket, bool writes, int64_t offset, void *memory, int64_t length)
{
    return (aio_request){.operation = {fd, ticket, writes, PAGE, offset, (uint64_t)(uintptr_t)memory, length}};
}

static int wait_for_all(aio_engine *engine, aio_request *requests, uint32_t count)
{
    for (uint32_t i = count; i-- > 0;)
        while (aio_wait(engine, requests, count, i, 500) == AIO_NOT_YET)
            ;
    uint32_t failed = aio_next_failure(requests, count, 0);
    return failed == count ? 0 : requests[failed].code;
}

/* Several threads write and read back their own parts of one file, while another registers and unregisters their memory. */

typedef struct {
    aio_engine *engine;
    int fd;
    int32_t ticket;
    int number;
    char *memory; /* 16 pages */
} worker;

static void *write_and_read_back(void *argument)
{
    worker *self = argument;
    for (int turn = 0; turn < 60; turn++) {
        int64_t start = (int64_t)(self->number * 8) * PAGE;
        memset(self->memory, 17 * self->number + turn, 8 * PAGE);
        aio_request batch[8];
        for (int i = 0; i < 8; i++)
            batch[i] = request(self->fd, self->ticket, true, start + i * PAGE, self->memory + i * PAGE, PAGE);
        CHECK(aio_submit(self->engine, batch, 8) == 0);
        CHECK(wait_for_all(self->engine, batch, 8) == 0);
        aio_request back = request(self->fd, self->ticket, false, start, self->memory + 8 * PAGE, 8 * PAGE);
        CHECK(aio_submit(self->engine, &back, 1) == 0);
        CHECK(wait_for_all(self->engine, &back, 1) == 0);
        CHECK(memcmp(self->memory, self->memory + 8 * PAGE, 8 * PAGE) == 0);
    }
    return NULL;
}

static void test_threads(const char *directory, bool short_completions)
{
    aio_fault faults[60] = {{3, -EAGAIN}, {20, -EINTR}}; /* the others: half of a read's piece, the whole of a write's */
    for (int i = 2; i < 60; i++)
        faults[i] = (aio_fault){30 + 5 * i, PAGE};
    aio_engine *engine;
    CHECK(aio_open(4, 2 * PAGE, faults, short_completions ? 60 : 0, &engine) == 0);
    int fd = open_file(directory, "threads");
    int32_t ticket;
    CHECK(aio_register_file(engine, fd, &ticket) == 0);
    pthread_t threads[NUM_THREADS];
    worker workers[NUM_THREADS];
    for (int i = 0; i < NUM_THREADS; i++) {
        workers[i] = (worker){engine, fd, i % 2 ? ticket : AIO_NO_TICKET, i, allocate(16 * PAGE)};
        CHECK(pthread_create(&threads[i], NULL, write_and_read_back, &workers[i]) == 0);
    }
    for (int turn = 0; turn < 60; turn++) {
        worker *one = &workers[turn % NUM_THREADS];
        CHECK(aio_register_memory(engine, (uint64_t)(uintptr_t)one->memory, 16 * PAGE) == 0);
        CHECK(aio_unregister_memory(engine, (uint64_t)(uintptr_t)one->memory, 16 * PAGE) == 0);
    }
    for (int i = 0; i < NUM_THREADS; i++) {
        pthread_join(threads[i], NULL);
        munmap(workers[i].memory, 16 * PAGE);
    }
    CHECK(aio_unregister_file(engine, ticket) == 0);
    close_engine(engine);
    close(fd);
}

/* A file is not taken from under a request, and an old ticket reaches no other file. */
static void test_tickets(const char *directory)
{
    aio_engine *engine = open_engine(2, PAGE);
    int ends[2], fd = open_file(directory, "tickets");
    CHECK(pipe(ends) == 0);
    char *memory = allocate(PAGE);
    int32_t on_pipe, on_file;
    CHECK(aio_register_file(engine, ends[0], &on_pipe) == 0);
    aio_request waiting = request(-1, on_pipe, false, 0, memory, PAGE);
    CHECK(aio_submit(engine, &waiting, 1) == 0);
    CHECK(aio_unregister_file(engine, on_pipe) == -EBUSY);
    CHECK(aio_wait(engine, &waiting, 1, 0, 0) == AIO_NOT_YET);
    CHECK(write(ends[1], memory, PAGE) == PAGE);
    CHECK(wait_for_all(engine, &waiting, 1) == 0);
    CHECK(aio_unregister_file(engine, on_pipe) == 0);
    CHECK(aio_unregister_file(engine, on_pipe) == -EBADF);
    CHECK(aio_register_file(engine, -1, &on_file) == -EBADF);
    CHECK(aio_register_file(engine, fd, &on_file) == 0); /* in the same place */
    CHECK(on_file != on_pipe);
    aio_request stale = request(fd, on_pipe, true, 0, memory, PAGE);
    CHECK(aio_submit(engine, &stale, 1) == 0);
    CHECK(wait_for_all(engine, &stale, 1) == -EBADF);
    CHECK(lseek(fd, 0, SEEK_END) == 0);
    for (int i = 0; i < 3 * AIO_MAX_FILES; i++) {
        int32_t next;
        CHECK(aio_register_file(engine, ends[0], &next) == 0);
        CHECK(aio_unregister_file(engine, next) == 0);
    }
    close_engine(engine);
    close(fd);
    close(ends[0]);
    close(ends[1]);
    munmap(memory, PAGE);
}

/* Registered memory is used as such: other pages at the same addresses get nothing, until it is unregistered. */
static void test_memory_is_registered(const char *directory)
{
    aio_engine *engine = open_engine(2, PAGE);
    int fd = open_file(directory, "registered");
    char *memory = allocate(2 * PAGE);
    uint64_t address = (uint64_t)(uintptr_t)memory;
    memset(memory, 5, 2 * PAGE);
    aio_request whole = request(fd, AIO_NO_TICKET, true, 0, memory, 2 * PAGE);
    CHECK(aio_submit(engine, &whole, 1) == 0);
    CHECK(wait_for_all(engine, &whole, 1) == 0);
    CHECK(aio_register_memory(engine, address, 2 * PAGE) == 0);
    CHECK(aio_register_memory(engine, PAGE, PAGE) == -EFAULT);
    for (int registered = 1; registered >= 0; registered--) {
        CHECK(mmap(memory, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
        whole = request(fd, AIO_NO_TICKET, false, 0, memory, 2 * PAGE);
        CHECK(aio_submit(engine, &whole, 1) == 0);
        CHECK(wait_for_all(engine, &whole, 1) == 0);
        CHECK(memory[0] == (registered ? 0 : 5) && memory[2 * PAGE - 1] == memory[0]);
        CHECK(aio_unregister_memory(engine, address, 2 * PAGE) == 0);
    }
    close_engine(engine);
    munmap(memory, 2 * PAGE);
    close(fd);
}

/* Whether a page is registered: then a read still fills the page that was there when it was, and not the new one. */
static bool is_registered(aio_engine *engine, int fd, char *page)
{
    CHECK(mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page);
    aio_request one = request(fd, AIO_NO_TICKET, false, 0, page, PAGE);
    CHECK(aio_submit(engine, &one, 1) == 0);
    CHECK(wait_for_all(engine, &one, 1) == 0);
    return page[0] != 5;
}

/* Memory belongs to the pair that registered it: a larger range that comes, goes or is refused leaves a smaller one inside. */
static void test_ranges_are_known_by_their_pair(const char *directory)
{
    aio_engine *engine = open_engine(2, PAGE);
    int fd = open_file(directory, "pairs");
    char *memory = allocate(4 * PAGE), *inner = memory + PAGE;
    uint64_t address = (uint64_t)(uintptr_t)memory, inner_address = address + PAGE;
    memset(memory, 5, PAGE);
    aio_request first = request(fd, AIO_NO_TICKET, true, 0, memory, PAGE);
    CHECK(aio_submit(engine, &first, 1) == 0);
    CHECK(wait_for_all(engine, &first, 1) == 0);
    CHECK(aio_register_memory(engine, inner_address, PAGE) == 0);
    CHECK(aio_register_memory(engine, address, 4 * PAGE) == 0);
    CHECK(is_registered(engine, fd, memory + 2 * PAGE));
    CHECK(aio_unregister_memory(engine, address, 4 * PAGE) == 0);
    CHECK(!is_registered(engine, fd, memory + 2 * PAGE));
    CHECK(is_registered(engine, fd, inner));
    munmap(memory + 3 * PAGE, PAGE);
    CHECK(aio_register_memory(engine, address, 4 * PAGE) == -EFAULT);
    CHECK(aio_unregister_memory(engine, address, 4 * PAGE) == 0);
    CHECK(is_registered(engine, fd, inner));
    CHECK(aio_register_memory(engine, inner_address, PAGE) == 0); /* again */
    CHECK(aio_unregister_memory(engine, inner_address, PAGE) == 0);
    CHECK(!is_registered(engine, fd, inner));
    close_engine(engine);
    munmap(memory, 3 * PAGE);
    close(fd);
}

/* Closed while threads submit: what was taken is done or cancelled, the rest is refused. */

static void *submit_until_refused(void *argument)
{
    worker *self = argument;
    for (;;) {
        aio_request batch[8];
        for (int i = 0; i < 8; i++)
            batch[i] = request(self->fd, self->ticket, true, i * PAGE, self->memory, PAGE);
        int code = aio_submit(self->engine, batch, 8);
        CHECK(code == 0 || code == -ESHUTDOWN);
        if (code)
            return NULL;
        code = wait_for_all(self->engine, batch, 8);
        CHECK(code == 0 || code == -ECANCELED);
    }
}

static void test_close_in_flight(const char *directory)
{
    int fd = open_file(directory, "closing");
    char *memory = allocate(PAGE);
    for (int turn = 0; turn < 6; turn++) {
        aio_engine *engine = open_engine(2, PAGE);
        int32_t ticket;
        CHECK(aio_register_file(engine, fd, &ticket) == 0);
        pthread_t threads[NUM_THREADS];
        worker one = {engine, fd, ticket, 0, memory};
        for (int i = 0; i < NUM_THREADS; i++)
            CHECK(pthread_create(&threads[i], NULL, submit_until_refused, &one) == 0);
        nanosleep(&(struct timespec){.tv_nsec = 2000000 * turn}, NULL);
        aio_close(engine);
        CHECK(aio_register_file(engine, fd, &ticket) == -ESHUTDOWN);
        for (int i = 0; i < NUM_THREADS; i++)
            pthread_join(threads[i], NULL);
        aio_free(engine);
    }
    munmap(memory, PAGE);
    close(fd);
}

/* A ring that dies: nothing is over before the kernel is done with its buffer, and then everything is, with the error. */
static void test_a_dying_ring(const char *directory)
{
    enum { BLOCK = 1 << 20, COUNT = 16 };
    int ends[2], fd = open_file(directory, "dying");
    CHECK(pipe(ends) == 0);
    char *memory = allocate((size_t)BLOCK * COUNT), *byte = allocate(PAGE);
    memset(memory, 1, (size_t)BLOCK * COUNT);
    aio_engine *engine = open_engine(COUNT, BLOCK);
    aio_request batch[COUNT + 1];
    for (int i = 0; i < COUNT; i++)
        batch[i] = request(fd, AIO_NO_TICKET, true, (int64_t)i * BLOCK, memory + (size_t)i * BLOCK, BLOCK);
    CHECK(aio_submit(engine, batch, COUNT) == 0);
    CHECK(wait_for_all(engine, batch, COUNT) == 0);

    atomic_store(&ring_dies, true);
    batch[0] = request(ends[0], AIO_NO_TICKET, false, 0, byte, PAGE); /* never ends by itself */
    for (int i = 1; i <= COUNT; i++)
        batch[i] = request(fd, AIO_NO_TICKET, false, (int64_t)(i - 1) * BLOCK, memory + (size_t)(i - 1) * BLOCK, BLOCK);
    CHECK(aio_submit(engine, batch, COUNT + 1) == 0);
    CHECK(wait_for_all(engine, batch, COUNT + 1) == -EBADF);
    memset(memory, 2, (size_t)BLOCK * COUNT);
    CHECK(aio_submit(engine, batch, 1) == -EBADF);
    int32_t ticket;
    CHECK(aio_register_file(engine, fd, &ticket) == -EBADF);
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL); /* what would still arrive has arrived */
    for (size_t i = 0; i < (size_t)BLOCK * COUNT; i += 512)
        CHECK(memory[i] == 2);
    close_engine(engine);
    atomic_store(&ring_dies, false);
    munmap(memory, (size_t)BLOCK * COUNT);
    munmap(byte, PAGE);
    close(fd);
    close(ends[0]);
    close(ends[1]);
}

static void test_a_hundred_engines(const char *directory)
{
    int fd = open_file(directory, "hundred");
    char *memory = allocate(PAGE);
    for (int turn = 0; turn < 100; turn++) {
        aio_engine *engine = open_engine(8, PAGE);
        int32_t ticket;
        CHECK(aio_register_file(engine, fd, &ticket) == 0);
        CHECK(aio_register_memory(engine, (uint64_t)(uintptr_t)memory, PAGE) == 0);
        aio_request one = request(fd, ticket, true, 0, memory, PAGE);
        CHECK(aio_submit(engine, &one, 1) == 0);
        if (turn % 2)
            CHECK(wait_for_all(engine, &one, 1) == 0);
        close_engine(engine);
        CHECK(atomic_load(&one.state) >= AIO_DONE);
    }
    munmap(memory, PAGE);
    close(fd);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    aio_engine *first;
    if (aio_open(1, PAGE, NULL, 0, &first))
        return 77;
    close_engine(first);
    for (int once = 0; once < 2; once++) {
        atomic_store(&polls_fire_once, once);
        test_threads(argv[1], once);
        test_tickets(argv[1]);
        test_close_in_flight(argv[1]);
    }
    test_memory_is_registered(argv[1]);
    test_ranges_are_known_by_their_pair(argv[1]);
    test_a_dying_ring(argv[1]);
    test_a_hundred_engines(argv[1]);
    return 0;
}
