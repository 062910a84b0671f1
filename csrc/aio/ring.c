/* The thread that owns the ring: it cuts requests into pieces, keeps queue_depth of them at the kernel and reads completions.
 *
 * Reads go first, because somebody usually waits for them; one piece in AIO_READ_RUN + 1 is a write while both wait.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <string.h>

#define AIO_READ_RUN 8
#define AIO_MAX_RETRIES 64 /* of one piece without progress */

/* Numbers of the kernel's interface that older liburing headers lack. */
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

/* Opens the ring with the best flags that the kernel takes; registered buffers and files would be set up here. */
static int open_ring(aio_engine *engine)
{
    static const unsigned flags[] = {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, IORING_SETUP_COOP_TASKRUN, 0};
    int code = -EINVAL;
    /* One entry for each piece and one for the wake-up read, so that there is always a free entry. */
    for (unsigned i = 0; i < sizeof(flags) / sizeof(*flags) && code == -EINVAL; i++)
        code = io_uring_queue_init(engine->queue_depth + 1, &engine->ring, flags[i]);
    return code;
}

static void arm_wake(aio_engine *engine)
{
    struct io_uring_sqe *entry = io_uring_get_sqe(&engine->ring);
    io_uring_prep_read(entry, engine->wake_fd, &engine->wake_count, sizeof(engine->wake_count), 0);
    io_uring_sqe_set_data(entry, NULL);
    engine->wake_armed = true;
}

static void issue(aio_engine *engine, piece *part)
{
    const aio_operation *operation = &part->request->operation;
    struct io_uring_sqe *entry = io_uring_get_sqe(&engine->ring);
    void *address = (void *)(uintptr_t)part->address;
    if (operation->writes)
        io_uring_prep_write(entry, operation->fd, address, part->length, (uint64_t)part->offset);
    else
        io_uring_prep_read(entry, operation->fd, address, part->length, (uint64_t)part->offset);
    io_uring_sqe_set_data(entry, part);
}

/* The queue whose turn it is; NULL when nothing waits. */
static request_list *next_queue(aio_engine *engine)
{
    request_list *reads = &engine->queues[0], *writes = &engine->queues[1];
    if (reads->head && (!writes->head || engine->read_run < AIO_READ_RUN)) {
        engine->read_run++;
        return reads;
    }
    engine->read_run = 0;
    return writes->head ? writes : NULL;
}

static void fill(aio_engine *engine)
{
    request_list *queue;
    while (engine->num_free && (queue = next_queue(engine))) {
        aio_request *request = queue->head;
        int64_t left = request->operation.length - request->issued_bytes;
        piece *part = engine->free_pieces[--engine->num_free];
        part->request = request;
        part->offset = request->operation.offset + request->issued_bytes;
        part->address = request->operation.address + (uint64_t)request->issued_bytes;
        part->length = left < (int64_t)engine->block_bytes ? (uint32_t)left : engine->block_bytes;
        part->retries = 0;
        request->issued_bytes += part->length;
        request->in_flight++;
        if (request->issued_bytes == request->operation.length)
            list_pop(queue);
        if (atomic_load_explicit(&request->state, memory_order_relaxed) == AIO_QUEUED)
            atomic_store_explicit(&request->state, AIO_SUBMITTED, memory_order_relaxed);
        issue(engine, part);
    }
}

/* The first failure of a request counts; the part of it that was not issued yet never will be. */
static void fail(aio_engine *engine, aio_request *request, int code, int64_t offset)
{
    if (request->code)
        return;
    request->code = code;
    request->failed_offset = offset;
    if (request->issued_bytes < request->operation.length) {
        list_pop(&engine->queues[request->operation.writes != 0]);
        request->issued_bytes = request->operation.length;
    }
}

static void retire(aio_engine *engine, piece *part)
{
    aio_request *request = part->request;
    engine->free_pieces[engine->num_free++] = part;
    if (--request->in_flight == 0 && request->issued_bytes == request->operation.length)
        list_append(&engine->finished, request);
}

static bool retry(aio_engine *engine, piece *part)
{
    if (part->request->code || part->retries++ >= AIO_MAX_RETRIES)
        return false;
    issue(engine, part);
    return true;
}

static void advance(piece *part, uint32_t moved)
{
    part->offset += moved;
    part->address += moved;
    part->length -= moved;
    part->retries = 0;
    atomic_store_explicit(&part->request->state, AIO_PARTIAL, memory_order_relaxed);
}

/* A completion is an error, short, or done; nothing else. */
static void complete(aio_engine *engine, piece *part, int32_t result)
{
    aio_request *request = part->request;
    if (result < 0) {
        if ((result == -EAGAIN || result == -EINTR) && retry(engine, part))
            return;
        fail(engine, request, result, part->offset);
    } else if ((uint32_t)result < part->length) {
        /* Under O_DIRECT the rest must start at a block; less than one block read is the end of the file. */
        uint32_t moved = (uint32_t)result - (uint32_t)result % (uint32_t)request->operation.granule_bytes;
        if (moved)
            advance(part, moved);
        if (!moved && !request->operation.writes)
            fail(engine, request, AIO_END_OF_FILE, part->offset + result);
        else if (retry(engine, part))
            return;
        else
            fail(engine, request, -EIO, part->offset);
    }
    retire(engine, part);
}

