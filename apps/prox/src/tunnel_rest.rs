//! When the flow of a tunnel may sleep with its session: while no path leads to the device, and nothing is under way.
//!
//! ```text
//!  session awake ──▶ the flow may not sleep; nothing wakes the task
//!    │   ▲
//!    ▼   │
//!  suspended ──────▶ the flow may sleep while the tunnel is idle, which is checked when bytes move
//!
//!  the process leaves ▶ the flow may sleep, however it is
//! ```

use std::convert::Infallible;

use bytes::Bytes;
use d2tp_driver::{Connection, FlowIo, HibernationSwitch};
use tokio_util::sync::CancellationToken;

use crate::flow_memo::FlowMemo;
use crate::prox::Prox;

/// Lets the flow of a tunnel sleep, or not.
pub(crate) struct TunnelRest {
    /// The flow's session; none: the flow never sleeps.
    session: Option<Connection>,
    switch: HibernationSwitch,
    memo: Bytes,
    /// Whether the flow may sleep now.
    is_allowed: bool,
}

impl TunnelRest {
    /// For a tunnel with this memo, which slept if it `is_woken`.
    pub(crate) fn new<F: FlowIo>(
        flow: &F,
        prox: &Prox,
        memo: &FlowMemo,
        is_woken: bool,
    ) -> TunnelRest {
        // What a tunnel leads to is this process's, and another node would lose it.
        let session = flow.session().filter(|_| prox.shared_records().is_none());
        TunnelRest::of_session(session, flow.hibernation_switch(), memo.encode(), is_woken)
    }

    fn of_session(
        session: Option<Connection>,
        switch: HibernationSwitch,
        memo: Bytes,
        is_woken: bool,
    ) -> TunnelRest {
        if is_woken {
            switch(Some(memo.clone())); // It had another one.
        }
        TunnelRest {
            session,
            switch,
            memo,
            is_allowed: is_woken,
        }
    }

    /// Lets the flow sleep while no path leads to the device, and the tunnel `is_idle`; and in any case once the process is
    /// `leaving`. A future of `changed` is ready when the tunnel may have become idle. While a path leads to the device,
    /// nothing wakes the task.
    pub(crate) async fn while_idle<C: Future<Output = ()>>(
        mut self,
        is_idle: impl Fn() -> bool,
        changed: impl Fn() -> C,
        leaving: &CancellationToken,
    ) -> Infallible {
        let Some(session) = self.session.take() else {
            return std::future::pending().await;
        };
        tokio::select! {
            never = self.while_serving(&session, &is_idle, &changed) => match never {},
            () = leaving.cancelled() => {}
        }
        self.allow(true);
        std::future::pending().await
    }

    async fn while_serving<C: Future<Output = ()>>(
        &mut self,
        session: &Connection,
        is_idle: &impl Fn() -> bool,
        changed: &impl Fn() -> C,
    ) -> Infallible {
        loop {
            self.allow(false);
            session.until_suspended().await;
            tokio::select! {
                never = self.while_suspended(is_idle, changed) => match never {},
                () = session.until_awake() => {}
            }
        }
    }

    async fn while_suspended<C: Future<Output = ()>>(
        &mut self,
        is_idle: impl Fn() -> bool,
        changed: impl Fn() -> C,
    ) -> Infallible {
        loop {
            self.allow(is_idle());
            changed().await;
        }
    }

