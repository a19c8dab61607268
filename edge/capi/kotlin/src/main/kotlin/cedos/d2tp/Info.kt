package cedos.d2tp

import kotlin.time.Duration
import kotlin.time.Duration.Companion.microseconds
import kotlin.time.Duration.Companion.milliseconds

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
    /** Until the deadline; null without one. */
    val slack: Duration?,
    val paths: List<Path>,
) {
    public enum class State { IDLE, CONNECTING, CONNECTED, OVER }

    public enum class Reason { NOTHING_KNOWN, NO_PATH, PATH_COST }

    /** A path of the connection's session, which it may share with others. */
    public data class Path(
        /** As the system calls it. */
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
        /** D2TP_PATHS_MAX */
        private const val PATHS_MAX = 8
        private const val PATH_NUMBERS = 7

        fun of(fd: Int): Info {
            val links = arrayOfNulls<String>(PATHS_MAX)
            val numbers = Native.info(fd, links).iterator()
            return Info(
                state = State.entries[numbers.nextInt()],
                // A later library may know more reasons.
                reason = Reason.entries.getOrElse(numbers.nextInt()) { Reason.NOTHING_KNOWN },
                bytesSent = numbers.nextLong(),
                bytesAcked = numbers.nextLong(),
                bytesReceived = numbers.nextLong(),
                slack = numbers.nextLong().takeIf { it >= 0 }?.milliseconds,
                paths = links.filterNotNull().map { path(it, numbers) },
            )
        }

        private fun path(link: String, numbers: LongIterator): Path = Path(
            link = link,
            cost = Cost.entries[numbers.nextInt()],
            state = PathState.entries[numbers.nextInt()],
            rtt = numbers.nextLong().microseconds,
            rttMin = numbers.nextLong().microseconds,
            bytesReceived = numbers.nextLong(),
            bytesSent = numbers.nextLong(),
            rate = numbers.nextLong().takeIf { it > 0 },
        )

        private fun LongIterator.nextInt(): Int = nextLong().toInt()
    }
}
