/* The side of the engine that any thread may call: open, submit, wait, close. */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

void list_append(request_list *list, aio_request *request)
{
    request->next = NULL;
    if (list->tail)
        list->tail->next = request;
    else
        list->head = request;
    list->tail = request;
}

aio_request *list_pop(request_list *list)
{
    aio_request *request = list->head;
    if (request) {
        list->head = request->next;
        if (!list->head)
            list->tail = NULL;
    }
    return request;
}

int64_t now_nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static bool over(aio_request *request)
{
    return atomic_load_explicit(&request->state, memory_order_acquire) >= AIO_DONE;
}

static int allocate(aio_engine *engine, const aio_fault *faults, uint32_t num_faults)
{
    engine->pieces = calloc(engine->queue_depth, sizeof(piece));
    engine->free_pieces = calloc(engine->queue_depth, sizeof(piece *));
    engine->faults = calloc(num_faults + 1, sizeof(aio_fault));
    if (!engine->pieces || !engine->free_pieces || !engine->faults)
        return -ENOMEM;
    if (num_faults)
        memcpy(engine->faults, faults, num_faults * sizeof(aio_fault));
    engine->num_faults = num_faults;
    for (uint32_t i = 0; i < engine->queue_depth; i++)
        engine->free_pieces[engine->num_free++] = &engine->pieces[i];
    engine->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return engine->wake_fd < 0 ? -errno : 0;
}

/* Starts the thread with every signal blocked, so that the program's handlers run on its own threads. */
static int start_thread(aio_engine *engine)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = -pthread_create(&engine->thread, NULL, ring_thread, engine);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code)
        return code;
    pthread_mutex_lock(&engine->lock);
    while (!engine->started)
        pthread_cond_wait(&engine->changed, &engine->lock);
    code = engine->broken;
    pthread_mutex_unlock(&engine->lock);
    if (code)
        pthread_join(engine->thread, NULL);
    return code;
}

int aio_open(uint32_t queue_depth, uint32_t block_bytes, const aio_fault *faults, uint32_t num_faults, aio_engine **opened)
{
    if (queue_depth < 1 || queue_depth > AIO_MAX_QUEUE_DEPTH || block_bytes < 1 || block_bytes > AIO_MAX_BLOCK_BYTES)
        return -EINVAL;
    aio_engine *engine = calloc(1, sizeof(*engine));
    if (!engine)
        return -ENOMEM;
    engine->queue_depth = queue_depth;
    engine->block_bytes = block_bytes;
    engine->wake_fd = -1;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);

    int code = allocate(engine, faults, num_faults);
    if (!code)
        code = start_thread(engine);
    if (code) {
        aio_free(engine);
        return code;
    }
    *opened = engine;
    return 0;
}

/* Alignment is checked here too, because some file systems silently turn a misaligned direct request into a buffered one. */
static int check(const aio_operation *operation)
{
    if (operation->granule_bytes < 1 || operation->offset < 0 || operation->length < 0 ||
        operation->length > INT64_MAX - operation->offset)
        return -EINVAL;
    uint64_t granule = (uint64_t)operation->granule_bytes;
    bool aligned = (uint64_t)operation->offset % granule == 0 && operation->address % granule == 0 &&
                   (uint64_t)operation->length % granule == 0;
    return aligned ? 0 : -EINVAL;
}

static void wake(aio_engine *engine)
{
    uint64_t one = 1;
    /* The counter cannot overflow in 2^64 wake-ups. */
    while (write(engine->wake_fd, &one, sizeof(one)) < 0 && errno == EINTR)
        ;
}

/* Under the lock: whether the thread has to be woken for what was just left to it. */
static bool take_asleep(aio_engine *engine)
{
    bool asleep = engine->asleep;
    engine->asleep = false;
    return asleep;
}

/* Requests with nothing to move are over at once. */
static void queue(aio_engine *engine, aio_request *request)
{
    if (request->code || request->operation.length == 0)
        atomic_store_explicit(&request->state, request->code ? AIO_FAILED : AIO_DONE, memory_order_release);
    else
        list_append(&engine->inbox, request);
}

