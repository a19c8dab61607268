package cedos.d2tp;

import java.io.IOException;
import java.time.Duration;

/** What a connection is asked for; what is left out, or null, is as docs/sockets.md says. */
public final class Options implements Cloneable {
    /** Which networks may be paid for, in the order of d2tp.h. */
    public enum Policy { FREE_ONLY, FREE_FIRST, BALANCED, FAST, ANY }

    /** What to do when free networks will not make the deadline, in the order of d2tp.h. */
    public enum IfLate { CELL, WAIT, FAIL }

    /**
     * What goes on when the program has ended, carried by the user's agent: nothing, what was written, or the connection
     * itself ({@link D2tpSocket#reopen}). Where no agent answers, connecting fails for the last two. In the order of d2tp.h.
     */
    public enum Persist { NO, WRITTEN, OPEN }

    /** What is held ahead of the program, 64 MiB or a day at most: metered networks are used from low on, up to high. */
    public static final class Thresholds {
        final long low;
        final long high;
        final int unit;
        final int rate;

        private Thresholds(long low, long high, int unit, int rate) {
            this.low = low;
            this.high = high;
            this.unit = unit;
            this.rate = rate;
        }

        /** In bytes. */
        public static Thresholds ofBytes(long low, long high) {
            return new Thresholds(low, high, 0, 0);
        }

        /** In what the program reads in a time. */
        public static Thresholds ofTime(Duration low, Duration high) {
            return new Thresholds(low.toMillis(), high.toMillis(), 1, 0);
        }

        /** The same for a program that reads so many bytes a second; else that is measured. */
        public Thresholds at(int bytesPerSecond) {
            return new Thresholds(low, high, unit, bytesPerSecond);
        }
    }

    private static final int DEADLINE = 1;
    private static final int ESIZE = 2;
    private static final int POLICY = 3;
    private static final int BUDGET = 4;
    private static final int PRIORITY = 5;
    private static final int IF_LATE = 6;
    private static final int PROXY = 10;
    private static final int PERSIST = 13;

    /** Finish within, in seconds, rounded up; then both ends drop the connection. */
    public Duration deadline;
    /** Bytes expected both ways. */
    public Long size;
    public Policy policy;
    /** Bytes that metered networks may carry. */
    public Long budget;
    /** 0 to 7; higher goes first. */
    public Integer priority;
    public IfLate ifLate;
    /** d2tp://host:port/KEY; else $CEDOS_PROX. */
    public String proxy;
    public Persist persist;
    public Thresholds buffer;

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
        if (persist != null && persist != Persist.NO) {
            Native.setNumber(fd, PERSIST, persist.ordinal(), 4);
        }
        if (buffer != null) {
            setBuffer(fd, buffer);
        }
    }

    static void setBuffer(int fd, Thresholds levels) throws IOException {
        Thresholds buffer = levels == null ? Thresholds.ofBytes(0, 0) : levels;
        Native.setBuffer(fd, buffer.low, buffer.high, buffer.unit, buffer.rate);
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

    /** Rounded up: a time that was given is not cut short. */
    private static long seconds(Duration span) {
        return Math.max(1, span.getNano() > 0 ? span.getSeconds() + 1 : span.getSeconds());
    }
}
