/* A client as they are written: fetch wait|poll HOST PORT PATH. The answer goes to stdout; where there is
 * none, the errno of connect to stderr, and exit code 3. */
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int failed(int why)
{
    fprintf(stderr, "errno %d\n", why);
    return 3;
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return 2;
    int polls = strcmp(argv[1], "poll") == 0;
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *found;
    int no_name = getaddrinfo(argv[2], argv[3], &hints, &found);
    if (no_name) {
        fprintf(stderr, "name: %s\n", gai_strerror(no_name));
        return 4;
    }
    int fd = socket(found->ai_family, SOCK_STREAM, 0);
    if (fd < 0)
        return failed(errno);
    if (polls)
        fcntl(fd, F_SETFL, O_NONBLOCK);
    if (connect(fd, found->ai_addr, found->ai_addrlen) < 0) {
        if (!polls || errno != EINPROGRESS)
            return failed(errno);
        struct pollfd one = { fd, POLLOUT, 0 };
        if (poll(&one, 1, 60000) != 1)
            return failed(ETIMEDOUT);
        int why = 0;
        socklen_t len = sizeof why;
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &why, &len);
        if (why)
            return failed(why);
        fcntl(fd, F_SETFL, 0);
    }
    char words[4096];
    int n = snprintf(words, sizeof words, "GET %s HTTP/1.0\r\nHost: %s\r\n\r\n", argv[4], argv[2]);
    if (write(fd, words, (size_t)n) != n)
        return failed(errno);
    ssize_t got;
    while ((got = read(fd, words, sizeof words)) > 0)
        fwrite(words, 1, (size_t)got, stdout);
    return got < 0 ? failed(errno) : 0;
}