static int32_t with_faults(aio_engine *engine, int32_t result)
{
    uint64_t number = engine->num_completions++;
    for (uint32_t i = 0; i < engine->num_faults; i++)
        if (engine->faults[i].completion == number)
            return engine->faults[i].result;
    return result;
}

/* Reads every completion that is there; returns -errno where the ring itself no longer works. */
static int reap(aio_engine *engine)
{
    struct io_uring_cqe *completion;
    unsigned head, seen = 0;
    int code = 0;
    io_uring_for_each_cqe(&engine->ring, head, completion) {
        piece *part = io_uring_cqe_get_data(completion);
        seen++;
        if (part) {
            complete(engine, part, with_faults(engine, completion->res));
        } else {
            engine->wake_armed = false;
            if (completion->res < 0 && completion->res != -EINTR && completion->res != -EAGAIN)
                code = completion->res;
        }
    }
    io_uring_cq_advance(&engine->ring, seen);
    return code;
}

static void cancel_unissued(aio_engine *engine, request_list *queue)
{
    aio_request *partly = queue->head && queue->head->issued_bytes ? list_pop(queue) : NULL;
    for (aio_request *request; (request = list_pop(queue));) {
        request->code = request->code ? request->code : -ECANCELED;
        list_append(&engine->finished, request);
    }
    if (partly)
        list_append(queue, partly);
}

/* Under the lock. The store of the state is the last touch of a request: its owner may free it from then on. */
static void publish(aio_engine *engine)
{
    bool awaited = false;
    for (aio_request *request; (request = list_pop(&engine->finished));) {
        awaited |= request->waiters > 0;
        atomic_store_explicit(&request->state, request->code ? AIO_FAILED : AIO_DONE, memory_order_release);
    }
    if (awaited)
        pthread_cond_broadcast(&engine->changed);
}

/* Publishes what is over and takes what is new; returns whether the engine is closing. */
static bool exchange(aio_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    publish(engine);
    engine->asleep = false;
    bool stopping = engine->stopping;
    request_list taken = engine->inbox;
    engine->inbox = (request_list){0};
    pthread_mutex_unlock(&engine->lock);

    for (aio_request *request; (request = list_pop(&taken));) {
        bool over = request->code || request->operation.length == 0;
        list_append(over ? &engine->finished : &engine->queues[request->operation.writes != 0], request);
    }
    for (int i = 0; i < 2 && stopping; i++)
        cancel_unissued(engine, &engine->queues[i]);
    return stopping;
}

/* Returns false when there is news to deal with before waiting. With a full window completions wake the thread anyway. */
static bool may_sleep(aio_engine *engine)
{
    if (engine->finished.head)
        return false;
    if (!engine->num_free)
        return true;
    pthread_mutex_lock(&engine->lock);
    bool news = engine->inbox.head != NULL;
    engine->asleep = !news;
    pthread_mutex_unlock(&engine->lock);
    return !news;
}

static int wait_for_completions(aio_engine *engine)
{
    int code = io_uring_submit_and_wait(&engine->ring, 1);
    if (code < 0 && code != -EINTR && code != -EAGAIN && code != -EBUSY)
        return code;
    return reap(engine);
}

/* Fails everything with the error that ended the ring. */
static void fail_all(aio_engine *engine, int code)
{
    pthread_mutex_lock(&engine->lock);
    engine->broken = code;
    for (uint32_t i = 0; i < engine->queue_depth; i++) {
        piece *part = &engine->pieces[i];
        bool at_kernel = part->request != NULL;
        for (uint32_t j = 0; j < engine->num_free && at_kernel; j++)
            at_kernel = engine->free_pieces[j] != part;
        if (at_kernel) {
            fail(engine, part->request, code, part->offset);
            retire(engine, part);
        }
    }
    request_list *waiting[] = {&engine->queues[0], &engine->queues[1], &engine->inbox};
    for (int i = 0; i < 3; i++)
        for (aio_request *request; (request = list_pop(waiting[i]));) {
            request->code = request->code ? request->code : code;
            list_append(&engine->finished, request);
        }
    publish(engine);
    pthread_mutex_unlock(&engine->lock);
}

static int serve(aio_engine *engine)
{
    for (;;) {
        bool stopping = exchange(engine);
        fill(engine);
        if (!stopping && !engine->wake_armed)
            arm_wake(engine);
        if (!may_sleep(engine))
            continue;
        if (stopping && !engine->wake_armed && engine->num_free == engine->queue_depth)
            return 0;
        int code = wait_for_completions(engine);
        if (code < 0)
            return code;
    }
}

void *ring_thread(void *argument)
{
    aio_engine *engine = argument;
    pthread_setname_np(pthread_self(), "infinity-aio");
    int code = open_ring(engine);
    pthread_mutex_lock(&engine->lock);
    engine->started = true;
    engine->broken = code;
    pthread_cond_broadcast(&engine->changed);
    pthread_mutex_unlock(&engine->lock);
    if (code)
        return NULL;
    code = serve(engine);
    io_uring_queue_exit(&engine->ring);
    if (code)
        fail_all(engine, code);
    return NULL;
}
