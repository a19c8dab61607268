/* refused PORT: connections without waiting to a port of this machine's where nobody listens, and what each way to ask
 * says of them. */
#include "bsd.h"

enum { ROUNDS = 20 };

static const char *name(long result) { return result >= 0 ? "ok" : strerrorname_np(errno); }

static int tried(const struct sockaddr_in *at, int *events) {
    struct pollfd one = {.events = POLLIN | POLLOUT};
    one.fd = BSD(socket)(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    NEED(one.fd >= 0);
    int begun = BSD(connect)(one.fd, (const struct sockaddr *)at, sizeof *at);
    /* The kernel's own may be refused before connect returns. */
    NEED(begun < 0 && (errno == EINPROGRESS || errno == ECONNREFUSED));
    NEED(BSD(poll)(&one, 1, -1) == 1);
    *events = one.revents & (POLLOUT | POLLERR | POLLHUP);
    return one.fd;
}

int main(int argc, char **argv) {
    struct sockaddr_in at = {.sin_family = AF_INET}, peer;
    char buf[4];
    int events;
    signal(SIGPIPE, SIG_IGN);
    if (argc != 2)
        return 2;
    at.sin_port = htons((uint16_t)atoi(argv[1]));
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int round = 0; round < ROUNDS; round++) {
        int fd = tried(&at, &events);
        int error = -1, plain = -1;
        socklen_t len = sizeof error;
        NEED(BSD(getsockopt)(fd, SOL_SOCKET, SO_ERROR, &error, &len) == 0);
        printf("error %s, events %x", strerrorname_np(error), events);
        printf(", send %s", name(BSD(send)(fd, "x", 1, NOSIGNAL)));
        BSD(close)(fd);

        fd = tried(&at, &events);
        printf(", send first %s", name(BSD(send)(fd, "x", 1, NOSIGNAL)));
        BSD(close)(fd);

        fd = tried(&at, &events);
        printf(", recv first %s", name(BSD(recv)(fd, buf, sizeof buf, 0)));
        BSD(close)(fd);

        fd = tried(&at, &events);
        printf(", again %s", name(BSD(connect)(fd, (struct sockaddr *)&at, sizeof at)));
        BSD(close)(fd);

        fd = tried(&at, &events);
        len = sizeof peer;
        printf(", peer %s", name(BSD(getpeername)(fd, (struct sockaddr *)&peer, &len)));
        BSD(close)(fd);

        /* Who asks the kernel hears that it is not connected, too. */
        fd = tried(&at, &events);
        len = sizeof plain;
        NEED(getsockopt(fd, SOL_SOCKET, SO_ERROR, &plain, &len) == 0);
        printf(", kernel %s", plain == 0 ? "ok" : "an error");
        printf(", write %s\n", name(write(fd, "x", 1)));
        BSD(close)(fd);
    }
    return 0;
}
