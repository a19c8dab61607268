import cedos.d2tp.D2tpServerSocket;
import cedos.d2tp.D2tpSocket;
import cedos.d2tp.D2tpSocketException;
import cedos.d2tp.D2tpSocketFactory;
import cedos.d2tp.Device;
import cedos.d2tp.Options;
import cedos.d2tp.ReopenException;
import cedos.d2tp.SocketInfo;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.BindException;
import java.net.InetSocketAddress;
import java.net.NoRouteToHostException;
import java.net.Socket;
import java.net.SocketException;
import java.net.SocketTimeoutException;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Arrays;
import javax.net.SocketFactory;

/**
 * Connections to a D2TP server, a server of its own and a page through the proxy. bindings/tests/languages/fetch.rs runs it.
 *
 * <p>java Example SERVER PROXY URL
 *
 * <p>And a connection that is opened again, beside an agent (bindings/tests/languages/reopen.rs):
 *
 * <p>java Example keep SERVER FILE — is killed when it has said "kept"; FILE: the token
 *
 * <p>java Example again FILE
 */
public final class Example {
    private Example() {}

    static void need(boolean what, String otherwise) {
        if (!what) {
            throw new AssertionError(otherwise);
        }
    }

    static void echo(String server, Options options) throws Exception {
        byte[] message = new byte[300_000];
        Arrays.fill(message, (byte) 'j');
        try (D2tpSocket socket = D2tpSocket.connect(server, options)) {
            Thread writer = new Thread(() -> {
                try {
                    socket.getOutputStream().write(message);
                    socket.shutdownOutput();
                } catch (IOException error) {
                    throw new AssertionError(error);
                }
            });
            writer.start();
            need(Arrays.equals(message, socket.getInputStream().readAllBytes()), "not what was sent");
            writer.join();
        }
        System.out.println("socket ok");
    }

    static void deadlines(String server) throws Exception {
        try (D2tpSocket socket = D2tpSocket.connect(server, new Options())) {
            InputStream in = socket.getInputStream();
            socket.setSoTimeout(10);
            try {
                in.read();
                throw new AssertionError("no timeout");
            } catch (SocketTimeoutException expected) {
                socket.setSoTimeout(0);
            }
            // Rounded up, never down.
            socket.setDeadline(Duration.ofMillis(1900));
            Duration slack = socket.info().slack;
            need(slack.compareTo(Duration.ofMillis(1500)) > 0, "" + slack);
            try {
                in.read();
                throw new AssertionError("no end");
            } catch (SocketTimeoutException expected) {
                System.out.println("deadline ok: " + expected.getMessage());
            }
        }
        // A close wakes who reads.
        D2tpSocket socket = D2tpSocket.connect(server, new Options());
        Thread closer = new Thread(() -> {
            try {
                Thread.sleep(50);
                socket.close();
            } catch (IOException | InterruptedException error) {
                throw new AssertionError(error);
            }
        });
        closer.start();
        try {
            socket.getInputStream().read();
            throw new AssertionError("read after close");
        } catch (IOException expected) {
            closer.join();
        }
        System.out.println("close ok");
    }

    static String hear(D2tpSocket socket, int bytes) throws IOException {
        return new String(socket.getInputStream().readNBytes(bytes), StandardCharsets.US_ASCII);
    }

    static void say(D2tpSocket socket, String words) throws IOException {
        socket.getOutputStream().write(words.getBytes(StandardCharsets.US_ASCII));
    }

