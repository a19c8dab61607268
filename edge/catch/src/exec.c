/*
 * Programs that are started by one with preload.c, and would call the kernel by themselves: the kernel is
 * made to hold their calls, as on the rung `notify` (notify.rs).
 *
 *   execve(file) ── file loads a C library ──▶ execve: preload.c is loaded again
 *                └─ it does not: filter? ────▶ cedos run: the filter
 *                                ◀─ seccomp ─▶ kernel: what hears it
 *                                fd ─────────▶ cedos run: it is heard ──▶ execve
 *
 * A filter is its thread's, which the program becomes. posix_spawn, whose child cannot be reached, is called
 * by a thread made for it, so that the child comes with the filter and the program stays without.
 *
 * Shells call execve in a child of vfork, which has its parent's memory: all here is on the stack.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "preload.h"

/* What calls a file makes when it is run, and who hears them. */
enum kind {
    /* preload.c, or execve says why it cannot be run. */
    HEARD,
    /* Nobody, unless the kernel holds them. */
    TO_BE_HELD,
    /* Nobody: it runs with other rights, which a filter would take away. */
    RAISED = 'p',
    /* Nobody: it is of another architecture, all of whose calls the filter refuses. */
    FOREIGN = 'a',
};

/* As far as execve(2) goes. */
#define INTERPRETERS_MAX 5
#define FIRST_LINE_BYTES_MAX 256

/* More has no program. */
#define HEADERS_MAX 256
#define NOTES_MAX 64

/* Whether a note is the Go linker's. Go programs may load the C library, and call the kernel past it. */
static int is_of_go(int fd, const ElfW(Phdr) * part)
{
    ElfW(Off) at = part->p_offset, end = at + part->p_filesz;
    for (int i = 0; i < NOTES_MAX && at + sizeof(ElfW(Nhdr)) < end; i++) {
        struct {
            ElfW(Nhdr) head;
            char name[4];
        } note;
        if (pread(fd, &note, sizeof note, (off_t)at) != sizeof note)
            return 0;
        if (note.head.n_namesz == sizeof note.name && memcmp(note.name, "Go\0", sizeof note.name) == 0)
            return 1;
        at += sizeof note.head + ((note.head.n_namesz + 3ul) & ~3ul) + ((note.head.n_descsz + 3ul) & ~3ul);
    }
    return 0;
}

/* This library's own header: programs of our architecture have the same. */
extern const ElfW(Ehdr) __ehdr_start __attribute__((visibility("hidden")));

static enum kind kind_of_elf(int fd, const ElfW(Ehdr) * head)
{
    if (head->e_ident[EI_CLASS] != __ehdr_start.e_ident[EI_CLASS] ||
        head->e_ident[EI_DATA] != __ehdr_start.e_ident[EI_DATA] ||
        head->e_machine != __ehdr_start.e_machine)
        return FOREIGN;
    int loads = 0;
    for (int i = 0; i < head->e_phnum && i < HEADERS_MAX; i++) {
        ElfW(Phdr) part;
        off_t at = (off_t)(head->e_phoff + (ElfW(Off))i * sizeof part);
        if (head->e_phentsize != sizeof part || pread(fd, &part, sizeof part, at) != sizeof part)
            return HEARD;
        if (part.p_type == PT_INTERP)
            loads = 1;
        else if (part.p_type == PT_NOTE && is_of_go(fd, &part))
            return TO_BE_HELD;
    }
    return loads ? HEARD : TO_BE_HELD;
}

/* `#!/bin/sh -e` becomes `/bin/sh`; NULL for no script. */
static char *interpreter(char *line)
{
    if (line[0] != '#' || line[1] != '!')
        return NULL;
    line += 2;
    line += strspn(line, " \t");
    line[strcspn(line, " \t\n")] = 0;
    return *line ? line : NULL;
}

