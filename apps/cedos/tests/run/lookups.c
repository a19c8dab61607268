/*
 * Looks up a name in one way, and prints the address: lookups WAY NAME SERVER.
 *
 * What is asked by hand is taken as a strict resolver takes it: from the address that was asked alone.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <arpa/nameser.h>
#include <fcntl.h>
#include <netdb.h>
#include <resolv.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { ROOM = 512, PATIENCE_MS = 5000, HEAD = 12 };

/* What is said of the socket in the epoll set. */
static const uint64_t EVENT_DATA = 0xfedcba9876543210;

static int fail(const char *why)
{
    perror(why);
    return 1;
}

static int print_four(const void *ip)
{
    char text[INET_ADDRSTRLEN];
    puts(inet_ntop(AF_INET, ip, text, sizeof text));
    return 0;
}

/* The address at the end of an answer with one record of type A. */
static int print_answer(const unsigned char *answer, ssize_t n)
{
    if (n < HEAD + 4 || answer[7] != 1)
        return fputs("no answer\n", stderr), 1;
    return print_four(answer + n - 4);
}

static size_t question_for(const char *name, unsigned char *into)
{
    static const unsigned char head[HEAD] = { 0x12, 0x34, 1, 0, 0, 1 };
    memcpy(into, head, HEAD);
    unsigned char *at = into + HEAD;
    while (*name) {
        size_t len = strcspn(name, ".");
        *at++ = (unsigned char)len;
        memcpy(at, name, len);
        at += len;
        name += len + (name[len] == '.');
    }
    static const unsigned char tail[] = { 0, 0, ns_t_a, 0, ns_c_in };
    memcpy(at, tail, sizeof tail);
    return (size_t)(at - into) + sizeof tail;
}

static int by_datagram(const char *way, const unsigned char *question, size_t len,
                       const struct sockaddr *server, socklen_t size)
{
    int fd = socket(server->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return fail("socket");
    /* As asynchronous resolvers do: the socket is waited for before it is used. */
    int set = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = { .events = EPOLLIN, .data.u64 = EVENT_DATA };
    if (set < 0 || epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) < 0)
        return fail("epoll_ctl");
    ssize_t sent = -1;
    struct iovec io = { (void *)question, len };
    struct msghdr message = { .msg_name = (void *)server, .msg_namelen = size, .msg_iov = &io, .msg_iovlen = 1 };
    if (strcmp(way, "connect") == 0) {
        if (connect(fd, server, size) < 0)
            return fail("connect");
        struct sockaddr_storage peer = { 0 };
        socklen_t room = sizeof peer;
        if (getpeername(fd, (struct sockaddr *)&peer, &room) < 0 || memcmp(&peer, server, 8) != 0)
            return fputs("another peer\n", stderr), 1;
        sent = send(fd, question, len, 0);
    } else if (strcmp(way, "sendto") == 0) {
        /* A second server is asked by the same socket; both answer. */
        struct sockaddr_in other = { .sin_family = AF_INET, .sin_port = htons(53) };
        inet_pton(AF_INET, "203.0.113.53", &other.sin_addr);
        sent = sendto(fd, question, len, 0, server, size);
        if (server->sa_family == AF_INET && sent >= 0)
            sent = sendto(fd, question, len, 0, (struct sockaddr *)&other, sizeof other);
    } else if (strcmp(way, "sendmsg") == 0) {
        sent = sendmsg(fd, &message, 0);
    } else if (strcmp(way, "sendmmsg") == 0) {
        struct mmsghdr one = { .msg_hdr = message };
        sent = sendmmsg(fd, &one, 1, 0);
    }
    if (sent < 0)
        return fail(way);
    unsigned char answer[ROOM];
    struct sockaddr_storage from = { 0 };
    socklen_t room = sizeof from;
    struct epoll_event happened = { 0 };
    if (epoll_wait(set, &happened, 1, PATIENCE_MS) != 1 || happened.data.u64 != EVENT_DATA)
        return fputs("nobody answers\n", stderr), 1;
    ssize_t n = recvfrom(fd, answer, sizeof answer, 0, (struct sockaddr *)&from, &room);
    /* Family, port and an address of IPv4. */
    if (n < 0 || room != size || memcmp(&from, server, 8) != 0)
        return fputs("answered from another address\n", stderr), 1;
    if (fcntl(fd, F_GETFD) != FD_CLOEXEC)
        return fputs("the descriptor would be inherited\n", stderr), 1;
    return print_answer(answer, n);
}

