/* told HOST PORT [persist | open | policy=N | locked | TOKEN [locked]]: a connection that does what it is told, line by
 * line, and says what came of it. */
#include "bsd.h"

static int fd;

static void said(const char *what, long value) {
    char text[300] = "";
    if (value >= 0) {
        printf("%s %ld\n", what, value);
    } else {
        const char *name = strerrorname_np(errno);
        socklen_t len = sizeof text;
        NEED(d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_ERROR, text, &len) == 0);
        printf("%s %s: %s\n", what, name, text);
    }
    fflush(stdout);
}

static long put(long count) {
    static char bytes[65536];
    for (long all = 0; all < count;) {
        size_t more = count - all < (long)sizeof bytes ? (size_t)(count - all) : sizeof bytes;
        ssize_t n = d2tp_send(fd, bytes, more, 0);
        if (n < 0)
            return -1;
        all += n;
    }
    return count;
}

/* As many, or all that comes before the end. */
static long take(long count) {
    static char bytes[65536];
    long all = 0;
    while (all < count) {
        size_t more = count - all < (long)sizeof bytes ? (size_t)(count - all) : sizeof bytes;
        ssize_t n = d2tp_recv(fd, bytes, more, 0);
        if (n < 0)
            return -1;
        if (n == 0)
            break;
        all += n;
    }
    return all;
}

/* As many, added to what the file has. */
static long copy(long count, const char *path) {
    static char bytes[65536];
    FILE *file = fopen(path, "a");
    long all = 0;
    NEED(file);
    while (all < count) {
        size_t more = count - all < (long)sizeof bytes ? (size_t)(count - all) : sizeof bytes;
        ssize_t n = d2tp_recv(fd, bytes, more, 0);
        if (n < 0)
            return -1;
        if (n == 0)
            break;
        NEED(fwrite(bytes, 1, (size_t)n, file) == (size_t)n);
        all += n;
    }
    NEED(fclose(file) == 0);
    return all;
}

/* All that the file has. */
static long send_file(const char *path) {
    static char bytes[65536];
    FILE *file = fopen(path, "r");
    long all = 0;
    size_t more;
    NEED(file);
    while ((more = fread(bytes, 1, sizeof bytes, file)) > 0) {
        for (size_t done = 0; done < more;) {
            ssize_t n = d2tp_send(fd, bytes + done, more - done, 0);
            if (n < 0)
                return -1;
            done += (size_t)n;
        }
        all += (long)more;
    }
    NEED(fclose(file) == 0);
    return all;
}

static void token(void) {
    unsigned char bytes[D2TP_TOKEN_BYTES + 1];
    socklen_t len = sizeof bytes;
    int number;
    NEED(d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_PERSIST, bytes, &len) == 0);
    printf("token ");
    for (socklen_t i = 0; i < len; i++)
        printf("%02x", bytes[i]);
    len = sizeof number;
    NEED(d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_PERSIST, &number, &len) == 0);
    printf(" %d\n", number);
    fflush(stdout);
}

static void reopened(const char *text) {
    unsigned char bytes[D2TP_TOKEN_BYTES];
    for (int i = 0; i < D2TP_TOKEN_BYTES; i++) {
        unsigned byte;
        NEED(sscanf(text + 2 * i, "%2x", &byte) == 1);
        bytes[i] = (unsigned char)byte;
    }
    NEED(d2tp_reopen(bytes, sizeof bytes - 1, 0) < 0 && errno == EINVAL);
    NEED(d2tp_reopen(bytes, sizeof bytes, 1 << 30) < 0 && errno == EINVAL);
    NEED(d2tp_reopen(NULL, sizeof bytes, 0) < 0 && errno == EFAULT);
    fd = d2tp_reopen(bytes, sizeof bytes, SOCK_CLOEXEC);
    printf("reopen %s\n", fd < 0 ? strerrorname_np(errno) : "0");
    fflush(stdout);
    if (fd < 0)
        exit(0);
    NEED(fcntl(fd, F_GETFD) == FD_CLOEXEC && !(fcntl(fd, F_GETFL) & O_NONBLOCK));
}

static long option(int name, const void *value, socklen_t len) {
    return d2tp_setsockopt(fd, SOL_D2TP, name, value, len);
}

