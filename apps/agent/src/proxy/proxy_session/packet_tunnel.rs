//! CONNECT-IP: IP packets beside a flow, in datagrams of the session, or in the flow itself.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use d2tp_driver::{Connection, ContextInbox, Flow, FlowIo as _, FlowSettings};
use d2tp_tunnel::{
    CapsuleReader, HEADERS_BY_RULES, HEADERS_FIELD, HeaderContext, METERED_ANSWERS, METERED_FIELD,
    PACKETS_UNREAD_MAX,
};
use http::{HeaderMap, HeaderValue};
use tokio::io::{AsyncWriteExt as _, ReadHalf, WriteHalf};

use super::ProxySession;
use crate::fetch::dial::{ByteStream, FetchFault};
use crate::fetch::tunnel;
use crate::proxy::conn_options::ConnOptions;
use crate::proxy::refusal::{ConnectRefusal, RefusalCause};

/// The beginning of the request.
const REQUEST: &str = "CONNECT-IP * HTTP/1.1\r\nHost: d2prox\r\n";

/// What the proxy may send in the flow of a packet tunnel while only metered links are up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MeteredPackets {
    /// Everything.
    All,
    /// Answers to packets that came in the flow. Older proxies send everything.
    AnswersOnly,
}

/// A tunnel for IP packets that D2Prox opened. It lasts until its flow ends, or it is dropped.
pub struct PacketTunnel {
    /// Packets from the proxy in the flow itself.
    reading: ReadHalf<Box<dyn ByteStream>>,
    capsules: CapsuleReader,
    /// The flow, for packets to the proxy; none once it was taken.
    writing: Option<WriteHalf<Box<dyn ByteStream>>>,
    /// The id of the flow.
    pub flow_id: u64,
    number: u64,
    line: Arc<ProxySession>,
    /// The inner addresses of this device: the same for good.
    pub addresses: Vec<IpAddr>,
    /// The proxy's addresses inside the tunnel, at which its name server answers.
    pub gateways: Vec<IpAddr>,
    /// How headers of packets may be compressed; none if the proxy does not do that.
    pub headers: Option<HeaderContext>,
    /// The session, for packets to the proxy.
    pub connection: Connection,
    /// Packets from the proxy.
    inbox: ContextInbox,
    /// Whether the packets received last came in the flow.
    came_in_flow: bool,
}

impl PacketTunnel {
    /// The flow, for packets that may not go as datagrams ([`d2tp_tunnel::PacketSource::write_capsules`]). `None` the second time.
    pub fn take_flow(&mut self) -> Option<WriteHalf<Box<dyn ByteStream>>> {
        self.writing.take()
    }

    /// Waits for packets of the proxy, and appends them to `datagrams`, where they may be halves. False when the tunnel
    /// has ended.
    pub async fn recv_all(&mut self, datagrams: &mut Vec<Bytes>) -> bool {
        tokio::select! {
            received = self.inbox.recv_all(datagrams) => {
                self.came_in_flow = false;
                received
            }
            packet = self.capsules.next(&mut self.reading) => match packet {
                Ok(Some(packet)) => {
                    datagrams.push(packet);
                    self.came_in_flow = true;
                    true
                }
                Ok(None) | Err(_) => false,
            },
        }
    }

    /// Whether the packets received last came in the flow, as over metered links, and not as datagrams.
    pub fn came_in_flow(&self) -> bool {
        self.came_in_flow
    }
}

impl Drop for PacketTunnel {
    fn drop(&mut self) {
        self.line.leave(self.number);
    }
}

