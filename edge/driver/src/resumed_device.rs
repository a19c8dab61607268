//! Devices that call as an instance: one that is this process's, or one that outlives it with what is wanted of its
//! flows.

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use d2tp_session::{Endpoint, FlowId, FlowRecord, ReasonCode, SessionEvent, SessionId, Time};
use parking_lot::Mutex;
use tokio::sync::broadcast::{self, error::RecvError};

use crate::attach::KernelLinks;
use crate::clock;
use crate::device::{Device, DeviceOptions};
use crate::driver_core::{DriverError, DriverShared, FlowEntry};
use crate::flow::Flow;
use crate::instance::{FORGOTTEN, Instance, InstanceClaim, InstanceUpkeep};
use crate::instance_lease::InstanceLease;
use crate::journal::JournalError;
use crate::server::CLOSE_GRACE;

impl Device {
    /// A device that calls as `lease`. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The server's name has no address.
    pub async fn with_lease(
        options: DeviceOptions,
        lease: Arc<InstanceLease>,
    ) -> Result<Device, DriverError> {
        let server = options.server.key;
        let (number, epochs) = (lease.number, lease.epochs.clone());
        let connect = |core: &mut Endpoint| Ok(core.connect(clock::now(), server, number, epochs));
        let mut device = Device::begin(options, Arc::new(KernelLinks), connect).await?;
        device.lease = Some(lease);
        Ok(device)
    }

    /// A device that goes on as `instance`: with the flow it claims, if its record is there. The
    /// server is told that the record's other flows are over. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The server's name has no address, or the journal cannot be used.
    pub async fn resume(
        options: DeviceOptions,
        instance: Arc<Instance>,
        claim: Option<InstanceClaim>,
    ) -> Result<(Device, Option<Flow>), DriverError> {
        let at_work = instance.clone();
        let read = move || -> Result<_, JournalError> {
            let found = at_work.record()?;
            let after = found.as_ref().map_or(0, |(r, _)| r.epoch.saturating_add(1));
            Ok((found, at_work.reserve(after)?))
        };
        let (found, epochs) = blocking(read).await?;
        let mut record = found.map(|(mut record, stored)| {
            let age = stored.age();
            // Whoever comes next has something to say.
            record.closing = None;
            for flow in &mut record.flows {
                flow.deadline_left = flow.deadline_left.map(|left| left.saturating_sub(age));
                if let Some(claim) = claim.filter(|c| c.flow == flow.id.0) {
                    take_claim(flow, claim);
                }
            }
            record
        });
        let server = options.server.key;
        let number = instance.number();
        let claimed = claim.map(|c| FlowId(c.flow)).filter(|id| {
            let flows = record.iter().flat_map(|r| &r.flows);
            flows.clone().any(|f| f.id == *id)
        });
        let given_up: Vec<FlowId> = record
            .iter_mut()
            .flat_map(|r| &r.flows)
            .map(|f| f.id)
            .filter(|id| Some(*id) != claimed)
            .collect();
        let bytes = record.map(|r| r.encode());
        let mut device = Device::begin(options, Arc::new(KernelLinks), move |core| {
            let now = clock::now();
            let restored = bytes.and_then(|b| core.restore(now, &b, epochs.clone()).ok());
            let id = restored.unwrap_or_else(|| core.connect(now, server, number, epochs));
            let _ = core.with(id, |s| {
                for flow in given_up {
                    s.reset(flow, FORGOTTEN);
                    s.stop(flow, FORGOTTEN);
                }
            });
            Ok(id)
        })
        .await?;
        let (shared, session, peer) = device.parts();
        let flow = claimed.map(|id| {
            let mut inner = shared.inner.lock();
            inner.flows.insert((session, id), FlowEntry::default());
            Flow::new(shared.clone(), session, id, peer)
        });
        let events = shared.events.subscribe();
        let upkeep = tokio::spawn(upkeep(
            shared.clone(),
            session,
            Arc::downgrade(&instance),
            events,
        ));
        device.instance_upkeep = Some(InstanceUpkeep {
            instance,
            upkeep,
            kept_flows: Mutex::default(),
        });
        Ok((device, flow))
    }

