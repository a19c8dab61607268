package cedos.d2tp;

import java.io.IOException;
import java.net.SocketException;

/** A descriptor that is closed with its last user, so that nobody reads another's. */
final class Descriptor {
    private static final int SHUT_RDWR = 2;

    private int fd = -1;
    private int bell = -1;
    private int users;
    private boolean stays;
    private volatile boolean closed;

    /** Whether what it leads to is to outlive it. */
    synchronized void stays(boolean does) {
        stays = does;
    }

    synchronized boolean stays() {
        return stays;
    }

    boolean isClosed() {
        return closed;
    }

    /** This is it, from now on; whoever says so has entered. */
    void open(int opened) throws IOException {
        String why;
        synchronized (this) {
            if (!closed && fd < 0) {
                fd = opened;
                users++;
                return;
            }
            why = closed ? "Socket is closed" : "already connected";
        }
        Native.close(opened);
        throw new SocketException(why);
    }

    /** For a call; whoever enters leaves. */
    synchronized int enter() throws IOException {
        if (closed || fd < 0) {
            throw new SocketException(closed ? "Socket closed" : "Socket is not connected");
        }
        users++;
        return fd;
    }

    /** What rings when it is closed, for whoever has entered. */
    synchronized int bell() throws IOException {
        if (bell < 0) {
            bell = Native.bell();
            if (closed) {
                Native.ring(bell);
            }
        }
        return bell;
    }

    void leave() throws IOException {
        int last = -1;
        boolean remains;
        synchronized (this) {
            users--;
            remains = stays;
            if (closed && users == 0) {
                last = fd;
                fd = -1;
                if (bell >= 0) {
                    Native.leave(bell);
                    bell = -1;
                }
            }
        }
        if (last >= 0 && remains) {
            Native.leave(last);
        } else if (last >= 0) {
            Native.close(last);
        }
    }

    void close() throws IOException {
        synchronized (this) {
            if (closed) {
                return;
            }
            closed = true;
            users++;
            if (bell >= 0) {
                Native.ring(bell);
            }
            if (fd >= 0 && users > 1 && !stays) {
                try {
                    // Whoever waits in a call of the same descriptor wakes.
                    Native.shutdown(fd, SHUT_RDWR);
                } catch (IOException notConnected) {
                    // Then nobody waits.
                }
            }
        }
        leave();
    }
}
