package cedos.d2tp;

import java.io.IOException;
import java.time.Duration;

/** What a connection is asked for; what is left out is as docs/sockets.md says. */
public final class Options implements Cloneable {
    /** Which networks may be paid for, in the order of d2tp.h. */
    public enum Policy { FREE_ONLY, FREE_FIRST, BALANCED, FAST, ANY }

    /** What to do when free networks will not make the deadline, in the order of d2tp.h. */
    public enum IfLate { CELL, WAIT, FAIL }

    private static final int DEADLINE = 1;
    private static final int ESIZE = 2;
    private static final int POLICY = 3;
    private static final int BUDGET = 4;
    private static final int PRIORITY = 5;
    private static final int IF_LATE = 6;
    private static final int PROXY = 10;

    /** Finish within; then both ends drop the connection. */
    public Duration deadline;
    /** Bytes expected both ways. */
    public Long size;
    public Policy policy;
    /** Bytes that networks which cost may carry. */
    public Long budget;
    /** 0 goes first, 7 last. */
    public Integer priority;
    public IfLate ifLate;
    /** d2tp://host:port/KEY; else $CEDOS_PROX. */
    public String proxy;

    void set(int fd) throws IOException {
        if (deadline != null) {
            setDeadline(fd, deadline);
        }
        if (size != null) {
            setSize(fd, size);
        }
        if (policy != null) {
            setPolicy(fd, policy);
        }
        if (budget != null) {
            setBudget(fd, budget);
        }
        if (priority != null) {
            Native.setNumber(fd, PRIORITY, priority, 4);
        }
        if (ifLate != null) {
            setIfLate(fd, ifLate);
        }
        if (proxy != null) {
            Native.setText(fd, PROXY, proxy);
        }
    }

    static void setDeadline(int fd, Duration within) throws IOException {
        Native.setNumber(fd, DEADLINE, within == null ? 0 : seconds(within), 8);
    }

    static void setSize(int fd, long bytes) throws IOException {
        Native.setNumber(fd, ESIZE, bytes, 8);
    }

    static void setPolicy(int fd, Policy policy) throws IOException {
        Native.setNumber(fd, POLICY, policy.ordinal(), 4);
    }

    static void setBudget(int fd, long bytes) throws IOException {
        Native.setNumber(fd, BUDGET, bytes, 8);
    }

    static void setIfLate(int fd, IfLate ifLate) throws IOException {
        Native.setNumber(fd, IF_LATE, ifLate.ordinal(), 4);
    }

    private static long seconds(Duration span) {
        return Math.max(1, span.getSeconds());
    }
}
