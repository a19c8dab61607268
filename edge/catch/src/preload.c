/*
 * What LD_PRELOAD puts in front of the C library: connect, name lookups and listen are asked of
 * `cedos run`, which connects the program's own socket in its place.
 *
 *   connect(fd, host) ── fd, address ──▶ cedos run ── connects fd ──▶ errno
 *   sendto(fd, to)    ── fd, address ──▶ cedos run: a socket in its place, for questions to name servers
 *   getaddrinfo(name) ── name ─────────▶ cedos run: an address that stands for the name
 *   getnameinfo(addr) ── address ──────▶ cedos run: the name that it stands for, or none
 *   listen(fd)        ── fd ───────────▶ cedos run: knows what listens
 *   bind(fd, groups)  ── no question: a socket for notices of links and addresses hears none
 *
 * Programs it starts that do without the C library are exec.c's. What the C library's own resolver
 * sends past these calls is resolver.c's. A socket takes another's place in replace.c.
 *
 * One question is one SOCK_SEQPACKET connection to the abstract address in CEDOS_RUN. What cannot be asked
 * fails: nothing goes past. Datagrams are not carried, and fail too.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/netlink.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "preload.h"

const char *variable(const char *name)
{
    size_t len = strlen(name);
    for (char **has = environ; has && *has; has++)
        if (strncmp(*has, name, len) == 0 && (*has)[len] == '=')
            return *has + len + 1;
    return NULL;
}

/* Where to ask, as it was when the program began: some clear their environment before they start another. */
static char asked_at[sizeof((struct sockaddr_un *)NULL)->sun_path];

__attribute__((constructor)) static void keep_name(void)
{
    const char *name = variable("CEDOS_RUN");
    if (name && strlen(name) < sizeof asked_at)
        strcpy(asked_at, name);
}

int ask_socket(void)
{
    /* Another library may connect before the constructor was called. */
    const char *name = *asked_at ? asked_at : variable("CEDOS_RUN");
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    size_t len = name ? strlen(name) : 0;
    if (len == 0 || len >= sizeof at.sun_path)
        return -1;
    memcpy(at.sun_path + 1, name, len);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + len);
    int done;
    do
        done = (int)syscall(SYS_connect, fd, &at, size);
    while (done < 0 && errno == EINTR);
    if (done < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* The answer to a question; `given` becomes the descriptor that came with it, or -1. Closes `fd`. */
static int exchange(int fd, char what, const void *said, size_t len, int passed, void *text, size_t *room,
                    int *given)
{
    int before = errno, answer = ENETUNREACH;
    char question[QUESTION_BYTES_MAX];
    question[0] = what;
    if (len > sizeof question - 1)
        goto out;
    memcpy(question + 1, said, len);
    struct iovec io = { question, len + 1 };
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr message = { .msg_iov = &io, .msg_iovlen = 1 };
    if (passed >= 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(head), &passed, sizeof passed);
    }
    ssize_t n;
    do
        n = syscall(SYS_sendmsg, fd, &message, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        goto out;
    char reply[sizeof(int32_t) + REPLY_TEXT_BYTES_MAX];
    io = (struct iovec){ reply, sizeof reply };
    message = (struct msghdr){ .msg_iov = &io, .msg_iovlen = 1 };
    if (given) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
    }
    do
        n = syscall(SYS_recvmsg, fd, &message, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n < (ssize_t)sizeof(int32_t))
        goto out;
    int32_t number;
    memcpy(&number, reply, sizeof number);
    answer = number;
    struct cmsghdr *head = given ? CMSG_FIRSTHDR(&message) : NULL;
    if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS)
        memcpy(given, CMSG_DATA(head), sizeof *given);
    if (room) {
        size_t rest = (size_t)n - sizeof number;
        if (rest < *room)
            *room = rest;
        memcpy(text, reply + sizeof number, *room);
    }
out:
    close(fd);
    errno = before;
    return answer;
}

int ask_on(int fd, char what, const void *said, size_t len, int passed, void *text, size_t *room)
{
    return exchange(fd, what, said, len, passed, text, room, NULL);
}

int ask(char what, const void *said, size_t len, int passed, void *text, size_t *room)
{
    int before = errno, fd = ask_socket();
    if (fd < 0)
        return errno = before, ENETUNREACH;
    return ask_on(fd, what, said, len, passed, text, room);
}