/* executable.rs sees the same in a file. */
static enum kind kind_of(int folder, const char *path)
{
    union {
        ElfW(Ehdr) elf;
        char line[FIRST_LINE_BYTES_MAX + 1];
    } head;
    int before = errno;
    enum kind kind = HEARD;
    for (int i = 0; i < INTERPRETERS_MAX && path; i++) {
        struct stat file;
        if (fstatat(folder, path, &file, 0) < 0 || !S_ISREG(file.st_mode) || !(file.st_mode & 0111))
            break;
        int fd = openat(folder, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (fd < 0)
            break;
        ssize_t n = pread(fd, head.line, FIRST_LINE_BYTES_MAX, 0);
        head.line[n > 0 ? n : 0] = 0;
        path = NULL;
        if (n >= (ssize_t)sizeof head.elf && memcmp(head.line, ELFMAG, SELFMAG) == 0) {
            kind = kind_of_elf(fd, &head.elf);
            if (kind == TO_BE_HELD && geteuid() != 0 &&
                (file.st_mode & (S_ISUID | S_ISGID) ||
                 fgetxattr(fd, "security.capability", NULL, 0) > 0))
                kind = RAISED;
        } else {
            path = interpreter(head.line);
            folder = AT_FDCWD;
        }
        close(fd);
    }
    errno = before;
    return kind;
}

/* Whether this thread has the filter: it has an answer of its own for this, the kernel another. */
static int is_held(void)
{
    return syscall(SYS_sendto, -1, NULL, 0, MSG_FASTOPEN, NULL, 0) < 0 && errno == EOPNOTSUPP;
}

/* linux/seccomp.h of Linux 5.19: signals wait until the call is answered, so that none is carried out twice. */
#define WAIT_KILLABLE (1ul << 5)

/* Has the kernel hold the calls of what this thread becomes, and of its children. 0, or an errno. */
static int hold(void)
{
    if (is_held())
        return 0;
    struct sock_filter filter[REPLY_TEXT_BYTES_MAX / sizeof(struct sock_filter)];
    size_t bytes = sizeof filter;
    int why = ask('f', "", 0, -1, filter, &bytes);
    if (why)
        return why;
    /* Connected before the filter is there, or that would hold it. */
    int question = ask_socket();
    if (question < 0)
        return ENETUNREACH;
    struct sock_fprog whole = { (unsigned short)(bytes / sizeof *filter), filter };
    long fd = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (fd == 0) {
        unsigned long flags = SECCOMP_FILTER_FLAG_NEW_LISTENER;
        fd = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags | WAIT_KILLABLE, &whole);
        if (fd < 0)
            fd = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &whole);
    }
    if (fd < 0) {
        why = errno;
        close(question);
        return why;
    }
    why = ask_on(question, 'h', "", 0, (int)fd, NULL, NULL);
    close((int)fd);
    return why;
}

/* ask.rs knows the letters of these, and those of enum kind. */
#define NOT_HELD 's'
#define NOT_HEARD 'h'

/* Has `cedos run` say that this program is not caught, or says it. */
static void miss(char because, int why, const char *path)
{
    char said[QUESTION_BYTES_MAX - 1];
    int32_t number = why;
    size_t head = 1 + sizeof number, len = strlen(path);
    if (len > sizeof said - head)
        len = sizeof said - head;
    said[0] = because;
    memcpy(said + 1, &number, sizeof number);
    memcpy(said + head, path, len);
    if (ask('u', said, head + len, -1, NULL, NULL) == 0)
        return;
    static const char before[] = "cedos run: it does not answer (has it ended?), so this program is not "
                                 "caught; start it by `cedos run --rung tun -- ...`: ";
    struct iovec text[] = { { (void *)before, sizeof before - 1 }, { (void *)path, strlen(path) }, { "\n", 1 } };
    ssize_t written = writev(STDERR_FILENO, text, sizeof text / sizeof *text);
    (void)written;
}

