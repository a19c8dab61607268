/*
 * Puts a socket in the place of a program's own, also in the epoll sets that have it. An entry of a set is of
 * a socket, not of a number: it is lost when the number becomes another socket.
 *
 *   /proc/thread-self/fd/N      ── "anon_inode:[eventpoll]" ───────▶ N is an epoll set
 *   /proc/thread-self/fdinfo/N  ── "tfd: FD events: HEX data: HEX" ─▶ its entry of FD (proc_pid_fdinfo(5))
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "preload.h"

/* Sets that a socket is in: one is usual. */
#define SETS_MAX 8

struct entry {
    int set;
    struct epoll_event event;
};

struct entries {
    size_t count;
    struct entry all[SETS_MAX];
};

/* One line of a set's information, if it is of this descriptor. */
static void read_line(const char *line, int set, int fd, struct entries *entries)
{
    static const char target[] = "tfd:";
    const char *events = strstr(line, "events:"), *data = strstr(line, "data:");
    if (strncmp(line, target, sizeof target - 1) != 0 || events == NULL || data == NULL)
        return;
    if (strtol(line + sizeof target - 1, NULL, 10) != fd || entries->count == SETS_MAX)
        return;
    struct entry *entry = &entries->all[entries->count++];
    entry->set = set;
    entry->event.events = (uint32_t)strtoul(events + strlen("events:"), NULL, 16);
    entry->event.data.u64 = strtoull(data + strlen("data:"), NULL, 16);
}

static void read_set(int folder, const char *number, int fd, struct entries *entries)
{
    int info = (int)syscall(SYS_openat, folder, number, O_RDONLY | O_CLOEXEC);
    if (info < 0)
        return;
    char bytes[1024];
    size_t has = 0;
    ssize_t n;
    /* Lines are of some hundred bytes at most. */
    while ((n = syscall(SYS_read, info, bytes + has, sizeof bytes - 1 - has)) > 0) {
        has += (size_t)n;
        bytes[has] = 0;
        char *line = bytes, *end;
        while ((end = strchr(line, '\n')) != NULL) {
            *end = 0;
            read_line(line, atoi(number), fd, entries);
            line = end + 1;
        }
        has -= (size_t)(line - bytes);
        memmove(bytes, line, has);
    }
    close(info);
}

static void find_entries(int fd, struct entries *entries)
{
    static const char wanted[] = "anon_inode:[eventpoll]";
    int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
    int fds = (int)syscall(SYS_openat, AT_FDCWD, "/proc/thread-self/fd", flags);
    int infos = (int)syscall(SYS_openat, AT_FDCWD, "/proc/thread-self/fdinfo", flags);
    _Alignas(struct dirent64) char names[2048];
    ssize_t n = 0;
    while (fds >= 0 && infos >= 0 && (n = syscall(SYS_getdents64, fds, names, sizeof names)) > 0) {
        const struct dirent64 *name;
        for (ssize_t at = 0; at < n; at += name->d_reclen) {
            name = (const struct dirent64 *)(names + at);
            char what[sizeof wanted];
            ssize_t len = readlinkat(fds, name->d_name, what, sizeof what);
            if (len == sizeof wanted - 1 && memcmp(what, wanted, (size_t)len) == 0)
                read_set(infos, name->d_name, fd, entries);
        }
    }
    if (fds >= 0)
        close(fds);
    if (infos >= 0)
        close(infos);
}

int put_in_place(int given, int fd)
{
    int flags = fcntl(fd, F_GETFD), failed = 0;
    if (flags < 0)
        return errno;
    struct entries entries = { 0 };
    find_entries(fd, &entries);
    for (size_t i = 0; i < entries.count; i++)
        epoll_ctl(entries.all[i].set, EPOLL_CTL_DEL, fd, NULL);
    if (dup3(given, fd, flags & FD_CLOEXEC ? O_CLOEXEC : 0) < 0)
        failed = errno;
    /* Where it failed the old one comes back. */
    for (size_t i = 0; i < entries.count; i++)
        epoll_ctl(entries.all[i].set, EPOLL_CTL_ADD, fd, &entries.all[i].event);
    return failed;
}
