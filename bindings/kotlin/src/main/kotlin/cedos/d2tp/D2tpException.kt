package cedos.d2tp

import java.io.IOException

/** A connection failed; the message is the sentence that libd2tp has for it. */
public class D2tpException internal constructor(
    /** As errno(3) has it on Linux. */
    public val errno: Int,
    sentence: String,
) : IOException(sentence) {
    public val why: Why = Why.entries.firstOrNull { errno in it.numbers } ?: Why.OTHER
}

/** What a program may want to tell apart. */
public enum class Why(internal vararg val numbers: Int) {
    /** The deadline passed. */
    DEADLINE(62),

    /** The budget is used up, and there is no free network. */
    BUDGET(122),

    /** The peer reset the connection, or its process or session ended. */
    RESET(104, 32),

    /** The server or the proxy does not let this device in; through the proxy: the host refuses. */
    REFUSED(111),

    /** A name that is not found, or the proxy finds no way there. */
    UNREACHABLE(113),

    /** The proxy does not open tunnels there. */
    FORBIDDEN(13),

    /** Through the proxy: the host does not answer. */
    TIMED_OUT(110),

    /** Neither a server's key nor a proxy is known. */
    NO_WAY(101),

    /** The device's key file cannot be read or made. */
    KEY_FILE(126),

    /** An address or an option that is none. */
    INVALID(22),

    /** What is to outlive the program needs the user's agent, and none answers: start `cedos agent`. */
    NO_AGENT(95),

    /** No connection of this token is kept: it was ended or let go, or its agent ended. */
    NOT_KEPT(2),

    /** The process that has the connection of this token is there. */
    IN_USE(16),

    /** As many connections are kept as an agent keeps, and all of them are in use. */
    NO_ROOM(105),

    /** Somebody listens there. */
    ADDRESS_TAKEN(98),
    OTHER,
}

/** What the Java binding says with a number, as this one does. */
internal inline fun <T> numbered(call: () -> T): T = try {
    call()
} catch (cause: D2tpSocketException) {
    throw D2tpException(cause.errno, cause.message.orEmpty())
}