/* Asks what becomes of a call on this socket. Where another socket is to take its place, it does. */
static int ask_about(char what, int fd, const struct sockaddr *to, socklen_t len)
{
    int before = errno, given = -1, question = ask_socket();
    if (question < 0)
        return errno = before, ENETUNREACH;
    int answer = exchange(question, what, to, len, fd, NULL, NULL, &given);
    if (given >= 0) {
        int failed = put_in_place(given, fd);
        if (failed)
            answer = failed;
        close(given);
    }
    errno = before;
    return answer;
}

int name_server_port(void)
{
    uint16_t port = 0;
    size_t room = sizeof port;
    return ask('d', "", 0, -1, &port, &room) == 0 && room == sizeof port ? port : 0;
}

/* Whether an address is on this machine, or no business of ours. */
static int is_near(const struct sockaddr *to, socklen_t len)
{
    if (to == NULL || len < sizeof to->sa_family)
        return 1;
    if (to->sa_family == AF_INET && len >= sizeof(struct sockaddr_in)) {
        uint32_t ip = ntohl(((const struct sockaddr_in *)to)->sin_addr.s_addr);
        return ip >> 24 == 127 || ip == 0;
    }
    if (to->sa_family == AF_INET6 && len >= offsetof(struct sockaddr_in6, sin6_scope_id)) {
        const struct in6_addr *ip = &((const struct sockaddr_in6 *)to)->sin6_addr;
        if (IN6_IS_ADDR_V4MAPPED(ip))
            return ip->s6_addr[12] == 127;
        return IN6_IS_ADDR_LOOPBACK(ip) || IN6_IS_ADDR_UNSPECIFIED(ip);
    }
    return 1;
}

#define DNS_PORT 53

/* Whether a name server has this address, also one of this machine: it would ask others. */
static int is_name_server(const struct sockaddr *to, socklen_t len)
{
    if (to == NULL)
        return 0;
    /* The port is at the same place in both. */
    if ((to->sa_family != AF_INET || len < sizeof(struct sockaddr_in)) &&
        (to->sa_family != AF_INET6 || len < offsetof(struct sockaddr_in6, sin6_scope_id)))
        return 0;
    return ntohs(((const struct sockaddr_in *)to)->sin_port) == DNS_PORT;
}

/* Whether this is the Unix socket of a resolver on this machine, which would ask others: the list of
 * caught_call.rs. */
static int is_resolver(const struct sockaddr *to, socklen_t len)
{
    static const char *const paths[] = { "/var/run/nscd/socket", "/run/nscd/socket",
                                         "/run/systemd/resolve/io.systemd.Resolve" };
    const size_t head = offsetof(struct sockaddr_un, sun_path);
    if (to == NULL || len <= head || to->sa_family != AF_UNIX)
        return 0;
    const char *path = ((const struct sockaddr_un *)to)->sun_path;
    size_t length = strnlen(path, len - head);
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        if (length == strlen(paths[i]) && memcmp(path, paths[i], length) == 0)
            return 1;
    return 0;
}

OURS int connect(int fd, const struct sockaddr *to, socklen_t len)
{
    if (is_resolver(to, len))
        return errno = ECONNREFUSED, -1;
    int passes = is_near(to, len) && !is_name_server(to, len);
    if (passes || len > sizeof(struct sockaddr_storage))
        return (int)syscall(SYS_connect, fd, to, len);
    int answer = ask_about('c', fd, to, len);
    if (answer == GO_ON)
        return (int)syscall(SYS_connect, fd, to, len);
    if (answer == 0)
        return 0;
    errno = answer;
    return -1;
}

OURS int listen(int fd, int backlog)
{
    int done = (int)syscall(SYS_listen, fd, backlog);
    if (done == 0)
        ask('l', "", 0, fd, NULL, NULL);
    return done;
}

/* Whether an address leads off this machine, and off its link. */
static int leads_out(const struct ifaddrs *has)
{
    if (has->ifa_addr == NULL || has->ifa_flags & IFF_LOOPBACK || !(has->ifa_flags & IFF_RUNNING))
        return 0;
    if (has->ifa_addr->sa_family == AF_INET)
        return 1;
    return has->ifa_addr->sa_family == AF_INET6 &&
           !IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)has->ifa_addr)->sin6_addr);
}

