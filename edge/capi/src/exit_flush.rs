//! Sends remaining data when the process ends.
//!
//! The kernel sends the last bytes of a TCP socket after its process has ended. This engine is a
//! thread of that process, so `exit` waits for it, for a limited time. `_exit` and a fatal signal
//! do not wait.

use std::rc::Rc;
use std::time::Duration;

use crate::engine_handle;
use crate::engine_state::EngineState;

/// The longest time that `exit` waits for peers to receive what was written. Higher: a program
/// without a network takes longer to end. Lower: more is lost. `d2tp_flush` waits without limit.
const EXIT_WAIT: Duration = Duration::from_secs(5); // a guess
/// The interval between two checks.
const LOOK: Duration = Duration::from_millis(2);
/// Time for the last packets to be sent.
const GRACE: Duration = Duration::from_millis(20); // the same as in the driver

/// Registers the handler that makes `exit` wait.
pub(crate) fn watch() {
    // SAFETY: a function of this library, which is never unloaded (build.rs).
    let failed = unsafe { libc::atexit(at_exit) };
    assert_eq!(failed, 0, "no memory for a pointer");
}

extern "C" fn at_exit() {
    // A forked child without its own engine has nothing to wait for.
    let Some(engine) = engine_handle::running() else {
        return;
    };
    let asked = engine.request(|engine, reply| {
        let engine = engine.clone();
        tokio::task::spawn_local(async move {
            flush_sockets(&engine).await;
            let _ = reply.send(());
        });
    });
    // Without an engine there is nothing left to do.
    let _ = asked;
}

async fn flush_sockets(engine: &Rc<EngineState>) {
    engine.leaving.send_replace(true);
    let owes = || {
        let flows = engine.flows.borrow();
        let handed = engine.agent_connections.borrow();
        flows.values().any(|held| !held.is_delivered())
            || engine.datagrams.has_unsent()
            || handed.values().any(|handed| handed.has_unsent())
    };
    let delivered = async {
        if engine.datagrams.has_clients() {
            // The programs' last data must be read first.
            tokio::time::sleep(LOOK).await;
        }
        while owes() {
            tokio::time::sleep(LOOK).await;
        }
    };
    let _ = tokio::time::timeout(EXIT_WAIT, delivered).await;
    if engine.say_goodbye() {
        tokio::time::sleep(GRACE).await;
    }
}
