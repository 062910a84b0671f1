/* The thread that owns the ring: it cuts requests into pieces, keeps queue_depth of them at the kernel and reads completions.
 *
 * Reads go first, because somebody usually waits for them; one piece in AIO_READ_RUN + 1 is a write while both wait.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

#define AIO_READ_RUN 8
#define AIO_MAX_RETRIES 64 /* of one piece without progress */
#define AIO_BYTES_PER_WAKE (256 << 10)
#define AIO_LONGEST_WAIT_NANOSECONDS 10000000 /* for more than one completion */
#define AIO_QUIESCE_MILLISECONDS 60000

/* Opens the ring with the best flags that the kernel takes. */
static int open_ring(aio_engine *engine)
{
    static const unsigned flags[] = {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, IORING_SETUP_COOP_TASKRUN, 0};
    int code = -EINVAL;
    /* One entry for each piece and one for the wake-up poll, so that there is always a free entry. */
    for (unsigned i = 0; i < sizeof(flags) / sizeof(*flags) && code == -EINVAL; i++)
        code = io_uring_queue_init(engine->queue_depth + 1, &engine->ring, flags[i]);
    return code;
}

/* The poll touches no memory, so nothing waits for it when the engine closes. */
static void arm_wake(aio_engine *engine)
{
    struct io_uring_sqe *entry = io_uring_get_sqe(&engine->ring);
    if (engine->wake_once) {
        uint64_t count; /* a poll that fires once fires for what was written before, too */
        (void)!read(engine->wake_fd, &count, sizeof(count));
        io_uring_prep_poll_add(entry, engine->wake_fd, POLLIN);
    } else {
        io_uring_prep_poll_multishot(entry, engine->wake_fd, POLLIN);
    }
    io_uring_sqe_set_data(entry, NULL);
    engine->wake_armed = true;
}

/* Returns -errno where the ring cannot be woken any more. */
static int woken(aio_engine *engine, const struct io_uring_cqe *completion)
{
    if (completion->flags & IORING_CQE_F_MORE)
        return 0;
    engine->wake_armed = false;
    if (completion->res == -EINVAL && !engine->wake_once) {
        engine->wake_once = true;
        return 0;
    }
    return completion->res < 0 && completion->res != -EINTR && completion->res != -EAGAIN ? completion->res : 0;
}

static void issue(aio_engine *engine, piece *part)
{
    const aio_operation *operation = &part->request->operation;
    struct io_uring_sqe *entry = io_uring_get_sqe(&engine->ring);
    void *address = (void *)(uintptr_t)part->address;
    int range = index_of_range(engine, part->address, part->length);
    int fd = operation->ticket == AIO_NO_TICKET ? operation->fd : operation->ticket % AIO_MAX_FILES;
    uint64_t offset = (uint64_t)part->offset;
    if (operation->writes && range >= 0)
        io_uring_prep_write_fixed(entry, fd, address, part->length, offset, range);
    else if (operation->writes)
        io_uring_prep_write(entry, fd, address, part->length, offset);
    else if (range >= 0)
        io_uring_prep_read_fixed(entry, fd, address, part->length, offset, range);
    else
        io_uring_prep_read(entry, fd, address, part->length, offset);
    if (operation->ticket != AIO_NO_TICKET)
        io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
    io_uring_sqe_set_data(entry, part);
    engine->recent_bytes = part->length;
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
        if (atomic_load_explicit(&request->state, memory_order_relaxed) == AIO_QUEUED) {
            request->issued_nanoseconds = now_nanoseconds();
            atomic_store_explicit(&request->state, AIO_SUBMITTED, memory_order_relaxed);
        }
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

static void finish(aio_engine *engine, aio_request *request)
{
    registered_file *file = file_of_ticket(engine, request->operation.ticket);
    if (file)
        file->num_users--;
    if (request->issued_nanoseconds)
        request->latency_nanoseconds = now_nanoseconds() - request->issued_nanoseconds;
    list_append(&engine->finished, request);
}

static void retire(aio_engine *engine, piece *part)
{
    aio_request *request = part->request;
    part->request = NULL;
    engine->free_pieces[engine->num_free++] = part;
    if (--request->in_flight == 0 && request->issued_bytes == request->operation.length)
        finish(engine, request);
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
        if (part)
            complete(engine, part, with_faults(engine, completion->res));
        else
            code = woken(engine, completion);
    }
    io_uring_cq_advance(&engine->ring, seen);
    return code;
}

