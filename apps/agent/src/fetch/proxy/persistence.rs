//! The state of a download through a proxy that outlives the process: its instance, the flow that
//! it claims, and the offset of the object in the flow.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use d2tp_driver::{Device, DriverError, FlowIo, Instance, InstanceClaim};
use tokio::time::timeout;

use super::ProxyClient;
use super::shared_flow::SharedFlow;
use crate::fetch::dial::ByteStream;
use crate::fetch::partial::{FlowNote, PartialNote};

/// Ready when the proxy knows the end of every flow that is over.
pub(super) async fn until_flows_settled(device: &Device) {
    while !device.is_settled() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

impl ProxyClient {
    /// Stores in `directory` what must outlive this process.
    pub fn with_state_directory(mut self, directory: PathBuf) -> ProxyClient {
        self.instances = Some(directory);
        self
    }

    /// Continues this flow in the next session; `durable_bytes` of the file are safe.
    pub fn claim(&self, flow: &FlowNote, durable_bytes: u64) {
        let claim = flow
            .flow_offset(durable_bytes)
            .map(|received| InstanceClaim {
                flow: flow.flow,
                received,
            });
        if self.select_claimed(flow.proxy) {
            self.state().claim = Some((flow.instance, claim));
        }
    }

    /// Takes the claimed flow, to be read from where it was claimed.
    pub fn take_claimed(&self) -> Option<Box<dyn ByteStream>> {
        let mut state = self.state();
        if !std::mem::take(&mut state.claimed) {
            return None;
        }
        let flow = state.flow.clone()?;
        state.broken = Arc::default();
        let broken = state.broken.clone();
        let head = None;
        Some(Box::new(SharedFlow { flow, head, broken }))
    }

    /// The note by which a later process can continue the current flow, whose answer begins with byte
    /// `from` of the object.
    pub fn flow_note(&self, from: u64) -> Option<FlowNote> {
        let state = self.state();
        let instance = state.instance.as_ref()?.number();
        let flow = state.flow.as_ref()?;
        let flow = flow.lock().unwrap_or_else(PoisonError::into_inner).id();
        let head = state.head.as_ref()?;
        let head = head.lock().unwrap_or_else(PoisonError::into_inner).end()?;
        let lead = i64::try_from(head).ok()?.checked_sub_unsigned(from)?;
        Some(FlowNote {
            instance,
            flow,
            lead,
            proxy: Some(self.servers.servers()[state.selection.current()].key),
        })
    }

    /// Records that the part with this note belongs to the current flow. False if that is too early.
    pub async fn persist_flow(&self, flow: u64, note: &Path) -> Result<bool, DriverError> {
        let Some(device) = self.device() else {
            return Ok(false);
        };
        let note = std::path::absolute(note).unwrap_or_else(|_| note.to_owned());
        let memo = Bytes::copy_from_slice(note.as_os_str().as_bytes());
        device.persist_flow(flow, memo).await
    }

    /// Why nothing can be recorded; returned once.
    pub fn take_persist_error(&self) -> Option<String> {
        self.state().trouble.take()
    }

    pub(super) async fn instance(&self) -> Option<Arc<Instance>> {
        let first = {
            let state = self.state();
            if let Some(instance) = &state.instance {
                return Some(instance.clone());
            }
            state.claim.map(|(instance, _)| instance)
        };
        let directory = self.instances.clone().filter(|_| self.given.is_none())?;
        let (ours, theirs) = (self.key.public(), self.address().key);
        let take = move || {
            Instance::take(&directory, ours, theirs, first, |instance, flow, memo| {
                PartialNote::continues_flow(Path::new(OsStr::from_bytes(memo)), instance, flow)
            })
        };
        match tokio::task::spawn_blocking(take).await {
            Ok(Ok(instance)) => {
                let instance = Arc::new(instance);
                let mut state = self.state();
                if first != Some(instance.number()) {
                    state.claim = None;
                }
                state.instance = Some(instance.clone());
                Some(instance)
            }
            Ok(Err(error)) => {
                self.state().trouble = Some(error.to_string());
                None
            }
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }

    /// Informs the proxy that the flows of this flow's instance are no longer needed. True if it confirmed.
    pub async fn release_instance(&self, flow: &FlowNote, patience: Duration) -> bool {
        if !self.select_claimed(flow.proxy) {
            return false;
        }
        self.state().claim = Some((flow.instance, None));
        if self.connect().await.is_err() {
            return false;
        }
        let told = match self.device() {
            Some(device) => timeout(patience, until_flows_settled(&device))
                .await
                .is_ok(),
            None => false,
        };
        if told {
            self.close().await;
        } else {
            self.detach().await;
        }
        told
    }

    /// Leaves without ending the current flow: the next process may claim it.
    pub async fn detach(&self) {
        let device = {
            let mut state = self.state();
            if let Some(flow) = state.flow.take() {
                flow.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .leave_open();
            }
            state.device.take()
        };
        if let Some(device) = device.and_then(Arc::into_inner)
            && let Err(error) = device.leave().await
        {
            tracing::warn!(%error, "the download will not resume in the same flow");
        }
    }
}