static void hold_or_miss(const char *path)
{
    int before = errno, why = hold();
    if (why)
        miss(is_held() ? NOT_HEARD : NOT_HELD, why, path);
    errno = before;
}

/* All that is to be done before this thread becomes what the file is. */
static void before_exec(int folder, const char *path)
{
    enum kind kind = kind_of(folder, path);
    if (kind == TO_BE_HELD)
        hold_or_miss(path);
    else if (kind != HEARD)
        miss((char)kind, 0, path);
}

OURS int execve(const char *path, char *const words[], char *const environment[])
{
    before_exec(AT_FDCWD, path);
    return (int)syscall(SYS_execve, path, words, environment);
}

OURS int execv(const char *path, char *const words[])
{
    return execve(path, words, environ);
}

/* Room for a descriptor's path. */
#define DESCRIPTOR_PATH_BYTES 32

OURS int execveat(int folder, const char *path, char *const words[], char *const environment[],
                  int flags)
{
    char whole[DESCRIPTOR_PATH_BYTES];
    if (*path == 0 && flags & AT_EMPTY_PATH) {
        snprintf(whole, sizeof whole, "/proc/self/fd/%d", folder);
        before_exec(AT_FDCWD, whole);
    } else {
        before_exec(folder, path);
    }
    return (int)syscall(SYS_execveat, folder, path, words, environment, flags);
}

OURS int fexecve(int fd, char *const words[], char *const environment[])
{
    return execveat(fd, "", words, environment, AT_EMPTY_PATH);
}

/* The next file that a name may stand for, as a shell finds it: `folders` is what is left of PATH, NULL at
 * its end. */
static int next_file(const char **folders, const char *name, char file[PATH_MAX])
{
    while (*folders) {
        const char *folder = *folders;
        size_t len = strcspn(folder, ":");
        *folders = folder[len] ? folder + len + 1 : NULL;
        if (len + 1 + strlen(name) + 1 > PATH_MAX)
            continue;
        memcpy(file, folder, len);
        if (len > 0)
            file[len++] = '/';
        strcpy(file + len, name);
        return 1;
    }
    return 0;
}

static const char *folders_of_programs(void)
{
    const char *folders = variable("PATH");
    return folders ? folders : "/bin:/usr/bin";
}

/* As execvp(3) does: what has no header of any kind is a script of the shell's. */
static void exec_or_shell(const char *path, char *const words[], char *const environment[])
{
    execve(path, words, environment);
    if (errno != ENOEXEC)
        return;
    size_t n = 0;
    while (words[n])
        n++;
    char *shell[n + 3];
    shell[0] = "/bin/sh";
    shell[1] = (char *)path;
    for (size_t i = 1; i < n; i++)
        shell[i + 1] = words[i];
    shell[n > 0 ? n + 1 : 2] = NULL;
    execve(shell[0], shell, environment);
}

OURS int execvpe(const char *name, char *const words[], char *const environment[])
{
    if (strchr(name, '/')) {
        exec_or_shell(name, words, environment);
        return -1;
    }
    int denied = 0;
    char file[PATH_MAX];
    const char *folders = folders_of_programs();
    errno = ENOENT;
    while (*name && next_file(&folders, name, file)) {
        exec_or_shell(file, words, environment);
        if (errno == EACCES)
            denied = 1;
        else if (errno != ENOENT && errno != ENOTDIR && errno != ESTALE && errno != ENODEV &&
                 errno != ETIMEDOUT)
            return -1;
    }
    if (denied)
        errno = EACCES;
    return -1;
}

OURS int execvp(const char *name, char *const words[])
{
    return execvpe(name, words, environ);
}

/* How many words there are up to NULL, one being said already. */
static size_t count(va_list *more)
{
    size_t n = 1;
    while (va_arg(*more, char *))
        n++;
    return n;
}

static void take(char **words, size_t n, const char *first, va_list *more)
{
    words[0] = (char *)first;
    for (size_t i = 1; i <= n; i++)
        words[i] = va_arg(*more, char *);
}

