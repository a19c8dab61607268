/*
 * Arbitrary files as programs, against what reads them before a caught program starts (exec.c): under
 * AddressSanitizer and UndefinedBehaviorSanitizer, by `cargo xtask nightly`.
 *
 *   arbitrary_programs PROGRAM FOLDER SEED SECONDS
 *
 * Each file is this PROGRAM's beginning with some bytes changed, or a first line of a script. The last line says how
 * many there were.
 */
#include "../../src/exec.c"

#include <stdlib.h>
#include <time.h>

#define BEGINNING_BYTES 8192

static uint64_t state;

/* xorshift64*: the same files for the same seed. */
static uint64_t draw(void)
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1dull;
}

static size_t fill(char *file, const char *beginning, size_t len)
{
    if (draw() % 4 == 0) {
        size_t n = (size_t)(draw() % (2 * FIRST_LINE_BYTES_MAX));
        for (size_t i = 0; i < n; i++)
            file[i] = "#! \t\n/abin\0sh"[draw() % 12];
        if (n > 2 && draw() % 2)
            memcpy(file, "#!", 2);
        return n;
    }
    memcpy(file, beginning, len);
    for (uint64_t changes = draw() % 16; changes > 0; changes--) {
        /* Mostly in the headers. */
        size_t at = (size_t)(draw() % (draw() % 2 ? 1024 : len));
        file[at < len ? at : 0] = (char)draw();
    }
    return draw() % 8 ? len : (size_t)(draw() % (len + 1));
}

int main(int count_of_words, char **words)
{
    if (count_of_words != 5)
        return 2;
    static char beginning[BEGINNING_BYTES], file[BEGINNING_BYTES];
    char path[PATH_MAX];
    state = strtoull(words[3], NULL, 10) * 2 + 1;
    time_t until = time(NULL) + atoi(words[4]);
    int program = open(words[1], O_RDONLY | O_CLOEXEC);
    ssize_t len = read(program, beginning, sizeof beginning);
    if (len <= FIRST_LINE_BYTES_MAX)
        return 2;
    snprintf(path, sizeof path, "%s/program", words[2]);
    unsigned long files = 0, kinds[128] = {0};
    for (; files % 256 || time(NULL) < until; files++) {
        size_t n = fill(file, beginning, (size_t)len);
        int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0700);
        if (fd < 0 || write(fd, file, n) != (ssize_t)n || close(fd) < 0)
            return 2;
        kinds[kind_of(AT_FDCWD, path) & 127]++;
    }
    printf("%lu files: %lu heard, %lu to be held, %lu foreign\n", files, kinds[HEARD], kinds[TO_BE_HELD],
           kinds[FOREIGN]);
    return 0;
}
