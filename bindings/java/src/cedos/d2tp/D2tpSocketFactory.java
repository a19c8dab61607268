package cedos.d2tp;

import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.Socket;
import javax.net.SocketFactory;

/**
 * Sockets over D2TP for clients that take a factory: {@code new OkHttpClient.Builder().socketFactory(new
 * D2tpSocketFactory(options))}. Such a client looks names up itself unless it is told not to.
 */
public final class D2tpSocketFactory extends SocketFactory {
    private final Options options;

    public D2tpSocketFactory(Options options) {
        this.options = options;
    }

    @Override
    public Socket createSocket() {
        return new D2tpSocket(options);
    }

    private Socket connected(InetSocketAddress to) throws IOException {
        Socket socket = createSocket();
        socket.connect(to);
        return socket;
    }

    @Override
    public Socket createSocket(String host, int port) throws IOException {
        return connected(InetSocketAddress.createUnresolved(host, port));
    }

    @Override
    public Socket createSocket(String host, int port, InetAddress local, int localPort) throws IOException {
        return createSocket(host, port);
    }

    @Override
    public Socket createSocket(InetAddress host, int port) throws IOException {
        return connected(new InetSocketAddress(host, port));
    }

    @Override
    public Socket createSocket(InetAddress host, int port, InetAddress local, int localPort) throws IOException {
        return createSocket(host, port);
    }
}