OURS int execl(const char *path, const char *first, ...)
{
    va_list more;
    va_start(more, first);
    size_t n = count(&more);
    va_end(more);
    char *words[n + 1];
    va_start(more, first);
    take(words, n, first, &more);
    va_end(more);
    return execve(path, words, environ);
}

OURS int execlp(const char *name, const char *first, ...)
{
    va_list more;
    va_start(more, first);
    size_t n = count(&more);
    va_end(more);
    char *words[n + 1];
    va_start(more, first);
    take(words, n, first, &more);
    va_end(more);
    return execvpe(name, words, environ);
}

OURS int execle(const char *path, const char *first, ...)
{
    va_list more;
    va_start(more, first);
    size_t n = count(&more);
    va_end(more);
    char *words[n + 1];
    va_start(more, first);
    take(words, n, first, &more);
    char *const *environment = va_arg(more, char *const *);
    va_end(more);
    return execve(path, words, environment);
}

typedef int spawn_call(pid_t *, const char *, const posix_spawn_file_actions_t *,
                       const posix_spawnattr_t *, char *const[], char *const[]);

struct spawn {
    spawn_call *real;
    pid_t *pid;
    const char *name, *file;
    const posix_spawn_file_actions_t *actions;
    const posix_spawnattr_t *how;
    char *const *words, *const *environment;
    int done;
};

static void *spawn_held(void *given)
{
    struct spawn *it = given;
    hold_or_miss(it->file);
    it->done = it->real(it->pid, it->name, it->actions, it->how, it->words, it->environment);
    return NULL;
}

/* By a thread that has the filter; the child has the signals that this thread lets through. */
static int spawn_by_thread(struct spawn *it)
{
    posix_spawnattr_t how;
    short flags = 0;
    if (it->how)
        how = *it->how;
    else
        posix_spawnattr_init(&how);
    posix_spawnattr_getflags(&how, &flags);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (!(flags & POSIX_SPAWN_SETSIGMASK)) {
        posix_spawnattr_setflags(&how, (short)(flags | POSIX_SPAWN_SETSIGMASK));
        posix_spawnattr_setsigmask(&how, &before);
    }
    it->how = &how;
    pthread_t thread;
    int failed = pthread_create(&thread, NULL, spawn_held, it);
    if (failed) {
        miss(NOT_HELD, failed, it->file);
        it->done = it->real(it->pid, it->name, it->actions, it->how, it->words, it->environment);
    } else {
        pthread_join(thread, NULL);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return it->done;
}

static int spawn(struct spawn it)
{
    if (it.real == NULL)
        return ENOSYS;
    enum kind kind = it.file ? kind_of(AT_FDCWD, it.file) : HEARD;
    if (kind == TO_BE_HELD)
        return spawn_by_thread(&it);
    if (kind != HEARD)
        miss((char)kind, 0, it.file);
    return it.real(it.pid, it.name, it.actions, it.how, it.words, it.environment);
}

OURS int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                     const posix_spawnattr_t *how, char *const words[], char *const environment[])
{
    spawn_call *real = (spawn_call *)dlsym(RTLD_NEXT, "posix_spawn");
    return spawn((struct spawn){ real, pid, path, path, actions, how, words, environment, 0 });
}

OURS int posix_spawnp(pid_t *pid, const char *name, const posix_spawn_file_actions_t *actions,
                      const posix_spawnattr_t *how, char *const words[], char *const environment[])
{
    spawn_call *real = (spawn_call *)dlsym(RTLD_NEXT, "posix_spawnp");
    char file[PATH_MAX];
    const char *folders = folders_of_programs(), *found = strchr(name, '/') ? name : NULL;
    while (!found && next_file(&folders, name, file))
        if (access(file, X_OK) == 0)
            found = file;
    return spawn((struct spawn){ real, pid, name, found, actions, how, words, environment, 0 });
}