    /** What only D2TP knows of a connection, and may be told. */
    static void known(String server, Options options) throws Exception {
        try (D2tpSocket socket = D2tpSocket.connect(server, options)) {
            say(socket, "known");
            socket.flushToPeer(60_000);
            need(hear(socket, 5).equals("known"), "something else");
            SocketInfo info = socket.info();
            need(info.state == SocketInfo.State.CONNECTED, "" + info.state);
            need(info.bytesAcked == 5 && info.bytesReceived == 5, info.bytesAcked + " " + info.bytesReceived);
            need(info.slack.compareTo(options.deadline) <= 0 && !info.slack.isZero(), "" + info.slack);
            need(info.paths.get(0).state == SocketInfo.PathState.WORKS, "" + info.paths.get(0).state);
            socket.setDeadline(null);
            socket.setSize(10);
            socket.setPolicy(Options.Policy.ANY);
            socket.setBudget(-1);
            socket.setIfLate(Options.IfLate.WAIT);
            socket.setBuffer(null);
            try {
                socket.setBuffer(Options.Thresholds.ofBytes(2, 1));
                throw new AssertionError("low above high");
            } catch (D2tpSocketException expected) {
                need(expected.errno == 22, "" + expected);
                need(socket.info().slack == null, "a deadline is left");
            }
            need(socket.token() == null, "it is not kept");
        }
        Device.networkChanged();
        try (Device.DLock one = Device.dlock(); Device.DLock two = Device.dlock()) {
            need(one != two, "they are counted");
        }
        System.out.println("known ok");
    }

    static void serve() throws Exception {
        D2tpServerSocket server = new D2tpServerSocket(new InetSocketAddress("127.0.0.1", 0));
        try {
            new D2tpServerSocket(new InetSocketAddress("127.0.0.1", server.getLocalPort())).close();
            throw new AssertionError("it is taken");
        } catch (BindException expected) {
            server.setSoTimeout(10);
        }
        try {
            server.accept().close();
            throw new AssertionError("who?");
        } catch (SocketTimeoutException expected) {
            server.setSoTimeout(0);
        }
        Thread serving = new Thread(() -> {
            try {
                while (true) {
                    try (D2tpSocket socket = server.accept()) {
                        need(socket.getInetAddress() == null && socket.getPort() > 0, "from nowhere");
                        say(socket, "by D2TP");
                    }
                }
            } catch (IOException error) {
                need(server.isClosed(), "" + error);
            }
        });
        serving.start();
        for (int i = 0; i < 2; i++) {
            try (D2tpSocket socket = D2tpSocket.connect(server.address(), new Options())) {
                String heard = new String(socket.getInputStream().readAllBytes(), StandardCharsets.US_ASCII);
                need(heard.equals("by D2TP"), heard);
            }
        }
        // A close wakes who accepts, and the address is free.
        server.close();
        serving.join();
        new D2tpServerSocket(new InetSocketAddress("127.0.0.1", server.getLocalPort())).close();
        System.out.println("listen ok: by D2TP");
    }

    /** What a connection that is to be kept hears where nobody keeps it. */
    static void alone(String server) throws Exception {
        try {
            D2tpSocket.reopen(new byte[32]);
            throw new AssertionError("there is no agent");
        } catch (ReopenException expected) {
            need(expected.why() == ReopenException.Why.NO_AGENT, "" + expected);
            need(expected.getMessage().contains("start `cedos agent`"), "" + expected);
        }
        Options kept = new Options();
        kept.persist = Options.Persist.OPEN;
        try {
            D2tpSocket.connect(server, kept);
            throw new AssertionError("there is no agent");
        } catch (SocketException expected) {
            need(expected.getMessage().contains("start `cedos agent`"), "" + expected);
        }
        System.out.println("alone ok");
    }

    static void keep(String server, Path file) throws Exception {
        Options kept = new Options();
        kept.persist = Options.Persist.OPEN;
        D2tpSocket socket = D2tpSocket.connect(server, kept);
        say(socket, "first second");
        need(hear(socket, 6).equals("first "), "something else");
        Files.write(file, socket.token());
        // A close wakes who reads, though it leaves the connection.
        D2tpSocket other = D2tpSocket.connect(server, kept);
        Thread closer = new Thread(() -> {
            try {
                Thread.sleep(50);
                other.close();
            } catch (IOException | InterruptedException error) {
                throw new AssertionError(error);
            }
        });
        other.setSoTimeout(10);
        try {
            other.getInputStream().read();
            throw new AssertionError("no timeout");
        } catch (SocketTimeoutException expected) {
            other.setSoTimeout(0);
        }
        closer.start();
        try {
            other.getInputStream().read();
            throw new AssertionError("read after close");
        } catch (SocketException expected) {
            closer.join();
        }
        socket.close();
        try {
            D2tpSocket.reopen(Files.readAllBytes(file));
            throw new AssertionError("it is ours");
        } catch (ReopenException expected) {
            need(expected.why() == ReopenException.Why.IN_USE, "" + expected);
            System.out.println("kept: " + expected.getMessage());
        }
        System.in.read();
    }

