package cedos.d2tp

import java.io.Closeable
import java.net.SocketException
import java.util.Objects
import kotlin.coroutines.cancellation.CancellationException
import kotlin.time.Duration
import kotlin.time.toJavaDuration
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.currentCoroutineContext
import kotlinx.coroutines.ensureActive
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.flow
import kotlinx.coroutines.withContext

/**
 * A connection that moves between networks and keeps a deadline, for coroutines. Reading and writing hold no thread while they wait.
 *
 * One coroutine may read while another writes. What is cancelled leaves the connection as it is: a read has taken
 * nothing, a write may have been accepted in part. What breaks a connection is a [D2tpException]; calls after [close]
 * are SocketExceptions.
 */
public class D2tpConnection private constructor(private val socket: D2tpSocket) : Closeable {
    /** Bytes read into the array, at least one unless [count] is 0, or -1 at the end. */
    public suspend fun read(into: ByteArray, from: Int = 0, count: Int = into.size - from): Int {
        Objects.checkFromIndexSize(from, count, into.size)
        if (count == 0) {
            return 0
        }
        val bytes = untilDone(Waiting.READABLE) { fd -> Native.readNow(fd, into, from, count) }
        return if (bytes == 0) -1 else bytes
    }

    /** What comes, in pieces, until the end. */
    public fun incoming(pieceBytesMax: Int = PIECE_BYTES): Flow<ByteArray> = flow {
        val piece = ByteArray(pieceBytesMax)
        while (true) {
            val bytes = read(piece)
            if (bytes < 0) {
                break
            }
            emit(piece.copyOf(bytes))
        }
    }

    /** Until all of it was accepted, as with TCP; [flush] waits until the peer has it. */
    public suspend fun write(bytes: ByteArray, from: Int = 0, count: Int = bytes.size - from) {
        Objects.checkFromIndexSize(from, count, bytes.size)
        var at = from
        while (at < from + count) {
            at += untilDone(Waiting.WRITABLE) { fd -> Native.writeNow(fd, bytes, at, from + count - at) }
        }
    }

    /** Waits until the peer has everything that was written. Unlike the others it holds a thread. */
    public suspend fun flush(): Unit = withContext(waits) {
        while (attempt { fd -> Native.flushFor(fd, FLUSH_LOOK_MS) } < 0) {
            ensureActive()
        }
    }

    /** Says that no more will be written: the peer reads the end. */
    public fun finish() {
        numbered { socket.shutdownOutput() }
    }

    /** What the connection and its paths do now. Asking an agent that carries it takes two seconds at most. */
    public suspend fun info(): Info = withContext(waits) { using { fd -> Info.of(fd) } }

    /** Changes the deadline, counted from now; null takes it away. */
    public fun setDeadline(within: Duration?) {
        require(within == null || (within.isFinite() && within.isPositive())) { "a deadline of $within" }
        numbered { socket.setDeadline(within?.toJavaDuration()) }
    }

    /** Changes what is known of the bytes both ways. */
    public fun setSize(bytes: Long?): Unit = change { fd -> Options.setSize(fd, bytes ?: 0L) }

    public fun setPolicy(policy: Policy): Unit = change { fd -> Options.setPolicy(fd, policy) }

    /** Changes what metered networks may carry in all; null takes the limit away. */
    public fun setBudget(bytes: Long?): Unit = change { fd -> Options.setBudget(fd, bytes ?: UNLIMITED) }

    public fun setIfLate(ifLate: IfLate): Unit = change { fd -> Options.setIfLate(fd, ifLate) }

    /** Changes what is held ahead of the program; null is what the kernel holds. */
    public fun setBuffer(levels: Thresholds?): Unit = change { fd -> Options.setBuffer(fd, levels) }

    /**
     * By what a connection of [Persist.OPEN] is opened again, 32 bytes; null for others. Whoever is the same user and has it
     * may have the connection: keep it in a file that nobody else may read.
     */
    public fun token(): ByteArray? = socket.token()

    /**
     * Ends it at once; what was written is still sent. Whoever waits in another call is told. A connection of [Persist.OPEN]
     * stays, to be opened again once this process has ended: [end] ends it.
     */
    override fun close(): Unit = closing { socket.close() }

