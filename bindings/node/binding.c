/* What Node needs of libd2tp beside the descriptor: connect, reopen, listen, options, causes. By Node-API, so one build
 * serves every version. A connection that is being made is polled by Node's loop; what else waits does so on threads of
 * Node's pool, and a listener on one of its own. */
#define NAPI_VERSION 8
#include <arpa/inet.h>
#include <d2tp.h>
#include <errno.h>
#include <fcntl.h>
#include <node_api.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <uv.h>

#define TEXT_BYTES 512

static const struct {
    const char *name;
    int option;
    size_t bytes;
} OPTIONS[] = {
    {"deadline", D2TP_SO_DEADLINE, 8}, {"size", D2TP_SO_ESIZE, 8},       {"policy", D2TP_SO_POLICY, 4},
    {"budget", D2TP_SO_BUDGET, 8},     {"priority", D2TP_SO_PRIORITY, 4}, {"ifLate", D2TP_SO_IFLATE, 4},
    {"persist", D2TP_SO_PERSIST, 4},
};
#define OPTIONS_COUNT (sizeof OPTIONS / sizeof OPTIONS[0])

/* The word of errno.h. Node's loop knows those that its own calls say. */
static const char *word_of(int number, char word[32]) {
    switch (number) {
    case ETIME:
        return "ETIME";
    case EDQUOT:
        return "EDQUOT";
    case ENOKEY:
        return "ENOKEY";
    case EOPNOTSUPP:
        return "EOPNOTSUPP";
    }
    return uv_err_name_r(-number, word, 32);
}

/* As Node's own errors: the number below zero, its word as the code. */
static napi_value fail(napi_env env, int number, const char *words) {
    napi_value error, text, code, value;
    char word[32];
    napi_create_string_utf8(env, word_of(number, word), NAPI_AUTO_LENGTH, &code);
    napi_create_string_utf8(env, *words ? words : strerror(number), NAPI_AUTO_LENGTH, &text);
    napi_create_error(env, code, text, &error);
    napi_create_int32(env, -number, &value);
    napi_set_named_property(env, error, "errno", value);
    return error;
}

/* Sets the thresholds that the object has as an array: low, high, unit, rate. */
static bool set_buffer(napi_env env, int fd, napi_value from) {
    bool has;
    double numbers[4];
    napi_value array, value;
    if (napi_has_named_property(env, from, "buffer", &has) != napi_ok || !has)
        return true;
    napi_get_named_property(env, from, "buffer", &array);
    for (uint32_t i = 0; i < 4; i++) {
        if (napi_get_element(env, array, i, &value) != napi_ok ||
            napi_get_value_double(env, value, &numbers[i]) != napi_ok || !(numbers[i] >= 0 && numbers[i] < 1e15)) {
            errno = EINVAL;
            return false;
        }
    }
    struct d2tp_rcvbufth levels = {
        .dr_low = (uint64_t)numbers[0],
        .dr_high = (uint64_t)numbers[1],
        .dr_unit = (uint32_t)numbers[2],
        .dr_rate = numbers[3] < UINT32_MAX ? (uint32_t)numbers[3] : UINT32_MAX,
    };
    return d2tp_setsockopt(fd, SOL_D2TP, D2TP_SO_RCVBUFTH, &levels, sizeof levels) == 0;
}

/* Sets the options that the object has; the name of one that is refused, or null. errno says why. */
static const char *set_all(napi_env env, int fd, napi_value from) {
    for (size_t i = 0; i < OPTIONS_COUNT; i++) {
        bool has;
        double number;
        napi_value value;
        if (napi_has_named_property(env, from, OPTIONS[i].name, &has) != napi_ok || !has)
            continue;
        napi_get_named_property(env, from, OPTIONS[i].name, &value);
        errno = EINVAL;
        if (napi_get_value_double(env, value, &number) != napi_ok || number < 0)
            return OPTIONS[i].name;
        uint64_t wide = (uint64_t)number;
        int narrow = (int)number;
        const void *at = OPTIONS[i].bytes == 8 ? (const void *)&wide : &narrow;
        if (d2tp_setsockopt(fd, SOL_D2TP, OPTIONS[i].option, at, OPTIONS[i].bytes) < 0)
            return OPTIONS[i].name;
    }
    return set_buffer(env, fd, from) ? NULL : "buffer";
}

