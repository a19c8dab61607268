package cedos.d2tp

import java.net.InetAddress
import java.net.Proxy
import java.security.MessageDigest
import java.util.concurrent.TimeUnit
import okhttp3.ConnectionPool
import okhttp3.Dns
import okhttp3.OkHttpClient

/**
 * Everything this client fetches goes through the proxy by D2TP. Names go to the proxy as they are, and no other proxy
 * is asked, for some of those would lead past D2TP.
 *
 * OkHttp's own times are taken away, since a connection may wait for hours; `callTimeout`, set after this, bounds a
 * call. With a deadline, a size or a budget no connection is kept for a later call, which would have what is left of
 * them; calls at the same time to one server of HTTP/2 share a connection all the same.
 */
public fun OkHttpClient.Builder.d2tp(options: D2tpOptions = D2tpOptions()): OkHttpClient.Builder = apply {
    socketFactory(D2tpSocketFactory(options.toJava()))
    dns(D2tpDns)
    proxy(Proxy.NO_PROXY)
    connectTimeout(0, TimeUnit.MILLISECONDS)
    readTimeout(0, TimeUnit.MILLISECONDS)
    writeTimeout(0, TimeUnit.MILLISECONDS)
    if (options.areOneTransfers) {
        connectionPool(ConnectionPool(0, 1, TimeUnit.NANOSECONDS))
    }
}

/**
 * Looks nothing up: a name's address is one that leads nowhere (100::/64, RFC 6666) and carries the name, which is what
 * [D2tpSocket] connects to. Each name has another, since OkHttp takes names of one address for one server.
 */
public object D2tpDns : Dns {
    private const val ADDRESS_BYTES = 16
    private const val NAME_BYTES = 8

    override fun lookup(hostname: String): List<InetAddress> {
        val digest = MessageDigest.getInstance("SHA-256").digest(hostname.lowercase().toByteArray())
        val address = ByteArray(ADDRESS_BYTES)
        address[0] = 1
        digest.copyInto(address, ADDRESS_BYTES - NAME_BYTES, 0, NAME_BYTES)
        return listOf(InetAddress.getByAddress(hostname, address))
    }
}
