//! Devices that connect as a given instance: a leased one, or one that outlives the process with
//! the flows to be kept.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use d2tp_session::{
    Endpoint, FlowId, FlowRecord, ReasonCode, SessionEvent, SessionId, SessionRecord, Time,
};
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
use crate::lease_record::LeaseRecord;
use crate::server::CLOSE_GRACE;

/// A flow of a leased instance that goes on in another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseClaim {
    /// The flow's id.
    pub flow: u64,
    /// The offset from which the server is to continue sending. Everything below is kept.
    pub received: u64,
    /// An offset below which the server has everything.
    pub sent: u64,
}

/// A device that continues a leased instance, with the flows that it claims.
pub struct ResumedLease {
    /// The device, which has no link yet.
    pub device: Device,
    /// The flows by their ids. One that is not here, the record did not name.
    pub flows: Vec<(u64, Flow)>,
}

impl Device {
    /// Creates a device that continues the leased instance from the record of its session, with the flows that it claims.
    /// The server is informed that the other ones are over. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The server's name has no address.
    pub async fn resume_lease(
        options: DeviceOptions,
        lease: Arc<InstanceLease>,
        record: &[u8],
        claims: &[LeaseClaim],
    ) -> Result<ResumedLease, DriverError> {
        let (number, epochs) = (lease.number, lease.epochs.clone());
        let record = SessionRecord::decode(record)
            .inspect_err(|error| tracing::warn!(%error, "connections do not go on"));
        let mut record = record.ok().filter(|record| record.instance == number);
        let mut flows = Vec::new();
        if let Some(record) = &mut record {
            record.closing = None;
            record.flows.retain_mut(|flow| {
                let claim = claims.iter().find(|claim| claim.flow == flow.id.0);
                let Some(claim) = claim else { return false };
                let (flow_id, received) = (claim.flow, claim.received);
                take_claim(
                    flow,
                    InstanceClaim {
                        flow: flow_id,
                        received,
                    },
                );
                flow.sent_to = claim.sent;
                (flow.send_end, flow.send_complete) = (None, false);
                flows.push(flow.id);
                true
            });
        }
        let server = options.server.key;
        let bytes = record.map(|record| record.encode());
        let mut device = Device::begin(options, Arc::new(KernelLinks), move |core| {
            let now = clock::now();
            let restored = bytes.and_then(|b| core.restore(now, &b, epochs.clone()).ok());
            Ok(restored.unwrap_or_else(|| core.connect(now, server, number, epochs)))
        })
        .await?;
        device.lease = Some(lease);
        let (shared, session, peer) = device.parts();
        let flows = flows.into_iter().map(|id| {
            let mut inner = shared.inner.lock();
            inner.flows.insert((session, id), FlowEntry::default());
            drop(inner);
            (id.0, Flow::new(shared.clone(), session, id, peer))
        });
        let flows = flows.collect();
        Ok(ResumedLease { device, flows })
    }

    /// The number of the leased instance, if the device has one.
    pub fn leased_instance(&self) -> Option<u64> {
        Some(self.lease.as_ref()?.number)
    }

    /// Leaves a record of the session beside the lease, so that the next process can go on with the flows that processes
    /// wait for; none if there are none.
    ///
    /// # Errors
    /// The device has no lease, its session is over, or the file system failed.
    pub fn write_lease_record(&self, waiting: Vec<(u64, u32)>) -> io::Result<()> {
        let lease = self.lease.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        if waiting.is_empty() {
            lease.remove_record();
            return Ok(());
        }
        let (shared, session, _) = self.parts();
        let record = {
            let inner = shared.inner.lock();
            let session = inner.core.session(session);
            session.map(|s| s.record(clock::now(), true))
        };
        let record = SessionRecord {
            // R-TICKET-2: the session may show it before the next process does.
            ticket: None,
            ..record.ok_or(io::ErrorKind::NotConnected)?
        };
        lease.write_record(&LeaseRecord {
            waiting,
            session: record.encode(),
        })
    }

    /// Tells the server that the device sends nothing for a while, on each path. The session goes on.
    pub fn pause(&self) {
        let (shared, session, _) = self.parts();
        let now = clock::now();
        let mut inner = shared.inner.lock();
        let links: Vec<_> = inner.sockets.keys().copied().collect();
        let _ = inner.core.with(session, |s| {
            for link in links {
                s.close_path(now, link, ReasonCode::NoPath);
            }
        });
        drop(inner);
        shared.wake();
    }

    /// Creates a device that connects as the leased instance. Must be called on a tokio runtime.
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

    /// Creates a device that continues as `instance`, with the flow that it claims, if its record
    /// exists. The server is informed that the other flows of the record are over. Must be called
    /// on a tokio runtime.
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
            // The next session has data to send, so it is not closing any more.
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

    /// Stores that the flow is to be kept beyond this process, with what is needed to resume it.
    /// Returns false if it is too early for that, because the server has not accepted all written
    /// data.
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

    /// Leaves without ending the session: the next process finds the flows that were kept and are
    /// not over, and what the server still has to be informed of.
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
        // The last packet on each path is sent in the task's next turn.
        tokio::time::sleep(CLOSE_GRACE).await;
        if let Some(keeping) = &mut self.instance_upkeep {
            // From here on another process can take the instance.
            keeping.upkeep.abort();
            let _ = (&mut keeping.upkeep).await;
        }
        Ok(())
    }

    /// Ends the session, and removes its record.
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

/// By how much the sequence number of a deadline is advanced, to exceed changes that another
/// process made and did not record.
const DEADLINES_SKIPPED: u64 = 1 << 20;

fn take_claim(flow: &mut FlowRecord, claim: InstanceClaim) {
    // Deadlines are not enforced before the server was asked. A flow that is claimed states its
    // deadline again, and that must be valid.
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

/// Reserves more epochs when the session has used up its own, because without them it cannot
/// resume.
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
            // Another process can use the file as soon as the device is dropped.
            let Some(instance) = instance.upgrade() else {
                return;
            };
            match blocking(move || instance.reserve(left.start)).await {
                // If no epochs are left to reserve, the session ends and reports that.
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
