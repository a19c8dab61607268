/* The calls of libd2tp for cedos.d2tp.Native, by JNI: it is in every JVM and in Android's. */
#include <arpa/inet.h>
#include <d2tp.h>
#include <errno.h>
#include <fcntl.h>
#include <jni.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define CALL(type, name) JNIEXPORT type JNICALL Java_cedos_d2tp_Native_##name
#define PIECE_BYTES 65536

#define WORDS_BYTES 512

/* What the number means: the cause in words where the connection has one. */
static const char *meaning(int fd, int number, char words[WORDS_BYTES]) {
    socklen_t len = WORDS_BYTES;
    if (fd < 0 || d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_ERROR, words, &len) < 0 || !*words)
        return strerror(number);
    words[WORDS_BYTES - 1] = 0;
    return words;
}

/* Throws what fits the number. */
static void fail(JNIEnv *env, int fd, int number) {
    char words[WORDS_BYTES];
    const char *kind = NULL;
    switch (number) {
    case EAGAIN: case EINPROGRESS: case ETIMEDOUT: case ETIME:
        kind = "java/net/SocketTimeoutException";
        break;
    case ECONNREFUSED:
        kind = "java/net/ConnectException";
        break;
    case EHOSTUNREACH: case ENETUNREACH:
        kind = "java/net/NoRouteToHostException";
        break;
    }
    jclass class = (*env)->FindClass(env, kind ? kind : "cedos/d2tp/D2tpSocketException");
    if (class && kind) {
        (*env)->ThrowNew(env, class, meaning(fd, number, words));
    } else if (class) {
        jmethodID of = (*env)->GetMethodID(env, class, "<init>", "(ILjava/lang/String;)V");
        jstring sentence = of ? (*env)->NewStringUTF(env, meaning(fd, number, words)) : NULL;
        jthrowable thrown = sentence ? (*env)->NewObject(env, class, of, number, sentence) : NULL;
        if (thrown)
            (*env)->Throw(env, thrown);
    }
}

static int told(JNIEnv *env, int fd, int said) {
    if (said < 0)
        fail(env, fd, errno);
    return said;
}

/* Whether it is ready before the time is over; throws if not. */
static int await(JNIEnv *env, int fd, short events, int timeout_ms) {
    struct pollfd one = {.fd = fd, .events = events};
    int ready;
    do
        ready = d2tp_poll(&one, 1, timeout_ms > 0 ? timeout_ms : -1);
    while (ready < 0 && errno == EINTR);
    if (ready == 0)
        fail(env, -1, ETIMEDOUT);
    return ready > 0;
}

