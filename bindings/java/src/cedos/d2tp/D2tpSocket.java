package cedos.d2tp;

import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.net.SocketAddress;
import java.net.SocketException;
import java.net.SocketTimeoutException;
import java.time.Duration;

/**
 * A connection that moves between networks and keeps a deadline, as a {@link Socket}. Bytes go through two calls of
 * libd2tp, since Java makes no channel of a descriptor that it did not open.
 *
 * <p>What fails says the cause in words: ConnectException, NoRouteToHostException and SocketTimeoutException (a deadline that
 * passed, too) are what they are for the kernel's sockets; anything else is a {@link D2tpSocketException}, which has the number.
 */
public final class D2tpSocket extends Socket {
    private static final int SHUT_RD = 0;
    private static final int SHUT_WR = 1;

    /** poll(2) */
    private static final int READABLE = 1;

    private final Options options;
    private final Descriptor descriptor = new Descriptor();
    private String far = "";
    private InetAddress given;
    private volatile boolean connected;
    private boolean inputShut;
    private boolean outputShut;
    private volatile int timeoutMs;

    public D2tpSocket() {
        this(new Options());
    }

    public D2tpSocket(Options options) {
        this.options = options;
    }

    /** Of a descriptor that is connected. */
    static D2tpSocket of(int fd, Options options) throws IOException {
        D2tpSocket socket = new D2tpSocket(options);
        socket.far = Native.far(fd);
        socket.descriptor.open(fd);
        try {
            socket.opened();
        } finally {
            socket.leave();
        }
        return socket;
    }

    /**
     * A connection of {@link Options.Persist#OPEN} whose process has ended: reading goes on with the first byte that it
     * had not read, and the token stays the same.
     *
     * @throws ReopenException why not
     */
    public static D2tpSocket reopen(byte[] token) throws IOException {
        int fd = Native.reopen(token);
        if (fd < 0) {
            throw new ReopenException(-fd);
        }
        Options options = new Options();
        options.persist = Options.Persist.OPEN;
        return of(fd, options);
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
        return new String[] {bare(address.substring(0, at)), address.substring(at + 1)};
    }

    /** An address of IPv6 without the brackets that set it off from a port. */
    private static String bare(String host) {
        return host.startsWith("[") && host.endsWith("]") ? host.substring(1, host.length() - 1) : host;
    }

    /** Only a socket of IPv6 takes such an address in numbers. */
    private static boolean isIpv6(String node, String service) {
        return service != null && node.indexOf(':') >= 0;
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
        int fd = Native.socket(isIpv6(node, service));
        descriptor.open(fd);
        far = service == null ? node : (isIpv6(node, service) ? "[" + node + "]" : node) + ":" + service;
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
        if (descriptor.isClosed()) {
            throw new SocketException("Socket closed");
        }
        // One that was never made is not left behind.
        descriptor.stays(options.persist == Options.Persist.OPEN);
        connected = true;
    }

    @Override
    public void connect(SocketAddress to, int timeout) throws IOException {
        InetSocketAddress address = (InetSocketAddress) to;
        given = address.getAddress();
        // A name is the proxy's to look up.
        connect(bare(address.getHostString()), Integer.toString(address.getPort()), timeout);
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
        return descriptor.enter();
    }

    void leave() throws IOException {
        descriptor.leave();
    }

    /**
     * What was written is still sent. Whoever waits in another call wakes. A connection of {@link Options.Persist#OPEN}
     * stays, to be opened again once this process has ended: {@link #end} ends it. A write that waits on one of these
     * does not wake.
     */
    @Override
    public void close() throws IOException {
        descriptor.close();
    }

    /** Ends the connection for everybody: one that would stay is not to be opened again. What was written is still sent. */
    public void end() throws IOException {
        descriptor.stays(false);
        close();
    }

    /** Waits for something to read, or for a close, which shuts a connection that stays not down. */
    private void await(int fd) throws IOException {
        int[] fds = {fd, descriptor.bell()};
        int[] events = {READABLE, READABLE};
        int failed = -Native.poll(fds, events, timeoutMs == 0 ? -1 : timeoutMs);
        if (failed != 0) {
            throw new D2tpSocketException(failed, Native.words(-1, failed));
        }
        if (events[0] == 0 && events[1] == 0) {
            throw new SocketTimeoutException("Read timed out");
        }
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
                    if (descriptor.stays()) {
                        await(fd);
                    }
                    boolean wasClosed = descriptor.isClosed();
                    int bytes = wasClosed ? 0 : Native.read(fd, into, from, count, timeoutMs);
                    if (wasClosed || descriptor.isClosed()) {
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

    private interface Change {
        void at(int fd) throws IOException;
    }

    private void change(Change change) throws IOException {
        int fd = enter();
        try {
            change.at(fd);
        } finally {
            leave();
        }
    }

    /** Changes the deadline, which both ends keep, in seconds from now, rounded up; null takes it away. */
    public void setDeadline(Duration within) throws IOException {
        change(fd -> Options.setDeadline(fd, within));
    }

    /** Changes how many bytes are expected both ways; 0 when that is not known. */
    public void setSize(long bytes) throws IOException {
        change(fd -> Options.setSize(fd, bytes));
    }

    /** Changes which networks may be paid for. */
    public void setPolicy(Options.Policy policy) throws IOException {
        change(fd -> Options.setPolicy(fd, policy));
    }

    /** Changes how many bytes metered networks may carry in all, what they did carry included; below 0 is no limit. */
    public void setBudget(long bytes) throws IOException {
        change(fd -> Options.setBudget(fd, Math.max(-1, bytes)));
    }

    /** Changes what is done when free networks will not make the deadline. */
    public void setIfLate(Options.IfLate ifLate) throws IOException {
        change(fd -> Options.setIfLate(fd, ifLate));
    }

    /** Changes what is held ahead of the program; null is what the kernel holds. */
    public void setBuffer(Options.Thresholds buffer) throws IOException {
        change(fd -> Options.setBuffer(fd, buffer));
    }

    /** What the connection and its paths do now. Asking an agent that carries it takes two seconds at most. */
    public SocketInfo info() throws IOException {
        int fd = enter();
        try {
            return SocketInfo.of(fd);
        } finally {
            leave();
        }
    }

    /**
     * By what a connection of {@link Options.Persist#OPEN} is opened again, 32 bytes; null for others. Whoever is the same
     * user and has it may have the connection: keep it in a file that nobody else may read.
     */
    public byte[] token() throws IOException {
        int fd = enter();
        try {
            return Native.token(fd);
        } finally {
            leave();
        }
    }

    /**
     * Waits until the peer has everything that was written: so many milliseconds, or as long as it takes if that is below 0.
     *
     * @throws SocketTimeoutException not yet
     */
    public void flushToPeer(int timeoutMs) throws IOException {
        change(fd -> Native.flush(fd, timeoutMs));
    }

    private void shut(int how) throws IOException {
        change(fd -> Native.shutdown(fd, how));
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
        return descriptor.isClosed();
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
            : InetSocketAddress.createUnresolved(bare(far.substring(0, at)), Integer.parseInt(far.substring(at + 1)));
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