impl ProxySession {
    /// Opens a tunnel for IP packets. They travel in datagrams of the context; while only metered links are up, in a flow
    /// with the policy of `options`. `metered` bounds what the proxy may send in that flow.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn open_packet_tunnel(
        self: &Arc<ProxySession>,
        context: u64,
        options: ConnOptions,
        metered: MeteredPackets,
    ) -> Result<PacketTunnel, ConnectRefusal> {
        self.session().await?;
        let unavailable = |text: &str| ConnectRefusal::new(RefusalCause::NoProxy, text.to_owned());
        let settings = FlowSettings {
            reachable: true,
            ..FlowSettings::default()
        };
        let mut begun = None;
        let io = self.proxy.open_parallel_with(settings, |device, flow| {
            let entered = self.enter(flow.clone(), options);
            begun = Some((entered.number, flow.clone(), device.connection()));
        });
        let mut io = io.map_err(|error| unavailable(&error.to_string()))?;
        let (number, flow, connection) = begun.expect("steered when it was opened");
        self.stirred.notify_one();
        // Before the answer, after which packets may come.
        let inbox = connection.context_with_room(context, PACKETS_UNREAD_MAX);
        let Some(inbox) = inbox else {
            self.leave(number);
            return Err(unavailable("this session has a tunnel already"));
        };
        let flow_id = flow.lock().unwrap_or_else(PoisonError::into_inner).id();
        let fields = self.request_packet_tunnel(&mut io, &flow, metered).await;
        let (reading, writing) = tokio::io::split(io);
        let mut opened = PacketTunnel {
            reading,
            capsules: CapsuleReader::default(),
            writing: Some(writing),
            flow_id,
            number,
            line: self.clone(),
            addresses: Vec::new(),
            gateways: Vec::new(),
            headers: None,
            connection,
            inbox,
            came_in_flow: false,
        };
        let fields = fields?;
        opened.addresses = addresses(&fields, "tunnel-address");
        opened.gateways = addresses(&fields, "tunnel-gateway");
        let by_rules = |value: &HeaderValue| value == HEADERS_BY_RULES;
        if fields.get(HEADERS_FIELD).is_some_and(by_rules) {
            opened.headers = header_context(&opened.addresses);
        }
        match opened.addresses.iter().any(IpAddr::is_ipv4) {
            true => Ok(opened),
            false => Err(unavailable("the proxy named no inner address")),
        }
    }

    async fn request_packet_tunnel(
        &self,
        io: &mut Box<dyn ByteStream>,
        flow: &Mutex<Flow>,
        metered: MeteredPackets,
    ) -> Result<HeaderMap, ConnectRefusal> {
        let field = match metered {
            MeteredPackets::All => String::new(),
            MeteredPackets::AnswersOnly => format!("{METERED_FIELD}: {METERED_ANSWERS}\r\n"),
        };
        let written = async {
            let headers = format!("{HEADERS_FIELD}: {HEADERS_BY_RULES}\r\n");
            io.write_all(format!("{REQUEST}{field}{headers}\r\n").as_bytes())
                .await?;
            io.flush().await
        };
        let answered = match written.await {
            Ok(()) => tunnel::read_fields(io).await,
            Err(error) => Err(FetchFault::Path(error.to_string())),
        };
        match answered {
            Ok(Ok(fields)) => Ok(fields),
            Ok(Err(refused)) => Err(ConnectRefusal::from_proxy(&refused)),
            Err(fault) => {
                self.check_answer(Err(fault), flow)?;
                Err(ConnectRefusal::new(RefusalCause::NoProxy, "the flow ended"))
            }
        }
    }
}

/// The context of headers for a client with these addresses; none without one of IPv4.
fn header_context(addresses: &[IpAddr]) -> Option<HeaderContext> {
    let v4 = addresses.iter().find_map(|address| match address {
        IpAddr::V4(v4) => Some(*v4),
        IpAddr::V6(_) => None,
    });
    let v6 = addresses.iter().find_map(|address| match address {
        IpAddr::V6(v6) => Some(*v6),
        IpAddr::V4(_) => None,
    });
    Some(HeaderContext::of_client(v4?, v6))
}

/// The addresses in a field of the answer.
fn addresses(fields: &HeaderMap, name: &str) -> Vec<IpAddr> {
    let values = fields
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok());
    let texts = values.flat_map(|value| value.split(','));
    texts.filter_map(|text| text.trim().parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_both_families_are_read_and_nonsense_is_left_out() {
        let mut fields = HeaderMap::new();
        fields.insert("tunnel-address", "10.83.0.2, fd00::2, x".parse().unwrap());
        let read = addresses(&fields, "tunnel-address");
        let texts: Vec<String> = read.iter().map(IpAddr::to_string).collect();
        assert_eq!(texts, ["10.83.0.2", "fd00::2"]);
        assert!(addresses(&fields, "tunnel-gateway").is_empty());
    }
}