CALL(jint, socket)(JNIEnv *env, jclass class, jboolean is_ipv6) {
    (void)class;
    return told(env, -1, d2tp_socket(is_ipv6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
}

/* Begins to connect a descriptor, which waits for nothing from then on: 0 or errno. */
static int begin(JNIEnv *env, int fd, jstring node, jstring service) {
    struct addrinfo *found;
    const char *port = NULL, *host = (*env)->GetStringUTFChars(env, node, NULL);
    if (service)
        port = (*env)->GetStringUTFChars(env, service, NULL);
    int why = host && (port || !service) ? d2tp_getaddrinfo(host, port, NULL, &found) : EAI_MEMORY;
    if (host)
        (*env)->ReleaseStringUTFChars(env, node, host);
    if (port)
        (*env)->ReleaseStringUTFChars(env, service, port);
    if (why != 0)
        return EINVAL;
    d2tp_fcntl(fd, F_SETFL, d2tp_fcntl(fd, F_GETFL, 0) | O_NONBLOCK);
    int number = d2tp_connect(fd, found->ai_addr, found->ai_addrlen) < 0 ? errno : 0;
    d2tp_freeaddrinfo(found);
    return number;
}

/* The error that a connection attempt ended with; 0 if it did well. */
static int pending(int fd) {
    int number = 0;
    socklen_t len = sizeof number;
    return d2tp_getsockopt(fd, SOL_SOCKET, SO_ERROR, &number, &len) < 0 ? errno : number;
}

CALL(void, connect)(JNIEnv *env, jclass class, jint fd, jstring node, jstring service, jint timeout_ms) {
    (void)class;
    int flags = d2tp_fcntl(fd, F_GETFL, 0), number = begin(env, fd, node, service);
    if (number == EINPROGRESS) {
        if (!await(env, fd, POLLOUT, timeout_ms))
            return;
        number = pending(fd);
    }
    d2tp_fcntl(fd, F_SETFL, flags);
    if (number)
        fail(env, fd, number);
}

CALL(void, setNumber)(JNIEnv *env, jclass class, jint fd, jint option, jlong value, jint bytes) {
    (void)class;
    int narrow = (int)value;
    const void *at = bytes == 8 ? (const void *)&value : &narrow;
    told(env, fd, d2tp_setsockopt(fd, SOL_D2TP, option, at, (socklen_t)bytes));
}

CALL(void, setBuffer)(JNIEnv *env, jclass class, jint fd, jlong low, jlong high, jint unit, jint rate) {
    (void)class;
    struct d2tp_rcvbufth levels = {
        .dr_low = (uint64_t)low, .dr_high = (uint64_t)high, .dr_unit = (uint32_t)unit, .dr_rate = (uint32_t)rate};
    told(env, -1, d2tp_setsockopt(fd, SOL_D2TP, D2TP_SO_RCVBUFTH, &levels, sizeof levels));
}

CALL(void, setText)(JNIEnv *env, jclass class, jint fd, jint option, jstring value) {
    (void)class;
    const char *text = (*env)->GetStringUTFChars(env, value, NULL);
    if (!text)
        return;
    int said = d2tp_setsockopt(fd, SOL_D2TP, option, text, (socklen_t)strlen(text));
    int number = errno;
    (*env)->ReleaseStringUTFChars(env, value, text);
    errno = number;
    told(env, -1, said);
}

CALL(jint, read)(JNIEnv *env, jclass class, jint fd, jbyteArray into, jint from, jint count, jint timeout_ms) {
    (void)class;
    char piece[PIECE_BYTES];
    if (timeout_ms > 0 && !await(env, fd, POLLIN, timeout_ms))
        return -1;
    ssize_t n = d2tp_recv(fd, piece, count < PIECE_BYTES ? (size_t)count : PIECE_BYTES, 0);
    if (n < 0) {
        fail(env, fd, errno);
        return -1;
    }
    (*env)->SetByteArrayRegion(env, into, from, (jsize)n, (const jbyte *)piece);
    return n == 0 ? -1 : (jint)n;
}

CALL(void, write)(JNIEnv *env, jclass class, jint fd, jbyteArray bytes, jint from, jint count) {
    (void)class;
    char piece[PIECE_BYTES];
    while (count > 0) {
        jint part = count < PIECE_BYTES ? count : PIECE_BYTES;
        (*env)->GetByteArrayRegion(env, bytes, from, part, (jbyte *)piece);
        from += part;
        count -= part;
        for (jint at = 0; at < part;) {
            ssize_t n = d2tp_send(fd, piece + at, (size_t)(part - at), 0);
            if (n < 0) {
                fail(env, fd, errno);
                return;
            }
            at += (jint)n;
        }
    }
}

CALL(void, flush)(JNIEnv *env, jclass class, jint fd, jint timeout_ms) {
    (void)class;
    told(env, fd, d2tp_flush(fd, timeout_ms));
}

CALL(void, shutdown)(JNIEnv *env, jclass class, jint fd, jint how) {
    (void)class;
    told(env, -1, d2tp_shutdown(fd, how));
}

CALL(void, close)(JNIEnv *env, jclass class, jint fd) {
    (void)class;
    told(env, -1, d2tp_close(fd));
}

/* By the kernel's call, which ends nothing of what is to be opened again. */
CALL(void, leave)(JNIEnv *env, jclass class, jint fd) {
    (void)class;
    told(env, -1, close(fd));
}

CALL(jbyteArray, token)(JNIEnv *env, jclass class, jint fd) {
    (void)class;
    jbyte token[D2TP_TOKEN_BYTES];
    socklen_t len = sizeof token;
    if (told(env, -1, d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_PERSIST, token, &len)) < 0 || len != sizeof token)
        return NULL;
    jbyteArray answer = (*env)->NewByteArray(env, sizeof token);
    if (answer)
        (*env)->SetByteArrayRegion(env, answer, 0, sizeof token, token);
    return answer;
}

CALL(jint, reopen)(JNIEnv *env, jclass class, jbyteArray of) {
    (void)class;
    jbyte token[D2TP_TOKEN_BYTES];
    if ((*env)->GetArrayLength(env, of) != sizeof token)
        return -EINVAL;
    (*env)->GetByteArrayRegion(env, of, 0, sizeof token, token);
    int fd = d2tp_reopen(token, sizeof token, SOCK_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

CALL(jstring, notReopened)(JNIEnv *env, jclass class, jint number) {
    (void)class;
    char words[WORDS_BYTES];
    switch (number) {
    case ENOENT:
        return (*env)->NewStringUTF(env, "no connection of this token is kept: it was ended or let go, or its agent ended");
    case EBUSY:
        return (*env)->NewStringUTF(env, "the process that has this connection is still there");
    case EOPNOTSUPP:
        return (*env)->NewStringUTF(env, "no agent answers that keeps connections: start `cedos agent`");
    case EINVAL:
        return (*env)->NewStringUTF(env, "a token has 32 bytes");
    }
    snprintf(words, sizeof words, "the connection cannot be opened again: %s", strerror(number));
    return (*env)->NewStringUTF(env, words);
}

/* One that waits for nothing, so that who polls it never sleeps in accept. */
CALL(jint, listen)(JNIEnv *env, jclass class, jbyteArray ip, jint port, jint backlog) {
    (void)class;
    int is_v4 = (*env)->GetArrayLength(env, ip) == 4;
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    const struct sockaddr *at = is_v4 ? (const struct sockaddr *)&v4 : (const struct sockaddr *)&v6;
    if (is_v4)
        (*env)->GetByteArrayRegion(env, ip, 0, 4, (jbyte *)&v4.sin_addr);
    else
        (*env)->GetByteArrayRegion(env, ip, 0, 16, (jbyte *)&v6.sin6_addr);
    int fd = d2tp_socket(is_v4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (told(env, -1, fd) < 0)
        return -1;
    if (d2tp_bind(fd, at, is_v4 ? sizeof v4 : sizeof v6) < 0 || d2tp_listen(fd, backlog) < 0) {
        int number = errno;
        d2tp_close(fd);
        if (number == EADDRINUSE || number == EADDRNOTAVAIL) {
            jclass bind = (*env)->FindClass(env, "java/net/BindException");
            if (bind)
                (*env)->ThrowNew(env, bind, strerror(number));
        } else {
            fail(env, -1, number);
        }
        return -1;
    }
    return fd;
}

CALL(jint, acceptNow)(JNIEnv *env, jclass class, jint fd) {
    (void)env, (void)class;
    int new;
    do
        new = d2tp_accept4(fd, NULL, NULL, SOCK_CLOEXEC);
    while (new < 0 && (errno == EINTR || errno == ECONNABORTED));
    return new < 0 ? -errno : new;
}

/* An address as host:port; empty for one of no known kind. */
static jstring place(JNIEnv *env, const struct sockaddr_storage *at) {
    char host[INET6_ADDRSTRLEN] = "", words[200] = "";
    if (at->ss_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)at;
        inet_ntop(AF_INET, &v4->sin_addr, host, sizeof host);
        snprintf(words, sizeof words, "%s:%d", host, ntohs(v4->sin_port));
    } else if (at->ss_family == AF_INET6) {
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)at;
        inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof host);
        snprintf(words, sizeof words, "[%s]:%d", host, ntohs(v6->sin6_port));
    } else if (at->ss_family == AF_D2TP) {
        const struct sockaddr_d2tp *name = (const struct sockaddr_d2tp *)at;
        snprintf(words, sizeof words, "%.*s:%d", (int)sizeof name->sd_host, name->sd_host, ntohs(name->sd_port));
    }
    return (*env)->NewStringUTF(env, words);
}

CALL(jstring, near)(JNIEnv *env, jclass class, jint fd) {
    (void)class;
    struct sockaddr_storage at;
    socklen_t len = sizeof at;
    return told(env, -1, d2tp_getsockname(fd, (struct sockaddr *)&at, &len)) < 0 ? NULL : place(env, &at);
}

CALL(jstring, far)(JNIEnv *env, jclass class, jint fd) {
    (void)class;
    struct sockaddr_storage at = {.ss_family = AF_UNSPEC};
    socklen_t len = sizeof at;
    /* One that is over already has nobody there. */
    (void)d2tp_getpeername(fd, (struct sockaddr *)&at, &len);
    return place(env, &at);
}

CALL(jstring, key)(JNIEnv *env, jclass class, jint fd) {
    (void)class;
    char key[64];
    socklen_t len = sizeof key;
    return told(env, -1, d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_HOSTKEY, key, &len)) < 0
        ? NULL
        : (*env)->NewStringUTF(env, key);
}

