import cedos.d2tp.D2tpConnection
import cedos.d2tp.D2tpException
import cedos.d2tp.D2tpListener
import cedos.d2tp.D2tpOptions
import cedos.d2tp.Device
import cedos.d2tp.Info
import cedos.d2tp.Persist
import cedos.d2tp.Policy
import cedos.d2tp.Thresholds
import cedos.d2tp.Why
import cedos.d2tp.d2tp
import java.io.ByteArrayOutputStream
import java.io.File
import java.io.IOException
import java.net.InetSocketAddress
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

// Connections to a D2TP server that says everything back, and pages through D2Prox. bindings/tests/languages/kotlin.rs runs it.
//
//     java -Dd2tp.library=FILE -cp … ExampleKt SERVER PROXY
//
// The proxy is one that finds one.example and two.example on this machine, and no other name.
//
// And a connection that is opened again, beside an agent (bindings/tests/languages/reopen.rs):
//
//     … ExampleKt keep SERVER FILE      is killed when it has said "kept"; FILE: the token
//     … ExampleKt again FILE

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
                connection.setBuffer(null)
                val nonsense = why { connection.setBuffer(Thresholds.ofBytes(2, 1)) }
                check(nonsense.why == Why.INVALID) { "$nonsense" }
                check(connection.token() == null) { "it is not kept" }
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

private suspend fun serve() {
    D2tpListener.open(InetSocketAddress("127.0.0.1", 0)).use { listener ->
        val port = listener.address.substringAfterLast(':').substringBefore('/').toInt()
        try {
            D2tpListener.open(InetSocketAddress("127.0.0.1", port)).close()
            error("it is taken")
        } catch (expected: D2tpException) {
            check(expected.why == Why.ADDRESS_TAKEN) { "$expected" }
        }
        check(withTimeoutOrNull(50.milliseconds) { listener.accept() } == null) { "who?" }
        coroutineScope {
            val serving = launch {
                listener.connections().collect { connection -> connection.use { it.write("by D2TP".toByteArray()) } }
            }
            repeat(2) {
                D2tpConnection.open(listener.address).use { check(hears(it, "by D2TP")) { "something else" } }
            }
            // A close wakes who accepts.
            listener.close()
            serving.join()
        }
    }
    Device.networkChanged()
    Device.dlock().use { }
    println("listen ok")
}

private suspend fun why(call: suspend () -> Unit): D2tpException = try {
    call()
    error("it is done")
} catch (expected: D2tpException) {
    expected
}

/** What a connection that is to be kept hears where nobody keeps it. */
private suspend fun alone(server: String) {
    for (attempt in listOf<suspend () -> Unit>(
        { D2tpConnection.reopen(ByteArray(32)) },
        { D2tpConnection.open(server, D2tpOptions(persist = Persist.OPEN)) },
    )) {
        val expected = why(attempt)
        check(expected.why == Why.NO_AGENT && "start `cedos agent`" in expected.message.orEmpty()) { "$expected" }
    }
    println("alone ok")
}

private suspend fun keep(server: String, file: File) {
    val kept = D2tpOptions(persist = Persist.OPEN)
    val connection = D2tpConnection.open(server, kept)
    connection.write("first second".toByteArray())
    check(hears(connection, "first ")) { "something else" }
    val token = connection.token()!!
    file.writeBytes(token)
    // A close wakes who reads, though it leaves the connection.
    coroutineScope {
        val other = D2tpConnection.open(server, kept)
        launch {
            delay(50.milliseconds)
            other.close()
        }
        try {
            other.read(ByteArray(1))
            error("read after close")
        } catch (expected: SocketException) {
            check(expected.message == "Socket closed") { "$expected" }
        }
    }
    connection.close()
    val expected = why { D2tpConnection.reopen(token) }
    check(expected.why == Why.IN_USE) { "$expected" }
    println("kept: ${expected.message}")
    System.`in`.read()
}

private suspend fun again(file: File) {
    val token = file.readBytes()
    val connection = D2tpConnection.reopen(token)
    check(hears(connection, "second")) { "something else" }
    check(connection.token().contentEquals(token)) { "another token" }
    connection.write("third".toByteArray())
    check(hears(connection, "third")) { "something else" }
    connection.flush()
    check(connection.info().bytesAcked == 17L) { "${connection.info()}" }
    connection.end()
    val expected = why { D2tpConnection.reopen(token) }
    check(expected.why == Why.NOT_KEPT) { "$expected" }
    println("ended: ${expected.message}")
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
    when (arguments[0]) {
        "keep" -> return runBlocking { keep(arguments[1], File(arguments[2])) }
        "again" -> return runBlocking { again(File(arguments[1])) }
    }
    val (server, proxy) = arguments
    runBlocking {
        echo(server)
        cancelled(server)
        deadlines(server)
        serve()
        alone(server)
    }
    fetch(proxy)
    fetchByTls(proxy)
    println("all ok")
}
