package cedos.d2tp;

import java.io.IOException;
import java.util.concurrent.atomic.AtomicBoolean;

/** What a program tells of its device, for all its connections. */
public final class Device {
    private Device() {}

    /**
     * The networks changed in a way that this process may not have seen: every link is tried at once, by an agent too where
     * one carries connections. Calling it often does no harm.
     */
    public static void networkChanged() throws IOException {
        Native.networkChanged();
    }

    /**
     * While one is held the machine is woken for connections of this process that wait for a network, and kept awake while
     * they move; its close gives it back.
     */
    public static final class DLock implements AutoCloseable {
        private final AtomicBoolean isHeld = new AtomicBoolean(true);

        private DLock() {}

        @Override
        public void close() throws IOException {
            if (isHeld.getAndSet(false)) {
                Native.dlock(false);
            }
        }
    }

    /** Takes a D-Lock. They are counted. */
    public static DLock dlock() throws IOException {
        Native.dlock(true);
        return new DLock();
    }
}
