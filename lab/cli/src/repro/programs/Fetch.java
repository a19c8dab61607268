import java.io.InputStream;
import java.io.OutputStream;
import java.net.Proxy;
import java.net.URL;
import java.nio.file.Files;
import java.nio.file.Path;

/** A JVM client as they are written: Fetch URL FILE. */
public class Fetch {
    public static void main(String[] words) throws Exception {
        // Not by a proxy: the sockets are what is to be caught.
        try (InputStream in = new URL(words[0]).openConnection(Proxy.NO_PROXY).getInputStream();
                OutputStream out = Files.newOutputStream(Path.of(words[1]))) {
            in.transferTo(out);
        }
    }
}