    /** Ends the connection for everybody: one that would stay is not to be opened again. */
    public fun end(): Unit = closing { socket.end() }

    private fun closing(how: () -> Unit) {
        val fd = try {
            using { it }
        } catch (_: SocketException) {
            // Nobody waits on one that was not opened, or is closed.
            null
        }
        how()
        fd?.let(Waiting::wake)
    }

    override fun toString(): String = socket.toString()

    private fun change(how: (Int) -> Unit): Unit = numbered { using(how) }

    private suspend fun connect(address: String) {
        val (node, service) = D2tpSocket.parts(address)
        // The first of a process reads the device's key and starts the engine.
        var said = withContext(waits) {
            val fd = numbered { socket.open(node, service) }
            leaving { attempted(fd, Native.begin(fd, node, service), IN_PROGRESS) }
        }
        if (said == -IN_PROGRESS) {
            using { fd -> Waiting.until(fd, Waiting.WRITABLE) }
            said = attempt { fd -> Native.pending(fd) }
        }
        check(said == 0)
        socket.opened()
    }

    /** What a call says once it need not wait. */
    private suspend inline fun untilDone(events: Int, call: (Int) -> Int): Int {
        while (true) {
            currentCoroutineContext().ensureActive()
            val said = attempt(call)
            if (said != -AGAIN) {
                return said
            }
            using { fd -> Waiting.until(fd, events) }
        }
    }

    /** What a call says: below zero only -EAGAIN. */
    private inline fun attempt(call: (Int) -> Int): Int = using { fd -> attempted(fd, call(fd), AGAIN) }

    private fun attempted(fd: Int, said: Int, expected: Int): Int {
        if (said < 0 && said != -expected) {
            throw D2tpException(-said, Native.words(fd, -said))
        }
        return said
    }

    /** The descriptor stays open until the call is over. */
    private inline fun <T> using(call: (Int) -> T): T {
        val fd = socket.enter()
        return leaving { call(fd) }
    }

    private inline fun <T> leaving(call: () -> T): T {
        try {
            return call()
        } finally {
            socket.leave()
        }
    }

    public companion object {
        private const val PIECE_BYTES = 65_536

        /** How soon a flush notices that it was cancelled. A guess. */
        private const val FLUSH_LOOK_MS = 200

        /** EAGAIN and EINPROGRESS of Linux. */
        private const val AGAIN = 11
        private const val IN_PROGRESS = 115

        /** UINT64_MAX */
        private const val UNLIMITED = -1L

        /** Calls that wait in libd2tp: threads of Dispatchers.IO, besides those that the program may use of it. */
        private val waits = Dispatchers.IO.limitedParallelism(64)

        /**
         * A connection of [Persist.OPEN] whose process has ended: reading goes on with the first byte that it had not read,
         * and the token stays the same. [D2tpException] with [Why.NOT_KEPT], [Why.IN_USE], [Why.NO_AGENT], or why the
         * connection broke meanwhile. Cancelled, it leaves the connection as [close] does.
         */
        public suspend fun reopen(token: ByteArray): D2tpConnection {
            var reopened: D2tpConnection? = null
            try {
                withContext(waits) { reopened = D2tpConnection(numbered { D2tpSocket.reopen(token) }) }
            } catch (cause: CancellationException) {
                reopened?.close()
                throw cause
            }
            return checkNotNull(reopened)
        }

        /** Of one that was accepted. */
        internal fun of(socket: D2tpSocket): D2tpConnection = D2tpConnection(socket)

        /**
         * Connects to "d2tp://host:port/KEY", or to "host:port" through the proxy. It waits for a network: four hours
         * at most, which `withTimeout` shortens.
         */
        public suspend fun open(address: String, options: D2tpOptions = D2tpOptions()): D2tpConnection {
            val connection = D2tpConnection(D2tpSocket(options.toJava()))
            try {
                connection.connect(address)
                currentCoroutineContext().ensureActive()
            } catch (cause: Throwable) {
                connection.close()
                throw cause
            }
            return connection
        }
    }
}