static void cause_of(int fd, char *words) {
    socklen_t len = TEXT_BYTES;
    if (d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_ERROR, words, &len) < 0)
        *words = 0;
}

/* The error for an option that is refused: its name, and what the socket says of it. */
static napi_value refusal(napi_env env, int fd, const char *name) {
    int number = errno;
    char words[TEXT_BYTES] = "", all[TEXT_BYTES + 20];
    cause_of(fd, words);
    snprintf(all, sizeof all, "%s: %s", name, *words ? words : strerror(number));
    return fail(env, number, all);
}

/* What waits on a thread of Node's pool. Its answer is `fd`, or else nothing. */
struct call {
    void (*run)(struct call *);
    int fd, number, timeout_ms;
    bool is_fd;
    char words[TEXT_BYTES];
    uint8_t token[D2TP_TOKEN_BYTES];
    struct d2tp_info info;
    napi_value (*answer)(napi_env, struct call *);
    napi_deferred deferred;
    napi_async_work work;
};

static void reopen_now(struct call *call) {
    call->fd = d2tp_reopen(call->token, sizeof call->token, SOCK_CLOEXEC);
    if (call->fd >= 0)
        return;
    call->number = errno;
    const char *words = NULL;
    switch (errno) {
    case ENOENT:
        words = "no connection of this token is kept: it was ended or let go, or its agent ended";
        break;
    case EBUSY:
        words = "the process that has this connection is still there";
        break;
    case EOPNOTSUPP:
        words = "no agent answers that keeps connections: start `cedos agent`";
        break;
    }
    if (words)
        snprintf(call->words, sizeof call->words, "%s", words);
    else
        snprintf(call->words, sizeof call->words, "the connection cannot be opened again: %s", strerror(call->number));
}

static void flush_now(struct call *call) {
    if (d2tp_flush(call->fd, call->timeout_ms) < 0) {
        call->number = errno;
        if (errno == EAGAIN)
            snprintf(call->words, sizeof call->words, "the peer has not got everything yet");
        else
            cause_of(call->fd, call->words);
    }
}

static void info_now(struct call *call) {
    socklen_t len = sizeof call->info;
    if (d2tp_getsockopt(call->fd, SOL_D2TP, D2TP_SO_INFO, &call->info, &len) < 0)
        call->number = errno;
}

static void end_now(struct call *call) {
    int fd = call->fd;
    call->fd = -1;
    if (d2tp_close(fd) < 0)
        call->number = errno;
}

static void number(napi_env env, napi_value of, const char *name, double value) {
    napi_value is;
    napi_create_double(env, value, &is);
    napi_set_named_property(env, of, name, is);
}

/* As index.js reads it: numbers, and the paths in an array. */
static napi_value answer_info(napi_env env, struct call *call) {
    const struct d2tp_info *info = &call->info;
    napi_value answer, paths;
    napi_create_object(env, &answer);
    number(env, answer, "state", info->di_state);
    number(env, answer, "reason", info->di_reason);
    number(env, answer, "bytesSent", (double)info->di_bytes_sent);
    number(env, answer, "bytesAcked", (double)info->di_bytes_acked);
    number(env, answer, "bytesReceived", (double)info->di_bytes_received);
    number(env, answer, "bytesAhead", (double)info->di_bytes_ahead);
    number(env, answer, "slack", (double)info->di_slack_ms);
    napi_create_array(env, &paths);
    for (uint32_t i = 0; i < info->di_paths_count && i < D2TP_PATHS_MAX; i++) {
        const struct d2tp_path_info *is = &info->di_paths[i];
        napi_value path, link;
        napi_create_object(env, &path);
        napi_create_string_utf8(env, is->dpi_link, NAPI_AUTO_LENGTH, &link);
        napi_set_named_property(env, path, "link", link);
        number(env, path, "cost", is->dpi_class);
        number(env, path, "state", is->dpi_state);
        number(env, path, "rtt", is->dpi_rtt_us / 1e3);
        number(env, path, "rttMin", is->dpi_rtt_min_us / 1e3);
        number(env, path, "bytesReceived", (double)is->dpi_bytes_received);
        number(env, path, "bytesSent", (double)is->dpi_bytes_sent);
        number(env, path, "rate", (double)is->dpi_rate);
        napi_set_element(env, paths, i, path);
    }
    napi_set_named_property(env, answer, "paths", paths);
    return answer;
}

