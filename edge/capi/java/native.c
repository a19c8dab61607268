/* The calls of libd2tp for cedos.d2tp.Native, by JNI: it is in every JVM and in Android's. */
#include <d2tp.h>
#include <errno.h>
#include <fcntl.h>
#include <jni.h>
#include <poll.h>
#include <string.h>

#define CALL(type, name) JNIEXPORT type JNICALL Java_cedos_d2tp_Native_##name
#define PIECE_BYTES 65536

/* Throws what fits the number, with the cause in words where there is one. */
static void fail(JNIEnv *env, int fd, int number) {
    char words[512] = "";
    socklen_t len = sizeof words;
    const char *kind = "java/net/SocketException";
    if (fd >= 0)
        d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_ERROR, words, &len);
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
    jclass class = (*env)->FindClass(env, kind);
    if (class)
        (*env)->ThrowNew(env, class, *words ? words : strerror(number));
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

CALL(jint, socket)(JNIEnv *env, jclass class) {
    (void)class;
    return told(env, -1, d2tp_socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
}

CALL(void, connect)(JNIEnv *env, jclass class, jint fd, jstring node, jstring service, jint timeout_ms) {
    (void)class;
    struct addrinfo *found;
    const char *port = NULL, *host = (*env)->GetStringUTFChars(env, node, NULL);
    if (service)
        port = (*env)->GetStringUTFChars(env, service, NULL);
    int why = host && (port || !service) ? d2tp_getaddrinfo(host, port, NULL, &found) : EAI_MEMORY;
    if (host)
        (*env)->ReleaseStringUTFChars(env, node, host);
    if (port)
        (*env)->ReleaseStringUTFChars(env, service, port);
    if (why != 0) {
        fail(env, -1, EINVAL);
        return;
    }
    int flags = d2tp_fcntl(fd, F_GETFL, 0), number = 0;
    socklen_t len = sizeof number;
    d2tp_fcntl(fd, F_SETFL, flags | O_NONBLOCK);
    int said = d2tp_connect(fd, found->ai_addr, found->ai_addrlen);
    number = said < 0 ? errno : 0;
    d2tp_freeaddrinfo(found);
    if (number == EINPROGRESS) {
        if (!await(env, fd, POLLOUT, timeout_ms))
            return;
        d2tp_getsockopt(fd, SOL_SOCKET, SO_ERROR, &number, &len);
    }
    d2tp_fcntl(fd, F_SETFL, flags);
    if (number)
        fail(env, fd, number);
}

CALL(void, setNumber)(JNIEnv *env, jclass class, jint fd, jint option, jlong value, jint bytes) {
    (void)class;
    int narrow = (int)value;
    const void *at = bytes == 8 ? (const void *)&value : &narrow;
    told(env, -1, d2tp_setsockopt(fd, SOL_D2TP, option, at, (socklen_t)bytes));
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
