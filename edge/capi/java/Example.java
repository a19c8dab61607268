import cedos.d2tp.D2tpSocket;
import cedos.d2tp.D2tpSocketFactory;
import cedos.d2tp.Options;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.NoRouteToHostException;
import java.net.Socket;
import java.net.SocketTimeoutException;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Arrays;
import javax.net.SocketFactory;

/**
 * A connection to a D2TP server and a page through the proxy. tests/languages.rs runs it.
 *
 * <p>java Example SERVER PROXY URL
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
            socket.setDeadline(Duration.ofSeconds(1));
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

    static void fetch(SocketFactory factory, URI url) throws Exception {
        try (Socket socket = factory.createSocket(url.getHost(), url.getPort())) {
            OutputStream out = socket.getOutputStream();
            String head = "GET " + url.getPath() + " HTTP/1.0\r\nHost: " + url.getHost() + "\r\n\r\n";
            out.write(head.getBytes(StandardCharsets.US_ASCII));
            String answer = new String(socket.getInputStream().readAllBytes(), StandardCharsets.US_ASCII);
            System.out.println("http ok: " + answer.substring(answer.indexOf("\r\n\r\n") + 4));
        }
        try {
            factory.createSocket("nobody.example", 80).close();
            throw new AssertionError("not refused");
        } catch (NoRouteToHostException expected) {
            System.out.println("refused: " + expected.getMessage());
        }
    }

    public static void main(String[] arguments) throws Exception {
        Options options = new Options();
        options.deadline = Duration.ofMinutes(1);
        options.policy = Options.Policy.FREE_ONLY;
        options.buffer = Options.Thresholds.ofTime(Duration.ofSeconds(2), Duration.ofSeconds(20)).at(80_000);
        echo(arguments[0], options);
        deadlines(arguments[0]);
        Options through = new Options();
        through.proxy = arguments[1];
        fetch(new D2tpSocketFactory(through), URI.create(arguments[2]));
    }
}
