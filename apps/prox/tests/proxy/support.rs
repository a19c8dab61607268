//! Helpers of the tests: flows in memory, and a device that reads answers.
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use cedos_prox::{Prox, ProxConfig, ProxFlowReport, ResetCause, Resolve, serve_flow};
use d2tp_driver::{FlowIo, HostKey, SendSource};
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::io::{
    AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf, ReadHalf, WriteHalf,
};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// The client key most tests use.
pub const CLIENT: HostKey = [1; 32];
/// Bytes a flow in memory buffers each way: little, so that a device that does not read is felt.
const FLOW_BUFFER_BYTES: usize = 16 * 1024;
/// No test waits longer than this for anything.
pub use cedos_lab_rig::PATIENCE;

/// What both ends of a flow in memory know.
#[derive(Default)]
struct Shared {
    reset: Option<u64>,
    over: Option<Result<(), io::ErrorKind>>,
    finished: Option<Waker>,
    deadline: Option<Instant>,
    /// The furthest deadline that the device may move the flow to.
    moved_deadline_max: Option<Duration>,
    /// Whether the proxy has allowed the flow to hibernate.
    may_sleep: bool,
}

impl Shared {
    fn end(&mut self, how: Result<(), io::ErrorKind>) {
        self.over.get_or_insert(how);
        if let Some(waker) = self.finished.take() {
            waker.wake();
        }
    }
}

/// The proxy's end of a flow in memory.
pub struct MemoryFlow {
    peer: HostKey,
    read: ReadHalf<DuplexStream>,
    write: Option<WriteHalf<DuplexStream>>,
    pump: Option<JoinHandle<()>>,
    shared: Arc<Mutex<Shared>>,
}

/// The device's end of a flow to the proxy.
pub struct Device {
    stream: Option<DuplexStream>,
    shared: Arc<Mutex<Shared>>,
}

/// A flow in memory.
pub fn flow(peer: HostKey, deadline: Option<Duration>) -> (MemoryFlow, Device) {
    let (near, far) = tokio::io::duplex(FLOW_BUFFER_BYTES);
    let shared = Arc::new(Mutex::new(Shared {
        deadline: deadline.map(|left| Instant::now() + left),
        ..Default::default()
    }));
    let (read, write) = tokio::io::split(near);
    let flow = MemoryFlow {
        peer,
        read,
        write: Some(write),
        pump: None,
        shared: shared.clone(),
    };
    (
        flow,
        Device {
            stream: Some(far),
            shared,
        },
    )
}

impl AsyncRead for MemoryFlow {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(Err(kind)) = self.shared.lock().over {
            return Poll::Ready(Err(kind.into()));
        }
        Pin::new(&mut self.read).poll_read(cx, buf)
    }
}

impl AsyncWrite for MemoryFlow {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.write {
            Some(write) => Pin::new(write).poll_write(cx, bytes),
            None => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.write {
            Some(write) => Pin::new(write).poll_flush(cx),
            None => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.write {
            Some(write) => Pin::new(write).poll_shutdown(cx),
            None => Poll::Ready(Ok(())),
        }
    }
}

impl FlowIo for MemoryFlow {
    fn id(&self) -> u64 {
        7
    }

    fn peer(&self) -> HostKey {
        self.peer
    }

    fn deadline_left(&self) -> Option<Duration> {
        let deadline = self.shared.lock().deadline?;
        Some(deadline.saturating_duration_since(Instant::now()))
    }

    fn limit_moved_deadlines(&mut self, max: Duration) {
        self.shared.lock().moved_deadline_max = Some(max);
    }

