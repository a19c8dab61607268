package cedos.d2tp;

import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.net.SocketAddress;
import java.net.SocketException;
import java.time.Duration;

/**
 * A connection that moves between networks and keeps a deadline, as a {@link Socket}. Bytes go through two calls of
 * libd2tp, since Java makes no channel of a descriptor that it did not open.
 */
public final class D2tpSocket extends Socket {
    private static final int SHUT_RD = 0;
    private static final int SHUT_WR = 1;
    private static final int SHUT_RDWR = 2;

    private final Options options;
    private final Object lock = new Object();
    private int fd = -1;
    private int users;
    private String far = "";
    private InetAddress given;
    private volatile boolean connected;
    private volatile boolean closed;
    private boolean inputShut;
    private boolean outputShut;
    private volatile int timeoutMs;

    public D2tpSocket() {
        this(new Options());
    }

    public D2tpSocket(Options options) {
        this.options = options;
    }

    /** Connects to "d2tp://host:port/KEY", or to "host:port" through the proxy. */
    public static D2tpSocket connect(String address, Options options) throws IOException {
        D2tpSocket socket = new D2tpSocket(options);
        String[] parts = parts(address);
        socket.connect(parts[0], parts[1], 0);
        return socket;
    }

    /** The node of an address, and its service unless the node says all. */
    static String[] parts(String address) throws IOException {
        if (address.startsWith("d2tp://")) {
            return new String[] {address, null};
        }
        int at = address.lastIndexOf(':');
        if (at < 0) {
            throw new SocketException(address + " is neither d2tp://host:port/KEY nor host:port");
        }
        return new String[] {address.substring(0, at), address.substring(at + 1)};
    }

    private void connect(String node, String service, int timeout) throws IOException {
        int fd = open(node, service);
        try {
            Native.connect(fd, node, service, timeout);
            opened();
        } catch (IOException error) {
            close();
            throw error;
        } finally {
            leave();
        }
    }

    /** A descriptor with the options; whoever asks connects it, says that it is {@link #opened}, and leaves. */
    int open(String node, String service) throws IOException {
        synchronized (lock) {
            if (closed) {
                throw new SocketException("Socket is closed");
            }
            if (fd >= 0) {
                throw new SocketException("already connected");
            }
            fd = Native.socket();
            users++;
            far = service == null ? node : node + ":" + service;
        }
        try {
            options.set(fd);
        } catch (IOException error) {
            close();
            leave();
            throw error;
        }
        return fd;
    }

    void opened() throws IOException {
        synchronized (lock) {
            if (closed) {
                throw new SocketException("Socket closed");
            }
            connected = true;
        }
    }

    @Override
    public void connect(SocketAddress to, int timeout) throws IOException {
        InetSocketAddress address = (InetSocketAddress) to;
        given = address.getAddress();
        // A name is the proxy's to look up.
        connect(address.getHostString(), Integer.toString(address.getPort()), timeout);
    }

    @Override
    public void connect(SocketAddress to) throws IOException {
        connect(to, 0);
    }

    /** Chooses nothing: policy chooses links. */
    @Override
    public void bind(SocketAddress ignored) {}

    /** The descriptor, for a call; whoever enters leaves. */
    int enter() throws IOException {
        synchronized (lock) {
            if (closed || fd < 0) {
                throw new SocketException(closed ? "Socket closed" : "Socket is not connected");
            }
            users++;
            return fd;
        }
    }

    /** The descriptor goes with its last user, so that nobody reads another's. */
    void leave() throws IOException {
        int last = -1;
        synchronized (lock) {
            users--;
            if (closed && users == 0) {
                last = fd;
                fd = -1;
            }
        }
        if (last >= 0) {
            Native.close(last);
        }
    }

