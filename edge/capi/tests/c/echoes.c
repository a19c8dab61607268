/* A D2TP server that says everything back, to as many as come. Says its address first. */
#include "bsd.h"

static void *echo(void *of) {
    int fd = (int)(intptr_t)of;
    char buf[65536];
    ssize_t n;
    while ((n = d2tp_recv(fd, buf, sizeof buf, 0)) > 0) {
        for (ssize_t at = 0; at < n;) {
            ssize_t sent = d2tp_send(fd, buf + at, n - at, 0);
            if (sent < 0)
                break;
            at += sent;
        }
    }
    d2tp_close(fd);
    return NULL;
}

int main(void) {
    struct sockaddr_in at;
    char key[64];
    socklen_t len = sizeof key;
    int ear = listener(50, &at), fd;
    NEED(d2tp_getsockopt(ear, SOL_D2TP, D2TP_SO_HOSTKEY, key, &len) == 0);
    printf("d2tp://127.0.0.1:%d/%s\n", ntohs(at.sin_port), key);
    fflush(stdout);
    while ((fd = d2tp_accept(ear, NULL, NULL)) >= 0) {
        pthread_t one;
        NEED(pthread_create(&one, NULL, echo, (void *)(intptr_t)fd) == 0);
        pthread_detach(one);
    }
    return 1;
}