    /// Writes down that the flow is wanted beyond this process, with what is needed to go on with
    /// it. False if it is too early for that: the server has not taken all that was written.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub async fn persist_flow(&self, flow: u64, memo: Bytes) -> Result<bool, DriverError> {
        let Some(keeping) = &self.instance_upkeep else {
            return Ok(false);
        };
        let (shared, session, _) = self.parts();
        let id = FlowId(flow);
        let record = {
            let inner = shared.inner.lock();
            inner
                .core
                .session(session)
                .filter(|s| s.is_flushed(id) && s.flow_ids().contains(&id))
                .map(|s| s.record(clock::now(), true))
        };
        let Some(record) = record else {
            return Ok(false);
        };
        let kept = {
            let mut kept = keeping.kept_flows.lock();
            kept.retain(|(known, _)| *known != id);
            kept.push((id, memo));
            kept.clone()
        };
        let instance = keeping.instance.clone();
        blocking(move || instance.write(Some(record), &kept)).await?;
        Ok(true)
    }

    /// Whether the device has an instance that outlives it.
    pub fn has_instance(&self) -> bool {
        self.instance_upkeep.is_some()
    }

    /// Whether the server knows the end of every flow that is over.
    pub fn is_settled(&self) -> bool {
        let (shared, session, _) = self.parts();
        let inner = shared.inner.lock();
        inner
            .core
            .session(session)
            .is_none_or(|s| s.flow_ids().is_empty())
    }

    /// Leaves without ending the session: what was remembered and is not over is there for the next
    /// process, and so is what the server still has to be told.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub async fn leave(mut self) -> Result<(), DriverError> {
        let (shared, session, _) = self.parts();
        let now = clock::now();
        let record = {
            let mut inner = shared.inner.lock();
            let links: Vec<_> = inner.sockets.keys().copied().collect();
            let _ = inner.core.with(session, |s| {
                for link in links {
                    s.close_path(now, link, ReasonCode::NoPath);
                }
            });
            inner.core.session(session).map(|s| s.record(now, true))
        };
        shared.wake();
        if let Some(keeping) = &self.instance_upkeep {
            let (instance, kept) = (keeping.instance.clone(), keeping.kept_flows.lock().clone());
            blocking(move || instance.write(record, &kept)).await?;
        }
        // The last word on each path leaves in the task's next turn.
        tokio::time::sleep(CLOSE_GRACE).await;
        if let Some(keeping) = &mut self.instance_upkeep {
            // Whoever comes next finds the instance free.
            keeping.upkeep.abort();
            let _ = (&mut keeping.upkeep).await;
        }
        Ok(())
    }

    /// The session is over: nothing of it is kept.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub async fn forget(&self) -> Result<(), DriverError> {
        match &self.instance_upkeep {
            Some(keeping) => {
                keeping.kept_flows.lock().clear();
                let instance = keeping.instance.clone();
                blocking(move || instance.write(None, &[])).await
            }
            None => Ok(()),
        }
    }
}

/// How far the sequence number of a deadline is advanced, for changes that another process made and did
/// not record.
const DEADLINES_SKIPPED: u64 = 1 << 20;

fn take_claim(flow: &mut FlowRecord, claim: InstanceClaim) {
    // Nothing ends here before the server was asked, however long it was; whoever claims says anew
    // how long there is, and that must count.
    flow.deadline_left = None;
    flow.deadline_seq = (flow.deadline_seq + DEADLINES_SKIPPED).min(1 << 60);
    flow.received_to = claim.received;
    flow.receive_end = None;
    flow.receive_complete = false;
}

async fn blocking<R: Send + 'static>(
    work: impl FnOnce() -> Result<R, JournalError> + Send + 'static,
) -> Result<R, DriverError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done?),
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Reserves more epochs when the session has used up its own: until then it cannot wake.
async fn upkeep(
    shared: Arc<DriverShared>,
    session: SessionId,
    instance: Weak<Instance>,
    mut events: broadcast::Receiver<(Time, SessionEvent)>,
) {
    loop {
        let left = {
            let inner = shared.inner.lock();
            inner.core.session(session).map(|s| s.epochs_left())
        };
        let Some(left) = left else { return };
        if left.is_empty() {
            // Its file is free for another process as soon as the device is gone.
            let Some(instance) = instance.upgrade() else {
                return;
            };
            match blocking(move || instance.reserve(left.start)).await {
                // Where there are no more, the session ends and says so.
                Ok(more) => {
                    shared.with(session, |s| s.add_epochs(more.end));
                }
                Err(error) => {
                    tracing::error!(%error, "the device cannot call: no more epochs can be reserved");
                    tokio::time::sleep(AGAIN_AFTER).await;
                    continue;
                }
            }
        }
        loop {
            match events.recv().await {
                Ok((_, SessionEvent::EpochsUsedUp)) | Err(RecvError::Lagged(_)) => break,
                Ok(_) => {}
                Err(RecvError::Closed) => return,
            }
        }
    }
}

/// How long to wait after a failed reservation of epochs.
const AGAIN_AFTER: Duration = Duration::from_secs(5); // a guess