/* On a thread of Node's pool. */
static void run(napi_env env, void *of) {
    struct call *call = of;
    (void)env;
    call->run(call);
}

static void done(napi_env env, napi_status status, void *of) {
    struct call *call = of;
    napi_value value;
    if (status != napi_ok && !call->number)
        call->number = ECANCELED;
    /* A twin is this call's own. */
    if (call->fd >= 0 && !call->is_fd)
        close(call->fd);
    else if (call->fd >= 0 && call->number)
        d2tp_close(call->fd);
    if (call->number) {
        napi_reject_deferred(env, call->deferred, fail(env, call->number, call->words));
    } else {
        if (call->answer)
            value = call->answer(env, call);
        else if (call->is_fd)
            napi_create_int32(env, call->fd, &value);
        else
            napi_get_undefined(env, &value);
        napi_resolve_deferred(env, call->deferred, value);
    }
    napi_delete_async_work(env, call->work);
    free(call);
}

static struct call *new_call(napi_env env, void (*of)(struct call *)) {
    struct call *call = calloc(1, sizeof *call);
    if (!call) {
        napi_throw(env, fail(env, ENOMEM, ""));
        return NULL;
    }
    call->run = of;
    call->fd = -1;
    return call;
}

/* A promise of what it comes to. */
static napi_value queue(napi_env env, struct call *call) {
    napi_value promise, name;
    napi_create_promise(env, &call->deferred, &promise);
    napi_create_string_utf8(env, "d2tp", NAPI_AUTO_LENGTH, &name);
    napi_create_async_work(env, NULL, name, run, done, call, &call->work);
    napi_queue_async_work(env, call->work);
    return promise;
}

/* A call about the socket of the first argument, on a twin: Node may close its own meanwhile. */
static struct call *about(napi_env env, napi_callback_info info, void (*of)(struct call *)) {
    size_t count = 2;
    napi_value arguments[2];
    int fd = -1, timeout_ms = -1;
    struct call *call = new_call(env, of);
    if (!call)
        return NULL;
    napi_get_cb_info(env, info, &count, arguments, NULL, NULL);
    napi_get_value_int32(env, arguments[0], &fd);
    if (count > 1)
        napi_get_value_int32(env, arguments[1], &timeout_ms);
    call->timeout_ms = timeout_ms;
    call->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (call->fd < 0) {
        napi_throw(env, fail(env, errno, ""));
        free(call);
        return NULL;
    }
    return call;
}

/* A connection that is being made: begun on a thread of Node's pool, for an agent may be asked, then polled by Node's loop.
 * Everything but `begin` is on Node's thread. */
struct attempt {
    uv_poll_t poll;
    napi_env env;
    /* A twin of the socket's: that is Node's to poll and to close. */
    int fd;
    int number, holders;
    bool is_polled, is_over;
    char node[256], service[16], words[TEXT_BYTES];
    napi_async_work work;
    napi_async_context context;
    napi_async_cleanup_hook_handle hook;
    napi_ref done;
};

static void let_go(struct attempt *attempt) {
    if (--attempt->holders == 0)
        free(attempt);
}

static void finalize_attempt(napi_env env, void *of, void *hint) {
    (void)env, (void)hint;
    let_go(of);
}

static void begin(napi_env env, void *of) {
    struct attempt *attempt = of;
    struct addrinfo *found;
    (void)env;
    if (d2tp_getaddrinfo(attempt->node, *attempt->service ? attempt->service : NULL, NULL, &found) != 0) {
        attempt->number = EINVAL;
        snprintf(attempt->words, sizeof attempt->words, "not an address: d2tp://host:port/KEY and host:port are");
        return;
    }
    attempt->number = d2tp_connect(attempt->fd, found->ai_addr, found->ai_addrlen) < 0 ? errno : 0;
    d2tp_freeaddrinfo(found);
}

static void on_closed(uv_handle_t *handle) {
    struct attempt *attempt = handle->data;
    napi_remove_async_cleanup_hook(attempt->hook);
    let_go(attempt);
}

/* The twin goes; with it a connection that was not made, which no agent is to keep. */
static void stop(struct attempt *attempt, bool is_made) {
    attempt->is_over = true;
    if (attempt->is_polled)
        uv_poll_stop(&attempt->poll);
    if (is_made)
        close(attempt->fd);
    else
        d2tp_close(attempt->fd);
    if (attempt->is_polled)
        uv_close((uv_handle_t *)&attempt->poll, on_closed);
    else
        let_go(attempt);
}