    fn allow(&mut self, may_sleep: bool) {
        if may_sleep != std::mem::replace(&mut self.is_allowed, may_sleep) {
            (self.switch)(may_sleep.then(|| self.memo.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::task::{Context, Wake, Waker};
    use std::time::Duration;

    use cedos_lab_rig::wait::{until, within};
    use d2tp_driver::EndpointConfig;
    use parking_lot::Mutex;
    use tokio::sync::Notify;

    use super::*;
    use crate::session_pair::{SessionPair, local_link};

    #[derive(Default)]
    struct CountedWakes(AtomicUsize);

    impl Wake for CountedWakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[tokio::test]
    async fn a_tunnel_whose_session_is_awake_is_never_woken_to_see_whether_it_may_sleep() {
        let mut pair = SessionPair::start(EndpointConfig::default()).await;
        let asked = AtomicUsize::new(0);
        let is_idle = || asked.fetch_add(1, Ordering::SeqCst) > 0;
        let changes = Notify::new();
        let switch = pair.far.hibernation_switch();
        let session = Some(pair.far.connection());
        let rest = TunnelRest::of_session(session, switch, Bytes::from_static(b"memo"), true);
        let serving = CancellationToken::new();
        let mut resting = pin!(rest.while_idle(is_idle, || changes.notified(), &serving));
        let wakes = Arc::<CountedWakes>::default();
        let waker = Waker::from(wakes.clone());
        let mut cx = Context::from_waker(&waker);
        assert!(resting.as_mut().poll(&mut cx).is_pending());
        assert_eq!(pair.far.memo(), None, "it may not sleep while it is awake");
        for _ in 0..100 {
            pair.exchange().await;
            changes.notify_one();
        }
        // sleep: that nothing wakes it in this time is the subject
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(wakes.0.load(Ordering::SeqCst), 0);
        assert_eq!(asked.load(Ordering::SeqCst), 0);
    }

    #[tokio::test]
    async fn a_tunnel_that_becomes_idle_in_an_outage_may_sleep_from_then_until_the_device_is_back()
    {
        let config = EndpointConfig {
            silence_max: Duration::from_secs(1).into(),
            ..EndpointConfig::default()
        };
        let mut pair = SessionPair::start(config).await;
        let session = pair.far.connection();
        let (idle, changes) = (Arc::new(AtomicBool::new(false)), Arc::new(Notify::new()));
        let looks = Arc::new(AtomicUsize::new(0));
        let switched = Arc::new(Mutex::new(Vec::new()));
        let switch: HibernationSwitch = {
            let switched = switched.clone();
            Box::new(move |memo| switched.lock().push(memo))
        };
        let memo = Bytes::from_static(b"memo");
        let rest = TunnelRest::of_session(Some(session.clone()), switch, memo.clone(), false);
        let resting = {
            let (idle, looks, changes) = (idle.clone(), looks.clone(), changes.clone());
            let is_idle = move || {
                looks.fetch_add(1, Ordering::SeqCst);
                idle.load(Ordering::SeqCst)
            };
            let serving = CancellationToken::new();
            tokio::spawn(async move {
                rest.while_idle(is_idle, || changes.notified(), &serving)
                    .await
            })
        };
        pair.links.remove("wifi");
        until("the device has no path", || pair.device.paths().is_empty()).await;
        within(session.until_suspended()).await;
        until("the tunnel is looked at", || {
            looks.load(Ordering::SeqCst) > 0
        })
        .await;
        assert_eq!(*switched.lock(), []);
        idle.store(true, Ordering::SeqCst);
        changes.notify_one();
        until("it may sleep", || *switched.lock() == [Some(memo.clone())]).await;
        // A byte is under way, and then it is not.
        idle.store(false, Ordering::SeqCst);
        changes.notify_one();
        until("it may not sleep", || switched.lock().last() == Some(&None)).await;
        idle.store(true, Ordering::SeqCst);
        changes.notify_one();
        until("it may sleep again", || switched.lock().len() == 3).await;
        pair.links.add(local_link("another", 3));
        within(session.until_awake()).await;
        // The device is silent again, so the server may suspend the session once more.
        until("it may not sleep", || switched.lock().len() >= 4).await;
        let memo = Some(memo);
        assert_eq!(switched.lock()[..4], [memo.clone(), None, memo, None]);
        pair.exchange().await;
        resting.abort();
    }
}