static int by_connection(const unsigned char *question, size_t len, const struct sockaddr *server, socklen_t size)
{
    int fd = socket(server->sa_family, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, server, size) < 0)
        return fail("connect");
    unsigned char said[ROOM + 2] = { (unsigned char)(len >> 8), (unsigned char)len };
    memcpy(said + 2, question, len);
    if (write(fd, said, len + 2) < 0)
        return fail("write");
    ssize_t n = recv(fd, said, 2, MSG_WAITALL);
    if (n == 2)
        n = recv(fd, said, (size_t)said[0] << 8 | said[1], MSG_WAITALL);
    return n < 0 ? fail("recv") : print_answer(said, n);
}

int main(int count, char **words)
{
    if (count != 4)
        return 2;
    const char *way = words[1], *name = words[2];
    alarm(20);
    unsigned char answer[ROOM], question[ROOM];
    size_t len = question_for(name, question);
    struct addrinfo hints = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM };
    struct addrinfo *found = NULL;
    if (strcmp(way, "getaddrinfo") == 0 || strcmp(way, "getaddrinfo_a") == 0) {
        struct gaicb one = { .ar_name = name, .ar_request = &hints };
        struct gaicb *list[] = { &one };
        int why = way[11] ? getaddrinfo_a(GAI_WAIT, list, 1, NULL) : getaddrinfo(name, NULL, &hints, &found);
        if (way[11])
            found = one.ar_result;
        if (why || found == NULL)
            return fprintf(stderr, "%s\n", gai_strerror(why)), 1;
        return print_four(&((struct sockaddr_in *)found->ai_addr)->sin_addr);
    }
    if (strcmp(way, "gethostbyname") == 0) {
        struct hostent *entry = gethostbyname(name);
        return entry ? print_four(entry->h_addr_list[0]) : 1;
    }
    if (strcmp(way, "res_query") == 0)
        return print_answer(answer, res_query(name, ns_c_in, ns_t_a, answer, sizeof answer));
    if (strcmp(way, "res_search") == 0)
        return print_answer(answer, res_search(name, ns_c_in, ns_t_a, answer, sizeof answer));
    if (strcmp(way, "res_send") == 0)
        return print_answer(answer, res_send(question, (int)len, answer, sizeof answer));
    if (strcmp(way, "res_nquery") == 0) {
        struct __res_state state = { 0 };
        if (res_ninit(&state) < 0)
            return fail("res_ninit");
        return print_answer(answer, res_nquery(&state, name, ns_c_in, ns_t_a, answer, sizeof answer));
    }
    struct sockaddr_in four = { .sin_family = AF_INET, .sin_port = htons(53) };
    struct sockaddr_in6 six = { .sin6_family = AF_INET6, .sin6_port = htons(53) };
    int is_four = inet_pton(AF_INET, words[3], &four.sin_addr) == 1;
    if (!is_four && inet_pton(AF_INET6, words[3], &six.sin6_addr) != 1)
        return 2;
    const struct sockaddr *server = is_four ? (struct sockaddr *)&four : (struct sockaddr *)&six;
    socklen_t size = is_four ? sizeof four : sizeof six;
    if (strcmp(way, "tcp-853") == 0)
        four.sin_port = htons(853);
    if (strncmp(way, "tcp", 3) == 0)
        return by_connection(question, len, server, size);
    return by_datagram(way, question, len, server, size);
}