/* Says what became of it: undefined, or an error. */
static void finish(struct attempt *attempt) {
    napi_env env = attempt->env;
    napi_handle_scope scope;
    napi_value callback, on, what;
    napi_open_handle_scope(env, &scope);
    if (attempt->number && !*attempt->words)
        cause_of(attempt->fd, attempt->words);
    if (attempt->number)
        what = fail(env, attempt->number, attempt->words);
    else
        napi_get_undefined(env, &what);
    napi_get_reference_value(env, attempt->done, &callback);
    napi_get_global(env, &on);
    napi_delete_reference(env, attempt->done);
    napi_async_context context = attempt->context;
    stop(attempt, !attempt->number);
    if (napi_make_callback(env, context, on, callback, 1, &what, NULL) == napi_pending_exception) {
        napi_value thrown;
        napi_get_and_clear_last_exception(env, &thrown);
        napi_fatal_exception(env, thrown);
    }
    napi_async_destroy(env, context);
    napi_close_handle_scope(env, scope);
}

static void on_writable(uv_poll_t *handle, int status, int events) {
    struct attempt *attempt = handle->data;
    socklen_t len = sizeof attempt->number;
    (void)events;
    /* The loop says EBADF of any error; the socket knows better. */
    if (d2tp_getsockopt(attempt->fd, SOL_SOCKET, SO_ERROR, &attempt->number, &len) < 0)
        attempt->number = errno;
    else if (!attempt->number && status < 0)
        attempt->number = -status;
    finish(attempt);
}

/* Node, or a worker of it, ends: no more of it is called. */
static void on_end(napi_async_cleanup_hook_handle hook, void *of) {
    struct attempt *attempt = of;
    (void)hook;
    if (!attempt->is_over)
        stop(attempt, false);
}

static void begun(napi_env env, napi_status status, void *of) {
    struct attempt *attempt = of;
    uv_loop_t *loop;
    napi_delete_async_work(env, attempt->work);
    if (attempt->is_over) {
        stop(attempt, false);
        return;
    }
    if (status != napi_ok)
        attempt->number = ECANCELED;
    if (attempt->number == EINPROGRESS) {
        attempt->poll.data = attempt;
        napi_get_uv_event_loop(env, &loop);
        attempt->number = -uv_poll_init(loop, &attempt->poll, attempt->fd);
        if (!attempt->number) {
            attempt->is_polled = true;
            napi_add_async_cleanup_hook(env, on_end, attempt, &attempt->hook);
            attempt->number = -uv_poll_start(&attempt->poll, UV_WRITABLE, on_writable);
        }
        if (!attempt->number)
            return;
    }
    finish(attempt);
}

/* connect(node, service, proxy, options, done): [a descriptor, what abandons it]. `done` hears undefined, or why not. */
static napi_value js_connect(napi_env env, napi_callback_info info) {
    size_t count = 5, proxy_len = 0;
    napi_value arguments[5], name, number, external, answer = NULL;
    char proxy[TEXT_BYTES], words[2 * TEXT_BYTES];
    napi_get_cb_info(env, info, &count, arguments, NULL, NULL);
    struct attempt *attempt = calloc(1, sizeof *attempt);
    if (!attempt) {
        napi_throw(env, fail(env, ENOMEM, ""));
        return NULL;
    }
    attempt->env = env;
    napi_get_value_string_utf8(env, arguments[0], attempt->node, sizeof attempt->node, NULL);
    napi_get_value_string_utf8(env, arguments[1], attempt->service, sizeof attempt->service, NULL);
    napi_get_value_string_utf8(env, arguments[2], proxy, sizeof proxy, &proxy_len);
    /* Only a socket of IPv6 takes such an address in numbers. */
    int family = *attempt->service && strchr(attempt->node, ':') ? AF_INET6 : AF_INET;
    int fd = d2tp_socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const char *refused = NULL;
    attempt->fd = -1;
    if (fd < 0) {
        napi_throw(env, fail(env, errno, ""));
    } else if (proxy_len && d2tp_setsockopt(fd, SOL_D2TP, D2TP_SO_PROXY, proxy, proxy_len) < 0) {
        snprintf(words, sizeof words, "proxy: %s is not d2tp://host:port/KEY", proxy);
        napi_throw(env, fail(env, errno, words));
    } else if ((refused = set_all(env, fd, arguments[3]))) {
        napi_throw(env, refusal(env, fd, refused));
    } else if ((attempt->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)) < 0) {
        napi_throw(env, fail(env, errno, ""));
    } else {
        attempt->holders = 2;
        napi_create_string_utf8(env, "d2tp", NAPI_AUTO_LENGTH, &name);
        napi_create_reference(env, arguments[4], 1, &attempt->done);
        napi_async_init(env, NULL, name, &attempt->context);
        napi_create_async_work(env, NULL, name, begin, begun, attempt, &attempt->work);
        napi_queue_async_work(env, attempt->work);
        napi_create_array(env, &answer);
        napi_create_int32(env, fd, &number);
        napi_create_external(env, attempt, finalize_attempt, NULL, &external);
        napi_set_element(env, answer, 0, number);
        napi_set_element(env, answer, 1, external);
        return answer;
    }
    if (fd >= 0)
        d2tp_close(fd);
    free(attempt);
    return NULL;
}

