package cedos.d2tp;

import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.net.SocketAddress;
import java.net.SocketException;
import java.net.SocketTimeoutException;

/**
 * A D2TP server at a UDP address, as a {@link ServerSocket}: what it accepts is a {@link D2tpSocket}. It lets anybody in, as
 * TCP does. {@link #address} is what others connect to.
 */
public final class D2tpServerSocket extends ServerSocket {
    private static final int EAGAIN = 11;
    private static final int BACKLOG = 128;

    private final Descriptor descriptor = new Descriptor();
    private volatile InetSocketAddress at;
    private String key;
    private volatile int timeoutMs;

    /** One that is to be bound. */
    public D2tpServerSocket() throws IOException {}

    /**
     * Listens at this address; port 0 is one of the system's choice.
     *
     * @throws java.net.BindException somebody has the address
     * @throws D2tpSocketException ENOKEY: the device's key file cannot be read or made
     */
    public D2tpServerSocket(InetSocketAddress at) throws IOException {
        bind(at);
    }

    @Override
    public void bind(SocketAddress to) throws IOException {
        bind(to, BACKLOG);
    }

    /** The backlog is how many connections wait in the kernel; others wait in the engine. */
    @Override
    public void bind(SocketAddress to, int backlog) throws IOException {
        InetSocketAddress place = to == null ? new InetSocketAddress(0) : (InetSocketAddress) to;
        if (place.isUnresolved()) {
            throw new SocketException(place.getHostString() + " is a name that is not found");
        }
        if (at != null) {
            throw new SocketException("Already bound");
        }
        int fd = Native.listen(place.getAddress().getAddress(), place.getPort(), backlog < 1 ? BACKLOG : backlog);
        descriptor.open(fd);
        try {
            key = Native.key(fd);
            String near = Native.near(fd);
            at = new InetSocketAddress(place.getAddress(), Integer.parseInt(near.substring(near.lastIndexOf(':') + 1)));
        } catch (IOException error) {
            close();
            throw error;
        } finally {
            descriptor.leave();
        }
    }

    /** What others connect to: d2tp://host:port/KEY; null before it is bound. */
    public String address() {
        if (at == null) {
            return null;
        }
        String host = at.getAddress().getHostAddress();
        return "d2tp://" + (host.contains(":") ? "[" + host + "]" : host) + ":" + at.getPort() + "/" + key;
    }

    /**
     * The next connection, a {@link D2tpSocket}.
     *
     * @throws SocketTimeoutException none came in the time of {@link #setSoTimeout}
     */
    @Override
    public D2tpSocket accept() throws IOException {
        int fd = enter();
        try {
            while (true) {
                D2tpSocket socket = acceptNow(fd);
                if (socket != null) {
                    return socket;
                }
                if (!Native.ready(fd, timeoutMs == 0 ? -1 : timeoutMs)) {
                    throw new SocketTimeoutException("Accept timed out");
                }
            }
        } finally {
            leave();
        }
    }

    /** A connection, or null where none waits. */
    D2tpSocket acceptNow(int fd) throws IOException {
        int accepted = Native.acceptNow(fd);
        if (accepted >= 0) {
            return D2tpSocket.of(accepted, new Options());
        }
        if (descriptor.isClosed()) {
            throw new SocketException("Socket closed");
        }
        if (accepted != -EAGAIN) {
            throw new D2tpSocketException(-accepted, Native.words(-1, -accepted));
        }
        return null;
    }

    int enter() throws IOException {
        return descriptor.enter();
    }

    void leave() throws IOException {
        descriptor.leave();
    }

    /** No more are taken, and whoever waits for one wakes. Those that were taken go on; after them the address is free. */
    @Override
    public void close() throws IOException {
        descriptor.close();
    }

    @Override
    public boolean isClosed() {
        return descriptor.isClosed();
    }

    @Override
    public boolean isBound() {
        return at != null;
    }

    @Override
    public InetAddress getInetAddress() {
        return at == null ? null : at.getAddress();
    }

    @Override
    public int getLocalPort() {
        return at == null ? -1 : at.getPort();
    }

    @Override
    public SocketAddress getLocalSocketAddress() {
        return at;
    }

    @Override
    public void setSoTimeout(int milliseconds) {
        timeoutMs = milliseconds;
    }

    @Override
    public int getSoTimeout() {
        return timeoutMs;
    }

    // ServerSocket itself would make one of the kernel's for these.
    @Override
    public void setReuseAddress(boolean on) {}

    @Override
    public boolean getReuseAddress() {
        return true;
    }

    @Override
    public void setReceiveBufferSize(int bytes) {}

    @Override
    public String toString() {
        return "D2tpServerSocket[" + address() + "]";
    }
}
