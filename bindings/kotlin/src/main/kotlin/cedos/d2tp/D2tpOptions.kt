package cedos.d2tp

import kotlin.time.Duration
import kotlin.time.toJavaDuration

/** Which networks may be paid for. */
public typealias Policy = Options.Policy

/** What to do when free networks will not make the deadline. */
public typealias IfLate = Options.IfLate

/** What goes on when the program has ended, carried by the user's agent: nothing, what was written, or the connection. */
public typealias Persist = Options.Persist

/** What is held ahead of the program. */
public typealias Thresholds = Options.Thresholds

/**
 * What a connection is asked for.
 *
 * @property deadline finish within, counted from when the connection is opened; then both ends drop it. Whole seconds,
 *   at least one. None: it waits as long as it takes.
 * @property size bytes expected both ways. A guess that is too high costs money, one too low the deadline.
 * @property budget bytes that metered networks may carry. None: no limit.
 * @property priority 0 to 7; higher goes first.
 * @property proxy d2tp://host:port/KEY of the proxy that leads to servers without a key; else `$CEDOS_PROX`.
 * @property persist what goes on when this process has ended. Where no agent answers that would carry it, opening is a
 *   [D2tpException] with [Why.NO_AGENT].
 * @property buffer what is held ahead of the program: metered networks are used from its low on, up to its high, which
 *   is 64 MiB or a day at most.
 */
public data class D2tpOptions(
    val deadline: Duration? = null,
    val size: Long? = null,
    val policy: Policy = Policy.FREE_FIRST,
    val budget: Long? = null,
    val priority: Int = 0,
    val ifLate: IfLate = IfLate.CELL,
    val proxy: String? = null,
    val persist: Persist = Persist.NO,
    val buffer: Thresholds? = null,
) {
    init {
        require(deadline == null || (deadline.isFinite() && deadline.isPositive())) { "a deadline of $deadline" }
        require(size == null || size >= 0) { "a size of $size bytes" }
        require(budget == null || budget >= 0) { "a budget of $budget bytes" }
        require(priority in 0..PRIORITY_MAX) { "priority $priority is not within 0 and $PRIORITY_MAX" }
    }

    /** Whether they speak of one transfer, which a second by the same connection would take from. */
    internal val areOneTransfers: Boolean
        get() = deadline != null || size != null || budget != null

    /** The same for [D2tpSocket] and [D2tpSocketFactory]. */
    public fun toJava(): Options {
        val options = Options()
        options.deadline = deadline?.toJavaDuration()
        options.size = size
        options.policy = policy
        options.budget = budget
        options.priority = priority
        options.ifLate = ifLate
        options.proxy = proxy
        options.persist = persist
        options.buffer = buffer
        return options
    }

    private companion object {
        const val PRIORITY_MAX = 7
    }
}
