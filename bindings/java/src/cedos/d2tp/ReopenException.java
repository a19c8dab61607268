package cedos.d2tp;

/** A connection is not opened again; the message says why. */
public final class ReopenException extends D2tpSocketException {
    private static final long serialVersionUID = 1;
    private static final int ENOENT = 2;
    private static final int EBUSY = 16;
    private static final int EOPNOTSUPP = 95;

    /** What a program may want to tell apart. */
    public enum Why {
        /** None of this token is kept: it was ended or let go, or its agent ended. */
        NOT_KEPT,
        /** The process that has it is there. */
        IN_USE,
        /** No agent answers that keeps connections. */
        NO_AGENT,
        /** It broke while nobody had it, or the token is none. */
        OTHER
    }

    ReopenException(int errno) {
        super(errno, Native.notReopened(errno));
    }

    public Why why() {
        switch (errno) {
            case ENOENT:
                return Why.NOT_KEPT;
            case EBUSY:
                return Why.IN_USE;
            case EOPNOTSUPP:
                return Why.NO_AGENT;
            default:
                return Why.OTHER;
        }
    }
}