    static void again(Path file) throws Exception {
        byte[] token = Files.readAllBytes(file);
        D2tpSocket socket = D2tpSocket.reopen(token);
        need(hear(socket, 6).equals("second"), "something else");
        need(Arrays.equals(socket.token(), token), "another token");
        say(socket, "third");
        need(hear(socket, 5).equals("third"), "something else");
        socket.flushToPeer(60_000);
        need(socket.info().bytesAcked == 17, "not all of both");
        socket.end();
        try {
            D2tpSocket.reopen(token);
            throw new AssertionError("after its end");
        } catch (ReopenException expected) {
            need(expected.why() == ReopenException.Why.NOT_KEPT, "" + expected);
            System.out.println("ended: " + expected.getMessage());
        }
    }

    /** What a URL leaves out. */
    static int port(URI url) {
        return url.getPort() >= 0 ? url.getPort() : url.getScheme().equals("https") ? 443 : 80;
    }

    static String page(Socket socket, URI url) throws IOException {
        OutputStream out = socket.getOutputStream();
        String path = url.getPath().isEmpty() ? "/" : url.getPath();
        String head = "GET " + path + " HTTP/1.0\r\nHost: " + url.getHost() + "\r\n\r\n";
        out.write(head.getBytes(StandardCharsets.US_ASCII));
        String answer = new String(socket.getInputStream().readAllBytes(), StandardCharsets.US_ASCII);
        return answer.substring(answer.indexOf("\r\n\r\n") + 4);
    }

    static void fetch(SocketFactory factory, String proxy, URI url) throws Exception {
        int port = port(url);
        try (Socket socket = factory.createSocket(url.getHost(), port)) {
            System.out.println("http ok: " + page(socket, url));
        }
        // An address of IPv6 in numbers goes to the proxy as any other; what it makes of it is its own.
        Options through = new Options();
        through.proxy = proxy;
        try {
            String said;
            try (Socket one = factory.createSocket("::1", port)) {
                said = page(one, url);
            }
            Socket two = D2tpSocket.connect("[::1]:" + port, through);
            need(said.equals(page(two, url)), "another page");
            need(two.getPort() == port && two.toString().contains("[::1]:"), "" + two);
            two.close();
            System.out.println("ipv6 ok: " + said);
        } catch (IOException error) {
            System.out.println("ipv6 refused: " + error.getMessage());
        }
        try {
            factory.createSocket("nobody.example", 80).close();
            throw new AssertionError("not refused");
        } catch (NoRouteToHostException expected) {
            System.out.println("refused: " + expected.getMessage());
        }
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments[0].equals("keep")) {
            keep(arguments[1], Path.of(arguments[2]));
            return;
        }
        if (arguments[0].equals("again")) {
            again(Path.of(arguments[1]));
            return;
        }
        Options options = new Options();
        options.deadline = Duration.ofMinutes(1);
        options.policy = Options.Policy.FREE_ONLY;
        options.buffer = Options.Thresholds.ofTime(Duration.ofSeconds(2), Duration.ofSeconds(20)).at(80_000);
        echo(arguments[0], options);
        known(arguments[0], options);
        deadlines(arguments[0]);
        serve();
        alone(arguments[0]);
        Options through = new Options();
        through.proxy = arguments[1];
        need(port(URI.create("http://host")) == 80 && port(URI.create("https://host/")) == 443, "what a URL leaves out");
        fetch(new D2tpSocketFactory(through), through.proxy, URI.create(arguments[2]));
    }
}