CALL(jboolean, ready)(JNIEnv *env, jclass class, jint fd, jint timeout_ms) {
    (void)class;
    struct pollfd one = {.fd = fd, .events = POLLIN};
    int ready;
    do
        ready = d2tp_poll(&one, 1, timeout_ms);
    while (ready < 0 && errno == EINTR);
    return told(env, -1, ready) > 0;
}

CALL(void, networkChanged)(JNIEnv *env, jclass class) {
    (void)class;
    told(env, -1, d2tp_network_changed());
}

CALL(void, dlock)(JNIEnv *env, jclass class, jboolean is_taken) {
    (void)class;
    told(env, -1, is_taken ? d2tp_dlock_acquire() : d2tp_dlock_release());
}

CALL(jint, begin)(JNIEnv *env, jclass class, jint fd, jstring node, jstring service) {
    (void)class;
    return -begin(env, fd, node, service);
}

CALL(jint, pending)(JNIEnv *env, jclass class, jint fd) {
    (void)env, (void)class;
    return -pending(fd);
}

CALL(jint, readNow)(JNIEnv *env, jclass class, jint fd, jbyteArray into, jint from, jint count) {
    (void)class;
    char piece[PIECE_BYTES];
    ssize_t n = d2tp_recv(fd, piece, count < PIECE_BYTES ? (size_t)count : PIECE_BYTES, MSG_DONTWAIT);
    if (n < 0)
        return -errno;
    (*env)->SetByteArrayRegion(env, into, from, (jsize)n, (const jbyte *)piece);
    return (jint)n;
}