/*
 * Whether this socket's groups are of links, addresses and routes, and the program is better off without:
 * browsers give up what waits when an address changes, which its connections do not notice. One that
 * begins without a network is to hear that there is one.
 */
static int hears_too_much(int fd)
{
    int protocol = -1, online = 0, before = errno;
    socklen_t len = sizeof protocol;
    struct ifaddrs *all = NULL;
    if (getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &len) == 0 && protocol == NETLINK_ROUTE &&
        getifaddrs(&all) == 0) {
        for (const struct ifaddrs *has = all; has && !online; has = has->ifa_next)
            online = leads_out(has);
        freeifaddrs(all);
    }
    errno = before;
    return online;
}

OURS int bind(int fd, const struct sockaddr *at, socklen_t len)
{
    struct sockaddr_nl quiet;
    if (at == NULL || len < sizeof quiet || at->sa_family != AF_NETLINK)
        return (int)syscall(SYS_bind, fd, at, len);
    memcpy(&quiet, at, sizeof quiet);
    if (quiet.nl_groups != 0 && hears_too_much(fd))
        quiet.nl_groups = 0;
    return (int)syscall(SYS_bind, fd, &quiet, sizeof quiet);
}

OURS int setsockopt(int fd, int level, int name, const void *value, socklen_t len)
{
    if (level == SOL_NETLINK && name == NETLINK_ADD_MEMBERSHIP && hears_too_much(fd))
        return 0;
    return (int)syscall(SYS_setsockopt, fd, level, name, value, len);
}

/* Whether a datagram, or the first bytes of a connection, must not leave by this socket. */
static int may_not_leave(int fd, const struct sockaddr *to, socklen_t len, int flags)
{
    if (flags & MSG_FASTOPEN)
        return errno = EOPNOTSUPP, 1;
    int type, asks = is_name_server(to, len), before = errno;
    socklen_t size = sizeof type;
    if (asks && (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) < 0 || type != SOCK_DGRAM))
        asks = 0;
    errno = before;
    int answer = asks ? ask_about('s', fd, to, len) : is_near(to, len) ? GO_ON : ENETUNREACH;
    if (answer == GO_ON)
        return 0;
    return errno = answer, 1;
}

OURS ssize_t sendto(int fd, const void *bytes, size_t n, int flags, const struct sockaddr *to,
                    socklen_t len)
{
    if (may_not_leave(fd, to, len, flags))
        return -1;
    return syscall(SYS_sendto, fd, bytes, n, flags, to, len);
}

OURS ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    if (message != NULL && may_not_leave(fd, message->msg_name, message->msg_namelen, flags))
        return -1;
    return syscall(SYS_sendmsg, fd, message, flags);
}

OURS int sendmmsg(int fd, struct mmsghdr *messages, unsigned n, int flags)
{
    for (unsigned i = 0; messages != NULL && i < n; i++) {
        const struct msghdr *message = &messages[i].msg_hdr;
        if (may_not_leave(fd, message->msg_name, message->msg_namelen, flags))
            return -1;
    }
    return (int)syscall(SYS_sendmmsg, fd, messages, n, flags);
}

/* Names of this machine are looked up by this machine. */
static int is_own_name(const char *name)
{
    size_t len = strlen(name);
    if (len > 0 && name[len - 1] == '.')
        len--;
    static const char local[] = "localhost";
    size_t tail = sizeof local - 1;
    if (len >= tail && strncasecmp(name + len - tail, local, tail) == 0 &&
        (len == tail || name[len - tail - 1] == '.'))
        return 1;
    char own[256] = "";
    return gethostname(own, sizeof own - 1) == 0 && strlen(own) == len &&
           strncasecmp(own, name, len) == 0;
}

static int is_address(const char *name)
{
    struct in_addr four;
    unsigned char six[16];
    /* Also `127.1` and the like, and IPv6 with a zone. */
    return inet_aton(name, &four) || inet_pton(AF_INET6, name, six) == 1 || strchr(name, '%');
}

/* An address that stands for the name; 0 if there is one. */
static int stand_in(const char *name, int family, char *text, size_t room)
{
    char said[QUESTION_BYTES_MAX - 1];
    size_t len = strlen(name);
    if (len == 0 || len > sizeof said - 1)
        return EINVAL;
    said[0] = family == AF_INET6 ? '6' : '4';
    memcpy(said + 1, name, len);
    room--;
    int answer = ask('n', said, len + 1, -1, text, &room);
    text[answer == 0 ? room : 0] = 0;
    return answer;
}

