package cedos.d2tp

import kotlin.concurrent.thread
import kotlin.coroutines.resume
import kotlin.coroutines.resumeWithException
import kotlinx.coroutines.CancellableContinuation
import kotlinx.coroutines.suspendCancellableCoroutine

/**
 * One thread that polls for every coroutine which waits on a descriptor: connections wait for hours, and a thread for
 * each would use up those of Dispatchers.IO. Each wait costs a look at all who wait, so this is for hundreds and not for
 * ten thousands.
 */
internal object Waiting {
    /** poll(2) */
    const val READABLE = 1
    const val WRITABLE = 4

    private class Waiter(val fd: Int, val events: Int, val waits: CancellableContinuation<Unit>)

    private val waiters = LinkedHashSet<Waiter>()
    private val bell = Native.bell()

    init {
        thread(isDaemon = true, name = "d2tp-waiting") {
            while (true) {
                round()
            }
        }
    }

    /** Until it is ready, or was shut down. The caller sees to it that the descriptor stays open. */
    suspend fun until(fd: Int, events: Int): Unit = suspendCancellableCoroutine { waits ->
        val waiter = Waiter(fd, events, waits)
        change { add(waiter) }
        waits.invokeOnCancellation { change { remove(waiter) } }
    }

    /** Whoever waits on it looks again. */
    fun wake(fd: Int) {
        val woken = synchronized(waiters) { waiters.filter { it.fd == fd }.onEach(waiters::remove) }
        Native.ring(bell)
        woken.forEach { it.waits.resume(Unit) }
    }

    private fun change(how: MutableSet<Waiter>.() -> Unit) {
        synchronized(waiters) { waiters.how() }
        Native.ring(bell)
    }

    private fun round() {
        val all = synchronized(waiters) { waiters.toList() }
        val fds = IntArray(all.size + 1) { at -> if (at == 0) bell else all[at - 1].fd }
        val events = IntArray(all.size + 1) { at -> if (at == 0) READABLE else all[at - 1].events }
        val failed = -Native.poll(fds, events, -1)
        if (events[0] != 0) {
            Native.hush(bell)
        }
        val over = all.filterIndexed { at, _ -> failed != 0 || events[at + 1] != 0 }
        // Whoever was cancelled meanwhile is there no more.
        for (waiter in synchronized(waiters) { over.filter { waiters.remove(it) } }) {
            when (failed) {
                0 -> waiter.waits.resume(Unit)
                else -> waiter.waits.resumeWithException(D2tpException(failed, Native.words(-1, failed)))
            }
        }
    }
}
