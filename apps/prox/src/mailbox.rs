//! MAILBOX: two clients that know the same number exchange some bytes, once.
//!
//! ```text
//!  first   MAILBOX *      200, Mailbox: 4271 ─▶ waits … ┐
//!  second  MAILBOX 4271   200                           ├─ bytes, both ways, for a minute at most
//!                                                       ┘  the number is free again
//! ```
//!
//! The content is up to them: `cedos send` and `cedos receive` prove a common password to each
//! other and seal the rest. The proxy knows the number, which is no secret.

use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{FlowIo, ResetCause};
use tokio::io::{AsyncWriteExt, DuplexStream, copy_bidirectional_with_sizes};
use tokio::time::timeout;

use crate::flow_answer::refuse;
use crate::flow_report::{FlowLogRecord, ProxFlowOutcome, ServedFrom};
use crate::flow_watch::FlowWatch;
use crate::mailbox_table::{OpenMailbox, UNREAD_BYTES_MAX};
use crate::prox::Prox;

/// How long two may talk: a few messages are exchanged.
const TALK_MAX: Duration = Duration::from_secs(60); // a guess: a round trip of some seconds, ten times
/// Serves a MAILBOX request: for a new mailbox, or for the one with this number.
pub(crate) async fn serve<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    number: Option<u32>,
) -> ProxFlowOutcome {
    record.asked = "MAILBOX".to_owned();
    let joined = match number {
        Some(number) => prox.mailboxes.join(number),
        None => match prox.mailboxes.open(flow.peer(), random_number) {
            Ok(mailbox) => match wait(flow, prox, watch, mailbox).await {
                Ok(partner) => Ok(partner),
                Err(outcome) => return outcome,
            },
            Err(refusal) => Err(refusal),
        },
    };
    let mut partner = match joined {
        Ok(partner) => partner,
        Err(refusal) => return refuse(flow, prox, watch, record, &refusal, false).await,
    };
    record.status = Some(200);
    record.served = ServedFrom::Relay;
    let talking = async {
        if number.is_some() {
            flow.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
        }
        let room = UNREAD_BYTES_MAX;
        copy_bidirectional_with_sizes(flow, &mut partner, room, room).await
    };
    let traffic = record.traffic.clone();
    let talked = tokio::select! {
        talked = timeout(TALK_MAX, talking) => talked,
        () = traffic.used_up() => return ProxFlowOutcome::Reset(ResetCause::MonthUsedUp),
        () = prox.stop.cancelled() => return ProxFlowOutcome::Reset(ResetCause::Stopping),
    };
    // The other one learns at once that nothing more comes.
    drop(partner);
    match talked {
        Ok(Ok((up, down))) => {
            (record.bytes_up, record.bytes_down) = (up, down);
            watch.gone(flow, prox).await.outcome()
        }
        Ok(Err(error)) => ProxFlowOutcome::Broken(error.to_string()),
        Err(_too_long) => ProxFlowOutcome::Reset(ResetCause::TunnelIdle),
    }
}

/// Tells the client its number, and waits until another one comes.
async fn wait<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    mut mailbox: OpenMailbox,
) -> Result<DuplexStream, ProxFlowOutcome> {
    let head = format!("HTTP/1.1 200 OK\r\nmailbox: {}\r\n\r\n", mailbox.number);
    if let Err(error) = flow.write_all(head.as_bytes()).await {
        return Err(ProxFlowOutcome::Broken(error.to_string()));
    }
    tokio::select! {
        partner = &mut mailbox.partner => {
            // Its sender is only dropped with this table.
            partner.map_err(|_| ProxFlowOutcome::Reset(ResetCause::Stopping))
        }
        gone = watch.gone(flow, prox) => Err(gone.outcome()),
    }
}

fn random_number() -> u32 {
    getrandom::u32().expect("the system has randomness")
}
