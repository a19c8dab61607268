//! What a connection costs on a metered link besides what it carries: at its start, and while it says a little
//! now and then, judged by what the kernel counted.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use crate::support::CProgram;
use crate::told::Program;
use cedos_lab_rig::namespace::{cell_on, in_namespace, origin_namespace, received, sent, wifi_on};
use cedos_lab_rig::origin::ScriptedOrigin;
use cedos_lab_rig::program::ProxyProcess;
use cedos_lab_rig::share::beside_others;
use cedos_lab_rig::wait::within;
use cedos_lab_rig::{program, this_test};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpListener;
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::time::sleep;

/// Bytes of a message, which the origin sends back.
const MESSAGE_BYTES: u64 = 100;
/// Messages at a time, and the pause after each.
const MESSAGES: u64 = 10;
const PAUSE: Duration = Duration::from_secs(2);

/// What the exchange of ML-KEM-768 takes: a key of 1,184 bytes, a ciphertext of 1,088, and the heads of the four
/// packets that carry their halves.
const KEY_EXCHANGE_BYTES: u64 = 1_184 + 1_088 + 4 * (28 + 29 + 4);

/// What a new session takes on a metered link, with its first message: the padded first packet, its answer, what
/// tells the links apart, the exchange of keys, and the first grants.
const NEW_SESSION_BYTES_MAX: u64 = 5_000 + KEY_EXCHANGE_BYTES;

/// What a message takes both ways beside its bytes and those of its echo: heads of packets, acknowledgements, and
/// the grant for what is to come. TCP takes 208 to 416.
const BESIDE_MESSAGE_BYTES_MAX: u64 = 600;

/// What a metered link may carry while a free one carries the connection: what the kernel itself asks of a link.
const BESIDE_WIFI_BYTES_MAX: u64 = 1_000; // 280 were seen: router solicitations

/// Sends a message whenever it is told to, and says how much came back.
const PROGRAM: &str = r#"
exec 3<>/dev/tcp/192.0.2.1/$0
printf 'GET /a HTTP/1.1\r\nHost: origin\r\n\r\n' >&3
while read order; do printf '%0100d' 0 >&3; head -c 100 <&3 | wc -c; done
"#;

fn metered() -> u64 {
    received("wwan0") + sent("wwan0")
}

/// An origin that sends back what it is sent, and a proxy.
struct Net {
    home: TempDir,
    origin: ScriptedOrigin,
    proxy: ProxyProcess,
}

impl Net {
    fn new() -> Net {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let (origin, proxy) = origin_namespace(|| async move {
            let listener = TcpListener::bind("192.0.2.1:0").await.expect("a port");
            let origin = ScriptedOrigin::play_at(listener, None, |_, mut stream| async move {
                let mut bytes = [0; 4096];
                while let Ok(count @ 1..) = stream.read(&mut bytes).await {
                    if stream.write_all(&bytes[..count]).await.is_err() {
                        return;
                    }
                }
            });
            let proxy = ProxyProcess::start(&place, "192.0.2.1:0", &[]).await;
            (origin, proxy)
        });
        Net {
            home,
            origin,
            proxy,
        }
    }
}

/// A program with one connection to the origin.
enum Talker {
    Run(
        #[expect(dead_code, reason = "it runs for as long as this is held")] Child,
        ChildStdin,
        Lines<BufReader<ChildStdout>>,
    ),
    Socket(Program),
}

impl Talker {
    fn run(net: &Net) -> Talker {
        let port = net.origin.address.port().to_string();
        let run = ["run", "--prox", &net.proxy.address, "--policy", "any", "--"];
        let words = [&run[..], &["bash", "-c", PROGRAM, &port]].concat();
        let mut running = program::cedos(net.home.path(), &words)
            .stdin(Stdio::piped())
            .spawn()
            .expect("start cedos run");
        let orders = running.stdin.take().expect("its input");
        let answers = BufReader::new(running.stdout.take().expect("its output")).lines();
        Talker::Run(running, orders, answers)
    }

    async fn socket(net: &Net) -> Talker {
        let port = net.origin.address.port().to_string();
        let (told, none) = (CProgram::with_d2tp("told.c"), PathBuf::from("none"));
        let arguments = ["192.0.2.1", &port, "policy=4"];
        let home = net.home.path();
        let mut socket = Program::start(&told, home, &net.proxy.address, &none, &arguments);
        assert_eq!(socket.hear().await, "policy 0");
        assert_eq!(socket.hear().await, "connect 0");
        assert!(socket.ask("ask").await.starts_with("ask "));
        Talker::Socket(socket)
    }

    /// Sends a message, and waits for its echo.
    async fn talk(&mut self) {
        match self {
            Talker::Run(_, orders, answers) => {
                orders.write_all(b"go\n").await.expect("it reads orders");
                let answer = within(answers.next_line()).await.expect("text");
                assert_eq!(answer.as_deref().map(str::trim), Some("100"));
            }
            Talker::Socket(socket) => {
                assert_eq!(socket.ask("write 100").await, "write 100");
                assert_eq!(socket.ask("read 100").await, "read 100");
            }
        }
    }

    /// Bytes on the metered link for each message, beside those of the message and its echo.
    async fn bytes_beside_messages(&mut self) -> u64 {
        let before = metered();
        for _ in 0..MESSAGES {
            self.talk().await;
            // sleep: how much is said between messages is the subject
            sleep(PAUSE).await;
        }
        (metered() - before).saturating_sub(2 * MESSAGES * MESSAGE_BYTES) / MESSAGES
    }
}

#[test]
fn a_new_session_and_rare_messages_cost_little_on_a_metered_link() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let net = Net::new();
        cell_on();
        for client in ["run", "socket"] {
            let before = metered();
            let mut talker = match client {
                "run" => Talker::run(&net),
                _ => Talker::socket(&net).await,
            };
            talker.talk().await;
            // sleep: what follows a handshake belongs to it
            sleep(PAUSE).await;
            let begins = metered() - before;
            let beside = talker.bytes_beside_messages().await;
            eprintln!("{client}: {begins} bytes at first, {beside} beside each message");
            assert!(begins <= NEW_SESSION_BYTES_MAX, "{client}: {begins}");
            assert!(beside <= BESIDE_MESSAGE_BYTES_MAX, "{client}: {beside}");
        }
    });
}

#[test]
fn beside_a_wifi_that_carries_a_connection_costs_nothing_on_a_metered_link() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let net = Net::new();
        wifi_on("198.51.100.7");
        cell_on();
        // sleep: what the system says over a new link is not ours
        sleep(PAUSE).await;
        for client in ["run", "socket"] {
            let before = metered();
            let mut talker = match client {
                "run" => Talker::run(&net),
                _ => Talker::socket(&net).await,
            };
            talker.bytes_beside_messages().await;
            let beside = metered() - before;
            eprintln!("{client}: {beside} bytes on the metered link beside Wi-Fi");
            assert!(beside <= BESIDE_WIFI_BYTES_MAX, "{client}: {beside}");
        }
    });
}