int main(int argc, char **argv) {
    char line[300], word[50];
    struct addrinfo *server;
    int one = 1;
    if (argc < 3)
        return 2;
    if (d2tp_getaddrinfo(argv[1], *argv[2] ? argv[2] : NULL, NULL, &server) != 0)
        return 2;
    fd = d2tp_socket(AF_INET, SOCK_STREAM, 0);
    NEED(fd >= 0);
    if (argc > 3 && strcmp(argv[3], "persist") == 0)
        said("persist", option(D2TP_SO_PERSIST, &one, sizeof one));
    if (argc > 3 && strcmp(argv[3], "open") == 0) {
        int all = D2TP_PERSIST_OPEN;
        said("persist", option(D2TP_SO_PERSIST, &all, sizeof all));
    }
    if (argc > 3 && strncmp(argv[3], "policy=", 7) == 0) {
        int policy = atoi(argv[3] + 7);
        said("policy", option(D2TP_SO_POLICY, &policy, sizeof policy));
    }
    if (argc > 3 && strcmp(argv[3], "locked") == 0) {
        int policy = D2TP_POLICY_FREE_ONLY;
        said("policy", option(D2TP_SO_POLICY, &policy, sizeof policy));
        said("lock", d2tp_dlock_acquire());
    }
    if (argc > 3 && strlen(argv[3]) == 2 * D2TP_TOKEN_BYTES) {
        NEED(d2tp_close(fd) == 0);
        if (argc > 4 && strcmp(argv[4], "locked") == 0)
            printf("lock %d\n", d2tp_dlock_acquire());
        reopened(argv[3]);
        struct sockaddr_in to, is;
        socklen_t len = sizeof is;
        NEED(d2tp_getpeername(fd, (struct sockaddr *)&is, &len) == 0);
        memcpy(&to, server->ai_addr, sizeof to);
        NEED(is.sin_port == to.sin_port && is.sin_addr.s_addr == to.sin_addr.s_addr);
    } else {
        said("connect", d2tp_connect(fd, server->ai_addr, server->ai_addrlen));
    }
    while (fgets(line, sizeof line, stdin)) {
        long value = 0;
        int number;
        if (sscanf(line, "%49s %ld", word, &value) < 1)
            continue;
        number = (int)value;
        if (strcmp(word, "write") == 0) {
            said("write", put(value));
        } else if (strcmp(word, "ask") == 0) {
            int len = snprintf(line, sizeof line, "GET /a HTTP/1.0\r\nHost: x\r\n\r\n");
            said("ask", d2tp_send(fd, line, len, 0));
        } else if (strcmp(word, "read") == 0) {
            said("read", take(value));
        } else if (strcmp(word, "copy") == 0) {
            char path[200];
            NEED(sscanf(line, "%*s %*s %199s", path) == 1);
            said("copy", copy(value, path));
        } else if (strcmp(word, "file") == 0) {
            char path[200];
            NEED(sscanf(line, "%*s %*s %199s", path) == 1);
            said("file", send_file(path));
        } else if (strcmp(word, "token") == 0) {
            token();
        } else if (strcmp(word, "flush") == 0) {
            said("flush", d2tp_flush(fd, number));
        } else if (strcmp(word, "policy") == 0) {
            said("policy", option(D2TP_SO_POLICY, &number, sizeof number));
        } else if (strcmp(word, "deadline") == 0) {
            said("deadline", option(D2TP_SO_DEADLINE, &number, sizeof number));
        } else if (strcmp(word, "size") == 0) {
            uint64_t size = value;
            said("size", option(D2TP_SO_ESIZE, &size, sizeof size));
        } else if (strcmp(word, "late") == 0) {
            said("late", option(D2TP_SO_IFLATE, &number, sizeof number));
        } else if (strcmp(word, "budget") == 0) {
            uint64_t budget = value;
            said("budget", option(D2TP_SO_BUDGET, &budget, sizeof budget));
        } else if (strcmp(word, "levels") == 0) {
            struct d2tp_rcvbufth levels = {0}, is;
            socklen_t len = sizeof is;
            long high = 0;
            sscanf(line, "%*s %*s %ld", &high);
            levels.dr_low = value;
            levels.dr_high = high;
            said("levels", option(D2TP_SO_RCVBUFTH, &levels, sizeof levels));
            NEED(d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_RCVBUFTH, &is, &len) == 0);
            NEED(len == sizeof is && memcmp(&is, &levels, sizeof is) == 0);
        } else if (strcmp(word, "ahead") == 0) {
            struct d2tp_info info;
            socklen_t len = sizeof info;
            NEED(d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_INFO, &info, &len) == 0);
            NEED(info.di_bytes_received >= info.di_bytes_ahead);
            said("ahead", (long)info.di_bytes_ahead);
        } else if (strcmp(word, "info") == 0) {
            struct d2tp_info info;
            socklen_t len = sizeof info;
            NEED(d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_INFO, &info, &len) == 0);
            printf("info %u %llu %llu %llu\n", info.di_state, (unsigned long long)info.di_bytes_sent,
                   (unsigned long long)info.di_bytes_acked, (unsigned long long)info.di_bytes_received);
            fflush(stdout);
        } else if (strcmp(word, "lock") == 0) {
            said("lock", d2tp_dlock_acquire());
        } else if (strcmp(word, "unlock") == 0) {
            said("unlock", d2tp_dlock_release());
        } else if (strcmp(word, "network") == 0) {
            said("network", d2tp_network_changed());
        } else if (strcmp(word, "end") == 0) {
            said("end", d2tp_shutdown(fd, SHUT_WR));
        } else if (strcmp(word, "close") == 0) {
            said("close", d2tp_close(fd));
        } else if (strcmp(word, "die") == 0) {
            raise(SIGKILL);
        } else {
            return 2;
        }
    }
    return 0;
}
