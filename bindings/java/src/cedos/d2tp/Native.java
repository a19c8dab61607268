package cedos.d2tp;

import java.io.IOException;

/** The calls of libd2tp (native.c). Every one that fails throws, with the cause in words. */
final class Native {
    static {
        String file = System.getProperty("d2tp.library");
        try {
            if (file != null) {
                System.load(file);
            } else {
                System.loadLibrary("d2tp_java");
            }
        } catch (UnsatisfiedLinkError error) {
            throw new UnsatisfiedLinkError(error.getMessage() + ": bindings/java/build.sh makes libd2tp_java.so, which"
                + " -Dd2tp.library=FILE names, and the system's loader is to find libd2tp.so.1 (ldconfig, LD_LIBRARY_PATH)");
        }
    }

    private Native() {}

    static native int socket(boolean isIpv6) throws IOException;

    /** Waits at most so many milliseconds; 0 is for ever. */
    static native void connect(int fd, String node, String service, int timeoutMs) throws IOException;

    static native void setNumber(int fd, int option, long value, int bytes) throws IOException;

    static native void setText(int fd, int option, String value) throws IOException;

    static native void setBuffer(int fd, long low, long high, int unit, int rate) throws IOException;

    /** Bytes read, or -1 at the end. */
    static native int read(int fd, byte[] into, int from, int count, int timeoutMs) throws IOException;

    static native void write(int fd, byte[] bytes, int from, int count) throws IOException;

    static native void flush(int fd, int timeoutMs) throws IOException;

    static native void shutdown(int fd, int how) throws IOException;

    static native void close(int fd) throws IOException;

    /** Closes the descriptor only: a connection that outlives its program stays. */
    static native void leave(int fd) throws IOException;

    /** By what it is opened again; null: it is not. */
    static native byte[] token(int fd) throws IOException;

    /** At an address of 4 or 16 bytes. */
    static native int listen(byte[] ip, int port, int backlog) throws IOException;

    /** Its own host:port. */
    static native String near(int fd) throws IOException;

    /** That of the far end; empty where nobody is. */
    static native String far(int fd);

    /** This process's public key. */
    static native String key(int fd) throws IOException;

    /** Whether there is something to read or to accept before so many milliseconds are over; below zero: for ever. */
    static native boolean ready(int fd, int timeoutMs) throws IOException;

    static native void networkChanged() throws IOException;

    /** Takes a D-Lock, or gives one back. */
    static native void dlock(boolean isTaken) throws IOException;

    // Calls that wait for nothing, for coroutines. Below zero they say -errno, and throw nothing.

    /** The descriptor of a connection that is opened again. It waits for the agent: two seconds at most. */
    static native int reopen(byte[] token);

    /** Why not, in words. */
    static native String notReopened(int number);

    /** The next connection's descriptor. */
    static native int acceptNow(int fd);

    /** Begins to connect: 0, or -EINPROGRESS and then, once it is writable, {@link #pending}. */
    static native int begin(int fd, String node, String service);

    /** What became of it: 0 or -errno. */
    static native int pending(int fd);

    /** Bytes read, 0 at the end. */
    static native int readNow(int fd, byte[] into, int from, int count);

    /** Bytes accepted. */
    static native int writeNow(int fd, byte[] bytes, int from, int count);

    /** Waits so long for the peer to have everything: -EAGAIN if it has not. */
    static native int flushFor(int fd, int timeoutMs);

    /** An error in words: the connection's own where it has any. */
    static native String words(int fd, int number);

    /**
     * di_state to di_bytes_received of d2tp.h, di_bytes_ahead and di_slack_ms, then for each path dpi_class to dpi_rate,
     * with its link's name.
     */
    static native long[] info(int fd, String[] links) throws IOException;

    /**
     * Waits until one is ready or so many milliseconds are over; below zero: for ever. What each is ready for replaces what was
     * asked.
     */
    static native int poll(int[] fds, int[] events, int timeoutMs);

    /** A descriptor that wakes poll when it is rung, until it is hushed. */
    static native int bell() throws IOException;

    static native void ring(int bell);

    static native void hush(int bell);
}
