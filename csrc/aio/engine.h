/* What the engine's parts share: engine.c (any thread), ring.c (the one thread that owns the ring), registered.c (its tables). */
#ifndef INFINITY_AIO_ENGINE_H
#define INFINITY_AIO_ENGINE_H

#include <liburing.h>
#include <pthread.h>
#include <stdbool.h>

#include "aio.h"

#define AIO_MAX_FILES 64
#define AIO_MAX_RANGES 1024

typedef struct {
    aio_request *head, *tail;
} request_list;

/* One block of a request at the kernel. */
typedef struct {
    aio_request *request; /* NULL while the piece is free */
    int64_t offset;
    uint64_t address;
    uint32_t length; /* what is left of it */
    uint32_t retries; /* since it last made progress */
} piece;

typedef struct {
    int32_t ticket;    /* its remainder by AIO_MAX_FILES is the place in the table */
    uint32_t num_users; /* requests on it that are not over */
    bool used;
} registered_file;

/* A part of what one call has registered, which is known by its pair of addresses. `end` is 0 where the place is free. */
typedef struct {
    uint64_t begin, end;
    uint64_t call_begin, call_end;
} registered_range;

/* The ring's tables of files and memory; each exists at the kernel from the first registration on. */
typedef struct {
    registered_file files[AIO_MAX_FILES];
    registered_range ranges[AIO_MAX_RANGES];
    uint32_t num_ranges; /* places in use, and free ones among them */
    bool has_files, has_ranges;
} registered_tables;

/* What only the owner of the ring may do, asked for by another thread that waits for the result. */
typedef struct command {
    int (*run)(aio_engine *engine, struct command *command);
    uint64_t address, num_bytes;
    int32_t fd, ticket;
    int32_t result;
    bool done;
    struct command *next;
} command;

struct aio_engine {
    uint32_t queue_depth;
    uint32_t block_bytes;
    aio_fault *faults;
    uint32_t num_faults;
    pthread_t thread;
    int wake_fd; /* an eventfd that the ring always polls */

    pthread_mutex_t lock;
    pthread_cond_t changed; /* the ring is up, a command is done, or a request with waiters is over */
    /* Under the lock. */
    request_list inbox;
    command *commands; /* the newest first */
    bool started;
    bool asleep; /* the thread waits for completions and wants to hear of news */
    bool stopping;
    int broken; /* -errno that ended the ring; 0 while it works */

    /* The thread's own. */
    struct io_uring ring;
    registered_tables registered;
    request_list queues[2]; /* reads, writes; only the head of each is partly issued */
    request_list finished;  /* over, not published yet */
    piece *pieces;
    piece **free_pieces; /* a stack */
    uint32_t num_free;
    uint32_t read_run;       /* pieces read since the last piece written */
    uint32_t recent_bytes;   /* the length of the piece issued last */
    uint64_t num_completions;
    bool wake_armed;
    bool wake_once; /* the kernel has no poll that stays armed */
};

void list_append(request_list *list, aio_request *request);
aio_request *list_pop(request_list *list);
int64_t now_nanoseconds(void); /* CLOCK_MONOTONIC */
void *ring_thread(void *engine);

/* registered.c; all of it belongs to the thread. */
int run_register_file(aio_engine *engine, command *command);
int run_unregister_file(aio_engine *engine, command *command);
void let_go_of_files(aio_engine *engine); /* at once: the end of a ring does that only some time later */
int run_register_memory(aio_engine *engine, command *command);
int run_unregister_memory(aio_engine *engine, command *command);
registered_file *file_of_ticket(aio_engine *engine, int32_t ticket); /* NULL: the ticket is not valid */
int index_of_range(const aio_engine *engine, uint64_t address, uint32_t length); /* -1: not in one range */

#endif
