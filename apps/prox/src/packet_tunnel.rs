//! CONNECT-IP: a client's IP packets, in datagrams beside this flow.
//!
//! ```text
//!  CONNECT-IP *   200, Tunnel-Address, Tunnel-Gateway … packets, as long as the flow is open
//! ```
//!
//! After the method of RFC 9484, whose templates and addresses in capsules are not used: a client has the same addresses
//! for good, and may reach what its flows may reach. Where only metered links are up, packets are capsules in the flow.
//!
//! While no path leads to the client, the flow may sleep with its session. Its address, and what is held of connections,
//! stay in this process until the client is back.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use d2tp_driver::{ContextInbox, FlowIo, ResetCause};
use d2tp_tunnel::{
    CapsuleReader, HEADERS_BY_RULES, HEADERS_FIELD, HeaderContext, INNER_MTU_MAX, PACKET_CONTEXT,
    PACKETS_UNREAD_MAX, PieceJoiner, TunWriter,
};
use tokio::io::AsyncWriteExt;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::counters::{TrafficDirection, TrafficKind};
use crate::flow_answer::refuse;
use crate::flow_memo::{FlowMemo, SleepingTunnel};
use crate::flow_report::{FlowLogRecord, ProxFlowOutcome, ServedFrom};
use crate::flow_watch::{FlowWatch, is_asleep};
use crate::inner_addresses::{InnerAddressPair, InnerNets};
use crate::packet_filter::{PacketDropReason, check_packet_from_client};
use crate::packet_network::{PacketAttachment, PacketNetwork, PacketNetworkError};
use crate::prox::{Prox, random_name};
use crate::refusal::ProxRefusal;
use crate::tunnel_helper::TunnelHelper;
use crate::tunnel_rest::TunnelRest;

/// How long an earlier tunnel in the same session may take to end.
const REPLACED_WITHIN: Duration = Duration::from_secs(1); // a guess: it is woken at once

impl Prox {
    /// Makes the network for packet tunnels, if the settings name inner networks. `directory`: where the addresses of
    /// clients are kept. `helper`: who changes the system's network, where this process may not. Must be called on a
    /// runtime.
    ///
    /// # Errors
    /// The networks make no sense, or the process may not change the system's network.
    pub fn open_packet_network(
        &self,
        directory: Option<&Path>,
        helper: Option<TunnelHelper>,
    ) -> Result<(), PacketNetworkError> {
        let config = self.config();
        if config.tunnel_nets.is_empty() {
            return Ok(());
        }
        let (counters, traffic) = (self.counters.clone(), self.traffic.clone());
        let network =
            PacketNetwork::start(&config.tunnel_nets, directory, counters, traffic, helper)?;
        let _ = self.packet_network.set(network);
        Ok(())
    }

    /// Removes the network for packet tunnels, and its rules.
    pub fn close_packet_network(&self) {
        if let Some(network) = self.packet_network.get() {
            network.close();
        }
    }
}

/// Serves a CONNECT-IP request.
pub(crate) async fn serve<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    answers_only: bool,
    compresses: bool,
) -> ProxFlowOutcome {
    record.asked = "CONNECT-IP".to_owned();
    let (network, attachment) = match attach(flow, prox, answers_only) {
        Ok(attached) => attached,
        Err(refusal) => return refuse(flow, prox, watch, record, &refusal, false).await,
    };
    let Some(inbox) = inbox(&attachment).await else {
        network.detach(&attachment);
        return refuse(flow, prox, watch, record, &ProxRefusal::Stopping, false).await;
    };
    record.status = Some(200);
    record.served = ServedFrom::Relay;
    if compresses {
        let own = &attachment.addresses;
        let headers = HeaderContext::of_proxy(own.v4, own.v6);
        attachment.source.set_headers(Some(headers));
    }
    let head = head(&attachment.addresses, &network.nets(), compresses);
    let written = flow.write_all(head.as_bytes()).await;
    if let Err(error) = written {
        network.detach(&attachment);
        return ProxFlowOutcome::Broken(error.to_string());
    }
    carry_or_sleep(flow, prox, record, &network, &attachment, &inbox, false).await
}