    @Override
    public void close() throws IOException {
        synchronized (lock) {
            if (closed) {
                return;
            }
            closed = true;
            users++;
            if (fd >= 0 && users > 1) {
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

    @Override
    public InputStream getInputStream() {
        return new InputStream() {
            @Override
            public int read() throws IOException {
                byte[] one = new byte[1];
                return read(one, 0, 1) < 0 ? -1 : one[0] & 0xff;
            }

            @Override
            public int read(byte[] into, int from, int count) throws IOException {
                java.util.Objects.checkFromIndexSize(from, count, into.length);
                if (count == 0) {
                    return 0;
                }
                int fd = enter();
                try {
                    int bytes = Native.read(fd, into, from, count, timeoutMs);
                    if (closed) {
                        throw new SocketException("Socket closed");
                    }
                    return bytes;
                } finally {
                    leave();
                }
            }

            @Override
            public void close() throws IOException {
                D2tpSocket.this.close();
            }
        };
    }

    @Override
    public OutputStream getOutputStream() {
        return new OutputStream() {
            @Override
            public void write(int one) throws IOException {
                write(new byte[] {(byte) one}, 0, 1);
            }

            @Override
            public void write(byte[] bytes, int from, int count) throws IOException {
                java.util.Objects.checkFromIndexSize(from, count, bytes.length);
                int fd = enter();
                try {
                    Native.write(fd, bytes, from, count);
                } finally {
                    leave();
                }
            }

            @Override
            public void close() throws IOException {
                D2tpSocket.this.close();
            }
        };
    }

    /** Changes the deadline, which both ends keep; null takes it away. */
    public void setDeadline(Duration within) throws IOException {
        int fd = enter();
        try {
            Options.setDeadline(fd, within);
        } finally {
            leave();
        }
    }

    /** Waits until the peer has everything that was written. */
    public void flushToPeer(int timeoutMs) throws IOException {
        int fd = enter();
        try {
            Native.flush(fd, timeoutMs);
        } finally {
            leave();
        }
    }

    private void shut(int how) throws IOException {
        int fd = enter();
        try {
            Native.shutdown(fd, how);
        } finally {
            leave();
        }
    }

    @Override
    public void shutdownInput() throws IOException {
        shut(SHUT_RD);
        inputShut = true;
    }

    @Override
    public void shutdownOutput() throws IOException {
        shut(SHUT_WR);
        outputShut = true;
    }

    @Override
    public void setSoTimeout(int milliseconds) {
        timeoutMs = milliseconds;
    }

    @Override
    public int getSoTimeout() {
        return timeoutMs;
    }

    @Override
    public boolean isConnected() {
        return connected;
    }

    @Override
    public boolean isBound() {
        return connected;
    }

    @Override
    public boolean isClosed() {
        return closed;
    }

    @Override
    public boolean isInputShutdown() {
        return inputShut;
    }

    @Override
    public boolean isOutputShutdown() {
        return outputShut;
    }

    /** A connection that moves has no address of its own. */
    @Override
    public InetAddress getLocalAddress() {
        return new InetSocketAddress(0).getAddress();
    }

    @Override
    public SocketAddress getLocalSocketAddress() {
        return connected ? new InetSocketAddress(0) : null;
    }

    /** Names are not looked up here. */
    @Override
    public SocketAddress getRemoteSocketAddress() {
        if (!connected) {
            return null;
        }
        int at = far.lastIndexOf(':');
        boolean isServer = far.startsWith("d2tp://");
        return isServer
            ? InetSocketAddress.createUnresolved(far, 0)
            : InetSocketAddress.createUnresolved(far.substring(0, at), Integer.parseInt(far.substring(at + 1)));
    }

    // Socket itself would make one of the kernel's to answer these.

    /** What {@code connect} was given, which may be null: names are not looked up here. */
    @Override
    public InetAddress getInetAddress() {
        return connected ? given : null;
    }

    @Override
    public int getPort() {
        return connected ? ((InetSocketAddress) getRemoteSocketAddress()).getPort() : 0;
    }

    @Override
    public int getLocalPort() {
        return connected ? 0 : -1;
    }

    // What the kernel would do on loopback, and D2TP does by itself.
    @Override
    public void setTcpNoDelay(boolean on) {}

    @Override
    public boolean getTcpNoDelay() {
        return true;
    }

    @Override
    public void setKeepAlive(boolean on) {}

    @Override
    public boolean getKeepAlive() {
        return false;
    }

    @Override
    public void setSoLinger(boolean on, int seconds) {}

    @Override
    public int getSoLinger() {
        return -1;
    }

    @Override
    public String toString() {
        return "D2tpSocket[" + far + "]";
    }
}
