package cedos.d2tp;

import java.net.SocketException;

/** A call failed in a way that java.net has no exception of its own for; the message is libd2tp's sentence. */
public class D2tpSocketException extends SocketException {
    private static final long serialVersionUID = 1;

    /** As errno(3) has it on Linux. */
    public final int errno;

    D2tpSocketException(int errno, String sentence) {
        super(sentence);
        this.errno = errno;
    }
}