/* abandon(what connect answered): nothing is said of it any more. */
static napi_value js_abandon(napi_env env, napi_callback_info info) {
    size_t count = 1;
    napi_value argument;
    struct attempt *attempt;
    napi_get_cb_info(env, info, &count, &argument, NULL, NULL);
    if (napi_get_value_external(env, argument, (void **)&attempt) != napi_ok || attempt->is_over)
        return NULL;
    napi_delete_reference(env, attempt->done);
    napi_async_destroy(env, attempt->context);
    attempt->is_over = true;
    /* One that is being begun is let go once it is. */
    if (attempt->is_polled)
        stop(attempt, false);
    return NULL;
}

/* reopen(token): a promise of a descriptor. */
static napi_value js_reopen(napi_env env, napi_callback_info info) {
    size_t count = 1, len = 0;
    napi_value token;
    void *bytes = NULL;
    napi_get_cb_info(env, info, &count, &token, NULL, NULL);
    if (napi_get_buffer_info(env, token, &bytes, &len) != napi_ok || len != D2TP_TOKEN_BYTES) {
        napi_throw(env, fail(env, EINVAL, "a token is a Buffer of 32 bytes"));
        return NULL;
    }
    struct call *call = new_call(env, reopen_now);
    if (!call)
        return NULL;
    memcpy(call->token, bytes, sizeof call->token);
    call->is_fd = true;
    return queue(env, call);
}

/* flush(fd, milliseconds): a promise. */
static napi_value js_flush(napi_env env, napi_callback_info info) {
    struct call *call = about(env, info, flush_now);
    return call ? queue(env, call) : NULL;
}

/* info(fd): a promise. */
static napi_value js_info(napi_env env, napi_callback_info info) {
    struct call *call = about(env, info, info_now);
    if (!call)
        return NULL;
    call->answer = answer_info;
    return queue(env, call);
}

/* end(fd): a promise. The descriptor itself is closed by Node. */
static napi_value js_end(napi_env env, napi_callback_info info) {
    struct call *call = about(env, info, end_now);
    return call ? queue(env, call) : NULL;
}

/* token(fd): a Buffer, or undefined. */
static napi_value js_token(napi_env env, napi_callback_info info) {
    size_t count = 1;
    napi_value argument, token = NULL;
    int fd;
    uint8_t bytes[D2TP_TOKEN_BYTES];
    socklen_t len = sizeof bytes;
    napi_get_cb_info(env, info, &count, &argument, NULL, NULL);
    napi_get_value_int32(env, argument, &fd);
    if (d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_PERSIST, bytes, &len) < 0)
        napi_throw(env, fail(env, errno, ""));
    else if (len == sizeof bytes)
        napi_create_buffer_copy(env, sizeof bytes, bytes, NULL, &token);
    return token;
}

/* networkChanged() */
static napi_value js_network_changed(napi_env env, napi_callback_info info) {
    (void)info;
    if (d2tp_network_changed() < 0)
        napi_throw(env, fail(env, errno, ""));
    return NULL;
}

/* dlock(isTaken) */
static napi_value js_dlock(napi_env env, napi_callback_info info) {
    size_t count = 1;
    napi_value argument;
    bool is_taken;
    napi_get_cb_info(env, info, &count, &argument, NULL, NULL);
    napi_get_value_bool(env, argument, &is_taken);
    if ((is_taken ? d2tp_dlock_acquire() : d2tp_dlock_release()) < 0)
        napi_throw(env, fail(env, errno, ""));
    return NULL;
}

