/* What the files of the library for LD_PRELOAD have in common. */
#ifndef CEDOS_PRELOAD_H
#define CEDOS_PRELOAD_H

#include <stddef.h>

#define OURS __attribute__((visibility("default")))

/* ask.rs says the same. */
#define GO_ON (-1)
#define QUESTION_BYTES_MAX 512
#define REPLY_TEXT_BYTES_MAX 512

/* All of these work between vfork and execve, too: they write to the stack alone. */

/* A variable of the environment. Not by getenv: bash has one of its own. */
const char *variable(const char *name);

/* A connection for one question; -1 where nobody answers. */
int ask_socket(void);

/* The answer's number; its text, if there is room for one, and how long that is. Closes `fd`. ENETUNREACH
 * where nobody answers. */
int ask_on(int fd, char what, const void *said, size_t len, int passed, void *text, size_t *room);

/* As ask_on, over a connection of its own. */
int ask(char what, const void *said, size_t len, int passed, void *text, size_t *room);

/* The port of our name server on 127.0.0.1; 0 where nobody answers. */
int name_server_port(void);

/* Makes descriptor `fd` the socket `given`, also in the epoll sets that have it. An errno, or 0. */
int put_in_place(int given, int fd);

/* Has the C library's resolver ask our name server, in this thread. */
void resolve_here(void);

#endif
