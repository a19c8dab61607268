import cedos.d2tp.D2tpConnection
import cedos.d2tp.D2tpException
import cedos.d2tp.D2tpOptions
import cedos.d2tp.Info
import cedos.d2tp.Policy
import cedos.d2tp.Thresholds
import cedos.d2tp.Why
import cedos.d2tp.d2tp
import java.io.ByteArrayOutputStream
import java.io.IOException
import java.net.SocketException
import kotlin.time.Duration.Companion.milliseconds
import kotlin.time.Duration.Companion.minutes
import kotlin.time.Duration.Companion.seconds
import kotlinx.coroutines.async
import kotlinx.coroutines.awaitAll
import kotlinx.coroutines.coroutineScope
import kotlinx.coroutines.delay
import kotlinx.coroutines.launch
import kotlinx.coroutines.runBlocking
import kotlinx.coroutines.withTimeoutOrNull
import mockwebserver3.MockResponse
import mockwebserver3.MockWebServer
import okhttp3.OkHttpClient
import okhttp3.Protocol
import okhttp3.Request
import okhttp3.Response
import okhttp3.tls.HandshakeCertificates
import okhttp3.tls.HeldCertificate

// Connections to a D2TP server that says everything back, and pages through D2Prox. apps/prox/tests/kotlin.rs runs it.
//
//     java -Dd2tp.library=FILE -cp … ExampleKt SERVER PROXY
//
// The proxy is one that finds one.example and two.example on this machine, and no other name.

/** More than there are threads in Dispatchers.IO. */
private const val AT_ONCE = 80

private suspend fun echo(server: String) {
    val message = ByteArray(300_000) { (it * 31).toByte() }
    D2tpConnection.open(server, D2tpOptions(deadline = 1.minutes, policy = Policy.FREE_ONLY, buffer = Thresholds.ofBytes(200_000, 1_000_000))).use { connection ->
        val heard = ByteArrayOutputStream()
        coroutineScope {
            launch {
                connection.write(message)
                connection.flush()
                val info = connection.info()
                check(info.state == Info.State.CONNECTED && info.bytesAcked == message.size.toLong()) { "$info" }
                check(info.slack!! in 1.seconds..1.minutes && info.paths.isNotEmpty()) { "$info" }
                connection.finish()
            }
            connection.incoming().collect { heard.write(it) }
        }
        check(heard.toByteArray().contentEquals(message)) { "not what was sent" }
    }
    println("echo ok")
}

private suspend fun hears(connection: D2tpConnection, word: String): Boolean {
    val heard = ByteArray(word.length)
    var bytes = 0
    while (bytes < heard.size) {
        bytes += connection.read(heard, bytes).also { check(it > 0) { "the end" } }
    }
    return heard.decodeToString() == word
}

private suspend fun cancelled(server: String) {
    // All wait in one thread; those that are cancelled have lost nothing.
    coroutineScope {
        val waiting = List(AT_ONCE) { at ->
            async {
                D2tpConnection.open(server).use { connection ->
                    check(withTimeoutOrNull(50.milliseconds) { connection.read(ByteArray(1)) } == null) { "from where?" }
                    connection.write("after $at".toByteArray())
                    check(hears(connection, "after $at")) { "something else" }
                }
            }
        }
        waiting.awaitAll()
    }
    // Nobody is at this port, so nobody answers.
    val nobody = server.replace(Regex(":\\d+/"), ":9/")
    check(withTimeoutOrNull(100.milliseconds) { D2tpConnection.open(nobody) } == null) { "who?" }
    // A close wakes who reads.
    coroutineScope {
        val connection = D2tpConnection.open(server)
        launch {
            delay(50.milliseconds)
            connection.close()
        }
        try {
            connection.read(ByteArray(1))
            error("read after close")
        } catch (expected: SocketException) {
            check(expected.message == "Socket closed") { "$expected" }
        }
    }
    println("cancel ok")
}

private suspend fun deadlines(server: String) {
    D2tpConnection.open(server).use { connection ->
        connection.setDeadline(1.seconds)
        try {
            connection.read(ByteArray(1))
            error("no end")
        } catch (expected: D2tpException) {
            check(expected.why == Why.DEADLINE) { "$expected" }
            println("deadline ok: ${expected.message}")
        }
    }
}

private fun OkHttpClient.get(url: String): Response = newCall(Request.Builder().url(url).build()).execute()

private fun fetch(proxy: String) {
    val client = OkHttpClient.Builder().d2tp(D2tpOptions(proxy = proxy)).build()
    MockWebServer().use { origin ->
        origin.enqueue(MockResponse.Builder().body("hello").build())
        origin.start()
        client.get("http://one.example:${origin.port}/").use { println("http ok: ${it.body.string()}") }
        // A call that is cancelled does not wait for its answer.
        val call = client.newCall(Request.Builder().url("http://one.example:${origin.port}/").build())
        Thread {
            origin.takeRequest()
            origin.takeRequest()
            call.cancel()
        }.start()
        try {
            call.execute().close()
            error("not cancelled")
        } catch (expected: IOException) {
            check(call.isCanceled()) { "$expected" }
        }
    }
    try {
        client.get("http://nobody.example/").close()
        error("not refused")
    } catch (expected: IOException) {
        println("refused: ${expected.message}")
    }
    client.connectionPool.evictAll()
}

/** Two names of one server, whose certificate has both: each is another server to the client. */
private fun fetchByTls(proxy: String) {
    val names = listOf("one.example", "two.example")
    val certificate = HeldCertificate.Builder()
    names.forEach(certificate::addSubjectAlternativeName)
    val held = certificate.build()
    val server = HandshakeCertificates.Builder().heldCertificate(held).build()
    val trust = HandshakeCertificates.Builder().addTrustedCertificate(held.certificate).build()
    fun client(options: D2tpOptions) = OkHttpClient.Builder()
        .d2tp(options)
        .sslSocketFactory(trust.sslSocketFactory(), trust.trustManager)
        .build()
    MockWebServer().use { origin ->
        origin.useHttps(server.sslSocketFactory())
        origin.start()
        fun OkHttpClient.connectionOf(name: String): Int {
            origin.enqueue(MockResponse.Builder().body("hello from $name").build())
            get("https://$name:${origin.port}/").use { answer ->
                check(answer.protocol == Protocol.HTTP_2) { "${answer.protocol}" }
                println("https ok: ${answer.body.string()}")
            }
            return origin.takeRequest().connectionIndex
        }
        val kept = client(D2tpOptions(proxy = proxy))
        val connections = (names + names).map { kept.connectionOf(it) }
        check(connections == listOf(0, 1, 0, 1)) { "$connections" }
        kept.connectionPool.evictAll()
        val brief = client(D2tpOptions(proxy = proxy, deadline = 1.minutes))
        check(List(2) { brief.connectionOf(names[0]) } == listOf(2, 3)) { "a deadline that was another's" }
    }
}

fun main(arguments: Array<String>) {
    val (server, proxy) = arguments
    runBlocking {
        echo(server)
        cancelled(server)
        deadlines(server)
    }
    fetch(proxy)
    fetchByTls(proxy)
    println("all ok")
}
