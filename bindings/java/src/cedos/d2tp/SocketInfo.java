package cedos.d2tp;

import java.io.IOException;
import java.time.Duration;
import java.time.temporal.ChronoUnit;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;

/** What a connection and its paths do now. */
public final class SocketInfo {
    /** How far it is: none, being made, made, ended or broken. */
    public enum State { IDLE, CONNECTING, CONNECTED, OVER }

    /** Why nothing moves: there is no network, or only such as cost and are not to be paid for now. */
    public enum Reason { NOTHING_KNOWN, NO_PATH, PATH_COST }

    /** What a network costs: nothing, by the byte, the same abroad. */
    public enum Cost { FREE, METERED, ROAMING }

    /** A path is tried, works, or nothing was heard on it for some time. */
    public enum PathState { OPENING, WORKS, SILENT }

    /** A path of the connection's session, which it may share with others. */
    public static final class Path {
        /** As the system calls it; empty where that is not known. */
        public final String link;
        public final Cost cost;
        public final PathState state;
        /** Smoothed. */
        public final Duration rtt;
        public final Duration rttMin;
        /** Payload of the whole session. */
        public final long bytesReceived;
        /** The same, what was sent again included. */
        public final long bytesSent;
        /** Bytes a second lately; 0 when not known. */
        public final long rate;

        private Path(String link, long[] numbers, int from) {
            this.link = link;
            cost = Cost.values()[(int) numbers[from]];
            state = PathState.values()[(int) numbers[from + 1]];
            rtt = Duration.of(numbers[from + 2], ChronoUnit.MICROS);
            rttMin = Duration.of(numbers[from + 3], ChronoUnit.MICROS);
            bytesReceived = numbers[from + 4];
            bytesSent = numbers[from + 5];
            rate = numbers[from + 6];
        }
    }

    /** D2TP_PATHS_MAX */
    private static final int PATHS_MAX = 8;
    private static final int NUMBERS = 7;
    private static final int PATH_NUMBERS = 7;

    public final State state;
    public final Reason reason;
    /** Taken from the program. */
    public final long bytesSent;
    /** Of those, what the peer has. */
    public final long bytesAcked;
    public final long bytesReceived;
    /** Of those, what the program has not read. */
    public final long bytesAhead;
    /** Until the deadline; null without one. */
    public final Duration slack;
    public final List<Path> paths;

    private SocketInfo(long[] numbers, String[] links) {
        Reason[] reasons = Reason.values();
        state = State.values()[(int) numbers[0]];
        // A later library may know more reasons.
        reason = numbers[1] < reasons.length ? reasons[(int) numbers[1]] : Reason.NOTHING_KNOWN;
        bytesSent = numbers[2];
        bytesAcked = numbers[3];
        bytesReceived = numbers[4];
        bytesAhead = numbers[5];
        slack = numbers[6] < 0 ? null : Duration.ofMillis(numbers[6]);
        List<Path> all = new ArrayList<>();
        for (int at = 0; NUMBERS + at * PATH_NUMBERS < numbers.length; at++) {
            all.add(new Path(links[at], numbers, NUMBERS + at * PATH_NUMBERS));
        }
        paths = Collections.unmodifiableList(all);
    }

    static SocketInfo of(int fd) throws IOException {
        String[] links = new String[PATHS_MAX];
        return new SocketInfo(Native.info(fd, links), links);
    }
}
