//! Tests in their own network namespace, and a device between two links: a free one and a metered
//! one.
//!
//! ```text
//!  device namespace                           origin namespace
//!  wlan0 198.51.100.7  ── veth, 20 Mb/s ──  ap0    198.51.100.1 ┐
//!  wwan0 203.0.113.7   ── veth, 20 Mb/s ──  tower0 203.0.113.1  ┤ origin at 192.0.2.1
//!  second device: eth0 192.0.2.129 ── veth ──  far0 192.0.2.130 ┘
//! ```
//!
//! Each test runs itself again under `unshare`; if the system forbids that, it prints a message and
//! passes.

use std::process::{Command, Output, Stdio};

use crate::PATIENCE;
use crate::missing_tool::skip_without;

const INSIDE: &str = "CEDOS_TEST_INSIDE_NAMESPACE";

/// The path of the enclosing test function, for `--exact`.
#[macro_export]
macro_rules! this_test {
    () => {{
        fn here() {}
        $crate::namespace::test_path(std::any::type_name_of_val(&here))
    }};
}

/// `cedos_tests::links::a_test::{{closure}}::here` → `links::a_test`.
#[doc(hidden)]
pub fn test_path(function: &'static str) -> String {
    let names = function.split("::").skip(1);
    let names: Vec<&str> = names
        .take_while(|name| !name.starts_with('{') && *name != "here")
        .collect();
    names.join("::")
}

/// The properties of the namespace that a test needs.
#[derive(Clone, Copy, Debug)]
pub struct NamespaceNeeds {
    /// The options for `unshare`.
    unshare: &'static str,
    /// Commands that fail if such a namespace is not available.
    attempt: &'static str,
}

impl NamespaceNeeds {
    /// A namespace by these options for `unshare`, and commands that fail if it is not available.
    pub const fn new(unshare: &'static str, attempt: &'static str) -> NamespaceNeeds {
        NamespaceNeeds { unshare, attempt }
    }
}

/// A network namespace with veth links that have a rate.
pub const SHAPED_LINKS: NamespaceNeeds = NamespaceNeeds {
    unshare: "-Urn",
    attempt: "ip link add a0 type veth peer name a1
              tc qdisc add dev a0 root tbf rate 1mbit burst 10k latency 50ms",
};

/// A network namespace with veth links.
pub const LINKS: NamespaceNeeds = NamespaceNeeds {
    unshare: "-Urn",
    attempt: "ip link add a0 type veth",
};

/// A network and a mount namespace with veth links that have a rate, in which programs can change
/// their user: only for root.
pub const SHAPED_LINKS_OF_ROOT: NamespaceNeeds = NamespaceNeeds {
    unshare: "-nm",
    attempt: "ip link add a0 type veth peer name a1
              tc qdisc add dev a0 root tbf rate 1mbit burst 10k latency 50ms
              setpriv --reuid 65534 --clear-groups true",
};

/// A network and a mount namespace.
pub const LINKS_AND_MOUNTS: NamespaceNeeds = NamespaceNeeds {
    unshare: "-Urnm",
    attempt: "mount -t tmpfs t /run",
};

/// Whether this process is a test that was run again in its namespace.
pub(crate) fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Runs the body of a test ([`this_test!`]) in its own device namespace.
pub fn in_namespace<F: Future<Output = ()>>(test: String, body: impl FnOnce() -> F) {
    in_namespace_with(SHAPED_LINKS, test, || {
        sh("ip link set lo up");
        body()
    });
}

/// Runs the body of a test ([`this_test!`]) in a namespace with these properties, in which no
/// interface is up.
pub fn in_namespace_with<F: Future<Output = ()>>(
    needs: NamespaceNeeds,
    test: String,
    body: impl FnOnce() -> F,
) {
    if is_inside() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        return runtime.expect("a runtime").block_on(body());
    }
    let allowed = Command::new("unshare")
        .args([needs.unshare, "sh", "-ec", needs.attempt])
        .output()
        .is_ok_and(|output| output.status.success());
    if !allowed {
        skip_without(
            "namespaces",
            "this system does not let us make namespaces with such links",
        );
        return;
    }
    let inside = Command::new("unshare")
        .arg(needs.unshare)
        .arg(std::env::current_exe().expect("path of this test"))
        // One that is ignored was asked for, or it would not have come here.
        .args(["--exact", &test, "--nocapture", "--include-ignored"])
        // The child's output is not part of this program's.
        .stdout(Stdio::piped())
        .env(INSIDE, "1")
        .spawn()
        .expect("run unshare");
    let Output { status, stdout, .. } = inside.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&stdout);
    eprint!("{said}");
    assert!(status.success(), "inside the namespace: {status}");
    assert!(said.contains("1 passed"), "there is no test `{test}`");
}

/// Runs shell commands; panics if one fails.
pub fn sh(commands: &str) {
    let output = Command::new("sh")
        .args(["-ec", commands])
        .output()
        .expect("run sh");
    assert!(
        output.status.success(),
        "{commands}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Starts something in a runtime on a separate thread, where it runs until the process ends.
pub fn on_its_own_thread<T, F>(start: impl FnOnce() -> F + Send + 'static) -> T
where
    T: Send + 'static,
    F: Future<Output = T>,
{
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime").block_on(async {
            assert!(tell.send(start().await).is_ok(), "the test listens");
            std::future::pending::<()>().await;
        });
    });
    told.recv_timeout(PATIENCE).expect("it starts")
}

