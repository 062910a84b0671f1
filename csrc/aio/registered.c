/* The ring's tables of registered files and memory, which save the kernel a look-up and the pinning of pages for each piece.
 *
 * A ticket names a place in the table and who has it: when the place gets a new file its ticket grows by the table's size, so
 * that an old ticket never reaches another file. Memory is looked up when a piece is issued, so unregistering it at any time
 * only makes later pieces plain; the kernel itself holds on to what pieces in flight use.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#define MAX_RANGE_BYTES (1ULL << 30)

/* Functions of liburing that update a table return how many entries they have changed. */
static int code_of(int updated)
{
    return updated < 0 ? updated : updated == 1 ? 0 : -EIO;
}

static int make_file_table(aio_engine *engine)
{
    registered_tables *tables = &engine->registered;
    if (tables->has_files)
        return 0;
    int empty[AIO_MAX_FILES];
    memset(empty, -1, sizeof(empty)); /* no file; older than the call for a sparse table */
    int code = io_uring_register_files(&engine->ring, empty, AIO_MAX_FILES);
    for (int32_t i = 0; i < AIO_MAX_FILES && !code; i++)
        tables->files[i].ticket = i - AIO_MAX_FILES;
    tables->has_files = !code;
    return code;
}

void let_go_of_files(aio_engine *engine)
{
    if (engine->registered.has_files)
        io_uring_unregister_files(&engine->ring);
}

static int make_range_table(aio_engine *engine)
{
    registered_tables *tables = &engine->registered;
    int code = tables->has_ranges ? 0 : io_uring_register_buffers_sparse(&engine->ring, AIO_MAX_RANGES);
    tables->has_ranges = !code;
    return code;
}

registered_file *file_of_ticket(aio_engine *engine, int32_t ticket)
{
    registered_file *file = &engine->registered.files[(uint32_t)ticket % AIO_MAX_FILES];
    return ticket >= 0 && file->used && file->ticket == ticket ? file : NULL;
}

int run_register_file(aio_engine *engine, command *command)
{
    int code = command->fd < 0 ? -EBADF : make_file_table(engine); /* to the kernel -1 is the order to empty a place */
    if (code)
        return code;
    registered_tables *tables = &engine->registered;
    uint32_t place = 0;
    while (place < AIO_MAX_FILES && tables->files[place].used)
        place++;
    if (place == AIO_MAX_FILES)
        return -ENFILE;
    code = code_of(io_uring_register_files_update(&engine->ring, place, &command->fd, 1));
    if (code)
        return code;
    registered_file *file = &tables->files[place];
    file->used = true;
    file->ticket += AIO_MAX_FILES;
    command->ticket = file->ticket;
    return 0;
}

int run_unregister_file(aio_engine *engine, command *command)
{
    registered_file *file = file_of_ticket(engine, command->ticket);
    if (!file)
        return -EBADF;
    if (file->num_users)
        return -EBUSY;
    file->used = false;
    const int none = -1;
    return code_of(io_uring_register_files_update(&engine->ring, (uint32_t)(file - engine->registered.files), &none, 1));
}

static int update_range(aio_engine *engine, uint32_t place, uint64_t begin, uint64_t end)
{
    struct iovec memory = {.iov_base = (void *)(uintptr_t)begin, .iov_len = end - begin};
    return code_of(io_uring_register_buffers_update_tag(&engine->ring, place, &memory, NULL, 1));
}

static int add_range(aio_engine *engine, registered_range range)
{
    registered_tables *tables = &engine->registered;
    uint32_t place = 0;
    while (place < tables->num_ranges && tables->ranges[place].end)
        place++;
    if (place == AIO_MAX_RANGES)
        return -ENOSPC;
    int code = update_range(engine, place, range.begin, range.end);
    if (code)
        return code;
    tables->ranges[place] = range;
    if (place == tables->num_ranges)
        tables->num_ranges++;
    return 0;
}

static bool is_of_call(const registered_range *range, uint64_t begin, uint64_t end)
{
    return range->end && range->call_begin == begin && range->call_end == end;
}

static bool has_ranges_of(const registered_tables *tables, uint64_t begin, uint64_t end)
{
    for (uint32_t place = 0; place < tables->num_ranges; place++)
        if (is_of_call(&tables->ranges[place], begin, end))
            return true;
    return false;
}

/* Frees what a call with this pair has registered, and nothing else that lies there. */
static void remove_ranges(aio_engine *engine, uint64_t begin, uint64_t end)
{
    registered_tables *tables = &engine->registered;
    for (uint32_t place = 0; place < tables->num_ranges; place++) {
        if (is_of_call(&tables->ranges[place], begin, end)) {
            tables->ranges[place] = (registered_range){0};
            update_range(engine, place, 0, 0); /* cannot fail for a reason that leaves anything to do */
        }
    }
}

int run_register_memory(aio_engine *engine, command *command)
{
    uint64_t begin = command->address, end = begin + command->num_bytes;
    if (!begin || end <= begin)
        return -EINVAL;
    if (has_ranges_of(&engine->registered, begin, end))
        return 0; /* registered already, by the same pair */
    int code = make_range_table(engine);
    for (uint64_t at = begin; at < end && !code; at += MAX_RANGE_BYTES) {
        uint64_t part_end = end - at < MAX_RANGE_BYTES ? end : at + MAX_RANGE_BYTES;
        code = add_range(engine, (registered_range){at, part_end, begin, end});
    }
    if (code)
        remove_ranges(engine, begin, end);
    return code;
}

int run_unregister_memory(aio_engine *engine, command *command)
{
    remove_ranges(engine, command->address, command->address + command->num_bytes);
    return 0;
}

int index_of_range(const aio_engine *engine, uint64_t address, uint32_t length)
{
    const registered_tables *tables = &engine->registered;
    for (uint32_t place = 0; place < tables->num_ranges; place++)
        if (tables->ranges[place].begin <= address && address + length <= tables->ranges[place].end)
            return (int)place;
    return -1;
}
