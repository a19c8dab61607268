//! The tunnel over a serial line to a bridge, as over a radio of some ten kilobits a second.

use cedos_lab_rig::namespace::in_namespace_with;
use cedos_lab_rig::program::{cedos, pid_of};
use cedos_lab_rig::serial::serial_cable;
use cedos_lab_rig::this_test;
use cedos_lab_rig::wait::{until_async, within};
use nix::sys::signal::{Signal, kill};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStdout};

use crate::scene::{PROXY_HOST, SERVER, Scene, TUNNEL, ask, udp};
use crate::tunnel::{connect, echo, end, status};

/// Bits per second of the line.
const BAUD: u64 = 115_200;
/// Questions over UDP, and the bytes of each.
const QUESTIONS: u64 = 40;
const QUESTION_BYTES: usize = 40;
/// What the rules save of a packet of IPv4 with UDP, at least: with its first rule 19 bytes.
const SAVED_MIN: u64 = 15;

/// A bridge, which says at its end what the line carried.
struct BridgeProcess {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl BridgeProcess {
    /// Starts a bridge in this namespace, which reaches the proxy by Wi-Fi.
    async fn start(scene: &Scene, device: &str) -> BridgeProcess {
        let proxy = format!("{PROXY_HOST}:4433");
        let words = ["bridge", "--serial", device, "--prox", &proxy];
        let mut child = cedos(scene.home.path(), &words).spawn().expect("start it");
        let mut output = BufReader::new(child.stdout.take().expect("its output"));
        let mut line = String::new();
        within(output.read_line(&mut line)).await.expect("text");
        assert!(line.contains("bytes per second"), "{line}");
        BridgeProcess { child, output }
    }

    async fn end(mut self) -> String {
        kill(pid_of(&self.child), Signal::SIGTERM).expect("it runs");
        let mut said = String::new();
        within(self.output.read_to_string(&mut said))
            .await
            .expect("text");
        let ended = within(self.child.wait()).await.expect("it ends");
        assert!(ended.success(), "{said}");
        said
    }
}

/// Waits until the status says that so many bytes of headers were saved; returns how many.
async fn saved_at_least(scene: &Scene, bytes: u64) -> u64 {
    until_async("headers are compressed", async || {
        let now = status(scene).await;
        let saved = now["vpn"]["packets"]["header_bytes_saved"].as_u64();
        saved.filter(|saved| *saved >= bytes)
    })
    .await
}

#[test]
fn headers_of_packets_are_compressed_on_a_radio_and_all_arrive_as_they_were() {
    in_namespace_with(TUNNEL, this_test!(), || async {
        let scene = Scene::start().await;
        let [near, far] = serial_cable(Some(BAUD / 10));
        let bridge = BridgeProcess::start(&scene, near.device.to_str().expect("text")).await;
        let line = format!("serial:{}@{BAUD}=free", far.device.display());
        let more = ["--link", &line, "--policy", "free-only", "--tcp", "packets"];
        let vpn = scene.up_over("wlan0=metered", &more).await;
        let call = udp(&format!("{SERVER}:7"));
        // Until the round trip was measured.
        ask(&call, b"first");
        for n in 0..QUESTIONS {
            ask(&call, &[n as u8; QUESTION_BYTES]);
        }
        let by_udp = saved_at_least(&scene, QUESTIONS * SAVED_MIN).await;
        // Connections, too: segments and ACKs.
        let mut stream = connect();
        for n in 0..5 {
            echo(&mut stream, &[n; 600]);
        }
        let with_tcp = saved_at_least(&scene, by_udp + 10 * SAVED_MIN).await;
        let pinged = std::process::Command::new("ping")
            .args(["-c", "3", "-i", "0.2", "-W", "5", SERVER])
            .output();
        if let Ok(pinged) = pinged {
            let said = String::from_utf8_lossy(&pinged.stdout);
            assert!(pinged.status.success(), "{said}");
        }
        end(&scene, vpn).await;
        let said = bridge.end().await;
        println!("{by_udp} bytes of {QUESTIONS} datagrams, {with_tcp} with segments: {said}");
    });
}