#define STAND_IN_BYTES 64

OURS int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                     struct addrinfo **found)
{
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
        (int (*)(const char *, const char *, const struct addrinfo *, struct addrinfo **))dlsym(
            RTLD_NEXT, "getaddrinfo");
    if (real == NULL)
        return EAI_FAIL;
    if (node == NULL || is_address(node) || (hints && hints->ai_flags & AI_NUMERICHOST))
        return real(node, service, hints, found);
    if (is_own_name(node)) {
        /* The machine's files may not know it. */
        resolve_here();
        return real(node, service, hints, found);
    }
    char text[STAND_IN_BYTES];
    struct addrinfo wanted = { 0 };
    if (hints)
        wanted = *hints;
    if (stand_in(node, wanted.ai_family, text, sizeof text) != 0)
        return EAI_AGAIN;
    int names = wanted.ai_flags & AI_CANONNAME;
    /* There may be no address but ours. */
    wanted.ai_flags &= ~(AI_ADDRCONFIG | AI_CANONNAME);
    wanted.ai_flags |= AI_NUMERICHOST;
    int failed = real(text, service, &wanted, found);
    if (!failed && names && *found && (*found)->ai_canonname == NULL)
        (*found)->ai_canonname = strdup(node);
    return failed;
}

/* The old calls, with the stand-in's text for the name. */
static const char *name_or_stand_in(const char *name, int family, char *text, size_t room)
{
    if (name == NULL || is_address(name))
        return name;
    if (is_own_name(name)) {
        resolve_here();
        return name;
    }
    return stand_in(name, family, text, room) == 0 ? text : NULL;
}

OURS struct hostent *gethostbyname2(const char *name, int family)
{
    struct hostent *(*real)(const char *, int) =
        (struct hostent * (*)(const char *, int)) dlsym(RTLD_NEXT, "gethostbyname2");
    char text[STAND_IN_BYTES];
    const char *asked = name_or_stand_in(name, family, text, sizeof text);
    if (real == NULL || asked == NULL)
        return h_errno = TRY_AGAIN, NULL;
    return real(asked, family);
}

OURS struct hostent *gethostbyname(const char *name)
{
    return gethostbyname2(name, AF_INET);
}

OURS int gethostbyname2_r(const char *name, int family, struct hostent *into, char *buffer,
                          size_t room, struct hostent **found, int *why)
{
    int (*real)(const char *, int, struct hostent *, char *, size_t, struct hostent **, int *) =
        (int (*)(const char *, int, struct hostent *, char *, size_t, struct hostent **,
                 int *))dlsym(RTLD_NEXT, "gethostbyname2_r");
    char text[STAND_IN_BYTES];
    const char *asked = name_or_stand_in(name, family, text, sizeof text);
    if (real == NULL || asked == NULL) {
        *found = NULL;
        *why = TRY_AGAIN;
        return EAGAIN;
    }
    return real(asked, family, into, buffer, room, found, why);
}

OURS int gethostbyname_r(const char *name, struct hostent *into, char *buffer, size_t room,
                         struct hostent **found, int *why)
{
    return gethostbyname2_r(name, AF_INET, into, buffer, room, found, why);
}

/* The name that an address stands for; 0 if it does. Any other has none: who could say it is asked in clear. */
static int stands_for(const struct sockaddr *at, socklen_t len, char *name, size_t room)
{
    room--;
    int answer = ask('r', at, len, -1, name, &room);
    name[answer == 0 ? room : 0] = 0;
    return answer;
}

#define NAME_BYTES 256

