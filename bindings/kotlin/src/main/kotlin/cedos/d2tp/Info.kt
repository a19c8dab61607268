package cedos.d2tp

import kotlin.time.Duration
import kotlin.time.toKotlinDuration

/** What a connection and its paths do now. */
public data class Info(
    val state: State,
    /** Why nothing moves. */
    val reason: Reason,
    /** Taken from the program. */
    val bytesSent: Long,
    /** Of those, what the peer has. */
    val bytesAcked: Long,
    val bytesReceived: Long,
    /** Of those, what the program has not read. */
    val bytesAhead: Long,
    /** Until the deadline; null without one. */
    val slack: Duration?,
    val paths: List<Path>,
) {
    public enum class State { IDLE, CONNECTING, CONNECTED, OVER }

    public enum class Reason { NOTHING_KNOWN, NO_PATH, PATH_COST }

    /** A path of the connection's session, which it may share with others. */
    public data class Path(
        /** As the system calls it; empty where that is not known. */
        val link: String,
        val cost: Cost,
        val state: PathState,
        /** Smoothed. */
        val rtt: Duration,
        val rttMin: Duration,
        val bytesReceived: Long,
        /** What was sent again included. */
        val bytesSent: Long,
        /** Bytes a second lately; null when not known. */
        val rate: Long?,
    )

    public enum class Cost { FREE, METERED, ROAMING }

    public enum class PathState { OPENING, WORKS, SILENT }

    internal companion object {
        fun of(fd: Int): Info {
            val info = SocketInfo.of(fd)
            return Info(
                state = State.entries[info.state.ordinal],
                reason = Reason.entries[info.reason.ordinal],
                bytesSent = info.bytesSent,
                bytesAcked = info.bytesAcked,
                bytesReceived = info.bytesReceived,
                bytesAhead = info.bytesAhead,
                slack = info.slack?.toKotlinDuration(),
                paths = info.paths.map(::path),
            )
        }

        private fun path(path: SocketInfo.Path): Path = Path(
            link = path.link,
            cost = Cost.entries[path.cost.ordinal],
            state = PathState.entries[path.state.ordinal],
            rtt = path.rtt.toKotlinDuration(),
            rttMin = path.rttMin.toKotlinDuration(),
            bytesReceived = path.bytesReceived,
            bytesSent = path.bytesSent,
            rate = path.rate.takeIf { it > 0 },
        )
    }
}