int aio_submit(aio_engine *engine, aio_request *requests, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        requests[i].failed_offset = requests[i].operation.offset;
        requests[i].code = check(&requests[i].operation);
    }
    pthread_mutex_lock(&engine->lock);
    int code = engine->stopping ? -ESHUTDOWN : engine->broken;
    for (uint32_t i = 0; i < count && !code; i++)
        queue(engine, &requests[i]);
    bool asleep = engine->inbox.head && take_asleep(engine);
    pthread_mutex_unlock(&engine->lock);
    if (asleep)
        wake(engine);
    return code;
}

static struct timespec after(uint32_t milliseconds)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t nanoseconds = (uint64_t)until.tv_nsec + (uint64_t)(milliseconds % 1000) * 1000000;
    until.tv_sec += milliseconds / 1000 + nanoseconds / 1000000000;
    until.tv_nsec = nanoseconds % 1000000000;
    return until;
}

static bool wait_for(aio_engine *engine, aio_request *request, uint32_t timeout_milliseconds)
{
    if (over(request) || !timeout_milliseconds)
        return over(request);
    struct timespec until = after(timeout_milliseconds);
    int code = 0;
    pthread_mutex_lock(&engine->lock);
    request->waiters++;
    while (!over(request) && !code)
        code = pthread_cond_timedwait(&engine->changed, &engine->lock, &until);
    request->waiters--;
    pthread_mutex_unlock(&engine->lock);
    return over(request);
}

int aio_wait(aio_engine *engine, aio_request *requests, uint32_t count, uint32_t index, uint32_t timeout_milliseconds)
{
    if (!wait_for(engine, &requests[index], timeout_milliseconds))
        return AIO_NOT_YET;
    while (count && over(&requests[count - 1]))
        count--;
    return count ? AIO_OVER : AIO_ALL_OVER;
}

uint32_t aio_next_failure(const aio_request *requests, uint32_t count, uint32_t from)
{
    while (from < count && !requests[from].code)
        from++;
    return from;
}

/* Lets the thread run a command and waits for the result. */
static int order(aio_engine *engine, command *command)
{
    pthread_mutex_lock(&engine->lock);
    int code = engine->stopping ? -ESHUTDOWN : engine->broken;
    if (code) {
        pthread_mutex_unlock(&engine->lock);
        return code;
    }
    command->next = engine->commands;
    engine->commands = command;
    if (take_asleep(engine))
        wake(engine);
    while (!command->done)
        pthread_cond_wait(&engine->changed, &engine->lock);
    pthread_mutex_unlock(&engine->lock);
    return command->result;
}

int aio_register_file(aio_engine *engine, int32_t fd, int32_t *ticket)
{
    command command = {.run = run_register_file, .fd = fd, .ticket = AIO_NO_TICKET};
    int code = order(engine, &command);
    *ticket = command.ticket;
    return code;
}

int aio_unregister_file(aio_engine *engine, int32_t ticket)
{
    return order(engine, &(command){.run = run_unregister_file, .ticket = ticket});
}

int aio_register_memory(aio_engine *engine, uint64_t address, uint64_t num_bytes)
{
    return order(engine, &(command){.run = run_register_memory, .address = address, .num_bytes = num_bytes});
}

int aio_unregister_memory(aio_engine *engine, uint64_t address, uint64_t num_bytes)
{
    return order(engine, &(command){.run = run_unregister_memory, .address = address, .num_bytes = num_bytes});
}

void aio_close(aio_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    engine->stopping = true;
    pthread_mutex_unlock(&engine->lock);
    wake(engine);
    pthread_join(engine->thread, NULL);
}

void aio_free(aio_engine *engine)
{
    if (engine->wake_fd >= 0)
        close(engine->wake_fd);
    pthread_cond_destroy(&engine->changed);
    pthread_mutex_destroy(&engine->lock);
    free(engine->faults);
    free(engine->free_pieces);
    free(engine->pieces);
    free(engine);
}