static void cancel_unissued(aio_engine *engine, request_list *queue)
{
    aio_request *partly = queue->head && queue->head->issued_bytes ? list_pop(queue) : NULL;
    for (aio_request *request; (request = list_pop(queue));) {
        request->code = -ECANCELED;
        finish(engine, request);
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

/* A request that the thread takes over is counted on its file until it is over. */
static void take(aio_engine *engine, aio_request *request)
{
    int32_t ticket = request->operation.ticket;
    registered_file *file = file_of_ticket(engine, ticket);
    if (file)
        file->num_users++;
    if (file || ticket == AIO_NO_TICKET) {
        list_append(&engine->queues[request->operation.writes != 0], request);
    } else {
        request->code = -EBADF;
        finish(engine, request);
    }
}

/* Entries that were prepared name places in the tables, so the kernel has to have seen them before a table changes. */
static void submit_prepared(aio_engine *engine)
{
    int code = 0;
    while (io_uring_sq_ready(&engine->ring) && (code >= 0 || code == -EINTR || code == -EAGAIN))
        code = io_uring_submit(&engine->ring);
}

/* After the requests that were submitted before them, so that a file is never taken from under one. */
static void run_commands(aio_engine *engine, command *newest)
{
    if (!engine->broken)
        submit_prepared(engine);
    command *oldest = NULL;
    for (command *next; newest; newest = next) {
        next = newest->next;
        newest->next = oldest;
        oldest = newest;
    }
    for (command *one = oldest; one; one = one->next)
        one->result = engine->broken ? engine->broken : one->run(engine, one);
    pthread_mutex_lock(&engine->lock);
    for (command *next; oldest; oldest = next) {
        next = oldest->next;
        oldest->done = true; /* from then on it is its owner's */
    }
    pthread_cond_broadcast(&engine->changed);
    pthread_mutex_unlock(&engine->lock);
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
    command *commands = engine->commands;
    engine->commands = NULL;
    pthread_mutex_unlock(&engine->lock);

    for (aio_request *request; (request = list_pop(&taken));)
        take(engine, request);
    if (commands)
        run_commands(engine, commands);
    for (int i = 0; i < 2 && stopping; i++)
        cancel_unissued(engine, &engine->queues[i]);
    return stopping;
}

/* Returns false when there is news to deal with before waiting. With a full window completions wake the thread anyway. */
static bool may_sleep(aio_engine *engine, bool stopping)
{
    if (engine->finished.head)
        return false;
    if (!engine->num_free)
        return true;
    pthread_mutex_lock(&engine->lock);
    bool news = engine->inbox.head || engine->commands || engine->stopping != stopping;
    engine->asleep = !news;
    pthread_mutex_unlock(&engine->lock);
    return !news;
}

/* How many completions to wait for. While requests queue up behind a full window, small pieces are taken some at a time: that
 * saves a system call for each and leaves most of the window at the kernel. */
static unsigned num_awaited(const aio_engine *engine)
{
    bool backlog = engine->queues[0].head || engine->queues[1].head;
    if (!backlog || !(engine->ring.features & IORING_FEAT_EXT_ARG))
        return 1;
    uint32_t most = engine->queue_depth / 8, wanted = AIO_BYTES_PER_WAKE / engine->recent_bytes;
    wanted = wanted < most ? wanted : most;
    return wanted ? wanted : 1;
}

static int wait_for_completions(aio_engine *engine)
{
    unsigned awaited = num_awaited(engine);
    struct __kernel_timespec longest = {.tv_nsec = AIO_LONGEST_WAIT_NANOSECONDS};
    struct io_uring_cqe *first;
    int code = awaited > 1 ? io_uring_submit_and_wait_timeout(&engine->ring, &first, awaited, &longest, NULL)
                           : io_uring_submit_and_wait(&engine->ring, 1);
    if (code < 0 && code != -EINTR && code != -EAGAIN && code != -EBUSY && code != -ETIME)
        return code;
    return reap(engine);
}

static void fail_queue(aio_engine *engine, request_list *queue, int code)
{
    for (aio_request *request; (request = list_pop(queue));) {
        request->code = request->code ? request->code : code;
        finish(engine, request);
    }
}

/* Takes back the pieces whose entry the kernel never took. */
static void take_back_unsubmitted(aio_engine *engine)
{
    struct io_uring_sq *queue = &engine->ring.sq;
    for (unsigned left = io_uring_sq_ready(&engine->ring); left; left--) {
        piece *part = (piece *)(uintptr_t)queue->sqes[(queue->sqe_tail - left) & queue->ring_mask].user_data;
        if (part)
            retire(engine, part);
    }
}

/* Returns when the kernel uses no buffer any more. Closing a ring does not wait for that, and where somebody closed its
 * descriptor nothing does: then a minute has to be enough, which is longer than the kernel gives a disk for one request. */
static void quiesce(aio_engine *engine)
{
    struct io_uring_sync_cancel_reg everything = {.flags = IORING_ASYNC_CANCEL_ANY, .timeout = {-1, -1}};
    if (engine->num_free < engine->queue_depth)
        io_uring_register_sync_cancel(&engine->ring, &everything); /* what waits for something other than a disk */
    for (int milliseconds = 0; engine->num_free < engine->queue_depth && milliseconds < AIO_QUIESCE_MILLISECONDS;) {
        struct io_uring_cqe *first;
        int code = io_uring_wait_cqe(&engine->ring, &first);
        reap(engine);
        if (code < 0 && code != -EINTR && code != -EAGAIN) {
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
            milliseconds++;
        }
    }
}

/* Fails everything with the error that ended the ring. */
static void fail_all(aio_engine *engine, int code)
{
    pthread_mutex_lock(&engine->lock);
    engine->broken = code;
    request_list unseen = engine->inbox;
    engine->inbox = (request_list){0};
    command *commands = engine->commands;
    engine->commands = NULL;
    pthread_mutex_unlock(&engine->lock);

    for (uint32_t i = 0; i < engine->queue_depth; i++)
        if (engine->pieces[i].request)
            fail(engine, engine->pieces[i].request, code, engine->pieces[i].offset);
    take_back_unsubmitted(engine);
    quiesce(engine);
    for (uint32_t i = 0; i < engine->queue_depth; i++)
        if (engine->pieces[i].request)
            retire(engine, &engine->pieces[i]);
    for (aio_request *request; (request = list_pop(&unseen));)
        take(engine, request);
    fail_queue(engine, &engine->queues[0], code);
    fail_queue(engine, &engine->queues[1], code);
    run_commands(engine, commands);
    pthread_mutex_lock(&engine->lock);
    publish(engine);
    pthread_mutex_unlock(&engine->lock);
}

static int serve(aio_engine *engine)
{
    for (;;) {
        bool stopping = exchange(engine);
        fill(engine);
        if (!engine->wake_armed)
            arm_wake(engine);
        if (!may_sleep(engine, stopping))
            continue;
        if (stopping && engine->num_free == engine->queue_depth)
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
    if (code)
        fail_all(engine, code);
    let_go_of_files(engine);
    io_uring_queue_exit(&engine->ring);
    return NULL;
}