    fn send_source(&mut self, source: Arc<dyn SendSource>) {
        let mut write = self.write.take().expect("one source per flow");
        let shared = self.shared.clone();
        self.pump = Some(tokio::spawn(async move {
            let mut offset = 0;
            loop {
                let read = std::future::poll_fn(|cx| source.poll_read_at(cx, offset, 10_000)).await;
                match read {
                    Ok(bytes) if bytes.is_empty() => {
                        let _ = write.shutdown().await;
                        return;
                    }
                    Ok(bytes) => {
                        if write.write_all(&bytes).await.is_err() {
                            return; // The device's end is gone; `crash` says so.
                        }
                        offset += bytes.len() as u64;
                    }
                    Err(_) => {
                        shared.lock().reset.get_or_insert(0);
                        let _ = write.shutdown().await;
                        return;
                    }
                }
            }
        }));
    }

    fn allow_hibernation(&mut self, _: bytes::Bytes) {
        self.shared.lock().may_sleep = true;
    }

    fn reset(&mut self, code: u64) {
        let mut shared = self.shared.lock();
        shared.reset.get_or_insert(code);
        shared.end(Err(io::ErrorKind::ConnectionReset));
    }

    fn poll_finished(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut shared = self.shared.lock();
        match shared.over {
            Some(how) => Poll::Ready(how.map_err(Into::into)),
            None => {
                shared.finished = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for MemoryFlow {
    fn drop(&mut self) {
        if let Some(pump) = self.pump.take() {
            pump.abort();
        }
        self.shared.lock().reset.get_or_insert(0);
    }
}

/// What a device got.
#[derive(Debug)]
pub struct ProxyReply {
    pub status: u16,
    pub headers: http::HeaderMap,
    pub body: Vec<u8>,
    /// Whether the flow ended with a reset instead of an end.
    pub reset: Option<u64>,
}

impl ProxyReply {
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }

    /// The reset cause, where there is one.
    pub fn cause(&self) -> Option<ResetCause> {
        self.reset.and_then(ResetCause::from_code)
    }

    /// Checks what must hold of every answer that ended cleanly.
    pub fn whole(self) -> ProxyReply {
        assert_eq!(self.reset, None, "reset: {:?}", self.cause());
        if let Some(length) = self.headers.get("content-length") {
            assert_eq!(length.to_str().unwrap(), self.body.len().to_string());
        }
        self
    }
}

impl Device {
    /// Sends bytes on the device's flow.
    pub async fn send(&mut self, text: impl AsRef<[u8]>) {
        self.stream
            .as_mut()
            .unwrap()
            .write_all(text.as_ref())
            .await
            .unwrap();
    }

    /// Ends the device's direction.
    pub async fn finish_sending(&mut self) {
        self.stream.as_mut().unwrap().shutdown().await.unwrap();
    }

    /// Reads exactly this many bytes.
    pub async fn read(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let reading = self.stream.as_mut().unwrap().read_exact(&mut bytes);
        tokio::time::timeout(PATIENCE, reading)
            .await
            .expect("bytes in time")
            .unwrap();
        bytes
    }

    /// Reads to the end or the reset.
    pub async fn read_rest(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let reading = self.stream.as_mut().unwrap().read_to_end(&mut bytes);
        tokio::time::timeout(PATIENCE, reading)
            .await
            .expect("an end in time")
            .unwrap();
        bytes
    }

    /// Reads a head, to its empty line.
    pub async fn read_head(&mut self) -> ProxyReply {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.extend(self.read(1).await);
        }
        parse(&head)
    }

    /// Reads the whole answer and then finishes the flow as a device does.
    pub async fn answer(mut self) -> ProxyReply {
        let bytes = self.read_rest().await;
        let reset = {
            let mut shared = self.shared.lock();
            shared.end(Ok(()));
            shared.reset
        };
        let mut answer = parse(&bytes);
        answer.reset = reset;
        answer
    }

    /// The device is gone: power lost, process killed.
    pub fn crash(mut self) {
        self.stream = None;
        self.shared.lock().end(Err(io::ErrorKind::ConnectionReset));
    }

    /// The device resets the flow; what was on its way may be lost.
    pub fn crash_with_reset(&mut self) {
        self.shared.lock().end(Err(io::ErrorKind::ConnectionReset));
        self.stream = None; // Wakes a reader.
    }

    /// Asserts that both ends have received everything.
    pub fn finished(&self) {
        self.shared.lock().end(Ok(()));
    }

    /// The reset code, once the proxy has reset the flow.
    pub fn reset_code(&self) -> Option<u64> {
        self.shared.lock().reset
    }

    /// Whether the proxy can go on with the flow after it has hibernated.
    pub fn may_sleep(&self) -> bool {
        self.shared.lock().may_sleep
    }

    /// Moves the flow's deadline to this time from now.
    pub fn set_deadline(&self, left: Duration) {
        let mut shared = self.shared.lock();
        let left = left.min(shared.moved_deadline_max.unwrap_or(left));
        shared.deadline = Some(Instant::now() + left);
    }
}

fn parse(bytes: &[u8]) -> ProxyReply {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut parsed = httparse::Response::new(&mut fields);
    let httparse::Status::Complete(head) = parsed.parse(bytes).unwrap() else {
        panic!("no whole head in {:?}", String::from_utf8_lossy(bytes));
    };
    let mut headers = http::HeaderMap::new();
    for field in parsed.headers.iter() {
        headers.append(
            http::HeaderName::from_bytes(field.name.as_bytes()).unwrap(),
            http::HeaderValue::from_bytes(field.value).unwrap(),
        );
    }
    let body = bytes[head..].to_vec();
    ProxyReply {
        status: parsed.code.unwrap(),
        headers,
        body,
        reset: None,
    }
}

/// A configuration for tests: any client, loopback allowed, short waits.
pub fn config() -> ProxConfig {
    ProxConfig {
        allow_any_client: true,
        allow_private: true,
        retry_wait: Duration::from_millis(1),
        ..Default::default()
    }
}

/// A proxy with the configuration of the tests.
pub fn prox() -> Arc<Prox> {
    Prox::new(config()).unwrap()
}

/// Starts serving one flow.
pub fn start(prox: &Arc<Prox>, peer: HostKey) -> (JoinHandle<ProxFlowReport>, Device) {
    start_until(prox, peer, None)
}

/// Starts serving one flow with a deadline.
pub fn start_until(
    prox: &Arc<Prox>,
    peer: HostKey,
    deadline: Option<Duration>,
) -> (JoinHandle<ProxFlowReport>, Device) {
    let (flow, device) = flow(peer, deadline);
    (tokio::spawn(serve_flow(flow, prox.clone())), device)
}

/// The report of a flow that must end.
pub async fn ended(serving: JoinHandle<ProxFlowReport>) -> ProxFlowReport {
    tokio::time::timeout(PATIENCE, serving)
        .await
        .expect("the flow ends")
        .unwrap()
}

/// One request, one whole exchange.
pub async fn ask(prox: &Arc<Prox>, request: impl AsRef<[u8]>) -> ProxyReply {
    let (serving, mut device) = start(prox, CLIENT);
    device.send(request).await;
    device.finish_sending().await;
    let answer = device.answer().await;
    ended(serving).await;
    answer
}

/// A GET with further header lines (each ending in CR LF).
pub fn get(url: &str, headers: &str) -> String {
    format!("GET {url} HTTP/1.1\r\nHost: origin\r\n{headers}\r\n")
}

/// Bytes that tell their place.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i * 31 + i / 256 + i / 65_536) as u8)
        .collect()
}

/// Waits until `what` holds, letting others run.
pub async fn until(what: impl Fn() -> bool) {
    cedos_lab_rig::wait::until("what the test waits for", what).await;
}

/// A resolver that knows a few names.
pub struct Names(pub Vec<(&'static str, IpAddr)>);

impl Resolve for Names {
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        let found: Vec<_> = self
            .0
            .iter()
            .filter(|(known, _)| *known == name)
            .map(|(_, ip)| *ip)
            .collect();
        Box::pin(async move {
            match found.is_empty() {
                true => Err(io::Error::other("no such name")),
                false => Ok(found),
            }
        })
    }
}
