/* many COUNT HOST PORT: as many connections at once, until it is ended. */
#include "bsd.h"

int main(int argc, char **argv) {
    struct sockaddr_in to = {.sin_family = AF_INET};
    if (argc != 4)
        return 2;
    to.sin_port = htons((uint16_t)atoi(argv[3]));
    NEED(inet_pton(AF_INET, argv[2], &to.sin_addr) == 1);
    for (int i = 0; i < atoi(argv[1]); i++) {
        int fd = BSD(socket)(AF_INET, SOCK_STREAM, 0);
        NEED(fd >= 0);
        NEED(BSD(connect)(fd, (struct sockaddr *)&to, sizeof to) == 0);
        NEED(BSD(send)(fd, "x", 1, NOSIGNAL) == 1);
    }
    puts("there");
    fflush(stdout);
    for (;;)
        pause();
}
