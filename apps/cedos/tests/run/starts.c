/* A program that starts another, in each way there is: starts WAY PROGRAM WORDS... Its exit code is the
 * other's. `bare`: with an empty environment; `unheld`: where the kernel holds no calls;
 * `script`: as a script's interpreter, whose first word is the script. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <spawn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int code(int status)
{
    return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
}

/* From now on seccomp(2) is a call that this kernel does not know. */
static void unheld(void)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_seccomp, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog whole = { sizeof filter / sizeof *filter, filter };
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &whole);
}

/* As make: in a child that has this one's memory. */
static int become(const char *way, char **words)
{
    char *none[] = { NULL };
    int fd = open(words[0], O_RDONLY | O_CLOEXEC);
    if (strcmp(way, "bare") == 0)
        clearenv();
    pid_t child = vfork();
    if (child == 0) {
        char **w = words;
        if (strcmp(way, "execve") == 0)
            execve(w[0], w, environ);
        else if (strcmp(way, "bare") == 0)
            execve(w[0], w, none);
        else if (strcmp(way, "execv") == 0)
            execv(w[0], w);
        else if (strcmp(way, "execvp") == 0)
            execvp(w[0], w);
        else if (strcmp(way, "execvpe") == 0)
            execvpe(w[0], w, environ);
        else if (strcmp(way, "execl") == 0)
            execl(w[0], w[0], w[1], w[2], w[3], w[4], NULL);
        else if (strcmp(way, "execlp") == 0)
            execlp(w[0], w[0], w[1], w[2], w[3], w[4], NULL);
        else if (strcmp(way, "execle") == 0)
            execle(w[0], w[0], w[1], w[2], w[3], w[4], NULL, environ);
        else if (strcmp(way, "fexecve") == 0)
            fexecve(fd, w, environ);
        else if (strcmp(way, "execveat") == 0)
            execveat(AT_FDCWD, w[0], w, environ, 0);
        _exit(98);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return code(status);
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    const char *way = argv[1];
    char **words = argv + 2;
    int status = 0;
    if (strcmp(way, "unheld") == 0) {
        unheld();
        way = "execve";
    }
    if (strcmp(way, "script") == 0) {
        words++;
        way = "execve";
    }
    if (strncmp(way, "spawn", 5) == 0) {
        pid_t child;
        int failed = strcmp(way, "spawnp") == 0
                         ? posix_spawnp(&child, words[0], NULL, NULL, words, environ)
                         : posix_spawn(&child, words[0], NULL, NULL, words, environ);
        if (failed)
            return 97;
        waitpid(child, &status, 0);
        return code(status);
    }
    if (strcmp(way, "system") && strcmp(way, "popen"))
        return become(way, words);
    char line[4096] = "";
    for (int i = 0; words[i]; i++)
        snprintf(line + strlen(line), sizeof line - strlen(line), "'%s' ", words[i]);
    if (way[0] == 's')
        return code(system(line));
    FILE *said = popen(line, "r");
    size_t n;
    while ((n = fread(line, 1, sizeof line, said)) > 0)
        fwrite(line, 1, n, stdout);
    return code(pclose(said));
}