/* A listener: its thread waits for connections and hands them to Node. */
struct ear {
    int fd, bell;
    pthread_t thread;
    napi_threadsafe_function heard;
};

static void *listen_on(void *of) {
    struct ear *ear = of;
    struct pollfd both[2] = {{.fd = ear->fd, .events = POLLIN}, {.fd = ear->bell, .events = POLLIN}};
    while (!both[1].revents) {
        if (d2tp_poll(both, 2, -1) < 0 && errno != EINTR)
            break;
        if (!both[0].revents)
            continue;
        int fd = d2tp_accept4(ear->fd, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM))
            poll(NULL, 0, 100);
        if (fd >= 0 && napi_call_threadsafe_function(ear->heard, (void *)(intptr_t)fd, napi_tsfn_blocking) != napi_ok)
            d2tp_close(fd);
    }
    /* When this returns the address is free, or is when what was accepted is over. */
    d2tp_close(ear->fd);
    (void)napi_call_threadsafe_function(ear->heard, (void *)(intptr_t)-1, napi_tsfn_blocking);
    napi_release_threadsafe_function(ear->heard, napi_tsfn_release);
    return NULL;
}

/* On Node's thread: a connection, or -1 when there will be no more. */
static void hand_over(napi_env env, napi_value callback, void *of, void *with) {
    napi_value fd, nothing;
    (void)of;
    if (!env) {
        if ((int)(intptr_t)with >= 0)
            d2tp_close((int)(intptr_t)with);
        return;
    }
    napi_create_int32(env, (int)(intptr_t)with, &fd);
    napi_get_undefined(env, &nothing);
    napi_call_function(env, nothing, callback, 1, &fd, NULL);
}

/* Its thread is over. */
static void unlisten(napi_env env, void *of, void *hint) {
    struct ear *ear = of;
    (void)env, (void)hint;
    pthread_join(ear->thread, NULL);
    close(ear->bell);
    free(ear);
}

/* listen(ip, port, connection): [what stops it, its address]. */
static napi_value js_listen(napi_env env, napi_callback_info info) {
    size_t count = 3;
    napi_value arguments[3], name, handle, address, answer;
    char ip[64] = "", key[64], place[200];
    int port = 0;
    struct sockaddr_in v4 = {.sin_family = AF_INET};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6};
    socklen_t len, key_len = sizeof key;
    napi_get_cb_info(env, info, &count, arguments, NULL, NULL);
    napi_get_value_string_utf8(env, arguments[0], ip, sizeof ip, NULL);
    napi_get_value_int32(env, arguments[1], &port);
    bool is_v4 = inet_pton(AF_INET, ip, &v4.sin_addr) == 1;
    if (!is_v4 && inet_pton(AF_INET6, ip, &v6.sin6_addr) != 1) {
        napi_throw(env, fail(env, EINVAL, "a D2TP server listens at an address in numbers"));
        return NULL;
    }
    v4.sin_port = v6.sin6_port = htons((uint16_t)port);
    struct sockaddr *at = is_v4 ? (struct sockaddr *)&v4 : (struct sockaddr *)&v6;
    len = is_v4 ? sizeof v4 : sizeof v6;
    struct ear *ear = calloc(1, sizeof *ear);
    if (!ear) {
        napi_throw(env, fail(env, ENOMEM, ""));
        return NULL;
    }
    ear->bell = eventfd(0, EFD_CLOEXEC);
    ear->fd = d2tp_socket(is_v4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    napi_create_string_utf8(env, "d2tp", NAPI_AUTO_LENGTH, &name);
    bool is_open = ear->bell >= 0 && ear->fd >= 0 && d2tp_bind(ear->fd, at, len) == 0 &&
                   d2tp_listen(ear->fd, 128) == 0 && d2tp_getsockname(ear->fd, at, &len) == 0 &&
                   d2tp_getsockopt(ear->fd, SOL_D2TP, D2TP_SO_HOSTKEY, key, &key_len) == 0;
    if (is_open) {
        napi_create_threadsafe_function(env, arguments[2], NULL, name, 0, 1, ear, unlisten, ear, hand_over, &ear->heard);
        errno = pthread_create(&ear->thread, NULL, listen_on, ear);
        if (errno != 0) {
            /* Its finalizer has no thread to wait for; nobody has the rest. */
            napi_throw(env, fail(env, errno, ""));
            d2tp_close(ear->fd);
            return NULL;
        } else {
            port = ntohs(is_v4 ? v4.sin_port : v6.sin6_port);
            snprintf(place, sizeof place, is_v4 ? "d2tp://%s:%d/%s" : "d2tp://[%s]:%d/%s", ip, port, key);
            napi_create_array(env, &answer);
            napi_create_int32(env, ear->bell, &handle);
            napi_create_string_utf8(env, place, NAPI_AUTO_LENGTH, &address);
            napi_set_element(env, answer, 0, handle);
            napi_set_element(env, answer, 1, address);
            return answer;
        }
    }
    napi_throw(env, fail(env, errno, ""));
    if (ear->fd >= 0)
        d2tp_close(ear->fd);
    if (ear->bell >= 0)
        close(ear->bell);
    free(ear);
    return NULL;
}

