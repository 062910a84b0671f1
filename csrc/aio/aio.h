/* Asynchronous reads and writes of (file, offset, address, length) on one io_uring ring: the whole public surface.
 *
 * Every function may be called from any thread. Failures are -errno; nothing is printed and nothing aborts.
 * Requests are the caller's memory: they, and the memory they point to, stay alive until they are over; the engine does
 * until nobody waits any more.
 */
#ifndef INFINITY_AIO_H
#define INFINITY_AIO_H

#include <stdatomic.h>
#include <stdint.h>

#define AIO_END_OF_FILE (-4096) /* a request's code when the file is shorter than it; below every -errno */
#define AIO_MAX_QUEUE_DEPTH 4096
#define AIO_MAX_BLOCK_BYTES (1 << 30) /* one completion counts its bytes in 31 bits */
#define AIO_NO_TICKET (-1)

enum { AIO_QUEUED, AIO_SUBMITTED, AIO_PARTIAL, AIO_DONE, AIO_FAILED };
enum { AIO_NOT_YET, AIO_OVER, AIO_ALL_OVER };

typedef struct aio_engine aio_engine;

typedef struct {
    int32_t fd;
    int32_t ticket;        /* of the registered file that the request is on, or AIO_NO_TICKET: then fd counts */
    int32_t writes;        /* 0: read into the address, 1: write from it */
    int32_t granule_bytes; /* progress counts in whole granules: the logical block under O_DIRECT, otherwise 1 */
    int64_t offset;
    uint64_t address;
    int64_t length;
} aio_operation;

typedef struct aio_request {
    aio_operation operation;     /* the caller's; everything else starts as zeros */
    _Atomic int32_t state;       /* AIO_DONE or AIO_FAILED: over, and the engine will not touch it again */
    int32_t code;                /* once over: 0, -errno or AIO_END_OF_FILE */
    int64_t failed_offset;       /* once failed: the place in the file */
    int64_t latency_nanoseconds; /* once over: since its first piece was issued; 0 where none was */
    /* The rest is the engine's. */
    int64_t issued_nanoseconds; /* when its first piece was, by CLOCK_MONOTONIC; 0: not yet */
    int64_t issued_bytes;       /* given to pieces so far */
    int32_t in_flight;          /* pieces at the kernel */
    int32_t waiters;            /* under the engine's lock */
    struct aio_request *next;
} aio_request;

/* Test hook: the completion with this number, counted from 0 over the engine's life, is seen as `result`. */
typedef struct {
    uint64_t completion;
    int32_t result;
} aio_fault;

int aio_open(uint32_t queue_depth, uint32_t block_bytes, const aio_fault *faults, uint32_t num_faults, aio_engine **engine);

/* Queues a batch: all of it or, on error, nothing. The requests of a batch are one array. */
int aio_submit(aio_engine *engine, aio_request *requests, uint32_t count);

/* Waits for one request of a batch. AIO_ALL_OVER: so is every other one of the batch. */
int aio_wait(aio_engine *engine, aio_request *requests, uint32_t count, uint32_t index, uint32_t timeout_milliseconds);

/* The first failed request from that index on; `count` where there is none. For a batch that is all over. */
uint32_t aio_next_failure(const aio_request *requests, uint32_t count, uint32_t from);

/* Registered files and memory make the requests on them cheaper. A ticket is never given out twice, and a request with one
 * that is no longer valid fails with EBADF. Memory counts where a piece lies in one range; ranges are cut at 1 GiB.
 * It is known by address and length: unregistering takes what was registered by that pair, however many calls named it, and
 * nothing else that lies there. */
int aio_register_file(aio_engine *engine, int32_t fd, int32_t *ticket);
int aio_unregister_file(aio_engine *engine, int32_t ticket); /* -EBUSY: requests on it are not over */
int aio_register_memory(aio_engine *engine, uint64_t address, uint64_t num_bytes); /* all of it or, on error, none */
int aio_unregister_memory(aio_engine *engine, uint64_t address, uint64_t num_bytes);

void aio_close(aio_engine *engine); /* finishes what is submitted, fails what is queued with ECANCELED, joins; once */
void aio_free(aio_engine *engine);  /* after aio_close */

#endif
