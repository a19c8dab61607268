/* A program that talks to itself: a server and a client of one process. */
#include <d2tp.h>

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what) \
    do { \
        if (!(what)) { \
            perror(#what); \
            exit(1); \
        } \
    } while (0)

int main(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    char key[64], buf[64];
    socklen_t keylen = sizeof key;

    int listener = d2tp_socket(AF_INET, SOCK_STREAM, 0);
    CHECK(listener >= 0);
    CHECK(d2tp_bind(listener, (struct sockaddr *)&at, sizeof at) == 0);
    CHECK(d2tp_listen(listener, 5) == 0);
    CHECK(d2tp_getsockname(listener, (struct sockaddr *)&at, &len) == 0);
    CHECK(at.sin_port != 0);
    CHECK(d2tp_getsockopt(listener, SOL_D2TP, D2TP_SO_HOSTKEY, key, &keylen) == 0);
    CHECK(strlen(key) == 43);

    int client = d2tp_socket(AF_INET, SOCK_STREAM, 0);
    CHECK(d2tp_setsockopt(client, SOL_D2TP, D2TP_SO_PEERKEY, key, strlen(key)) == 0);
    CHECK(d2tp_connect(client, (struct sockaddr *)&at, sizeof at) == 0);

    struct sockaddr_in from;
    len = sizeof from;
    int server = d2tp_accept(listener, (struct sockaddr *)&from, &len);
    CHECK(server >= 0);
    CHECK(from.sin_family == AF_INET && from.sin_addr.s_addr == htonl(INADDR_LOOPBACK));

    CHECK(d2tp_send(client, "hello", 5, 0) == 5);
    CHECK(d2tp_recv(server, buf, sizeof buf, 0) == 5 && memcmp(buf, "hello", 5) == 0);
    CHECK(d2tp_flush(client, 5000) == 0);
    CHECK(d2tp_write(server, "and back", 8) == 8);
    CHECK(d2tp_shutdown(server, SHUT_WR) == 0);
    CHECK(d2tp_recv(client, buf, sizeof buf, MSG_WAITALL) == 8 && memcmp(buf, "and back", 8) == 0);

    struct d2tp_info info;
    len = sizeof info;
    CHECK(d2tp_getsockopt(client, SOL_D2TP, D2TP_SO_INFO, &info, &len) == 0);
    CHECK(len == sizeof info && info.di_version == 1 && info.di_size == sizeof info);
    CHECK(info.di_state == 2 && info.di_bytes_sent == 5 && info.di_bytes_acked == 5);
    CHECK(info.di_bytes_received == 8 && info.di_paths_count == 1);
    /* What it came to is known once it is over. */
    CHECK(d2tp_shutdown(client, SHUT_WR) == 0);
    CHECK(d2tp_recv(server, buf, sizeof buf, 0) == 0 && d2tp_recv(client, buf, sizeof buf, 0) == 0);
    for (int tries = 0; info.di_state != 3; tries++) {
        CHECK(tries < 6000 && poll(NULL, 0, 10) == 0);
        len = sizeof info;
        CHECK(d2tp_getsockopt(client, SOL_D2TP, D2TP_SO_INFO, &info, &len) == 0);
    }
    CHECK(info.di_bytes_sent == 5 && info.di_bytes_acked == 5 && info.di_bytes_received == 8);
    CHECK(d2tp_close(client) == 0 && d2tp_close(server) == 0 && d2tp_close(listener) == 0);

    /* Nobody listens: it is tried for as long as the program waits, which hears what may be wrong. */
    struct timeval wait = {.tv_usec = 300000};
    char why[200];
    at.sin_port = htons(9);
    client = d2tp_socket(AF_D2TP, SOCK_STREAM, 0);
    CHECK(d2tp_setsockopt(client, SOL_D2TP, D2TP_SO_PEERKEY, key, strlen(key)) == 0);
    CHECK(d2tp_setsockopt(client, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait) == 0);
    CHECK(d2tp_connect(client, (struct sockaddr *)&at, sizeof at) < 0 && errno == EINPROGRESS);
    len = sizeof why;
    CHECK(d2tp_getsockopt(client, SOL_D2TP, D2TP_SO_ERROR, why, &len) == 0);
    CHECK(strncmp(why, "not connected yet: ", 19) == 0);
    CHECK(d2tp_close(client) == 0);
    puts("ok");
    return 0;
}
