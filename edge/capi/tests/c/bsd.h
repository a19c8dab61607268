/* One program text for two kinds of sockets: the kernel's TCP, or D2TP's with -DWITH_D2TP. */
#ifndef BSD_H
#define BSD_H

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef WITH_D2TP
#include <d2tp.h>
#define BSD(call) d2tp_##call
#define NOSIGNAL 0
#else
#define BSD(call) call
/* Which every call of d2tp.h implies. */
#define NOSIGNAL MSG_NOSIGNAL
#endif

static inline int out_of_order(const char *what, int line) {
    fprintf(stderr, "line %d: %s: %s\n", line, what, strerror(errno));
    exit(1);
}
/* What a case needs to begin at all. */
#define NEED(what) ((what) ? 0 : out_of_order(#what, __LINE__))

/* The key that D2TP servers of this process have. */
static inline void know_peer(int fd) {
#ifdef WITH_D2TP
    char key[64];
    socklen_t len = sizeof key;
    NEED(d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_HOSTKEY, key, &len) == 0);
    NEED(d2tp_setsockopt(fd, SOL_D2TP, D2TP_SO_PEERKEY, key, strlen(key)) == 0);
#else
    (void)fd;
#endif
}

static inline int client_socket(int flags) {
    int fd = BSD(socket)(AF_INET, SOCK_STREAM | flags, 0);
    NEED(fd >= 0);
    know_peer(fd);
    return fd;
}

static inline struct sockaddr_in loopback(int port) {
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons(port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    return at;
}

/* A listener on a port of the system's choice. */
static inline int listener(int backlog, struct sockaddr_in *at) {
    socklen_t len = sizeof *at;
    int one = 1;
    int fd = BSD(socket)(AF_INET, SOCK_STREAM, 0);
    NEED(fd >= 0);
    NEED(BSD(setsockopt)(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
    *at = loopback(0);
    NEED(BSD(bind)(fd, (struct sockaddr *)at, sizeof *at) == 0);
    NEED(BSD(listen)(fd, backlog) == 0);
    NEED(BSD(getsockname)(fd, (struct sockaddr *)at, &len) == 0);
    return fd;
}

/* Two ends of a connection. */
static inline void connection(int *client, int *server) {
    struct sockaddr_in at;
    int ear = listener(5, &at);
    *client = client_socket(0);
    NEED(BSD(connect)(*client, (struct sockaddr *)&at, sizeof at) == 0);
    *server = BSD(accept)(ear, NULL, NULL);
    NEED(*server >= 0);
    NEED(BSD(close)(ear) == 0);
}

/* Waits for any of `events`, for as long as it takes; the watchdog ends what takes too long. */
static inline int until(int fd, int events) {
    struct pollfd one = {.fd = fd, .events = events};
    NEED(BSD(poll)(&one, 1, -1) == 1);
    return one.revents;
}

static inline void send_all(int fd, const void *bytes, size_t len) {
    const char *at = bytes;
    while (len > 0) {
        ssize_t n = BSD(send)(fd, at, len, NOSIGNAL);
        NEED(n > 0);
        at += n;
        len -= n;
    }
}

#endif