/// Creates the origin namespace on a thread that stays in it, and starts its services there.
pub fn origin_namespace<T, F>(start: impl FnOnce() -> F + Send + 'static) -> T
where
    T: Send + 'static,
    F: Future<Output = T>,
{
    let device = std::process::id();
    on_its_own_thread(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("a second namespace");
        sh(&format!(
            "ip link set lo up
             ip addr add 192.0.2.1/32 dev lo
             ip link add ap0 type veth peer name wlan0 netns {device}
             ip link add tower0 type veth peer name wwan0 netns {device}
             ip addr add 198.51.100.1/24 dev ap0
             ip addr add 203.0.113.1/24 dev tower0
             ip link set ap0 up
             ip link set tower0 up
             tc qdisc add dev ap0 root tbf rate 20mbit burst 20k latency 100ms
             tc qdisc add dev tower0 root tbf rate 20mbit burst 20k latency 100ms"
        ));
        start()
    })
}

/// Creates a namespace for a second device, and starts it there. Must be called on the thread of the origin namespace,
/// which this device reaches by a link of its own; it does not reach the other device.
pub fn second_device_namespace<T, F>(start: impl FnOnce() -> F + Send + 'static) -> T
where
    T: Send + 'static,
    F: Future<Output = T>,
{
    let (process, origin) = (std::process::id(), nix::unistd::gettid());
    on_its_own_thread(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("a third namespace");
        let at_origin = format!("nsenter --net=/proc/{process}/task/{origin}/ns/net");
        sh(&format!(
            "ip link set lo up
             ip link add eth0 type veth peer name far0 netns {origin}
             ip addr add 192.0.2.129/25 dev eth0
             ip link set eth0 up
             {at_origin} ip addr add 192.0.2.130/25 dev far0
             {at_origin} ip link set far0 up
             ip route add default via 192.0.2.130"
        ));
        start()
    })
}

/// The far end of a link that drops incoming UDP, like a network that blocks UDP.
#[derive(Debug)]
pub struct BlockedUdp {
    link: &'static str,
    /// The network namespace of the far end.
    namespace: String,
}

impl BlockedUdp {
    /// Drops UDP that arrives on `link` of the calling thread's namespace.
    pub fn on(link: &'static str) -> BlockedUdp {
        // The rule that delivers to local addresses comes first by default.
        sh(&format!(
            "ip rule add pref 100 lookup local
             ip rule del pref 0
             ip rule add pref 10 iif {link} ipproto udp blackhole"
        ));
        let (process, thread) = (std::process::id(), nix::unistd::gettid());
        BlockedUdp {
            link,
            namespace: format!("/proc/{process}/task/{thread}/ns/net"),
        }
    }

    /// Stops dropping UDP.
    pub fn lift(&self) {
        self.sh("ip rule del pref 10");
    }

    /// Drops UDP again.
    pub fn block(&self) {
        let link = self.link;
        self.sh(&format!(
            "ip rule add pref 10 iif {link} ipproto udp blackhole"
        ));
    }

    fn sh(&self, command: &str) {
        sh(&format!("nsenter --net={} {command}", self.namespace));
    }
}

/// Brings the device's Wi-Fi up with this address.
pub fn wifi_on(address: &str) {
    sh(&format!(
        "ip link set wlan0 up
         ip addr add {address}/24 dev wlan0
         ip route add default via 198.51.100.1 dev wlan0 metric 600"
    ));
}

/// Takes the device's Wi-Fi down.
pub fn wifi_off() {
    sh("ip addr flush dev wlan0; ip link set wlan0 down");
}

/// Brings the device's metered link up.
pub fn cell_on() {
    sh("ip link set wwan0 up
        ip addr add 203.0.113.7/24 dev wwan0
        ip route add default via 203.0.113.1 dev wwan0 metric 700");
}

/// The columns of `/proc/net/dev` behind a link's name.
const RECEIVED_BYTES: usize = 0;
const SENT_BYTES: usize = 8;

/// Bytes the kernel received on a link.
pub fn received(link: &str) -> u64 {
    counted(link, RECEIVED_BYTES)
}

/// Bytes the kernel sent on a link.
pub fn sent(link: &str) -> u64 {
    counted(link, SENT_BYTES)
}

fn counted(link: &str, field: usize) -> u64 {
    // Of the namespace of this thread. Starting `ip` takes long on a busy machine, and the bytes go on meanwhile.
    let text = std::fs::read_to_string("/proc/thread-self/net/dev").expect("the kernel's counters");
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let (_, counters) = lines
        .find(|(name, _)| name.trim() == link)
        .unwrap_or_else(|| panic!("no link {link}: {text}"));
    let counter = counters.split_whitespace().nth(field);
    counter
        .and_then(|bytes| bytes.parse().ok())
        .expect("a counter")
}

#[cfg(test)]
mod tests {
    mod deep {
        #[test]
        fn a_test_knows_its_path() {
            let path = "namespace::tests::deep::a_test_knows_its_path";
            assert_eq!(crate::this_test!(), path);
            let closure = || crate::this_test!();
            assert_eq!(closure(), path);
        }
    }
}
