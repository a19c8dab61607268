/* What Node needs of libd2tp beside the descriptor: connect, options, causes. By Node-API, so one build serves
 * every version; nothing waits on Node's own thread. */
#define NAPI_VERSION 8
#include <d2tp.h>
#include <errno.h>
#include <node_api.h>
#include <stdlib.h>
#include <string.h>

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

static napi_value fail(napi_env env, int number, const char *words) {
    napi_value error, text, value;
    napi_create_string_utf8(env, *words ? words : strerror(number), NAPI_AUTO_LENGTH, &text);
    napi_create_error(env, NULL, text, &error);
    napi_create_int32(env, number, &value);
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

/* Sets the options that the object has; the name of one that is refused, or null. */
static const char *set_all(napi_env env, int fd, napi_value from) {
    for (size_t i = 0; i < OPTIONS_COUNT; i++) {
        bool has;
        double number;
        napi_value value;
        if (napi_has_named_property(env, from, OPTIONS[i].name, &has) != napi_ok || !has)
            continue;
        napi_get_named_property(env, from, OPTIONS[i].name, &value);
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

struct call {
    int fd, number;
    char node[256], service[16], words[TEXT_BYTES];
    napi_deferred deferred;
    napi_async_work work;
};

/* On a thread of Node's pool. */
static void run(napi_env env, void *of) {
    struct call *call = of;
    struct addrinfo *found;
    (void)env;
    if (d2tp_getaddrinfo(call->node, *call->service ? call->service : NULL, NULL, &found) != 0) {
        call->number = EINVAL;
        return;
    }
    if (d2tp_connect(call->fd, found->ai_addr, found->ai_addrlen) < 0) {
        call->number = errno;
        cause_of(call->fd, call->words);
    }
    d2tp_freeaddrinfo(found);
}

static void done(napi_env env, napi_status status, void *of) {
    struct call *call = of;
    napi_value value;
    if (status != napi_ok)
        call->number = ECANCELED;
    if (call->number) {
        d2tp_close(call->fd);
        napi_reject_deferred(env, call->deferred, fail(env, call->number, call->words));
    } else {
        napi_create_int32(env, call->fd, &value);
        napi_resolve_deferred(env, call->deferred, value);
    }
    napi_delete_async_work(env, call->work);
    free(call);
}

/* connect(node, service, proxy, options): a promise of a descriptor. */
static napi_value js_connect(napi_env env, napi_callback_info info) {
    size_t count = 4;
    napi_value arguments[4], promise, name;
    char proxy[TEXT_BYTES];
    napi_get_cb_info(env, info, &count, arguments, NULL, NULL);
    struct call *call = calloc(1, sizeof *call);
    if (!call) {
        napi_throw(env, fail(env, ENOMEM, ""));
        return NULL;
    }
    size_t proxy_len = 0;
    napi_get_value_string_utf8(env, arguments[0], call->node, sizeof call->node, NULL);
    napi_get_value_string_utf8(env, arguments[1], call->service, sizeof call->service, NULL);
    napi_get_value_string_utf8(env, arguments[2], proxy, sizeof proxy, &proxy_len);
    call->fd = d2tp_socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const char *refused = NULL;
    if (call->fd < 0) {
        napi_throw(env, fail(env, errno, ""));
    } else if (proxy_len && d2tp_setsockopt(call->fd, SOL_D2TP, D2TP_SO_PROXY, proxy, proxy_len) < 0) {
        napi_throw(env, fail(env, errno, "not a proxy: d2tp://host:port/KEY is one"));
    } else if ((refused = set_all(env, call->fd, arguments[3]))) {
        napi_throw(env, fail(env, EINVAL, refused));
    } else {
        napi_create_promise(env, &call->deferred, &promise);
        napi_create_string_utf8(env, "d2tp", NAPI_AUTO_LENGTH, &name);
        napi_create_async_work(env, NULL, name, run, done, call, &call->work);
        napi_queue_async_work(env, call->work);
        return promise;
    }
    if (call->fd >= 0)
        d2tp_close(call->fd);
    free(call);
    return NULL;
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
        napi_throw(env, fail(env, errno, refused));
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
    const napi_property_descriptor all[] = {
        {"connect", NULL, js_connect, NULL, NULL, NULL, napi_enumerable, NULL},
        {"set", NULL, js_set, NULL, NULL, NULL, napi_enumerable, NULL},
        {"cause", NULL, js_cause, NULL, NULL, NULL, napi_enumerable, NULL},
    };
    napi_define_properties(env, exports, sizeof all / sizeof all[0], all);
    return exports;
}