/// Goes on with a tunnel whose flow slept.
pub(crate) async fn resume<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    record: &mut FlowLogRecord,
    number: u64,
) -> ProxFlowOutcome {
    record.traffic.set_kind(TrafficKind::Packets);
    let network = prox.packet_network.get().cloned();
    let woken = network.zip(flow.session()).and_then(|(network, session)| {
        let attachment = network.wake(number, flow.peer(), session)?;
        Some((network, attachment))
    });
    // The client opens another one.
    let ended = ProxFlowOutcome::Reset(ResetCause::TunnelReset);
    let Some((network, attachment)) = woken else {
        return ended;
    };
    let Some(inbox) = inbox(&attachment).await else {
        network.detach(&attachment);
        return ended;
    };
    record.status = Some(200);
    record.served = ServedFrom::Relay;
    carry_or_sleep(flow, prox, record, &network, &attachment, &inbox, true).await
}

/// Carries packets until the tunnel ends, or its session sleeps. `is_woken`: it slept before.
async fn carry_or_sleep<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    record: &FlowLogRecord,
    network: &Arc<PacketNetwork>,
    attachment: &Arc<PacketAttachment>,
    inbox: &ContextInbox,
    is_woken: bool,
) -> ProxFlowOutcome {
    record.traffic.leave_to_packets();
    let number = random_name();
    let memo = FlowMemo::of_tunnel(SleepingTunnel::Packets(number), &record.asked, false);
    let rest = TunnelRest::new(flow, prox, &memo, is_woken);
    // What it holds is this process's: when that leaves, the tunnel is reset, and its client opens another one.
    let never_leaving = CancellationToken::new();
    let mut reader = CapsuleReader::default();
    let ended = |text: &str| ProxFlowOutcome::Broken(text.to_owned());
    let outcome = tokio::select! {
        outcome = carry(flow, inbox, prox, network, attachment, &mut reader) => outcome,
        () = attachment.replaced.cancelled() => ended("a newer tunnel of this client replaced it"),
        () = prox.stop.cancelled() => ProxFlowOutcome::Reset(ResetCause::Stopping),
        never = rest.while_idle(|| true, std::future::pending, &never_leaving) => match never {},
    };
    let finished = std::future::poll_fn(|cx| Poll::Ready(flow.poll_finished(cx))).await;
    let is_asleep = matches!(finished, Poll::Ready(Err(error)) if is_asleep(&error));
    // What has begun of a capsule is not in the flow's record.
    if is_asleep && reader.is_empty() {
        network.put_to_sleep(number, attachment);
        return ProxFlowOutcome::Hibernated;
    }
    network.detach(attachment);
    match is_asleep {
        true => ProxFlowOutcome::Hibernated,
        false => outcome,
    }
}

fn attach<F: FlowIo>(
    flow: &F,
    prox: &Prox,
    answers_only: bool,
) -> Result<(Arc<PacketNetwork>, Arc<PacketAttachment>), ProxRefusal> {
    let network = prox.packet_network.get();
    // A client without D2TP has no session whose datagrams could carry packets.
    let network = network.zip(flow.session());
    let (network, session) = network.ok_or(ProxRefusal::NoPacketTunnels)?;
    network.tun().ok_or(ProxRefusal::Stopping)?;
    let memory = prox.memory_account(flow.peer()).charge();
    let attachment = network.attach(flow.peer(), session, memory, answers_only)?;
    Ok((network.clone(), attachment))
}

/// The packets of the client, once an earlier tunnel in its session has given them up.
async fn inbox(attachment: &PacketAttachment) -> Option<ContextInbox> {
    let began = Instant::now();
    loop {
        let connection = &attachment.connection;
        let inbox = connection.context_with_room(PACKET_CONTEXT, PACKETS_UNREAD_MAX);
        if inbox.is_some() || began.elapsed() > REPLACED_WITHIN {
            return inbox;
        }
        sleep(Duration::from_millis(10)).await;
    }
}

