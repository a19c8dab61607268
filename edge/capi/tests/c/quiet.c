/* What the library does not do: no thread before it is used, no descriptor taken, no signal. */
#include "bsd.h"

#include <dirent.h>

static int threads(void) {
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    NEED(tasks);
    for (struct dirent *one; (one = readdir(tasks));)
        count += one->d_name[0] != '.';
    closedir(tasks);
    return count;
}

/* Whether every thread but this one blocks the signal. */
static int others_block(int number) {
    DIR *tasks = opendir("/proc/self/task");
    int all = 1;
    NEED(tasks);
    for (struct dirent *one; (one = readdir(tasks));) {
        char path[300], line[300];
        if (one->d_name[0] == '.' || atoi(one->d_name) == getpid())
            continue;
        snprintf(path, sizeof path, "/proc/self/task/%s/status", one->d_name);
        FILE *status = fopen(path, "r");
        NEED(status);
        while (fgets(line, sizeof line, status)) {
            unsigned long long blocked;
            if (sscanf(line, "SigBlk: %llx", &blocked) == 1)
                all &= (blocked >> (number - 1)) & 1;
        }
        fclose(status);
    }
    closedir(tasks);
    return all;
}

int main(void) {
    struct sockaddr_in at;
    char buf[8];
    int c, s;
    NEED(threads() == 1);
    NEED(d2tp_network_changed() == 0 && d2tp_poll(NULL, 0, 0) == 0);
    NEED(threads() == 1);

    int lowest = dup(0);
    close(lowest);
    int ear = listener(5, &at);
    NEED(ear == lowest);
    NEED(threads() > 1 && others_block(SIGTERM) && others_block(SIGINT));
    c = client_socket(0);
    NEED(c == lowest + 1);
    NEED(d2tp_connect(c, (struct sockaddr *)&at, sizeof at) == 0);
    s = d2tp_accept(ear, NULL, NULL);
    NEED(s == lowest + 2);
    /* As programs do before they start another. */
    for (int fd = lowest + 3; fd < 1024; fd++)
        close(fd);
    send_all(c, "alive", 5);
    NEED(d2tp_recv(s, buf, 5, MSG_WAITALL) == 5);

    /* SIGPIPE would end us. */
    NEED(d2tp_close(s) == 0);
    while (d2tp_send(c, "x", 1, 0) == 1)
        d2tp_poll(NULL, 0, 5);
    NEED(errno == EPIPE || errno == ECONNRESET);
    NEED(d2tp_write(c, "x", 1) == -1 && errno == EPIPE);
    struct iovec one = {"x", 1};
    NEED(d2tp_writev(c, &one, 1) == -1 && errno == EPIPE);

    NEED(d2tp_dlock_release() == -1 && errno == EINVAL);
    NEED(d2tp_dlock_acquire() == 1 && d2tp_dlock_acquire() == 2);
    NEED(d2tp_dlock_release() == 1 && d2tp_dlock_release() == 0);
    puts("ok");
    return 0;
}
