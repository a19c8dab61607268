//! The control of the current flow: its grant for metered links, its deadline, and whether its
//! sender pauses it because others have priority.

use std::sync::Arc;
use std::time::Duration;

use d2tp_sched::{
    ClientDecision, CostPolicy, DeadlineFallback, Grant, LinkCandidate, LinkChoice, LinkWaitReason,
};

use super::decision_log::DecisionLog;
use super::flow_deadline::FlowDeadline;
use super::paid_grant::PaidGrant;
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::proxy::ProxyClient;
use crate::fetch::transfer::control::TransferControl;
use crate::fetch::transfer::progress::ContentProgress;
use crate::fetch::upload_body::UploadBody;

/// The sender of the object, which pauses it while other transfers go first.
pub(in crate::fetch::transfer) enum FlowSender {
    /// The proxy: a download.
    Proxy,
    /// This device: an upload.
    Device(Arc<UploadBody>),
}

/// The flow of the current request.
pub(super) struct TransferFlow<'a> {
    client: &'a ProxyClient,
    sender: FlowSender,
    grant: PaidGrant,
    deadline: FlowDeadline,
    log: DecisionLog,
    is_held_back: bool,
}

impl<'a> TransferFlow<'a> {
    /// Creates the state before a flow is opened.
    pub(super) fn new(client: &'a ProxyClient, sender: FlowSender) -> TransferFlow<'a> {
        TransferFlow {
            client,
            sender,
            grant: PaidGrant::default(),
            deadline: FlowDeadline::default(),
            log: DecisionLog::default(),
            is_held_back: false,
        }
    }

    /// Records a new session, for which the driver has no grant.
    pub(super) fn on_new_session(&mut self) {
        self.grant = PaidGrant::default();
        self.deadline = FlowDeadline::default();
        self.log = DecisionLog::default();
    }

    /// Prepares for a new flow.
    pub(super) fn on_new_flow(&mut self, control: &TransferControl<'_>) {
        self.client.set_time_left(control.time_ahead());
        self.hold_back(false);
        self.is_held_back = false;
        self.deadline.on_new_flow(control.time_left());
        self.grant.on_new_flow();
    }

    /// Whether the proxy sends the object.
    pub(super) fn is_download(&self) -> bool {
        matches!(self.sender, FlowSender::Proxy)
    }

    /// Whether metered links may carry payload of the flow.
    pub(super) fn spends(&self) -> bool {
        self.grant.spends()
    }

    /// Bytes of the flow that the proxy acknowledged.
    pub(super) fn acknowledged_bytes(&self) -> u64 {
        let acknowledged = self.client.with_flow(|_, flow| flow.acknowledged());
        acknowledged.unwrap_or(0)
    }

    /// Sets the flow's deadline to what is left of the transfer's.
    pub(super) fn set_deadline(&self, left: Option<Duration>) {
        self.client.with_flow(|_, flow| flow.set_deadline(left));
    }

    /// Keeps the flow's deadline equal to the transfer's.
    pub(super) fn follow_deadline(&mut self, control: &mut TransferControl<'_>) {
        if control.take_new_terms() {
            // The driver and the proxy go by them too.
            self.grant.on_new_terms();
            self.deadline.on_new_terms();
            self.set_deadline(control.time_ahead());
        }
        let (left, now) = (control.time_left(), BootInstant::now());
        if let Some(left) = self.deadline.correction(left, now) {
            self.set_deadline(Some(left));
        }
        if self.deadline.lift(left, control.terms.if_late) {
            // Late is better than never: neither end may drop the flow now.
            self.set_deadline(None);
        }
    }

    /// Counts metered bytes that the driver reports beside the object.
    pub(super) fn count_paid(&self, control: &mut TransferControl<'_>) {
        if !self.grant.is_counted() {
            return;
        }
        let counted = self
            .client
            .with_flow(|device, flow| device.paid_bytes(flow));
        if let Some(counted) = counted {
            let metered = self.metered_bytes(control);
            control.usage.paid_besides = self.grant.paid_besides(counted, metered);
        }
    }

    /// Bytes that metered links carried so far.
    fn metered_bytes(&self, control: &TransferControl<'_>) -> u64 {
        let carried = self.client.carried().into_iter();
        let metered = carried.filter(|(link, _)| control.usage.is_metered(link));
        metered.map(|(_, traffic)| traffic.bytes).sum()
    }

    /// Applies a decision to the driver and the sender. True if the permission to pay for links
    /// changed.
    pub(super) fn go_by(
        &mut self,
        decision: &ClientDecision,
        candidates: &[LinkCandidate],
        control: &TransferControl<'_>,
        progress: ContentProgress,
    ) -> bool {
        let may_pay_again = control.terms.policy != CostPolicy::FreeOnly
            && control.terms.if_late == DeadlineFallback::Cell
            && control.metered_bytes_to_spend(progress) != Some(0);
        let now = BootInstant::now();
        let grant = self.grant.extend(decision.grant, may_pay_again, now);
        let device = self.client.device();
        if let Some(device) = &device {
            device.set_resting(&decision.resting);
        }
        self.log
            .record(decision, grant, candidates, device.as_deref());
        let changed = self.apply(grant, control);
        self.hold_back(matches!(
            decision.choice,
            LinkChoice::Wait {
                reason: LinkWaitReason::QueuedBehind,
                ..
            }
        ));
        changed
    }

    /// Applies a grant to the driver. True if it is of another kind than before.
    fn apply(&mut self, grant: Grant, control: &TransferControl<'_>) -> bool {
        let carried = self.metered_bytes(control) + control.usage.paid_besides;
        let own = control.terms.metered_bytes_max;
        let Some(limit) = self.grant.limit(grant, carried, own) else {
            return false;
        };
        let told = self.client.with_flow(|device, flow| {
            device.allow_paid(flow, limit.may_pay, limit.at_most);
        });
        told.is_some() && self.grant.set_applied(grant)
    }

    /// Pauses or resumes the flow at its sender.
    fn hold_back(&mut self, behind: bool) {
        if self.is_held_back == behind {
            return;
        }
        match &self.sender {
            FlowSender::Device(body) => body.set_held(behind),
            FlowSender::Proxy => {
                let told = self.client.with_flow(|_, flow| flow.hold_back(behind));
                if told.is_none() {
                    return;
                }
            }
        }
        self.is_held_back = behind;
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use d2tp_driver::{SchedulerHandle, SecretKey, SendSource};
    use d2tp_sched::{SchedulerKind, TransferDirection};
    use tokio::sync::watch;

    use super::*;
    use crate::fetch::mode::FetchMode;
    use crate::fetch::report::{TransferEvent, TransferObserver};
    use crate::fetch::request_method::RequestMethod;
    use crate::fetch::transfer::job::{Destination, TransferContext, TransferJob};
    use crate::fetch::upload_body::UploadSource;
    use crate::terms::TransferTerms;

    struct DeafObserver;

    impl TransferObserver for DeafObserver {
        fn on_event(&mut self, _: &TransferEvent) {}
    }

    #[test]
    fn an_upload_that_was_held_back_goes_on_in_the_next_session() {
        let job = TransferJob {
            url: "http://origin.example/a".parse().unwrap(),
            destination: Destination::Nowhere,
            terms: TransferTerms::default(),
            now: false,
            integrity: None,
            tries_max: 1,
            stall: Duration::from_secs(10),
            allow_downgrade: false,
            fields: [].into(),
            cookies: None,
            unless: None,
            keep_older: 0,
            method: RequestMethod::Get,
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        let token = Some("token".to_owned());
        let body = UploadBody::open(
            file.path(),
            &job.url,
            false,
            None,
            token,
            || false,
            |_, _| (),
        );
        let body = Arc::new(body.unwrap());
        let drawn = UploadSource::new(body.clone(), false);
        let is_held =
            || (drawn.poll_read_at(&mut Context::from_waker(Waker::noop()), 0, 1)).is_pending();
        let (_links, links) = watch::channel(Arc::new(Vec::new()));
        let (_stop, stop) = watch::channel(false);
        let key = SecretKey::from_bytes([7; 32]);
        let address = format!("d2tp://127.0.0.1:1/{}", key.public());
        let client = ProxyClient::new(
            address.parse::<d2tp_driver::ServerAddress>().unwrap(),
            key,
            links.clone(),
            None,
        );
        let scheduler = SchedulerHandle::new(SchedulerKind::default());
        let context = TransferContext::standalone(links, stop, scheduler);
        let mut observer = DeafObserver;
        let (mode, direction) = (FetchMode::ProxyFetch, TransferDirection::Up);
        let start = BootInstant::now();
        let control = TransferControl::new(&job, mode, context, direction, &mut observer, start);

        let mut flow = TransferFlow::new(&client, FlowSender::Device(body));
        assert!(!is_held());
        flow.hold_back(true);
        assert!(is_held());
        flow.on_new_session();
        flow.on_new_flow(&control);
        assert!(!is_held());
    }
}
