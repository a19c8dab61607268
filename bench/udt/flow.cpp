// One UDT flow from one process to another, for comparison: what UDT's own defaults do, with its
// buffers as large as those of the other transports here.
//
//   flow receive ADDRESS BYTES    listens, says where, takes one flow, counts from its first byte
//   flow send ADDRESS PORT        fills it until it is killed
//
// It says what the other transports' processes say: one JSON value per line.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <arpa/inet.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>
#include <time.h>

#include <udt/udt.h>

static const int CALL_BYTES = 256 << 10;
static const int BUFFER_BYTES = 8 << 20;

static double wall_s() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

static double cpu_s() {
    rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_utime.tv_sec + used.ru_utime.tv_usec / 1e6 + used.ru_stime.tv_sec +
           used.ru_stime.tv_usec / 1e6;
}

static int fail(const char *what) {
    fprintf(stderr, "udt: %s: %s\n", what, UDT::getlasterror().getErrorMessage());
    return 1;
}

static UDTSOCKET open_socket() {
    UDTSOCKET s = UDT::socket(AF_INET, SOCK_STREAM, 0);
    int bytes = BUFFER_BYTES, packets = BUFFER_BYTES / 1024;
    UDT::setsockopt(s, 0, UDT_FC, &packets, sizeof packets);
    UDT::setsockopt(s, 0, UDT_SNDBUF, &bytes, sizeof bytes);
    UDT::setsockopt(s, 0, UDT_RCVBUF, &bytes, sizeof bytes);
    UDT::setsockopt(s, 0, UDP_SNDBUF, &bytes, sizeof bytes);
    UDT::setsockopt(s, 0, UDP_RCVBUF, &bytes, sizeof bytes);
    return s;
}

static int receive(const char *address, long long bytes) {
    UDTSOCKET listener = open_socket();
    sockaddr_in at;
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    if (inet_pton(AF_INET, address, &at.sin_addr) != 1) {
        fprintf(stderr, "udt: %s is no IPv4 address\n", address);
        return 2;
    }
    if (UDT::bind(listener, reinterpret_cast<sockaddr *>(&at), sizeof at) == UDT::ERROR)
        return fail("bind");
    if (UDT::listen(listener, 1) == UDT::ERROR)
        return fail("listen");
    int length = sizeof at;
    UDT::getsockname(listener, reinterpret_cast<sockaddr *>(&at), &length);
    printf("{\"Card\":{\"address\":\"%s:%d\",\"identity\":[]}}\n", address, ntohs(at.sin_port));
    fflush(stdout);
    UDTSOCKET flow = UDT::accept(listener, NULL, NULL);
    if (flow == UDT::INVALID_SOCK)
        return fail("accept");
    std::vector<char> buffer(CALL_BYTES);
    long long got = 0;
    double begun = 0, cpu = 0;
    while (got < bytes) {
        int n = UDT::recv(flow, &buffer[0], CALL_BYTES, 0);
        if (n == UDT::ERROR)
            return fail("receiving");
        if (got == 0) {
            begun = wall_s();
            cpu = cpu_s();
        }
        got += n;
    }
    printf("{\"Report\":{\"bytes\":%lld,\"window_s\":%.6f,\"cpu_s\":%.6f,\"waited_s\":0.0,"
           "\"notes\":\"UDT's own congestion control, no encryption\"}}\n",
           got, wall_s() - begun, cpu_s() - cpu);
    fflush(stdout);
    _exit(0);
}

static int send_for_ever(const char *address, const char *port) {
    UDTSOCKET flow = open_socket();
    sockaddr_in to;
    memset(&to, 0, sizeof to);
    to.sin_family = AF_INET;
    to.sin_port = htons(atoi(port));
    inet_pton(AF_INET, address, &to.sin_addr);
    if (UDT::connect(flow, reinterpret_cast<sockaddr *>(&to), sizeof to) == UDT::ERROR)
        return fail("connect");
    std::vector<char> buffer(CALL_BYTES, 0x5a);
    for (;;)
        if (UDT::send(flow, &buffer[0], CALL_BYTES, 0) == UDT::ERROR)
            return fail("sending");
}

int main(int count, char **words) {
    UDT::startup();
    if (count == 4 && !strcmp(words[1], "receive"))
        return receive(words[2], atoll(words[3]));
    if (count == 4 && !strcmp(words[1], "send"))
        return send_for_ever(words[2], words[3]);
    fprintf(stderr, "usage: flow receive ADDRESS BYTES | send ADDRESS PORT\n");
    return 2;
}
