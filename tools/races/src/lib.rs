//! Small parts of the driver that threads share, run by loom in every order in which their steps may happen.
//!
//! ```text
//!  edge/driver/src/engine_waker.rs ── crate::synchronisation ─▶ std, in the driver
//!                                                           └─▶ loom, here
//! ```
//!
//! `cargo test --release` in this folder; `cargo xtask nightly --only races` runs it.

#![cfg(test)]

#[path = "../../../edge/driver/src/engine_waker.rs"]
mod engine_waker;

mod synchronisation {
    pub(crate) use loom::sync::Mutex;
    pub(crate) use loom::sync::atomic::{AtomicBool, Ordering};
}

use std::sync::Arc;
use std::task::{Wake, Waker};

use engine_waker::EngineWaker;
use synchronisation::{AtomicBool, Mutex, Ordering};

/// A runtime with one task: whether it will have another turn.
struct ScheduledTask(AtomicBool);

impl Wake for ScheduledTask {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// The engine's waker, its task, and what other threads change under a lock.
struct EngineModel {
    waker: EngineWaker,
    task: Arc<ScheduledTask>,
    changed: Mutex<bool>,
}

impl EngineModel {
    /// The task was woken, and its turn is to begin.
    fn woken() -> Arc<EngineModel> {
        let engine = EngineModel {
            waker: EngineWaker::new(),
            task: Arc::new(ScheduledTask(AtomicBool::new(false))),
            changed: Mutex::new(false),
        };
        engine.waker.begin_turn(&Waker::from(engine.task.clone()));
        engine.waker.wake();
        Arc::new(engine)
    }

    /// Begins a turn, as the runtime does.
    fn begin_turn(&self) {
        self.task.0.store(false, Ordering::SeqCst);
        self.waker.begin_turn(&Waker::from(self.task.clone()));
    }

    /// Ends a turn: one more follows if the task was woken in it.
    fn end_turn(&self) {
        if self.waker.is_woken() {
            self.task.0.store(true, Ordering::SeqCst);
        }
    }

    fn is_scheduled(&self) -> bool {
        self.task.0.load(Ordering::SeqCst)
    }
}

#[test]
fn a_change_under_a_lock_is_seen_in_the_turn_or_causes_another_one() {
    loom::model(|| {
        let engine = EngineModel::woken();
        let others: Vec<_> = (0..2)
            .map(|_| {
                let engine = engine.clone();
                loom::thread::spawn(move || {
                    *engine.changed.lock().unwrap() = true;
                    engine.waker.wake();
                })
            })
            .collect();
        engine.begin_turn();
        let seen = *engine.changed.lock().unwrap();
        engine.end_turn();
        for other in others {
            other.join().unwrap();
        }
        assert!(seen || engine.is_scheduled());
    });
}

#[test]
fn a_timer_to_be_set_again_is_set_in_the_turn_or_in_another_one() {
    loom::model(|| {
        let engine = EngineModel::woken();
        let other = engine.clone();
        let other = loom::thread::spawn(move || other.waker.rearm());
        engine.begin_turn();
        engine.end_turn();
        let rearmed = engine.waker.take_rearm();
        other.join().unwrap();
        assert!(rearmed || engine.is_scheduled());
    });
}

/// The check can fail: a turn that takes the mark after it looked loses what was changed between.
#[test]
#[should_panic = "neither seen nor scheduled"]
fn a_mark_that_is_taken_after_the_look_loses_a_change() {
    loom::model(|| {
        let engine = EngineModel::woken();
        let other = engine.clone();
        let other = loom::thread::spawn(move || {
            *other.changed.lock().unwrap() = true;
            other.waker.wake();
        });
        let seen = *engine.changed.lock().unwrap();
        engine.begin_turn();
        engine.end_turn();
        other.join().unwrap();
        assert!(seen || engine.is_scheduled(), "neither seen nor scheduled");
    });
}