fn head(own: &InnerAddressPair, nets: &InnerNets, compresses: bool) -> String {
    let list = |pair: &InnerAddressPair| {
        let texts: Vec<String> = pair.all().map(|address| address.to_string()).collect();
        texts.join(", ")
    };
    let headers = match compresses {
        true => format!("{HEADERS_FIELD}: {HEADERS_BY_RULES}\r\n"),
        false => String::new(),
    };
    format!(
        "HTTP/1.1 200 OK\r\ntunnel-address: {}\r\ntunnel-gateway: {}\r\n{headers}\r\n",
        list(own),
        list(&nets.gateway()),
    )
}

/// Carries packets both ways until the session or the flow is over.
async fn carry<F: FlowIo>(
    flow: &mut F,
    inbox: &ContextInbox,
    prox: &Prox,
    network: &PacketNetwork,
    attachment: &PacketAttachment,
    reader: &mut CapsuleReader,
) -> ProxFlowOutcome {
    let id = flow.id();
    attachment.source.repair_elsewhere(id);
    let (mut reading, mut writing) = tokio::io::split(flow);
    let broken = |error: io::Error| ProxFlowOutcome::Broken(error.to_string());
    let datagrams = async {
        let (mut joiner, mut writer) = (PieceJoiner::default(), TunWriter::default());
        let mut datagrams = Vec::new();
        while inbox.recv_all(&mut datagrams).await {
            let packets = datagrams
                .drain(..)
                .filter_map(|datagram| joiner.join(datagram))
                .map(|packet| attachment.source.expanded(packet));
            if !accept(packets, &mut writer, prox, network, attachment) {
                break;
            }
        }
        ProxFlowOutcome::Broken("the session, or the network device, ended".to_owned())
    };
    let capsules = async {
        let mut writer = TunWriter::default();
        loop {
            let packet = match reader.next(&mut reading).await {
                Ok(packet) => packet,
                Err(error) => return broken(error),
            };
            if let (Some(answers), Some(packet)) = (&attachment.answers, &packet) {
                answers.on_asked(packet);
            }
            let accepted = packet
                .is_some_and(|packet| accept([packet], &mut writer, prox, network, attachment));
            if !accepted {
                return ProxFlowOutcome::Broken("the tunnel ended".to_owned());
            }
        }
    };
    let to_flow = attachment
        .source
        .write_capsules(&attachment.connection, id, &mut writing);
    tokio::select! {
        outcome = datagrams => outcome,
        outcome = capsules => outcome,
        written = to_flow => match written {
            Ok(()) => ProxFlowOutcome::Broken("the tunnel ended".to_owned()),
            Err(error) => broken(error),
        },
    }
}

/// Hands packets of the client to the kernel. False if there is no device any more.
fn accept(
    packets: impl IntoIterator<Item = Bytes>,
    writer: &mut TunWriter,
    prox: &Prox,
    network: &PacketNetwork,
    attachment: &PacketAttachment,
) -> bool {
    let Some(tun) = network.tun() else {
        return false;
    };
    let upstream = prox.upstream();
    let mut accepted = Vec::new();
    for packet in packets {
        if packet.len() > usize::from(INNER_MTU_MAX) {
            network.on_drop(PacketDropReason::TooBig);
            continue;
        }
        let checked = check_packet_from_client(
            &packet,
            &attachment.addresses,
            &network.nets(),
            &upstream.filter,
        );
        let is_admitted = || network.admits(attachment, TrafficDirection::Up, packet.len());
        match checked {
            Ok(()) if is_admitted() => accepted.push(packet),
            Ok(()) => network.on_drop(PacketDropReason::OverLimit),
            Err(reason) => network.on_drop(reason),
        }
    }
    attachment
        .source
        .on_received(&attachment.connection, &mut accepted);
    tun.send(writer, &accepted).is_ok()
}