CALL(jint, writeNow)(JNIEnv *env, jclass class, jint fd, jbyteArray bytes, jint from, jint count) {
    (void)class;
    char piece[PIECE_BYTES];
    jint part = count < PIECE_BYTES ? count : PIECE_BYTES;
    (*env)->GetByteArrayRegion(env, bytes, from, part, (jbyte *)piece);
    ssize_t n = d2tp_send(fd, piece, (size_t)part, MSG_DONTWAIT);
    return n < 0 ? -errno : (jint)n;
}

CALL(jint, flushFor)(JNIEnv *env, jclass class, jint fd, jint timeout_ms) {
    (void)env, (void)class;
    return d2tp_flush(fd, timeout_ms) < 0 ? -errno : 0;
}

CALL(jstring, words)(JNIEnv *env, jclass class, jint fd, jint number) {
    (void)class;
    char words[WORDS_BYTES];
    return (*env)->NewStringUTF(env, meaning(fd, number, words));
}

CALL(jlongArray, info)(JNIEnv *env, jclass class, jint fd, jobjectArray links) {
    (void)class;
    struct d2tp_info info;
    socklen_t len = sizeof info;
    memset(&info, 0, sizeof info);
    if (told(env, -1, d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_INFO, &info, &len)) < 0)
        return NULL;
    jlong numbers[7 + 7 * D2TP_PATHS_MAX] = {
        info.di_state, info.di_reason, (jlong)info.di_bytes_sent, (jlong)info.di_bytes_acked,
        (jlong)info.di_bytes_received, (jlong)info.di_bytes_ahead, info.di_slack_ms,
    };
    jlong *next = numbers + 7;
    jsize room = (*env)->GetArrayLength(env, links);
    for (jsize i = 0; i < (jsize)info.di_paths_count && i < room && i < D2TP_PATHS_MAX; i++) {
        const struct d2tp_path_info *path = &info.di_paths[i];
        jstring link = (*env)->NewStringUTF(env, path->dpi_link);
        if (!link)
            return NULL;
        (*env)->SetObjectArrayElement(env, links, i, link);
        (*env)->DeleteLocalRef(env, link);
        *next++ = path->dpi_class;
        *next++ = path->dpi_state;
        *next++ = path->dpi_rtt_us;
        *next++ = path->dpi_rtt_min_us;
        *next++ = (jlong)path->dpi_bytes_received;
        *next++ = (jlong)path->dpi_bytes_sent;
        *next++ = (jlong)path->dpi_rate;
    }
    jlongArray answer = (*env)->NewLongArray(env, (jsize)(next - numbers));
    if (answer)
        (*env)->SetLongArrayRegion(env, answer, 0, (jsize)(next - numbers), numbers);
    return answer;
}

CALL(jint, poll)(JNIEnv *env, jclass class, jintArray fds, jintArray events, jint timeout_ms) {
    (void)class;
    jsize count = (*env)->GetArrayLength(env, fds);
    struct pollfd *all = calloc((size_t)count, sizeof *all);
    jint *numbers = calloc((size_t)count, sizeof *numbers);
    int ready = -1, number = ENOMEM;
    if (all && numbers) {
        (*env)->GetIntArrayRegion(env, fds, 0, count, numbers);
        for (jsize i = 0; i < count; i++)
            all[i].fd = numbers[i];
        (*env)->GetIntArrayRegion(env, events, 0, count, numbers);
        for (jsize i = 0; i < count; i++)
            all[i].events = (short)numbers[i];
        do
            ready = d2tp_poll(all, (nfds_t)count, timeout_ms);
        while (ready < 0 && errno == EINTR);
        number = errno;
        for (jsize i = 0; i < count; i++)
            numbers[i] = all[i].revents;
        (*env)->SetIntArrayRegion(env, events, 0, count, numbers);
    }
    free(all);
    free(numbers);
    return ready < 0 ? -number : 0;
}

CALL(jint, bell)(JNIEnv *env, jclass class) {
    (void)class;
    return told(env, -1, eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
}

CALL(void, ring)(JNIEnv *env, jclass class, jint bell) {
    (void)env, (void)class;
    /* It can only be full, and then it is ringing. */
    (void)!eventfd_write(bell, 1);
}

CALL(void, hush)(JNIEnv *env, jclass class, jint bell) {
    (void)env, (void)class;
    eventfd_t rung;
    (void)!eventfd_read(bell, &rung);
}
