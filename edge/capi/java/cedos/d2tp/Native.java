package cedos.d2tp;

import java.io.IOException;

/** The calls of libd2tp (native.c). Every one that fails throws, with the cause in words. */
final class Native {
    static {
        String file = System.getProperty("d2tp.library");
        if (file != null) {
            System.load(file);
        } else {
            System.loadLibrary("d2tp_java");
        }
    }

    private Native() {}

    static native int socket() throws IOException;

    /** Waits at most so many milliseconds; 0 is for ever. */
    static native void connect(int fd, String node, String service, int timeoutMs) throws IOException;

    static native void setNumber(int fd, int option, long value, int bytes) throws IOException;

    static native void setText(int fd, int option, String value) throws IOException;

    /** Bytes read, or -1 at the end. */
    static native int read(int fd, byte[] into, int from, int count, int timeoutMs) throws IOException;

    static native void write(int fd, byte[] bytes, int from, int count) throws IOException;

    static native void flush(int fd, int timeoutMs) throws IOException;

    static native void shutdown(int fd, int how) throws IOException;

    static native void close(int fd) throws IOException;
}