OURS int getnameinfo(const struct sockaddr *restrict at, socklen_t len, char *restrict host,
                     socklen_t host_room, char *restrict service, socklen_t service_room, int flags)
{
    int (*real)(const struct sockaddr *, socklen_t, char *, socklen_t, char *, socklen_t, int) =
        (int (*)(const struct sockaddr *, socklen_t, char *, socklen_t, char *, socklen_t,
                 int))dlsym(RTLD_NEXT, "getnameinfo");
    if (real == NULL)
        return EAI_FAIL;
    if (is_near(at, len) || len > sizeof(struct sockaddr_storage) || host == NULL ||
        host_room == 0 || (flags & NI_NUMERICHOST && !(flags & NI_NAMEREQD)))
        return real(at, len, host, host_room, service, service_room, flags);
    char name[NAME_BYTES];
    if (flags & NI_NUMERICHOST || stands_for(at, len, name, sizeof name) != 0) {
        if (flags & NI_NAMEREQD)
            return EAI_NONAME;
        return real(at, len, host, host_room, service, service_room, flags | NI_NUMERICHOST);
    }
    if (strlen(name) >= host_room)
        return EAI_OVERFLOW;
    strcpy(host, name);
    if (service == NULL || service_room == 0)
        return 0;
    return real(at, len, NULL, 0, service, service_room, flags & ~NI_NAMEREQD);
}

/* An address without its port; how long it is, or 0. */
static socklen_t whole(const void *ip, socklen_t len, int family, struct sockaddr_storage *at)
{
    memset(at, 0, sizeof *at);
    at->ss_family = (sa_family_t)family;
    if (ip != NULL && family == AF_INET && len == sizeof(struct in_addr)) {
        memcpy(&((struct sockaddr_in *)at)->sin_addr, ip, len);
        return sizeof(struct sockaddr_in);
    }
    if (ip != NULL && family == AF_INET6 && len == sizeof(struct in6_addr)) {
        memcpy(&((struct sockaddr_in6 *)at)->sin6_addr, ip, len);
        return sizeof(struct sockaddr_in6);
    }
    return 0;
}

/* What the old calls say of an address, in one piece. */
struct told {
    char *none[1];
    char *addresses[2];
    unsigned char address[sizeof(struct in6_addr)];
    char name[NAME_BYTES];
};

static int tell(const struct sockaddr_storage *at, socklen_t at_len, const void *ip, socklen_t len,
                struct hostent *into, struct told *told)
{
    if (stands_for((const struct sockaddr *)at, at_len, told->name, sizeof told->name) != 0)
        return HOST_NOT_FOUND;
    memcpy(told->address, ip, len);
    told->none[0] = NULL;
    told->addresses[0] = (char *)told->address;
    told->addresses[1] = NULL;
    *into = (struct hostent){ .h_name = told->name,
                              .h_aliases = told->none,
                              .h_addrtype = at->ss_family,
                              .h_length = (int)len,
                              .h_addr_list = told->addresses };
    return 0;
}

OURS struct hostent *gethostbyaddr(const void *ip, socklen_t len, int family)
{
    static struct hostent entry;
    static struct told told;
    struct sockaddr_storage at;
    socklen_t at_len = whole(ip, len, family, &at);
    if (at_len == 0 || is_near((struct sockaddr *)&at, at_len)) {
        struct hostent *(*real)(const void *, socklen_t, int) =
            (struct hostent * (*)(const void *, socklen_t, int)) dlsym(RTLD_NEXT, "gethostbyaddr");
        if (real == NULL)
            return h_errno = NO_RECOVERY, NULL;
        return real(ip, len, family);
    }
    int why = tell(&at, at_len, ip, len, &entry, &told);
    if (why != 0)
        return h_errno = why, NULL;
    return &entry;
}

OURS int gethostbyaddr_r(const void *restrict ip, socklen_t len, int family,
                         struct hostent *restrict into, char *restrict buffer, size_t room,
                         struct hostent **restrict found, int *restrict why)
{
    struct sockaddr_storage at;
    socklen_t at_len = whole(ip, len, family, &at);
    *found = NULL;
    if (at_len == 0 || is_near((struct sockaddr *)&at, at_len)) {
        int (*real)(const void *, socklen_t, int, struct hostent *, char *, size_t,
                    struct hostent **, int *) =
            (int (*)(const void *, socklen_t, int, struct hostent *, char *, size_t,
                     struct hostent **, int *))dlsym(RTLD_NEXT, "gethostbyaddr_r");
        if (real == NULL)
            return *why = NO_RECOVERY, EAGAIN;
        return real(ip, len, family, into, buffer, room, found, why);
    }
    size_t skipped = -(uintptr_t)buffer % _Alignof(struct told);
    if (room < skipped + sizeof(struct told))
        return *why = NETDB_INTERNAL, ERANGE;
    *why = tell(&at, at_len, ip, len, into, (struct told *)(buffer + skipped));
    if (*why != 0)
        return 0;
    *found = into;
    return 0;
}