/* stop(what listen answered): once. */
static napi_value js_stop(napi_env env, napi_callback_info info) {
    size_t count = 1;
    napi_value argument;
    int bell;
    napi_get_cb_info(env, info, &count, &argument, NULL, NULL);
    napi_get_value_int32(env, argument, &bell);
    (void)!eventfd_write(bell, 1);
    return NULL;
}

/* far(fd): host:port of the far end, or an empty text. */
static napi_value js_far(napi_env env, napi_callback_info info) {
    size_t count = 1;
    napi_value argument, text;
    int fd;
    char ip[INET6_ADDRSTRLEN] = "", place[100] = "";
    struct sockaddr_storage at;
    socklen_t len = sizeof at;
    napi_get_cb_info(env, info, &count, &argument, NULL, NULL);
    napi_get_value_int32(env, argument, &fd);
    if (d2tp_getpeername(fd, (struct sockaddr *)&at, &len) == 0) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)&at;
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)&at;
        if (at.ss_family == AF_INET && inet_ntop(AF_INET, &v4->sin_addr, ip, sizeof ip))
            snprintf(place, sizeof place, "%s:%d", ip, ntohs(v4->sin_port));
        if (at.ss_family == AF_INET6 && inet_ntop(AF_INET6, &v6->sin6_addr, ip, sizeof ip))
            snprintf(place, sizeof place, "[%s]:%d", ip, ntohs(v6->sin6_port));
    }
    napi_create_string_utf8(env, place, NAPI_AUTO_LENGTH, &text);
    return text;
}

/* set(fd, options) */
static napi_value js_set(napi_env env, napi_callback_info info) {
    size_t count = 2;
    napi_value arguments[2];
    int fd;
    napi_get_cb_info(env, info, &count, arguments, NULL, NULL);
    napi_get_value_int32(env, arguments[0], &fd);
    const char *refused = set_all(env, fd, arguments[1]);
    if (refused)
        napi_throw(env, refusal(env, fd, refused));
    return NULL;
}

/* cause(fd): why it broke, or an empty text. */
static napi_value js_cause(napi_env env, napi_callback_info info) {
    size_t count = 1;
    napi_value argument, text;
    int fd;
    char words[TEXT_BYTES] = "";
    napi_get_cb_info(env, info, &count, &argument, NULL, NULL);
    napi_get_value_int32(env, argument, &fd);
    cause_of(fd, words);
    napi_create_string_utf8(env, words, NAPI_AUTO_LENGTH, &text);
    return text;
}

NAPI_MODULE_INIT() {
#define FUNCTION(name, of) {name, NULL, of, NULL, NULL, NULL, napi_enumerable, NULL}
    const napi_property_descriptor all[] = {
        FUNCTION("connect", js_connect),
        FUNCTION("abandon", js_abandon),
        FUNCTION("reopen", js_reopen),
        FUNCTION("set", js_set),
        FUNCTION("cause", js_cause),
        FUNCTION("flush", js_flush),
        FUNCTION("info", js_info),
        FUNCTION("token", js_token),
        FUNCTION("end", js_end),
        FUNCTION("far", js_far),
        FUNCTION("listen", js_listen),
        FUNCTION("stop", js_stop),
        FUNCTION("networkChanged", js_network_changed),
        FUNCTION("dlock", js_dlock),
    };
    napi_define_properties(env, exports, sizeof all / sizeof all[0], all);
    return exports;
}
