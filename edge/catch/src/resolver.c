/*
 * The C library's own resolver. It sends by calls inside the library, which no other library comes before:
 *
 *   res_query, res_search, res_send … ── the resolver's list of name servers is ours alone ──▶ cedos run
 *   getaddrinfo_a ─────────────────────── each name by getaddrinfo of preload.c
 *
 * The list is a field of the resolver's state, which programs may set (resolver(3)): the library keeps what
 * it finds there. Where `cedos run` does not answer, no server is asked.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <arpa/nameser.h>
#include <dlfcn.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <resolv.h>
#include <stddef.h>

#include "preload.h"

/* Has the resolver of this state ask our name server, and no other. 0, or -1 with h_errno. */
static int ask_ours(res_state state)
{
    int before = errno;
    if (!(state->options & RES_INIT) && res_ninit(state) < 0)
        return h_errno = NETDB_INTERNAL, -1;
    int port = name_server_port();
    errno = before;
    if (port == 0)
        return h_errno = TRY_AGAIN, -1;
    state->nscount = 1;
    state->nsaddr_list[0] = (struct sockaddr_in){
        .sin_family = AF_INET,
        .sin_port = htons((unsigned short)port),
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
    };
    /* It listens for datagrams alone. */
    state->options &= ~(unsigned long)RES_USEVC;
    return 0;
}

void resolve_here(void)
{
    ask_ours(__res_state());
}

/* Calls the library's function of this name, with our name server. */
#define THROUGH_OURS(state, name, parameters, arguments)                 \
    do {                                                                 \
        int(*real) parameters = (int(*) parameters)dlsym(RTLD_NEXT, name); \
        if (real == NULL)                                                \
            return h_errno = NO_RECOVERY, -1;                            \
        if (ask_ours(state) < 0)                                         \
            return -1;                                                   \
        return real arguments;                                           \
    } while (0)

/* resolv.h may name these otherwise. */
#undef res_query
#undef res_search
#undef res_querydomain
#undef res_send
#undef res_nquery
#undef res_nsearch
#undef res_nquerydomain
#undef res_nsend

/* Older programs know them by names with two underscores. */
#define BOTH_NAMES(name) \
    OURS __typeof__(name) __##name __attribute__((alias(#name)))

OURS int res_query(const char *name, int class, int type, unsigned char *into, int room)
{
    THROUGH_OURS(__res_state(), "res_query", (const char *, int, int, unsigned char *, int),
                 (name, class, type, into, room));
}

OURS int res_search(const char *name, int class, int type, unsigned char *into, int room)
{
    THROUGH_OURS(__res_state(), "res_search", (const char *, int, int, unsigned char *, int),
                 (name, class, type, into, room));
}

OURS int res_querydomain(const char *name, const char *domain, int class, int type,
                         unsigned char *into, int room)
{
    THROUGH_OURS(__res_state(), "res_querydomain",
                 (const char *, const char *, int, int, unsigned char *, int),
                 (name, domain, class, type, into, room));
}

OURS int res_send(const unsigned char *question, int len, unsigned char *into, int room)
{
    THROUGH_OURS(__res_state(), "res_send", (const unsigned char *, int, unsigned char *, int),
                 (question, len, into, room));
}

OURS int res_nquery(res_state state, const char *name, int class, int type, unsigned char *into,
                    int room)
{
    THROUGH_OURS(state, "res_nquery", (res_state, const char *, int, int, unsigned char *, int),
                 (state, name, class, type, into, room));
}

OURS int res_nsearch(res_state state, const char *name, int class, int type, unsigned char *into,
                     int room)
{
    THROUGH_OURS(state, "res_nsearch", (res_state, const char *, int, int, unsigned char *, int),
                 (state, name, class, type, into, room));
}

OURS int res_nquerydomain(res_state state, const char *name, const char *domain, int class,
                          int type, unsigned char *into, int room)
{
    THROUGH_OURS(state, "res_nquerydomain",
                 (res_state, const char *, const char *, int, int, unsigned char *, int),
                 (state, name, domain, class, type, into, room));
}

OURS int res_nsend(res_state state, const unsigned char *question, int len, unsigned char *into,
                   int room)
{
    THROUGH_OURS(state, "res_nsend", (res_state, const unsigned char *, int, unsigned char *, int),
                 (state, question, len, into, room));
}

BOTH_NAMES(res_query);
BOTH_NAMES(res_search);
BOTH_NAMES(res_querydomain);
BOTH_NAMES(res_send);
BOTH_NAMES(res_nquery);
BOTH_NAMES(res_nsearch);
BOTH_NAMES(res_nquerydomain);
BOTH_NAMES(res_nsend);

/* Our getaddrinfo waits for no network, so all is done before this returns. */
OURS int getaddrinfo_a(int mode, struct gaicb *list[], int count, struct sigevent *notice)
{
    int (*real)(int, struct gaicb **, int, struct sigevent *) =
        (int (*)(int, struct gaicb **, int, struct sigevent *))dlsym(RTLD_NEXT, "getaddrinfo_a");
    if (real == NULL)
        return EAI_SYSTEM;
    for (int i = 0; i < count; i++) {
        struct gaicb *one = list[i];
        if (one == NULL)
            continue;
        one->ar_result = NULL;
        one->__return =
            getaddrinfo(one->ar_name, one->ar_service, one->ar_request, &one->ar_result);
    }
    /* With nothing to look up it only gives notice. */
    return real(mode, list, 0, notice);
}
