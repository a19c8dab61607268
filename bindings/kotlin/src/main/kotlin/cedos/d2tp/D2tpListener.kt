package cedos.d2tp

import java.io.Closeable
import java.net.BindException
import java.net.InetSocketAddress
import java.net.SocketException
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.currentCoroutineContext
import kotlinx.coroutines.ensureActive
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.flow
import kotlinx.coroutines.withContext

/** A D2TP server, for coroutines. It lets anybody in, as TCP does. */
public class D2tpListener private constructor(private val server: D2tpServerSocket) : Closeable {
    /** What others connect to: d2tp://host:port/KEY. */
    public val address: String = server.address()

    /** The next connection. It holds no thread while it waits, and what is cancelled has taken none. */
    public suspend fun accept(): D2tpConnection {
        while (true) {
            currentCoroutineContext().ensureActive()
            val fd = server.enter()
            try {
                numbered { server.acceptNow(fd) }?.let { return D2tpConnection.of(it) }
                Waiting.until(fd, Waiting.READABLE)
            } finally {
                server.leave()
            }
        }
    }

    /** One connection after another, until it is closed. */
    public fun connections(): Flow<D2tpConnection> = flow {
        while (true) {
            val connection = try {
                accept()
            } catch (cause: SocketException) {
                if (server.isClosed) break else throw cause
            }
            emit(connection)
        }
    }

    /** No more are taken, and whoever waits for one is told. Those that were taken go on. */
    override fun close() {
        server.close()
    }

    override fun toString(): String = server.toString()

    public companion object {
        /**
         * At a UDP address; port 0 is one of the system's choice. [D2tpException] with [Why.ADDRESS_TAKEN], or
         * [Why.KEY_FILE] where the device's key cannot be had.
         */
        public suspend fun open(at: InetSocketAddress): D2tpListener = withContext(Dispatchers.IO) {
            try {
                D2tpListener(numbered { D2tpServerSocket(at) })
            } catch (cause: BindException) {
                throw D2tpException(ADDRESS_IN_USE, cause.message.orEmpty())
            }
        }

        /** EADDRINUSE of Linux. */
        private const val ADDRESS_IN_USE = 98
    }
}
