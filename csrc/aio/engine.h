/* What the engine's two halves share: engine.c (any thread) and ring.c (the one thread that owns the ring). */
#ifndef INFINITY_AIO_ENGINE_H
#define INFINITY_AIO_ENGINE_H

#include <liburing.h>
#include <pthread.h>
#include <stdbool.h>

#include "aio.h"

typedef struct {
    aio_request *head, *tail;
} request_list;

/* One block of a request at the kernel. */
typedef struct {
    aio_request *request;
    int64_t offset;
    uint64_t address;
    uint32_t length; /* what is left of it */
    uint32_t retries; /* since it last made progress */
} piece;

struct aio_engine {
    uint32_t queue_depth;
    uint32_t block_bytes;
    aio_fault *faults;
    uint32_t num_faults;
    pthread_t thread;
    int wake_fd; /* an eventfd that the ring always reads */

    pthread_mutex_t lock;
    pthread_cond_t changed; /* the ring is up, or a request with waiters is over */
    /* Under the lock. */
    request_list inbox;
    bool started;
    bool asleep; /* the thread waits for completions and wants to hear of new requests */
    bool stopping;
    int broken; /* -errno that ended the ring; 0 while it works */

    /* The thread's own. */
    struct io_uring ring;
    request_list queues[2]; /* reads, writes; only the head of each is partly issued */
    request_list finished;  /* over, not published yet */
    piece *pieces;
    piece **free_pieces; /* a stack */
    uint32_t num_free;
    uint32_t read_run; /* pieces read since the last piece written */
    uint64_t num_completions;
    uint64_t wake_count; /* the kernel reads the eventfd into it */
    bool wake_armed;
};

void list_append(request_list *list, aio_request *request);
aio_request *list_pop(request_list *list);
void *ring_thread(void *engine);

#endif
